"""Private names of torch that this library uses.

Other modules import them from here, which a test checks. The release check (`tools/release_check`) looks up each name
in the wheel of a new torch without importing it. Each private name has an alias here, so a new version of torch only
changes this module. Private attributes of torch's objects are used everywhere, and listed in the release check.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import _foreach_copy_ as foreach_copy
from torch import nn
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch._C import _are_functorch_transforms_active as functorch_transforms_are_active
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _disabled_torch_function_impl as without_torch_function
from torch._C import _get_tracing_state as tracing_state
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch._C import _len_torch_dispatch_stack as count_dispatch_modes
from torch._C import _len_torch_function_stack as count_function_modes
from torch._C import _storage_Use_Count as storage_use_count
from torch._C._autograd import _top_saved_tensors_default_hooks as saved_tensors_hooks
from torch._C._functorch import is_batchedtensor as is_batched
from torch.distributed import _state_dict_utils as state_dict_utils
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._common_utils import FSDP_FLATTENED as FLATTENED
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.nn.modules.dropout import _DropoutNd as DropoutNd
from torch.overrides import _get_current_function_mode_stack as function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from nrl_models.errors import Problem, ProblemKind, ShardingError

__all__ = [
    "FLATTENED",
    "FSDP1_NAME",
    "WRAPPED_NAMES",
    "WRAPPERS",
    "BatchNorm",
    "ConvNd",
    "DeviceContext",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "DropoutNd",
    "FSDPMeshInfo",
    "ShardPlacementResult",
    "ShardedParameter",
    "StridedShard",
    "TorchDispatchMode",
    "count_dispatch_modes",
    "count_function_modes",
    "current_graph_task_id",
    "disable_current_modes",
    "foreach_copy",
    "function_mode_stack",
    "functorch_transforms_are_active",
    "is_any_autocast_enabled",
    "is_batched",
    "is_traceable_wrapper_subclass",
    "local_scalar_dense",
    "module_wrappers",
    "name_inside",
    "param_groups_of",
    "prefix_in_state_dict",
    "saved_tensors_hooks",
    "set_policy",
    "sharded_parameters",
    "state_dict_utils",
    "storage_use_count",
    "tracing_state",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "without_torch_function",
]

try:  # newer versions of torch shard the parameters of a unit in several groups
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
except ImportError:
    FSDPMeshInfo = ShardPlacementResult = None  # type: ignore[assignment,misc]


def param_groups_of(unit: Any) -> list[Any]:
    """Return the groups of parameters of a module that `fully_shard` sharded."""
    state = unit._get_fsdp_state()
    if FSDPMeshInfo is None:  # one group, or None
        return [group for group in [getattr(state, _ONLY_GROUP, None)] if group is not None]
    return list(state._fsdp_param_groups)


def set_policy(group: Any, policy: MixedPrecisionPolicy) -> None:
    """Set the policy of a group from `param_groups_of`.

    torch 2.15 reads it from each parameter, older versions from the group.

    Raises:
        ShardingError: If this version of torch has it elsewhere.
    """
    holders = [each for each in (group, *group.fsdp_params) if hasattr(each, _POLICY)]
    if not holders:
        detail = f"torch {torch.__version__} has no {_POLICY} of a group or parameter: install torch 2.15 or older"
        raise ShardingError("cannot shard the model", [Problem(ProblemKind.PLAN, "FSDP", detail)])
    for holder in holders:
        setattr(holder, _POLICY, policy)


_POLICY = "mp_policy"
"""Attribute with the policy of a group or a parameter."""

_ONLY_GROUP = "_fsdp_param_group"
"""Attribute with the only group of a unit in older versions of torch."""


class ShardedParameter(NamedTuple):
    """A parameter that `fully_shard` sharded.

    Attributes:
        slots: Modules and attributes that have it; several if it is tied. FSDP sets all of them in each forward.
        current: The sharded parameter.
        known: Objects that FSDP sets: sharded, gathered, or sharded over fewer ranks after a forward.
        is_used: Whether a forward has used it. Before, FSDP takes over another DTensor in the first slot.
    """

    slots: list[tuple[nn.Module, str]]
    current: nn.Parameter
    known: tuple[nn.Parameter, ...]
    is_used: bool


def sharded_parameters(unit: Any) -> Iterator[ShardedParameter]:
    """Yield the parameters of a module that `fully_shard` sharded, without those of units inside."""
    for group in param_groups_of(unit):
        for parameter in group.fsdp_params:
            info = parameter._module_info
            tied = zip(info.shared_modules, info.shared_param_names, strict=True)
            states = (getattr(parameter, name, None) for name in _GATHERED)
            known = (parameter.sharded_param, *(state for state in states if state is not None))
            slots = [(info.module, info.param_name), *tied]
            yield ShardedParameter(slots, parameter.sharded_param, known, group._reset_sharded_params)


_GATHERED = ("_unsharded_param", "_sharded_post_forward_param")
"""Attributes of a sharded parameter with its other states. They are set by the first forward."""


local_scalar_dense = torch.ops.aten._local_scalar_dense
"""The operation behind `Tensor.item()`; operations are part of torch's export format."""


class PrivateAttribute(NamedTuple):
    """An attribute of torch's objects that this library reads.

    Attributes:
        module: Module that defines the class.
        class_name: Name of the class.
        name: Name of the attribute.
    """

    module: str
    class_name: str
    name: str


WRAPPERS = (
    PrivateAttribute("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    PrivateAttribute(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"
    ),
    PrivateAttribute(
        "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module"
    ),
    PrivateAttribute("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    PrivateAttribute("torch.nn.parallel.data_parallel", "DataParallel", "module"),
)
"""Torch's classes that wrap one module, with the attribute that contains it."""
WRAPPED_NAMES = frozenset(wrapper.name for wrapper in WRAPPERS if wrapper.name.startswith("_"))
"""Attributes in which wrappers have the inner module. Modules of models have no attributes with these names."""

FSDP1_NAME = "_fsdp_wrapped_module"
_HIDDEN = ("_checkpoint_wrapped_module", FSDP1_NAME)


def module_wrappers() -> tuple[tuple[type[nn.Module], str], ...]:
    """Return torch's classes that wrap one module, with the attribute that contains it.

    Leaves out classes of modules that are not imported, because they have no instances.
    """
    wrappers = (
        (getattr(sys.modules.get(wrapper.module), wrapper.class_name, None), wrapper.name) for wrapper in WRAPPERS
    )
    return tuple((kind, name) for kind, name in wrappers if kind is not None)


_inside: WeakKeyDictionary[type, str] = WeakKeyDictionary()


def name_inside(kind: type) -> str:
    """Return the attribute in which a class of torch's wrappers has the inner module; empty for other classes.

    Cached by class: a wrapper's module is imported before any subclass of it exists.
    """
    name = _inside.get(kind)
    if name is None:
        name = next((name for wrapper, name in module_wrappers() if issubclass(kind, wrapper)), "")
        _inside[kind] = name
    return name


def prefix_in_state_dict(wrapper: nn.Module) -> str:
    """Return the prefix that a wrapper adds to names in `state_dict()`; empty if it removes its prefix again."""
    name = name_inside(type(wrapper))
    return "" if name in _HIDDEN else f"{name}."
