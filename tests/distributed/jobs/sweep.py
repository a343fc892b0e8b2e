"""Load one architecture after another over the ranks, and compare it with one process."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from jobs import pipeline
from jobs.equality import expected, full_gradients, step
from jobs.setting import batches, case_of, mesh_of
from nrl_models.distributed import Pipeline
from nrl_models.distributed.mesh import size_of
from nrl_models.distributed.parallel_plan import declared_expert_plan
from nrl_models.errors import ShardingError
from nrl_models.onboarding.inspect import kinds_of
from nrl_models.parity.noise import NOISE_FACTOR
from nrl_models.testing.case import SEED, FamilyCase
from nrl_models.testing.suite.conditions import generates, reads_what_it_writes

LOSS, GRADIENTS = 1e-6, 1e-5
"""Bounds on differences from sharding: of the loss, relative to it; of gradients, relative to the largest of all."""

SMALL_GRADIENTS, ROUNDING = 1e-2, 1e-6
"""Bounds on a tensor's gradients if they are small compared with others: relative to its own, and to the largest.

Gradients that are zero in exact arithmetic (a bias before a batch norm) are 5e-7 to 2e-6 of the largest due to
rounding. The smallest meaningful gradients are a hundred times larger.
"""

MOST_NOISE = 1e-4
"""Largest difference that can be rounding, relative to the largest gradient of all.

A difference above the other bounds is rounding if it is at most `NOISE_FACTOR` times that of one process which rounds
in another way (`rounded_otherwise`), and at most `SMALL_GRADIENTS` of the tensor's own gradients. Gradients of Gemma
4's embeddings with audio differ by 3.5e-5 there, also in transformers' class. Sharded in fp64, without audio, they
differ by less than 4e-9.
"""

_case = lru_cache(maxsize=1)(case_of)
_mesh = lru_cache(maxsize=None)(mesh_of)


def prepare(architecture: str, folder: str) -> list[str]:
    """Save the tiny checkpoint with transformers. Returns the possible mesh dimensions."""
    case = _case(architecture)
    if dist.get_rank() == 0:
        case.reference().save_pretrained(folder)
    dist.barrier()
    has_experts = "moe" in kinds_of(case.config) or declared_expert_plan(case.model())
    has_stages = generates(case) and reads_what_it_writes(case)
    return ["fsdp", "tp", *(["ep", "compiled"] if has_experts else []), *(["pp"] if has_stages else [])]


def holds(architecture: str, folder: str, dimension: str) -> str:
    """Load the checkpoint over all ranks along a dimension. Returns the difference to one process, or nothing."""
    case, mesh = _case(architecture), _mesh(**{dimension: dist.get_world_size()})
    model = case.model_class.from_pretrained(folder, mesh=mesh, plan="auto")
    unsharded = case.model()
    exported = dict(model.state_dict_adapter.iter_export(model))
    tensor_differences = [*different_tensors(exported, dict(unsharded.state_dict_adapter.iter_export(unsharded)))]
    return "; ".join([*tensor_differences, *different_step(case, model.train(), mesh)])


def holds_compiled(architecture: str, folder: str) -> str:
    """Take a step with one compiled layer of each kind that has experts, or only their experts, over EP and over TP.

    Returns:
        The difference to one process, or nothing.

    Raises:
        ShardingError: If the model can be divided over neither.
    """
    case, lines, refusals = _case(architecture), [], []
    compile_parts = compile_layers if layers_compile(case) else compile_blocks
    for dimension in ("ep", "tp"):
        mesh = _mesh(**{dimension: dist.get_world_size()})
        try:
            model = case.model_class.from_pretrained(folder, mesh=mesh, plan="auto")
        except ShardingError as error:  # on all ranks
            refusals.append(error)
            continue
        compile_parts(model)
        lines += [f"{dimension}: {line}" for line in different_step(case, model.train(), mesh)]
        torch.compiler.reset()
    if len(refusals) == 2:
        raise refusals[0]
    return "; ".join(lines)


def compile_layers(model: nn.Module) -> None:
    """Compile autograd of one layer of each kind that has experts. Kernels are not compiled."""
    layers = layers_of(model)
    for layer in one_of_each_kind([layer for layer in layers if has_experts(layer)] or layers):
        layer.compile(backend="aot_eager")


def compile_blocks(model: nn.Module) -> None:
    """Compile the modules with experts in layers, for architectures whose layers torch cannot compile in this way."""
    for layer in layers_of(model):
        for block in layer.children():
            if has_experts(block):
                block.compile(backend="aot_eager")


def layers_compile(case: FamilyCase) -> bool:
    """Return True if torch compiles the layers of transformers' class. The backward of some linear attention fails."""
    model = copy.deepcopy(case.reference()).train()
    if not any("linear_attn" in name for name, _ in model.named_modules()):
        return True
    compile_layers(model)
    try:
        model(**batches(case, 1)[0], use_cache=False).loss.backward()
    except RuntimeError:
        return False
    finally:
        torch.compiler.reset()
    return True


def has_experts(layer: nn.Module) -> bool:
    """Return True if a decoder layer has experts."""
    return any("experts" in name.split(".") for name, _ in layer.named_modules())


def one_of_each_kind(layers: list[nn.Module]) -> list[nn.Module]:
    """Return the first layer of each kind: with the same classes of modules under the same names."""
    kinds: dict[object, nn.Module] = {}
    for layer in layers:
        kinds.setdefault(tuple((name, type(module)) for name, module in layer.named_modules()), layer)
    return list(kinds.values())


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model's stacks, without layers inside them."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    return [layer for name in outer for layer in model.get_submodule(name).children()]


