"""Rows and their token ids, reward rules, and supervised steps, compared with their definitions."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import new_model
from recipe_inputs import ROWS, byte_tokenizer
from tokenizers import processors
from transformers import AddedToken, LlamaConfig

from nrl_models.errors import NRLModelsError, RecipeError
from nrl_models.losses import LOSSES
from nrl_models.recipes.recipe import LearningRateSchedule, Training
from nrl_models.recipes.recipe_run import learning_rate_schedule, shuffled
from nrl_models.recipes.reward_rules import boxed, last_number
from nrl_models.recipes.rows import answered_ids, padded_rows, prompt_ids, rows, sequences_of
from nrl_models.recipes.supervised import SupervisedLoop
from nrl_models.testing.tiny import tiny_config

CONFIG = tiny_config(LlamaConfig)
TOKENIZER = byte_tokenizer(CONFIG)


def text(ids: list[int], trained: list[bool] | None = None) -> str:
    return TOKENIZER.decode([token for place, token in enumerate(ids) if trained is None or trained[place]])


def test_rows_from_file(rows_file: Path) -> None:
    results = rows(str(rows_file))
    assert len(results) == len(ROWS)
    assert results[0] == ROWS[0]


def test_size_limit_applies_per_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nrl_models.recipes.data_sets.sources.MOST_BYTES", 100)
    monkeypatch.setattr("nrl_models.common.checkpoint.json_reading.MOST_BYTES", 100)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"number": number}) + "\n" for number in range(1000)))
    assert [row["number"] for row in rows(str(file))] == list(range(1000))
    file.write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": "a" * 200}) + "\n")
    with pytest.raises(NRLModelsError, match="line 2: has more than 100 bytes"):
        rows(str(file))


def test_column_templates(rows_file: Path) -> None:
    columns = {
        "prompt": "Q: $question", "same": "$messages", "price": "$$5", "flag": True, "nothing": None, "number": 5,
        "chat": [{"role": "user", "content": "$question $answer"}],
    }  # fmt: skip
    row = rows(str(rows_file), columns=columns)[0]
    assert row["prompt"] == "Q: 3 + 1?"
    assert row["same"] == ROWS[0]["messages"]
    assert row["price"] == "$5"
    assert (row["flag"], row["nothing"], row["number"]) == (True, None, 5)
    assert row["chat"] == [{"role": "user", "content": "3 + 1? #### 4"}]
    assert row["answer"] == ROWS[0]["answer"]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", {}, "has no rows"),
        ("[1]\n", {}, "line 1"),
        ('{"a": 1}\n{"a"\n', {}, "line 2"),
        ('{"a": 1}\n', {"split": "train"}, "(?s)has no split.*remove split: data.split=null"),
        (
            '{"a": 1}\n',
            {"columns": {"b": "cost $5"}},
            r"(?s)columns: Invalid placeholder.*write \$\$ for a dollar sign",
        ),
        ('{"a": 1}\n', {"columns": {"b": "$c"}}, "'c' is not a column; it has a"),
    ],
)
def test_invalid_files_raise(tmp_path: Path, content: str, options: dict[str, Any], message: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    with pytest.raises(NRLModelsError, match=message):
        rows(str(file), **options)


def test_file_with_other_suffix_raises(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text("{}")
    with pytest.raises(RecipeError, match=r"is a file without the suffix .jsonl"):
        rows(str(file))


def test_directory_without_data_raises(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "code.py").write_text("")
    with pytest.raises(RecipeError, match="cannot be loaded by datasets"):
        rows(str(tmp_path))


@pytest.mark.parametrize("name", ["rows.jsnl", "rows.json", "row.jsonl", "./rows", "data/rows"])
def test_missing_file_is_not_requested_from_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", None)
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "data"):
        folder.mkdir(exist_ok=True)
        (folder / "rows.jsonl").write_text("{}")
        (folder / "other.txt").write_text("")
    nearest = "data/rows.jsonl" if name == "data/rows" else "rows.jsonl"
    with pytest.raises(RecipeError, match=re.escape(f"{name}: no such file (did you mean {nearest}?)")):
        rows(name)


def test_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` only reads its cache. Its requests are repeated with pauses."""
    datasets = pytest.importorskip("datasets")

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", fail)
    monkeypatch.setattr("huggingface_hub.HfApi.hf_hub_download", None)
    expected = "owner/name: cannot be fetched from the hub: ConnectionError: Name or service not known"
    with pytest.raises(RecipeError, match=expected):
        rows("owner/name")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"offline": datasets.config.HF_HUB_OFFLINE}])
    assert rows("owner/name")[0] == {"offline": True}
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    assert rows("owner/name")[0] == {"offline": False}


