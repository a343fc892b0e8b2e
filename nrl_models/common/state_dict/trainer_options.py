"""What NeMo Automodel and NeMo RL pass to a `state_dict_adapter`, and what it means to ours.

`exclude_key_regex` is honoured. `quantization=True` asks for the tensors of a quantised checkpoint (8-bit weights and
their scales) as places to read it into; here weights are read and dequantised by `from_pretrained`. `device_mesh` of
`from_hf` asks for this rank's experts only. The rest is in `WITHOUT_EFFECT`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nrl_models.errors import Problem, ProblemKind, ShardingError, UnknownArgumentError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

WITHOUT_EFFECT = {
    "device_mesh": "where experts are divided; of sharded tensors views are given where a rank has them",
    "for_checkpoint_load": "asks for views rather than copies, which are always given",
    "legacy_paramwrapper_layout": "how adapters on Automodel's own expert layers are saved, which are not used here",
    "v4_compatible": "as `legacy_paramwrapper_layout`; of weights it changes nothing there either",
}
"""Keywords of `to_hf` and `convert_single_tensor_to_hf` that Automodel 0.7 passes, with why nothing follows."""


def check_options(quantization: bool, options: Mapping[str, Any]) -> None:
    """Check what a trainer passes to `to_hf`.

    Raises:
        UnknownArgumentError: tensors of a quantised checkpoint are asked for, or a keyword is not known.
    """
    if quantization:
        raise UnknownArgumentError(
            "quantization=True asks for 8-bit tensors and their scales, and these are the weights that the model "
            "computes with. Expected quantization=False; nrl_models.AutoModelForCausalLM.from_pretrained reads a "
            "quantised checkpoint and dequantises it."
        )
    if unknown := sorted(options.keys() - WITHOUT_EFFECT.keys()):
        known = ", ".join(("exclude_key_regex", "layout", "quantization", *WITHOUT_EFFECT))
        raise UnknownArgumentError(f"unknown keyword {', '.join(unknown)}: expected {known}")


def check_mesh(mesh: DeviceMesh | None) -> None:
    """Check that no experts are divided over the mesh that a trainer passes to `from_hf`.

    Raises:
        ShardingError: they are.
    """
    if mesh is None:
        return
    experts = mesh["ep"] if "ep" in (mesh.mesh_dim_names or ()) else mesh
    if experts.size() > 1:
        detail = f"divides experts over {experts.size()} ranks; from_hf gives them all"
        advice = "call from_hf without it, and load_state_dict of a model sharded by nrl_models takes each rank's share"
        raise ShardingError(
            "experts cannot be divided", [Problem(ProblemKind.MESH, "device_mesh", detail, None, advice)]
        )
