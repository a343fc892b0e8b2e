"""Serve adapters with vLLM's LoRA support, without merging them into the weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from nrl_models.common.checkpoint.publication.publishing import ADAPTER_WEIGHTS_NAME
from nrl_models.common.dtypes import dtype_name
from nrl_models.common.trust.adapter_files import require_adapter_files
from nrl_models.engines.transfer.sent_tensors import finite
from nrl_models.errors import CheckpointError, EngineError, listed, one_line

EXPERTS = ".experts"
"""Part of the names of experts, which are one module in vLLM and parameters in PEFT."""


def adapter_modules(manager: Any, number: int) -> dict[str, list[str]]:
    """Compare an adapter that vLLM has loaded with the modules that it wrapped.

    Args:
        manager: vLLM's `LoRAModelManager`, in its worker.
        number: Number of the adapter.

    Returns:
        Module names by vLLM's naming, with fused projections split. `sent`: modules for which the adapter has both
        matrices. `wrapped`: modules where vLLM applies adapters. `misfits`: matrices of the adapter whose size is not
        the module's. vLLM would fill only a part of the module's matrix with them.
    """

    def parts(name: str) -> list[str]:
        return [name] if name.endswith(EXPERTS) else manager.packed_modules.get(name) or [name]

    sent, misfits = [], []
    for name, lora in manager._registered_adapters[number].loras.items():
        split = parts(name)
        pairs = [(lora.lora_a, lora.lora_b)] if split == [name] else zip(lora.lora_a, lora.lora_b, strict=True)
        complete = {
            index: (part, *pair)
            for index, (part, pair) in enumerate(zip(split, pairs, strict=True))
            if all(side is not None for side in pair)
        }
        sent += [part for part, *_ in complete.values()]
        sizes = _sizes(manager.modules.get(name))
        misfits += [
            f"{part} ({before.shape[1]} to {after.shape[0]}, expected {' to '.join(map(str, sizes[index]))})"
            for index, (part, before, after) in complete.items()
            if index < len(sizes) and (before.shape[1], after.shape[0]) != sizes[index]
        ]
    return {"sent": sent, "wrapped": [part for name in manager.modules for part in parts(name)], "misfits": misfits}


def _sizes(module: Any) -> list[tuple[int, int]]:
    """Return the input and output size of each linear in a vLLM module with adapters.

    The list is empty for sharded modules and for modules without adapters.

    vLLM has a stack `(adapters, 1, rank, in_features)` and one `(adapters, 1, out_features, rank)` per fused linear.
    """
    before, after = (getattr(module, f"lora_{side}_stacked", None) for side in "ab")
    if getattr(module, "tp_size", None) != 1 or not isinstance(before, tuple) or not isinstance(after, tuple):
        return []
    return [(first.shape[3], second.shape[2]) for first, second in zip(before, after, strict=True)]


def load_adapter(llm: Any, folder: Path, number: int) -> Any:
    """Load an adapter into vLLM.

    Args:
        llm: A `vllm.LLM`.
        folder: Directory written by PEFT's `save_pretrained`.
        number: A new number, because vLLM caches adapters and prefixes by number.

    Returns:
        The `LoRARequest` for requests with this adapter.

    Raises:
        EngineError: If vLLM does not support adapters, or does not apply this one completely. vLLM keeps its state.
    """
    if llm.llm_engine.vllm_config.lora_config is None:
        raise EngineError(
            "this vLLM has adapters disabled: start it with enable_lora=True, and max_lora_rank of at least the "
            "adapter's rank; or refit it with merged weights, nrl_models.export_adapter(model).iter_export(model)"
        )
    if not (folder / "adapter_config.json").is_file():
        raise EngineError(f"{folder} has no adapter_config.json: expected a folder that PEFT saved an adapter in")
    _require_values(folder)
    from vllm.lora.request import LoRARequest

    request = LoRARequest(f"adapter-{number}", number, str(folder))
    try:
        taken = llm.llm_engine.add_lora(request)
    except Exception as error:  # any error of vLLM
        raise EngineError(f"vLLM does not support the adapter in {folder}: {one_line(error)}") from error
    if not taken:
        raise EngineError(f"vLLM does not support the adapter in {folder}, without a reason")
    try:
        _require_applied(llm, folder, number)
    except EngineError:
        llm.llm_engine.remove_lora(number)
        raise
    return request


def _require_values(folder: Path) -> None:
    """Check that an adapter has finite floating-point numbers in safetensors. vLLM loads any values, and pickles.

    Raises:
        EngineError: If a file is damaged, is a pickle, or has other values.
    """
    file = folder / ADAPTER_WEIGHTS_NAME
    try:
        require_adapter_files(folder)
        tensors = load_file(file)
    except CheckpointError as error:
        raise EngineError(*str(error).splitlines()) from error
    except SafetensorError as error:
        raise EngineError(f"{file} is damaged: {one_line(error)}") from error
    for name, tensor in finite(tensors.items()) if tensors else ():
        if not tensor.is_floating_point():
            raise EngineError(
                f"{name} in {file} has the dtype {dtype_name(tensor.dtype)}: expected a floating-point dtype"
            )


def _require_applied(llm: Any, folder: Path, number: int) -> None:
    """Check that vLLM applies every module of an adapter, and that the adapter has every module that it targets.

    vLLM looks up the adapter's tensors by the names of its modules, and silently runs modules without a match
    unadapted.

    Raises:
        EngineError: If some modules do not match. The message lists them.
    """
    workers: list[dict[str, list[str]]] = llm.collective_rpc("nrl_adapter", args=(number,))
    sent = {name for worker in workers for name in worker["sent"]}
    wrapped = {name for worker in workers for name in worker["wrapped"]}
    misfits = sorted({name for worker in workers for name in worker["misfits"]})
    if misfits:
        raise EngineError(
            f"the adapter in {folder} has matrices of other sizes than the engine's model: {listed(misfits)}. Save it "
            "from the model that the engine serves"
        )
    if ignored := sorted(sent - wrapped):
        raise EngineError(
            f"vLLM ignores {len(ignored)} modules of the adapter in {folder}: {listed(ignored)}. It has no adaptable "
            f"module of these names; it has {listed(sorted(wrapped), 2)}. Save the adapter from the model that the "
            "engine serves, with modules of the text model only, or refit the engine with merged weights"
        )
    if not sent:
        raise EngineError(f"vLLM found no module in the adapter in {folder}: expected tensors of lora_A and lora_B")
    if missing := sorted((wrapped - sent) & _targeted(folder, wrapped)):
        raise EngineError(
            f"the adapter in {folder} has no matrices for {len(missing)} modules that its adapter_config.json targets: "
            f"{listed(missing)}. vLLM would run them without an adapter: save the adapter again, or name its layers in "
            "layers_to_transform"
        )


def _targeted(folder: Path, names: Iterable[str]) -> set[str]:
    """Return the module names to which PEFT would add an adapter, according to `adapter_config.json`."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    content = json.loads((folder / "adapter_config.json").read_text())
    fields = LoraConfig.__dataclass_fields__
    config = LoraConfig(**{key: value for key, value in content.items() if key in fields})
    return {name for name in names if EXPERTS not in name and check_target_module_exists(config, name)}