@pytest.mark.parametrize(
    ("prompt", "answer", "untrained_text", "trained_text"),
    [
        ("2 + 2 =", " 4", "2 + 2 =", " 4<end>"),
        (None, "a text", "", "a text<end>"),
        ([{"role": "user", "content": "Hi"}], "Ho", "uHi<end>a", "Ho<end>"),
        ("Hi", [{"role": "assistant", "content": "Ho"}], "uHi<end>a", "Ho<end>"),
        (None, ROWS[0]["messages"], "u3 + 1?<end>a", "4<end>"),
        ("ignored", ROWS[0]["messages"], "u3 + 1?<end>a", "4<end>"),
    ],
)
def test_only_answers_are_trained(prompt: Any, answer: Any, untrained_text: str, trained_text: str) -> None:
    ids, trained = answered_ids(TOKENIZER, prompt, answer)
    assert text(ids, trained) == trained_text
    assert text(ids, [not value for value in trained]) == untrained_text
    if prompt not in (None, "ignored") and not (isinstance(prompt, str) and isinstance(answer, list)):
        assert ids[: len(prompt_ids(TOKENIZER, prompt))] == prompt_ids(TOKENIZER, prompt)


def chat(*messages: str) -> list[dict[str, str]]:
    """Return messages with roles by their first letters: system, user, assistant, tool."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[message[0]], "content": message[1:]} for message in messages]


@pytest.mark.parametrize(
    ("prompt", "answer", "trained_text"),
    [
        (chat("uHi"), chat("aHo", "uAnd?", "aSo"), "Ho<end>So<end>"),
        (chat("uHi"), chat("aHo", "uAnd?"), "Ho<end>"),
        (chat("uHi"), chat("aHo", "uHi", "aSo"), "Ho<end>So<end>"),  # the user repeats the prompt
        (chat("uHi", "aHo"), chat("uAnd?", "aHo", "uHi", "aSo"), "Ho<end>So<end>"),
        (chat("sBe", "uHi"), chat("aHo", "t5", "aSo"), "Ho<end>So<end>"),
        (chat("uHi"), chat("t5", "aSo"), "So<end>"),
        (chat("sBe"), chat("uHi", "aHo", "uAnd?", "aSo"), "Ho<end>So<end>"),
        ("Hi", chat("aHo", "uAnd?", "aSo"), "Ho<end>So<end>"),
        (None, chat("uHi", "aHo", "uAnd?", "aSo"), "So<end>"),
    ],
)
@pytest.mark.parametrize("blank", ["", "\n", " \n"])
def test_only_assistant_messages_are_trained(prompt: Any, answer: Any, trained_text: str, blank: str) -> None:
    """The end token of each message is trained. Text that the template adds after it is not."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = tokenizer.chat_template.replace("eos_token", f"eos_token + {blank!r}")
    ids, trained = answered_ids(tokenizer, prompt, answer)
    assert text(ids, trained) == trained_text
    messages = [*(chat(f"u{prompt}") if isinstance(prompt, str) else prompt or []), *answer]
    assert ids == tokenizer.apply_chat_template(messages, return_dict=False)


@pytest.mark.parametrize("before", [chat(), chat("sBe"), chat("uHm", "aHa")])
def test_prompt_is_not_repeated_in_complete_chat(before: list[dict[str, str]]) -> None:
    ids, trained = answered_ids(TOKENIZER, chat("uHi"), [*before, *chat("uHi", "aHo")])
    assert ids == TOKENIZER.apply_chat_template([*before, *chat("uHi", "aHo")], return_dict=False)
    assert text(ids, trained) == "Ho<end>"


