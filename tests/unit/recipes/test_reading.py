"""Reading recipes into frozen dataclasses. One error lists everything that is wrong."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nrl_models import AutoModelForCausalLM
from nrl_models.errors import RecipeError, UnknownArgumentError
from nrl_models.losses import Correction, Normalize
from nrl_models.recipes import read_recipe, recipe_file, recipes
from nrl_models.recipes.gates import Gate
from nrl_models.recipes.recipe import (
    POLICY_METRICS,
    PolicyRecipe,
    PolicyTraining,
    SupervisedRecipe,
    SupervisedTraining,
    WatchSettings,
)
from nrl_models.recipes.targets import SAFE_LOADING, SLOTS

POLICY = """
model:
  _target_: nrl_models.AutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: some/model
  dtype: float32
backend: {attn: sdpa}
freeze_config: {vision: true, language: false}
data: {_target_: nrl_models.recipes.rows.rows, path: rows.jsonl}
reward: {_target_: nrl_models.recipes.reward_rules.last_number}
engine: {name: vllm, dtype: bfloat16, options: {enforce_eager: true}}
optimizer: {_target_: torch.optim.AdamW, lr: 1e-6}
loss: {name: dapo, eps_high: 0.3, correction: {type: tis, cap: 2}}
training: {steps: 10, questions: 4, group: 8, max_prompt: 100, new_tokens: 50}
gates: ["median(token_mult_prob_error) < 1.05", "max(kl_k3) <= 0.015"]
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(text: str = POLICY, **changed: str) -> Path:
        """Write the recipe to a file, with some of its lines replaced by key."""
        lines = text.splitlines()
        for key, value in changed.items():
            place = next((place for place, line in enumerate(lines) if line.startswith(f"{key}:")), None)
            if place is None:
                lines.append(f"{key}: {value}")
            else:
                lines[place] = f"{key}: {value}"
        file = tmp_path / "recipe.yaml"
        file.write_text("\n".join(lines) + "\n")
        return file

    return written


def read_problems(file: Path, *overrides: str) -> dict[str, str]:
    """Return the problems by key."""
    with pytest.raises(RecipeError) as raised:
        read_recipe(file, overrides)
    assert all(problem.subject in str(raised.value) for problem in raised.value.problems)
    return {problem.subject: f"{problem.detail} {problem.advice}" for problem in raised.value.problems}


