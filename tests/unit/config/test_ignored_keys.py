"""Every command that builds a model has the option `--ignore-config-key`. It applies to that command only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from checkpoints import edit_config
from typer.testing import CliRunner

from nrl_models.cli import app
from nrl_models.cli.arguments import IgnoredConfigKeys
from nrl_models.cli.checkpoint_paths import checkpoint_path, config_path
from nrl_models.common.config.ignored import ignored_here

PARSERS = (checkpoint_path, config_path)
COMMANDS = {
    "inspect": ["inspect", "PATH"],
    "convert": ["convert", "PATH", "OUT"],
    "plan": ["plan", "PATH", "--mesh", "fsdp=2"],
    "quirks": ["quirks", "PATH"],
    "parity": ["parity", "PATH", "--check", "1"],
    "embeddings": ["diagnose", "embeddings", "PATH"],
}


def functions(command: Any, name: str = "") -> Iterator[tuple[str, Callable[..., None]]]:
    for key, inner in getattr(command, "commands", {}).items():
        yield from functions(inner, f"{name} {key}".strip())
    if not hasattr(command, "commands"):
        yield name, command.callback


def test_all_checkpoint_commands_have_ignore_option() -> None:
    takes, has = set(), set()
    for name, function in functions(typer.main.get_command(app)):
        hints = get_type_hints(function, include_extras=True).values()
        if any(getattr(extra, "parser", None) in PARSERS for hint in hints for extra in get_args(hint)[1:]):
            takes.add(name)
        if IgnoredConfigKeys in hints:
            has.add(name)
    assert {"parity", "consistency", "refit-check", "diagnose precision", "plan", "quirks"} <= takes
    assert has == takes


@pytest.mark.parametrize("command", COMMANDS)
def test_ignore_config_key_option(command: str, folder: Path, tmp_path: Path) -> None:
    edit_config(folder, logit_scale=0.5)
    words = {"PATH": str(folder), "OUT": str(tmp_path / "out")}
    arguments = [words.get(word, word) for word in COMMANDS[command]]
    rejected = CliRunner().invoke(app, arguments)
    assert rejected.exit_code == 2
    assert "logit_scale" in rejected.output
    assert "--ignore-config-key" in rejected.output
    done = CliRunner().invoke(app, [*arguments, "--ignore-config-key", "logit_scale"])
    assert done.exit_code != 2, done.output
    assert not ignored_here()


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_command_logs_no_ignored_keys(quiet: bool, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_config(folder, is_llama_config=True)
    assert CliRunner().invoke(app, [*["--quiet"] * quiet, "inspect", str(folder)]).exit_code == 0
    assert ("is_llama_config" in caplog.text) is not quiet
    assert logging.getLogger("nrl_models").level == logging.NOTSET