def test_special_token_ends_turn() -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_tokens([AddedToken("<turn>", special=True)])
    tokenizer.chat_template = tokenizer.chat_template.replace("eos_token", "'<turn>\n'")
    ids, trained = answered_ids(tokenizer, "Hi", chat("aHo"))
    assert tokenizer.decode([token for token, own in zip(ids, trained, strict=True) if own]) == "Ho<turn>"


@pytest.mark.parametrize("end", ["", "\n", "###"])
def test_template_without_end_of_turn_raises(end: str) -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = tokenizer.chat_template.replace("eos_token", repr(end))
    with pytest.raises(NRLModelsError, match="no end-of-turn token after an answer"):
        answered_ids(tokenizer, "Hi", chat("aHo"))


@pytest.mark.parametrize(
    ("prompt", "answer"), [(chat("uHi"), chat("t5")), (None, chat("uHi", "aHo", "uAnd?")), (None, chat("uHi", "uHo"))]
)
def test_answer_with_other_role_raises(prompt: Any, answer: Any) -> None:
    with pytest.raises(NRLModelsError, match=r"messages of the role (tool|user): expected one of the assistant"):
        answered_ids(TOKENIZER, prompt, answer)


def appending(before: str, after: str) -> Any:
    """Make the tokenizer add tokens around each text, like Llama's with `add_eos_token` and BERT's."""
    tokenizer = byte_tokenizer(CONFIG, {"<start>": 300})
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (before, after) if token]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{before} $A {after}".strip(), special_tokens=ids
    )
    return tokenizer


@pytest.mark.parametrize("before", ["", "<start>"])
@pytest.mark.parametrize("after", ["", "<end>", "<pad>"])
def test_tokens_appended_by_tokenizer(before: str, after: str) -> None:
    """A prompt has no end token, and an answer has one."""
    tokenizer = appending(before, after)
    assert tokenizer.decode(tokenizer("x")["input_ids"]) == f"{before}x{after}"
    for sample_text in ("2 + 2 =", "", "ends<end>"):
        assert tokenizer.decode(prompt_ids(tokenizer, sample_text)) == before + sample_text
    for sample_text, written in (("a text", "a text<end>"), ("a text<end>", "a text<end>"), ("", "<end>")):
        ids, trained = answered_ids(tokenizer, None, sample_text)
        assert tokenizer.decode(ids) == before + written
        assert all(trained)
        ids, trained = answered_ids(tokenizer, "2 + 2 =", sample_text)
        assert tokenizer.decode(ids) == f"{before}2 + 2 ={written}"
        assert tokenizer.decode([token for token, own in zip(ids, trained, strict=True) if own]) == written
    ids, _ = answered_ids(tokenizer, chat("uHi"), "Ho")
    assert tokenizer.decode(ids) == "uHi<end>aHo<end>"


def test_template_with_changing_prompt_raises() -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = "{% if add_generation_prompt %}think {% endif %}{{ messages[0]['content'] }}"
    with pytest.raises(NRLModelsError, match="renders a question differently once an answer follows"):
        answered_ids(tokenizer, None, ROWS[0]["messages"])


def test_missing_columns_raise() -> None:
    with pytest.raises(RecipeError, match="has chosen, rejected: expected prompt and completion"):
        sequences_of(TOKENIZER, {"chosen": "a", "rejected": "b"}, pairs=False)
    with pytest.raises(RecipeError, match="has text: expected chosen and rejected"):
        sequences_of(TOKENIZER, {"text": "a"}, pairs=True)