def test_recipe_is_frozen_dataclass(write: Any) -> None:
    recipe = read_recipe(write())
    assert isinstance(recipe, PolicyRecipe)
    assert recipe.model.function == AutoModelForCausalLM.from_pretrained
    assert recipe.model.arguments == {"pretrained_model_name_or_path": "some/model", "dtype": "float32"}
    assert recipe.optimizer.function is torch.optim.AdamW
    assert recipe.optimizer.arguments == {"lr": 1e-6}  # YAML 1.1 parses it as text
    assert (recipe.loss.normalize, recipe.loss.eps_high, recipe.loss.eps_low) == (Normalize.TOKEN, 0.3, 0.2)
    assert recipe.loss.correction == Correction("tis", cap=2.0)
    assert recipe.gates == (
        Gate("median", "token_mult_prob_error", "<", 1.05),
        Gate("max", "kl_k3", "<=", 0.015),
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.seed = 1


def test_overrides_replace_add_and_remove_keys(write: Any) -> None:
    overrides = ("training.steps=3", "loss.kl=0.1", "freeze_config.vision=null", "engine.dtype=null", "seed=7")
    recipe = read_recipe(write(), [*overrides, "gates=[last(reward) > 0.5]"])
    assert (recipe.training.steps, recipe.loss.kl, recipe.seed) == (3, 0.1, 7)
    assert recipe.freeze_config == {"language": False}
    assert recipe.engine.dtype is None
    assert recipe.gates == (Gate("last", "reward", ">", 0.5),)


def test_watch_section(write: Any) -> None:
    assert read_recipe(write()).watch is None
    assert read_recipe(write(watch="{}")).watch == WatchSettings(fail=True, probe_every=1)
    assert read_recipe(write(watch="{fail: false, probe_every: 0}")).watch == WatchSettings(fail=False, probe_every=0)
    assert "expected true or false" in read_problems(write(watch="{fail: 3}"))["watch.fail"]
    assert "expected at least 0" in read_problems(write(watch="{probe_every: -1}"))["watch"]
    (problem,) = read_problems(write(watch="{}"), "training.dropout=true").values()
    assert "expected training.dropout=false" in problem


def test_loss_determines_accepted_sections(write: Any) -> None:
    problems = read_problems(write(loss="{name: sft}"))
    assert problems["reward"].startswith("nothing reads it")
    assert problems["engine"].startswith("nothing reads it")
    assert problems["training.batch"].startswith("is missing")
    assert "this run measures loss, gradient_norm, tokens" in problems["gates"]


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("steps=3", "training.steps"),
        ("step=3", "training.steps"),
        ("lr=1e-5", "optimizer.lr"),
        ("training.lr=1e-5", "optimizer.lr"),
        ("dtype=float32", "engine.dtype or model.dtype"),
        ("cap=3", "loss.correction.cap"),
        ("revision=main", "data.revision"),
        ("training.step=3", "steps"),
    ],
)
def test_suggestions_include_keys_of_other_sections(write: Any, override: str, nearest: str) -> None:
    (problem,) = read_problems(write(), override).values()
    assert problem.startswith(f"nothing reads it (did you mean {nearest}?)")


def test_error_lists_all_problems_with_suggestions(write: Any) -> None:
    file = write(
        backend="{attn: sdpa, linear: te}",
        freeze_config="{vison: true, language: maybe}",
        optimizer="{_target_: torch.optim.AdamW, learning_rate: 1e-6, weigth_decay: 0}",
        training="{step: 10, questions: 4, group: many, max_prompt: 100, new_tokens: 50}",
        gates='["median(token_mult_prob_eror) < 1.05"]',
        engin="{}",
    )
    problems = read_problems(file, "seed=true")
    assert "did you mean engine" in problems["engin"]
    assert "did you mean steps" in problems["training.step"]
    assert "is missing" in problems["training.steps"]
    assert "is 'many': expected a whole number" in problems["training.group"]
    assert "did you mean vision" in problems["freeze_config.vison"]
    assert "expected true or false" in problems["freeze_config.language"]
    assert "did you mean weight_decay" in problems["optimizer.weigth_decay"]
    assert "expected some of lr" in problems["optimizer.learning_rate"]
    assert "linear='te'" in problems["backend"]
    assert "did you mean token_mult_prob_error" in problems["gates"]
    assert "is True: expected a whole number" in problems["seed"]
    assert len(problems) == 11


@pytest.mark.parametrize(
    ("loss", "key", "message"),
    [
        ("{name: dap}", "loss.name", "did you mean dapo?"),
        ("{name: dap}", "loss.name", "expected one of sft, dpo, reward, grpo, dr_grpo, dapo"),
        ("{eps_high: 0.3}", "loss.name", "is missing"),
        ("dapo", "loss.name", "is missing"),
        ("{name: dapo, eps_hihg: 0.3}", "loss.eps_hihg", "did you mean eps_high"),
        ("{name: dapo, eps_low: 2.0}", "loss", "eps_low=2.0"),
        ("{name: dapo, correction: {cap: 2.0}}", "loss.correction", "Invalid truncated importance sampling type: None"),
        ("{name: dapo, correction: {type: null}}", "loss.correction", "expected tis or mis"),
        ("{name: dapo, correction: {type: tiss}}", "loss.correction", "expected tis or mis"),
        ("{name: dapo, normalize: tokens}", "loss.normalize", "expected sequence or token or longest"),
        ("{name: dapo, overlong_buffer: 51}", "recipe.yaml", "at most training.new_tokens, 50"),
    ],
)
def test_invalid_losses(write: Any, loss: str, key: str, message: str) -> None:
    assert message in read_problems(write(loss=loss))[key]