def holds_over_stages(architecture: str) -> str:
    """Take a step over two stages. Returns the difference to one process, or nothing."""
    case = _case(architecture)
    model = pipeline.sharded(case, "1F1B", torch.float32, pp=2)
    wanted = pipeline.expected(case, torch.float32, packed=False)
    differences = pipeline.compared(case, wanted, Pipeline(model, pipeline.MICROBATCHES), packed=False)
    lines = []
    if not differences["loss"] <= LOSS * abs(wanted[0]):
        lines.append(f"loss differs, by {differences['loss']:.1e}, from {wanted[0]:.7f} in one process")
    if not differences["gradients"] <= GRADIENTS:
        lines.append(f"gradients differ, by {differences['gradients']:.1e} of the largest")
    if differences["missing"]:
        lines.append(f"no stage has gradients of {_some(differences['missing'])}")
    return "; ".join(lines)


def different_tensors(exported: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Describe wrong exported weights."""
    if exported.keys() != wanted.keys():
        return [f"exports other tensors: {_some(sorted(exported.keys() ^ wanted.keys()))}"]
    wrong = [name for name, tensor in wanted.items() if not torch.equal(tensor, exported[name])]
    return [f"exported weights are not those of the checkpoint: {_some(wrong)}"] if wrong else []


def different_step(case: FamilyCase, model: PreTrainedModel, mesh: DeviceMesh) -> list[str]:
    """Describe wrong loss or gradients of a training step."""
    loss, wanted = expected(case, size_of(mesh, "fsdp"))
    actual, gradients = step(model, case), full_gradients(model)
    lines = []
    if not abs(actual - loss) <= LOSS * abs(loss):
        lines.append(f"loss is {actual:.7f}, and {loss:.7f} in one process")
    wrong = different_gradients(gradients, wanted)
    if wrong:  # a second pass of one process measures its own rounding
        scale = max(float(tensor.abs().max()) for tensor in wanted.values())
        noise = different_gradients(expected(case, size_of(mesh, "fsdp"), rounded=True)[1], wanted, every=True)
        own = {name: SMALL_GRADIENTS * largest_of(wanted.get(name)) / scale for name in wrong}
        limits = {name: min(NOISE_FACTOR * noise.get(name, 0.0), own[name], MOST_NOISE) for name in wrong}
        wrong = {name: worst for name, worst in wrong.items() if not worst <= limits[name]}
    if wrong:
        names = sorted(wrong, key=lambda name: -wrong[name])
        lines.append(f"gradients differ, by {wrong[names[0]]:.1e} of the largest at most: {_some(names)}")
    return lines


def different_gradients(
    gradients: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], *, every: bool = False
) -> dict[str, float]:
    """Return the differences above the bounds (or all of them), relative to the largest gradient of all."""
    scale = max(float(tensor.abs().max()) for tensor in wanted.values())
    found: dict[str, float] = {}
    for name in {**wanted, **gradients}:  # a missing gradient counts as zeros
        one, other = wanted.get(name), gradients.get(name)
        difference = (0 if other is None else other) - (0 if one is None else one)
        worst, largest = float(difference.abs().max()), largest_of(one)
        is_same = worst <= GRADIENTS * scale and worst <= max(SMALL_GRADIENTS * largest, ROUNDING * scale)
        if every or not is_same:
            found[name] = worst / scale
    return found


def largest_of(tensor: torch.Tensor | None) -> float:
    """Return the largest magnitude in a tensor; 0 for None."""
    return 0.0 if tensor is None else float(tensor.abs().max())


def _some(names: list[str], limit: int = 4) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def qlora(architecture: str, folder: str) -> tuple[str, str]:
    """Train LoRA adapters on the checkpoint in 4 bits, in one process, and compare with transformers' own class.

    Returns:
        `agrees`, `limited` or `disagrees`, and the reason. `limited` means that transformers' own class also fails.
    """
    if dist.get_rank():
        return "agrees", ""
    case = _case(architecture)
    try:
        reference, wanted = _train_quantized(case.reference_class, case, folder)
    except Exception as error:
        return "limited", f"transformers' own class does not train so either: {type(error).__name__}: {error}"
    if not reference:
        return "limited", "has no linear that bitsandbytes quantizes"
    quantized, losses = _train_quantized(case.model_class, case, folder)
    if quantized != reference:
        return "disagrees", f"other linears are quantized: {_some(sorted(set(quantized) ^ set(reference)))}"
    if wanted[-1] == wanted[0]:
        return "limited", "adapters change nothing in transformers' own class either"
    difference = max(abs(loss - other) for loss, other in zip(losses, wanted, strict=True))
    return (
        ("agrees", "") if difference <= 1e-5 * wanted[0] else ("disagrees", f"losses are {losses}, and {wanted} there")
    )


def _train_quantized(
    model_class: type[PreTrainedModel], case: FamilyCase, folder: str, **options: Any
) -> tuple[list[str], list[float]]:
    """Return the names of quantized linears, and the losses of a few steps with adapters on all of them."""
    import bitsandbytes
    import peft
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model: nn.Module = model_class.from_pretrained(folder, quantization_config=config, **options)
    quantized = [name for name, module in model.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    if not quantized:
        return [], []
    torch.manual_seed(SEED)
    # PEFT does not support Mamba's output projection, which has this name, because its kernels use the weight directly.
    targets = [name for name in quantized if not name.endswith(".out_proj")]
    # In training mode: in evaluation mode bitsandbytes repacks weights for CPUs that have a kernel for it.
    model = peft.get_peft_model(model.train(), peft.LoraConfig(r=4, target_modules=targets))
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)
    (batch,) = batches(case, 1)
    losses = []
    for _ in range(3):
        torch.manual_seed(SEED)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return quantized, losses