def test_rows_are_reshuffled_each_epoch() -> None:
    order = [row["number"] for row in islice(shuffled([{"number": n} for n in range(5)], 0), 15)]
    assert [sorted(order[start : start + 5]) for start in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    assert order[:5] != order[5:10]


@pytest.mark.parametrize(
    ("answer", "completion", "ended", "reward"),
    [
        ("so #### 1,234", "It is 1234", True, 1.0),
        ("#### 42", "41, no: 42.", True, 1.0),
        ("#### 42", "42, no: 41", True, 0.0),
        ("#### 42", "42", False, 0.0),
        ("#### 42", "none", True, 0.0),
        ("-3.50", "x = -3.5", True, 1.0),
        ("none", "3", True, 0.0),
        ("7", "pages 3-7", True, 1.0),
        ("-7", "3 is not -7", True, 1.0),
        ("-7", "x = \u22127", True, 1.0),
        ("0.5", "it is .5", True, 1.0),
        ("1000", "1e3", True, 1.0),
        ("3", "in version 2.5.3", True, 1.0),
        ("12", "12 eggs.", True, 1.0),
        ("12", "1,2", True, 0.0),  # two numbers
        ("1e401", "1e400", True, 0.0),
        ("3", "1e99999999999999999999", True, 0.0),  # larger than any Decimal
        ("5e-99999999999999999999", "5e-99999999999999999999", True, 0.0),
    ],
)
def test_last_number(answer: str, completion: str, ended: bool, reward: float) -> None:
    assert last_number({"answer": answer}, completion, ended) == reward


@pytest.mark.parametrize(
    ("answer", "completion", "ended", "reward"),
    [
        ("34", r"so \boxed{34}", True, 1.0),
        ("34", r"\boxed{33}, no: \boxed{34}", True, 1.0),
        (r"2 \sqrt { 221 }", r"\boxed{2\sqrt{221}}", True, 1.0),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{2}}", True, 1.0),
        ("34", r"\boxed{34}", False, 0.0),
        ("34", "34", True, 0.0),
        ("34", r"\boxed{34", True, 0.0),
        (r"\frac{\sqrt{\frac{1}{2}}}{2}", r"\boxed{\frac{\sqrt{\frac{1}{2}}}{2}}, not \boxed{", True, 1.0),
    ],
)
def test_boxed(answer: str, completion: str, ended: bool, reward: float) -> None:
    assert boxed({"solution": answer}, completion, ended, answer="solution") == reward


# Steps


def loop(name: str, micro_batch: int = 4) -> SupervisedLoop:
    kind = "ForSequenceClassification" if name == "reward" else "ForCausalLM"
    config = tiny_config(LlamaConfig, {"num_labels": 1, "pad_token_id": 0} if name == "reward" else {})
    model, reference = new_model(config, kind), new_model(config, kind, seed=1).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return SupervisedLoop(
        model=model, optimizer=optimizer, settings=LOSSES[name], pad=0, micro_batch=micro_batch, reference=reference
    )


def encoded(*, pairs: bool) -> Any:
    rows = [{key: value for key, value in row.items() if key != "messages"} for row in ROWS]
    return (sequences_of(TOKENIZER, row, pairs=pairs) for row in rows)


@pytest.mark.parametrize("name", ["sft", "dpo", "reward"])
def test_micro_batch_size_does_not_change_step(name: str) -> None:
    results = {}
    for size in (1, 3, 5):
        made = loop(name, size)
        measured = made.step(encoded(pairs=name != "sft"), 5)
        results[size] = (
            measured,
            [parameter.grad.clone() for parameter in made.model.parameters() if parameter.grad is not None],
        )
    for size in (1, 3):
        assert results[size][0] == pytest.approx(results[5][0], rel=1e-4, abs=1e-5)
        torch.testing.assert_close(results[size][1], results[5][1], rtol=1e-3, atol=1e-5)