def test_inconsistent_training_values(write: Any) -> None:
    file = write(
        training="{steps: 1, questions: 4, group: 8, max_prompt: 100, new_tokens: 50, updates: 3, row_tokens: 149}"
    )
    (message,) = read_problems(file).values()
    assert "updates=3: expected a divisor of the 4 questions" in message
    assert "row_tokens=149: expected at least the 150 of max_prompt and new_tokens" in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=fast", "is 'fast': expected a number"),
        ("optimizer.lr=-1", "is -1, which AdamW does not accept: Invalid learning rate"),
        ("optimizer.betas=0.9", "is 0.9: expected a list of 2 values"),
        ("optimizer.betas=[0.9, high]", "is [0.9, 'high']: expected a list of 2 values"),
        ("optimizer.weight_decay=-1", "is -1, which AdamW does not accept: Invalid weight_decay"),
        ("optimizer.amsgrad=maybe", "is 'maybe': expected true or false"),
        ("data.path=3", "is 3: expected text"),
        ("model.revision=1234567", "is 1234567: expected text"),
        ("model.subfolder=3", "is 3: expected text"),
        ("data.columns=text", "is 'text': expected keys and values or null"),
        ("reward.answer=5", "is 5: expected text"),
        ("engine.options.seed=3", "the run sets it itself: use seed"),
        ("engine.options.dtype=float32", "the run sets it itself: use engine.dtype"),
        ("engine.options.max_length=16", "use training.max_prompt and training.new_tokens"),
        ("loss.name=[]", "[] is not a loss"),
        ("seed=-1", "expected a whole number from 0 to 4294967295"),
        ("seed=1180591620717411303424", "expected a whole number from 0 to 4294967295"),
    ],
)
def test_invalid_values(write: Any, override: str, message: str) -> None:
    (problem,) = read_problems(write(), override).items()
    assert problem[0] == override.partition("=")[0]
    assert message in problem[1]


def test_invalid_sums_arguments(write: Any) -> None:
    data = "{_target_: nrl_models.recipes.sums.sums, count: many, largest: 2.5}"
    expected = {"data.count": "is 'many': expected a whole number ", "data.largest": "is 2.5: expected a whole number "}
    assert read_problems(write(data=data)) == expected


def test_dependent_optimizer_arguments(write: Any) -> None:
    sgd = write(optimizer="{_target_: torch.optim.SGD, nesterov: true, lr: 1}")
    assert "Nesterov momentum requires a momentum" in read_problems(sgd)["optimizer.nesterov"]
    assert read_recipe(sgd, ["optimizer.momentum=0.9"]).optimizer.arguments["nesterov"] is True
    assert set(read_problems(sgd, "optimizer.momentum=0.9", "optimizer.lr=-1")) == {"optimizer.lr"}


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        ("median(reward)", "expected a gate such as"),
        ("medium(reward) > 1", "unknown statistic medium: expected one of median, mean"),
        ("median(reward) > high", "the bound high is not a finite number"),
        ("median(reward) > nan", "the bound nan is not a finite number"),
        ("median(perplexity) < 1", "this run measures token_mult_prob_error, kl_k3, reward"),
    ],
)
def test_invalid_gates_raise(gate: str, message: str) -> None:
    with pytest.raises(UnknownArgumentError) as raised:
        Gate.parse(gate, POLICY_METRICS)
    assert message in str(raised.value)


