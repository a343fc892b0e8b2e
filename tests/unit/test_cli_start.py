"""The command line without a model: help, version, completion, and early errors."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import nrl_models
from nrl_models.cli import app, console
from nrl_models.cli.certifying import CHECK_NAMES
from tests.unit.printed import unframed

runner = CliRunner()

HEAVY = ("torch", "transformers", "numpy")


def run_process(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from nrl_models.cli import app; app(prog_name='nrl-models')", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=os.environ | {"COLUMNS": "200"} | variables
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with folders and files that are not checkpoints, and one that might be."""
    for name in ("empty", "checkpoint", "broken", "list", "binary", "directory/config.json"):
        (tmp_path / name).mkdir(parents=True)
    for name, content in (
        ("checkpoint", b'{"model_type": "llama"}'),
        ("broken", b'{"model_type": '),
        ("list", b"[]"),
        ("binary", b"\xff\xfe\x00"),
    ):
        (tmp_path / name / "config.json").write_bytes(content)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_has_three_panels(option: str) -> None:
    result = runner.invoke(app, [option])
    assert result.exit_code == 0
    panels = [line.split()[1] for line in result.output.splitlines() if line.startswith("╭")]
    assert panels == ["Options", "Use", "Check", "Contribute"]
    commands = [line.split()[1] for line in result.output.splitlines() if line.startswith("│ ")]
    assert "new" in commands