def test_sft_loss_matches_model_loss() -> None:
    made = loop("sft")
    batch = [row[0] for row in islice(encoded(pairs=False), 5)]
    ids, there, answers = padded_rows(batch, 0, torch.device("cpu"))
    expected = made.model(input_ids=ids, attention_mask=there.long(), labels=ids.masked_fill(~answers, -100)).loss
    assert made.step(encoded(pairs=False), 5)["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_pair_metrics() -> None:
    made = loop("reward")
    pairs = list(islice(encoded(pairs=True), 5))
    scores = []
    for side in (0, 1):
        ids, there, _ = padded_rows([pair[side] for pair in pairs], 0, torch.device("cpu"))
        with torch.no_grad():
            scores.append(made.model(input_ids=ids, attention_mask=there.long()).logits[:, 0])
    margin = scores[0] - scores[1]
    results = made.step(encoded(pairs=True), 5)
    assert results["ordered"] == pytest.approx((margin > 0).float().mean().item())
    assert results["margin"] == pytest.approx(margin.mean().item(), abs=1e-5)
    assert results["loss"] == pytest.approx(-torch.nn.functional.logsigmoid(margin).mean().item(), abs=1e-5)
    reference = loop("dpo")
    reference.reference.load_state_dict(reference.model.state_dict())
    results = reference.step(encoded(pairs=True), 5)
    assert results["loss"] == pytest.approx(math.log(2), abs=1e-4), "the policy equals its reference"


@pytest.mark.parametrize("name", ["sft", "dpo", "reward"])
def test_dropout_is_off_by_default(name: str) -> None:
    results = {}
    for mode, dropout in ((False, False), (True, False), (True, True)):
        made = loop(name)
        made = dataclasses.replace(made, dropout=dropout)
        if name == "dpo":
            made.reference.load_state_dict(made.model.state_dict())
        for model in (made.model, made.reference):
            for layer in model.model.layers:
                layer.self_attn.attention_dropout = 0.3
            model.train(mode)
        results[mode, dropout] = made.step(encoded(pairs=name != "sft"), 5)["loss"]
        assert made.model.training == made.reference.training == mode
    assert results[True, False] == pytest.approx(results[False, False], abs=1e-6)
    assert abs(results[True, True] - results[False, False]) > 1e-4
    if name == "dpo":
        assert results[True, False] == pytest.approx(math.log(2), abs=1e-5)


def test_update_with_non_finite_gradient_is_skipped() -> None:
    made = loop("sft")
    made.optimizer.param_groups[0]["lr"] = 0.1
    before = copy.deepcopy(made.model.state_dict())
    handle = made.model.lm_head.weight.register_hook(lambda gradient: gradient * math.nan)
    assert made.step(encoded(pairs=False), 5)["skipped_updates"] == 1
    torch.testing.assert_close(dict(made.model.state_dict()), dict(before), rtol=0, atol=0)
    handle.remove()
    assert made.step(encoded(pairs=False), 5)["skipped_updates"] == 0


def test_zero_clip_gradient_norm_does_not_clip() -> None:
    made = dataclasses.replace(loop("sft"), clip_gradient_norm=0.0)
    measured = made.step(encoded(pairs=False), 5)
    squared = sum(p.grad.square().sum().item() for p in made.model.parameters() if p.grad is not None)
    assert measured["gradient_norm"] == pytest.approx(math.sqrt(squared), rel=1e-5)
    assert measured["gradient_norm"] > 0


DECAYS = {
    LearningRateSchedule.CONSTANT: lambda progress: 1.0,
    LearningRateSchedule.LINEAR: lambda progress: 1.0 - progress,
    LearningRateSchedule.COSINE: lambda progress: (1.0 + math.cos(math.pi * progress)) / 2.0,
}


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("schedule", LearningRateSchedule)
def test_learning_rate_increases_during_warmup(schedule: LearningRateSchedule, warmup: int) -> None:
    steps, rates = 12, []
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = learning_rate_schedule(optimizer, Training(steps=steps, schedule=schedule, warmup=warmup))
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    decay = [DECAYS[schedule]((step - warmup) / (steps - warmup)) for step in range(warmup, steps)]
    assert rates == pytest.approx([2.0 * step / warmup for step in range(warmup)] + [2.0 * factor for factor in decay])


def test_deeply_nested_row_raises(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"a": 1}) + "\n" + "[" * 100_000 + "\n")
    with pytest.raises(NRLModelsError, match="line 2"):
        rows(str(file))