def test_gates() -> None:
    history = [{"reward": value} for value in (1.0, 2.0, 6.0)]
    values = {"median": 2.0, "mean": 3.0, "max": 6.0, "min": 1.0, "first": 1.0, "last": 6.0}
    for name, value in values.items():
        for relation, passed in {"<": False, "<=": True, ">": False, ">=": True}.items():
            verdict = Gate.parse(f"{name}(reward) {relation} {value}", ["reward"]).check(history)
            assert (verdict.value, verdict.passed) == (value, passed)
    gate = Gate.parse("median(reward) < 10", ["reward"])
    assert not gate.check([]).passed, "gates fail without measurements"
    assert not gate.check([{"loss": 1.0}]).passed
    assert not gate.check([*history, {"reward": float("nan")}]).passed
    assert gate.check([*history, {"loss": 1.0}]).passed


# Invalid files


def test_reward_target_only_from_command_line(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('imported').touch()\n"
        "def reward(row, completion, ended): return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    file = write(reward="{_target_: elsewhere.reward}")
    problems = read_problems(file, "training.steps=1")
    assert "elsewhere.reward is code from elsewhere" in problems["reward._target_"]
    assert "give it on the command line: reward._target_=elsewhere.reward" in problems["reward._target_"]
    assert not (tmp_path / "imported").exists(), "the module is not imported"
    recipe = read_recipe(file, ["reward._target_=elsewhere.reward"])
    assert recipe.reward.function({}, "", True) == 1.0
    assert (tmp_path / "imported").exists()


def test_reward_function_signatures(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "def named(example, text, finished, *, scale=1.0): return scale\n"
        "def variadic(*args): return 1.0\n"
        "def short(row, completion): return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    recipe = read_recipe(write(reward="{scale: 2.0}"), ["reward._target_=my_rewards.named"])
    assert recipe.reward.function({}, "", True, **recipe.reward.arguments) == 2.0
    assert read_recipe(write(), ["reward._target_=my_rewards.variadic"]).reward.function({}, "", True) == 1.0
    problems = read_problems(write(), "reward._target_=my_rewards.short")
    assert problems["reward._target_"].strip() == "takes 2 positional arguments; expected row, completion, ended"


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", ["os.system", "nrl_models.auto.torch.os.system", "builtins.eval", "subprocess.Popen"])
def test_unlisted_targets_in_file_raise(write: Any, slot: str, name: str) -> None:
    text = POLICY.replace(
        "model:\n  _target_: nrl_models.AutoModelForCausalLM.from_pretrained\n", "model:\n  _target_: x\n"
    )
    if slot == "model":
        file = write(text.replace("_target_: x", f"_target_: {name}"))
    else:
        file = write(**{slot: f"{{_target_: {name}}}"})
    assert "is code from elsewhere" in read_problems(file)[f"{slot}._target_"]


def test_nested_target_raises(write: Any) -> None:
    file = write(data="{_target_: nrl_models.recipes.rows.rows, path: x, columns: {_target_: os.system}}")
    assert "only the first level" in read_problems(file)["data.columns._target_"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.trust_remote_code", "true", "run code"),
        ("model.offload_folder", "/tmp/x", "write files"),
        ("model.token", "abc", "name a secret"),
        ("engine.options.python", "/tmp/python", "code to run"),
        ("engine.options.worker_cls", "evil.Worker", "code to run"),
        ("engine.options.trust_remote_code", "true", "code to run"),
    ],
)
def test_options_that_run_code_only_from_command_line(write: Any, key: str, value: str, message: str) -> None:
    part, name = key.rsplit(".", 1)
    text = POLICY.replace("  dtype: float32\n", f"  dtype: float32\n  {name}: {value}\n", part == "model")
    text = text.replace("enforce_eager: true", f"{name}: {value}") if part != "model" else text
    problems = read_problems(write(text))
    assert message in problems[key]
    assert f"{key}=" in problems[key]
    read_recipe(write(), [f"{key}={value}"])


@pytest.mark.parametrize("key", ["backend.attn", "model.attn_implementation"])
def test_hub_kernels_only_from_command_line(write: Any, key: str) -> None:
    text = POLICY.replace("attn: sdpa", "attn: someone/kernel")
    if key.startswith("model"):
        text = POLICY.replace("  dtype: float32\n", "  dtype: float32\n  attn_implementation: someone/kernel\n")
    assert "whose code would be downloaded and run" in read_problems(write(text))[key.partition(".")[0]]
    read_recipe(write(), [f"{key}=someone/kernel"])


def test_safe_loading_options_exist() -> None:
    from nrl_models.loading.options import KEYWORDS

    assert set(SAFE_LOADING) <= {*KEYWORDS, "pretrained_model_name_or_path"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x [1]\nb: *x\n", "anchor or alias"),
        ("- 1\n", "not a mapping"),
        ("a: 1\na: 2\n", "duplicate key"),
        ("a: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
        ("a: {\n", "cannot be read"),
        ("[" * 50_000, "nested deeper than 32 levels"),
        ("\n".join(f"{' ' * level}a:" for level in range(100)), "nested deeper than 32 levels"),
        ("a: " + "x" * 2**16, "has more than"),
    ],
    ids=["anchor", "list", "duplicate key", "tag", "unclosed", "deep flow", "deep blocks", "large"],
)
def test_invalid_yaml(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    (detail,) = read_problems(file).values()
    assert message in detail


def test_interpolation_raises(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    problems = read_problems(write(POLICY.replace("some/model", "${oc.env:SECRET}")))
    assert "interpolation" in problems["model.pretrained_model_name_or_path"]
    assert "hunter2" not in str(problems)


@pytest.mark.parametrize("override", ["training.steps", "=3", "training.steps.x=1", "a.[=1"])
def test_invalid_overrides(write: Any, override: str) -> None:
    assert read_problems(write(), override)


def test_model_class_must_match_loss(write: Any) -> None:
    text = POLICY.replace("AutoModelForCausalLM", "AutoModelForSequenceClassification")
    assert "needs a model that writes text" in read_problems(write(text))["model._target_"]


def test_misspelled_loading_option(write: Any) -> None:
    text = POLICY.replace("  dtype: float32", "  dtpye: float32")
    assert "did you mean dtype" in read_problems(write(text))["model.dtpye"]
    text = POLICY.replace("  dtype: float32", "  router_aux_loss_coef: 0.0")
    assert read_recipe(write(text)).model.arguments["router_aux_loss_coef"] == 0.0


def test_unknown_recipe_name_raises() -> None:
    with pytest.raises(RecipeError, match="did you mean llama/grpo"):
        recipe_file("llama/grpp")
    assert recipe_file("llama/grpo") == recipes()["llama/grpo"]


@pytest.mark.parametrize("name", recipes())
def test_bundled_recipes_are_valid(name: str) -> None:
    recipe = read_recipe(recipes()[name])
    assert isinstance(recipe, (PolicyRecipe, SupervisedRecipe))
    assert recipe.gates, "recipes define gates"
    lines = recipes()[name].read_text().splitlines()
    assert sum("#" in line for line in lines) >= 3, "recipes have comments"
    assert lines[0].startswith("# ")


PAGE = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()


def test_page_shows_the_bundled_recipe() -> None:
    (shown,) = re.findall(r"^```yaml\n(# .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert shown == recipe_file("demo/grpo").read_text()


def test_page_lists_training_keys_and_defaults() -> None:
    table = PAGE[PAGE.index("### Training") : PAGE.index("### Columns")]
    listed = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| `?([^|`]+)`? \|", table, re.MULTILINE))
    fields = {field.name: field for kind in (SupervisedTraining, PolicyTraining) for field in dataclasses.fields(kind)}
    assert listed.keys() == fields.keys()
    for name, field in fields.items():
        if field.default is dataclasses.MISSING:
            assert listed[name] == "required"
        elif name != "row_tokens":  # by device
            assert listed[name] in (str(field.default), json.dumps(field.default))