COMMANDS = (
    *("", "demo", "inspect", "convert", "plan", "quirks", "train", "certify", "parity", "consistency", "refit-check"),
    *("new", "diagnose", "diagnose embeddings", "diagnose max-model-len", "diagnose decode-vs-prefill"),
    *("diagnose precision", "diagnose prefix-caching"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_metavars_and_no_python_types(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    printed = runner.invoke(app, [*command.split(), "--help"]).output
    assert "Usage: " in printed
    assert not re.findall(r"<[a-zA-Z\[\]]+>|\[\[|\bPath\b|\bINTEGER\b", printed)


def test_help_does_not_break_paragraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    printed = runner.invoke(app, ["train", "--help"]).output
    assert "pass it on the command line, for example reward._target_=package.function." in printed


def test_short_help_of_a_command() -> None:
    assert "Usage" in runner.invoke(app, ["diagnose", "embeddings", "-h"]).output


def test_certify_help_lists_every_check() -> None:
    from nrl_models.certify.all_checks import NAMES

    assert CHECK_NAMES == NAMES


def test_version() -> None:
    assert runner.invoke(app, ["--version"]).output == f"nrl_models {nrl_models.__version__}\n"


@pytest.mark.parametrize(("before", "after"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_omp_wait_policy_defaults_to_passive(before: str | None, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting is made before torch is imported, which reads it once, because engine and trainer share the cores."""
    monkeypatch.setenv("OMP_WAIT_POLICY", before or "")
    if before is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    assert runner.invoke(app, ["diagnose", "max-model-len", "nowhere"]).exit_code == 2
    assert os.environ["OMP_WAIT_POLICY"] == after


def test_completion() -> None:
    variables = {"_NRL_MODELS_COMPLETE": "complete_bash", "COMP_WORDS": "nrl-models ins", "COMP_CWORD": "1"}
    assert run_process(**variables).stdout.split() == ["inspect"]
    variables |= {"COMP_WORDS": "nrl-models convert a b --dtype fl", "COMP_CWORD": "5"}
    assert run_process(**variables).stdout.split() == ["float32", "float16", "float64"]


MISTAKES = (
    ("inspect ./nowhere", "Invalid value for 'PATH': no such directory: ./nowhere"),
    ("inspect /nowhere/at/all", "no such directory: /nowhere/at/all"),
    ("inspect empty/nowhere", "no such directory: empty/nowhere"),  # its parent exists
    ("inspect a/b/c", "no such directory: a/b/c"),  # not a valid repo ID
    ("inspect empty", "empty: config.json is missing"),
    ("inspect checkpoint/config.json", "is a file, expected a checkpoint directory"),
    ("inspect file", "file is a file, expected a checkpoint directory"),  # could be a valid repo ID
    ("inspect broken", "config.json is not a JSON object: Expecting value"),
    ("inspect list", "config.json is not a JSON object"),
    ("inspect binary", "config.json is not a JSON object: 'utf-8' codec"),
    ("inspect directory", "config.json cannot be read: OSError: not a regular file"),
    ("quirks broken/config.json", "is not a JSON object"),
    ("new broken/config.json", "is not a JSON object"),
    ("new owner/name", "no such file or directory: owner/name"),
    ("convert checkpoint out --dtype fp8", "Invalid value for '--dtype'"),
    ("diagnose embeddings checkpoint --overwrite", "--overwrite needs --reinitialize"),
    ("diagnose embeddings checkpoint --near-zero-threshold=-1", "Invalid value for '--near-zero-threshold'"),
    ("inspect ./checkpoints", "no such directory: ./checkpoints (did you mean checkpoint?)"),
    ("plan checkpoint --mesh fdsp=2", "'fdsp=2': expected NAME=SIZE, each name of pp, fsdp, ep, tp at most once"),
    ("plan checkpoint --mesh fdsp=2", "(did you mean fsdp?)"),
    ("plan checkpoint --mesh fsdp=1048576,tp=2", "has 2,097,152 ranks, expected at most 1,048,576"),
    ("plan checkpoint --mesh tp=0", "'tp=0': expected a size of at least 1"),
    ("parity checkpoint --check 9", "Invalid value for '--check'"),
    (
        "consistency checkpoint --engine tgi",
        "unknown engine 'tgi': expected one of vllm, vllm-transformers, mlx, megatron, hf-generate",
    ),
    ("consistency checkpoint --engine-option device", "'device': expected KEY=VALUE"),
    ("refit-check checkpoint --bucket-mb inf", "Invalid value for '--bucket-mb'"),
    ("demo --out file", "Invalid value for '--out': file is a file, expected a directory"),
    ("convert checkpoint file", "file is a file, expected a directory"),
    ("diagnose embeddings checkpoint --reinitialize file", "file is a file, expected a directory"),
    ("inspect checkpoint/config.json", "expected a checkpoint directory or a GGUF file (did you mean checkpoint?)"),
    ("replay empty", "empty is a directory, expected a file"),
    ("consistency checkpoint --text nowhere.txt", "nowhere.txt"),
)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("command", "message"), MISTAKES, ids=[command for command, _ in MISTAKES])
def test_invalid_command_exits_with_message(command: str, message: str) -> None:
    result = runner.invoke(app, command.split())
    assert result.exit_code == 2
    assert message in unframed(result.output + result.stderr)
    assert isinstance(result.exception, SystemExit)  # no traceback


def test_invalid_command_does_not_import_torch(here: Path) -> None:
    code = (
        "import json, sys\nfrom typer.testing import CliRunner\nfrom nrl_models.cli import app\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    assert CliRunner().invoke(app, command).exit_code == 2, command\n"
        f"    assert not set({HEAVY}) & set(sys.modules), command"
    )
    commands = json.dumps([command.split() for command, _ in MISTAKES])
    done = subprocess.run([sys.executable, "-c", code, commands], capture_output=True, text=True, cwd=here, check=False)
    assert done.returncode == 0, done.stderr


def test_invalid_command_is_fast(here: Path) -> None:
    """In CPU time: half a second on an idle machine. Importing torch alone takes longer than the limit."""

    def seconds(*command: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], cwd=here, capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    mistake = ("-m", "nrl_models", "plan", "checkpoint", "--mesh", "fdsp=2")
    runs = [(seconds(*mistake), seconds("-c", "import typer")) for _ in range(3)]
    ours, typers = (min(times) for times in zip(*runs, strict=True))
    assert ours < max(1.0, 8 * typers)


def test_hub_repo_id_is_not_treated_as_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = runner.invoke(app, ["inspect", "owner/no-such-name"])
    assert result.exit_code == 2
    assert "cannot be fetched as a hub repository" in unframed(result.output + result.stderr)


def test_json_to_stdout_contains_only_json(llama_checkpoint: Path) -> None:
    result = runner.invoke(app, ["inspect", str(llama_checkpoint), "--json", "-"])
    assert json.loads(result.stdout)["architecture"] == "LlamaForCausalLM"
    assert "LlamaForCausalLM" in result.stderr
    assert not Path("-").exists()


@pytest.mark.parametrize("before", [True, False], ids=["before the command", "after the command"])
def test_quiet(before: bool, llama_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.setenv(name, "")  # restored after the test
    command = ["inspect", str(llama_checkpoint)]
    result = runner.invoke(app, ["--quiet", *command] if before else [*command, "-q"])
    assert (result.exit_code, result.output) == (0, "")
    result = runner.invoke(app, ["-q", "inspect", str(llama_checkpoint), "--json", "-"])
    assert json.loads(result.stdout)
    assert not result.stderr
    assert console.output == console.Output()  # options apply to one run, also to commands of tools/ in this process
    assert "LlamaForCausalLM" in runner.invoke(app, command).output


@pytest.mark.parametrize("name", ["-q", "--traceback"])
def test_arguments_after_double_dash_are_not_options(
    name: str, llama_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).symlink_to(llama_checkpoint)
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["inspect", "--", name])
    assert (result.exit_code, "LlamaForCausalLM" in result.output) == (0, True)


def test_unexpected_error_hides_traceback_by_default(llama_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def inspect(path: Path) -> None:
        raise KeyError("nope")

    monkeypatch.setattr("nrl_models.onboarding.inspect.inspect", inspect)
    result = runner.invoke(app, ["inspect", str(llama_checkpoint)])
    assert result.exit_code == 2
    assert "error: KeyError 'nope' nrl_models did not expect this error." in unframed(result.output + result.stderr)
    result = runner.invoke(app, ["inspect", str(llama_checkpoint), "--traceback"])
    assert isinstance(result.exception, KeyError)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": None}, "config.json has no model_type"),
        ({"model_type": "lama"}, "(did you mean llama"),
        ({"model_type": ["llama"]}, "config: model_type: is ['llama'], expected a name"),
        ({"architectures": [3]}, "config: architectures: is [3], expected a list of names"),
        ({"architectures": ["LamaForCausalLM"]}, "LamaForCausalLM"),
        ({"hidden_size": "wide"}, "'hidden_size' expected int, got str"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
        ({"dtype": "float23"}, "float23"),
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["inspect {}", "new {}/config.json", "plan {} --mesh fsdp=2", "quirks {}"])
def test_invalid_config_exits_with_message(
    values: dict[str, object], message: str, command: str, llama_checkpoint: Path, tmp_path: Path
) -> None:
    content = json.loads((llama_checkpoint / "config.json").read_text()) | values
    (tmp_path / "config.json").write_text(json.dumps(content))
    result = runner.invoke(app, command.format(tmp_path).split())
    assert result.exit_code == 2
    assert message in unframed(result.output + result.stderr)
    assert "did not expect" not in unframed(result.output + result.stderr)


@pytest.mark.parametrize("command", ["inspect {}", "plan {} --mesh fsdp=2", "quirks {}"])
def test_misspelled_activation_exits_with_message(command: str, llama_checkpoint: Path, tmp_path: Path) -> None:
    content = json.loads((llama_checkpoint / "config.json").read_text()) | {"hidden_act": "silyu"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    result = runner.invoke(app, command.format(tmp_path).split())
    assert result.exit_code == 2
    assert "hidden_act: is 'silyu'" in unframed(result.output + result.stderr)


def redirected(redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a shell's redirection."""
    command = [sys.executable, "-c", "from nrl_models.cli import app; app(prog_name='nrl-models')", *arguments]
    return subprocess.run(
        ["bash", "-c", f'"$@" {redirection}', "-", *command], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("redirection", "arguments", "status"),
    [("2>&-", ["train", "--list"], 0), ("<&- >&- 2>&-", ["train", "--list"], 0), (">&-", ["inspect", "./nowhere"], 2)],
)
def test_closed_streams_do_not_change_exit_status(redirection: str, arguments: list[str], status: int) -> None:
    result = redirected(redirection, *arguments)
    assert result.returncode == status
    assert "Traceback" not in result.stderr
    assert bool(result.stdout) == (redirection == "2>&-")


def test_closed_streams_keep_their_descriptors() -> None:
    """A file that is opened later must not receive what native code writes to standard error."""
    code = "import os; from nrl_models.cli import console; console.open_closed_streams(); "
    code += "print(os.path.realpath('/dev/fd/2'), os.get_inheritable(2), open('/dev/zero').fileno() > 2)"
    command = ["bash", "-c", '"$@" 2>&-', "-", sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["/dev/null", "True", "True"]


@pytest.mark.parametrize(
    ("redirection", "arguments"),
    [(">/dev/full", ["--version"]), (">/dev/full", ["--help"]), ("2>/dev/full", ["inspect", "./nowhere"])],
)
def test_full_disk_exits_with_status_2(redirection: str, arguments: list[str]) -> None:
    result = redirected(redirection, *arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert ("No space left on device" in result.stderr) == redirection.startswith(">")
