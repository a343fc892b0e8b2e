"""vLLM drafts with multi-token prediction weights saved by nrl_models, and accepts a refit that contains them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from nrl_models import AutoModelForCausalLM
from nrl_models.common.state_dict.kept_tensors import kept_by
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.scores import final_scores
from nrl_models.logprobs import Sampling, token_mult_prob_error
from tests.engine.families import BOUND, tiny_model
from tests.engine.one_engine import OneEngine

NEW_TOKENS = 16


def save_published(folder: Path) -> Path:
    """Save a GLM-4.5 with an MTP layer as published: the last layer's shapes, and a projection of two vectors."""
    model = tiny_model("Glm4MoeForCausalLM")
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    last, hidden = model.config.num_hidden_layers - 1, model.config.hidden_size
    torch.manual_seed(1)
    of_last = {name: tensor for name, tensor in tensors.items() if f"model.layers.{last}." in name}
    layer = {name.removeprefix(f"model.layers.{last}."): 0.1 * torch.randn_like(t) for name, t in of_last.items()}
    layer |= {"eh_proj.weight": 0.1 * torch.randn(hidden, 2 * hidden), "shared_head.norm.weight": torch.randn(hidden)}
    layer |= {"enorm.weight": torch.randn(hidden), "hnorm.weight": torch.randn(hidden)}
    layer |= {"embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
    layer |= {"shared_head.head.weight": tensors["lm_head.weight"].clone()}
    tensors |= {f"model.layers.{last + 1}.{name}": tensor for name, tensor in layer.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def drafter_of(engine: Any) -> Any:
    """Return the draft model of a vLLM engine in this process."""
    return engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter.model


def test_drafting_with_saved_and_refitted_mtp_weights(vllm: OneEngine, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_published(tmp_path / "published"), dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    drafting = {"method": "mtp", "num_speculative_tokens": 1}
    engine = vllm(tmp_path / "saved", speculative_config=drafting)
    layer = f"model.layers.{model.config.num_hidden_layers}"
    drafter, mtp_tensors = dict(drafter_of(engine).named_parameters()), kept_by(model)
    for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"):
        assert torch.equal(drafter[f"{layer}.{name}"], mtp_tensors[f"{layer}.{name}"].read()), name

    def mismatch() -> float:
        prompts = torch.randint(16, 200, (3, 40), generator=torch.Generator().manual_seed(0)).tolist()
        samples = engine.generate(prompts, Sampling(temperature=0.0), max_new_tokens=NEW_TOKENS)
        tokens = torch.tensor([[*sample.prompt, *sample.tokens] for sample in samples])
        sampled = torch.tensor([sample.logprobs for sample in samples], dtype=torch.float64)
        trainer = HFEngine(model, "trainer")
        return token_mult_prob_error(final_scores(trainer, tokens, NEW_TOKENS, Sampling()), sampled)

    assert mismatch() <= BOUND
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert mismatch() > 1.01
    sent = list(model.state_dict_adapter.iter_export(model))
    assert mtp_tensors.keys() <= {name for name, _ in sent}
    report = engine.refit(sent)
    assert not report.unwritten
    assert mismatch() <= BOUND
