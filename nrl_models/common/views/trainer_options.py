"""Options that NeMo AutoModel and NeMo RL pass to a `state_dict_adapter`, and their effect here.

- `exclude_key_regex` is supported.
- `quantization=True` raises an error. It requests 8-bit weights and scales, as targets for reading a quantized
  checkpoint. Here, `from_pretrained` reads and dequantizes such checkpoints.
- `device_mesh` of `from_hf` raises an error if it shards experts. It requests only the experts of this rank.
- Keywords in `WITHOUT_EFFECT` are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nrl_models.errors import Problem, ProblemKind, ShardingError, UnknownArgumentError, one_line, shown

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

WITHOUT_EFFECT = {
    "device_mesh": "the mesh that shards experts; views of sharded tensors are returned if a rank has them",
    "for_checkpoint_load": "requests views rather than copies; views are always returned",
    "legacy_paramwrapper_layout": "format of adapters on Automodel's expert layers, which are not used here",
    "v4_compatible": "format of adapters, as `legacy_paramwrapper_layout`; no effect on weights in Automodel either",
}
"""Keywords of `to_hf` and `convert_single_tensor_to_hf` in Automodel 0.7 that are ignored, with the reason."""


def check_options(quantization: bool, options: Mapping[str, Any]) -> None:
    """Check the options that a trainer passes to `to_hf`.

    Raises:
        UnknownArgumentError: If `quantization` is True, or a keyword is unknown.
    """
    if quantization:
        raise UnknownArgumentError(
            "quantization=True requests 8-bit tensors and their scales, but this adapter converts the weights that the "
            "model computes with. Expected quantization=False; nrl_models.AutoModelForCausalLM.from_pretrained reads a "
            "quantized checkpoint and dequantizes it."
        )
    if unknown := sorted(options.keys() - WITHOUT_EFFECT.keys()):
        known = ", ".join(("exclude_key_regex", "layout", "quantization", *WITHOUT_EFFECT))
        raise UnknownArgumentError(f"unknown keyword {', '.join(unknown)}: expected {known}")


def excluded_keys(pattern: str | None) -> re.Pattern[str]:
    """Return the compiled `exclude_key_regex`. Without a pattern, the result matches nothing.

    Raises:
        UnknownArgumentError: If it is not a regular expression.
    """
    try:
        return re.compile(pattern or r"(?!)")
    except (re.error, TypeError) as error:
        raise UnknownArgumentError(
            f"exclude_key_regex={shown(pattern)}: expected a regular expression ({one_line(error)})"
        ) from error


def named_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield pairs of name and tensor.

    Raises:
        UnknownArgumentError: If an item is not a pair whose first element is a string.
    """
    if not isinstance(tensors, Iterable):
        raise UnknownArgumentError(f"tensors={shown(tensors)}: expected pairs of name and tensor")
    for pair in tensors:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise UnknownArgumentError(
                f"tensors has {shown(pair)}: expected pairs of name and tensor, for example state_dict.items()"
            )
        yield pair[0], pair[1]


def require_whole_experts(mesh: DeviceMesh | None) -> None:
    """Check that the mesh that a trainer passes to `from_hf` does not shard experts.

    Raises:
        ShardingError: If it does.
    """
    if mesh is None:
        return
    experts = mesh["ep"] if "ep" in (mesh.mesh_dim_names or ()) else mesh
    if experts.size() > 1:
        detail = f"shards experts over {experts.size()} ranks, but from_hf returns all of them"
        advice = "call from_hf without it; load_state_dict of a model sharded by nrl_models selects each rank's share"
        raise ShardingError(
            "experts cannot be divided", [Problem(ProblemKind.MESH, "device_mesh", detail, None, advice)]
        )
