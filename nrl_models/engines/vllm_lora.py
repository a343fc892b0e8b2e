"""Adapters that vLLM adds to its weights while it runs, by its own LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nrl_models.errors import EngineError, one_line


def load_adapter(llm: Any, folder: Path, number: int) -> Any:
    """Have vLLM read an adapter.

    Args:
        llm: a `vllm.LLM`.
        folder: what PEFT's `save_pretrained` wrote.
        number: no earlier adapter's, for vLLM keeps what it has read, and prefixes that were computed with it.

    Returns:
        The `LoRARequest` that requests with this adapter name.

    Raises:
        EngineError: vLLM takes no adapters, or not this one. It has what it had before.
    """
    if llm.llm_engine.vllm_config.lora_config is None:
        raise EngineError(
            "this vLLM takes no adapters: start it with enable_lora=True, and max_lora_rank of at least the adapter's "
            "rank; or refit it with merged weights, nrl_models.export_adapter(model).iter_export(model)"
        )
    if not (folder / "adapter_config.json").is_file():
        raise EngineError(f"{folder} has no adapter_config.json: expected a folder that PEFT saved an adapter in")
    from vllm.lora.request import LoRARequest

    request = LoRARequest(f"adapter-{number}", number, str(folder))
    try:
        taken = llm.llm_engine.add_lora(request)
    except Exception as error:  # whatever vLLM raises
        raise EngineError(f"vLLM does not take the adapter in {folder}: {one_line(error)}") from error
    if not taken:
        raise EngineError(f"vLLM does not take the adapter in {folder}, and does not say why")
    return request
