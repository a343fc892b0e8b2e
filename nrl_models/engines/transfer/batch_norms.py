"""Load the statistics of batch norms, which vLLM's layerwise reload loses.

vLLM loads `running_mean`, `running_var` and `num_batches_tracked` into the tensors that `state_dict()` returns. During
a layerwise reload, these lack the loaders of the module's buffers. So the statistics are dropped, and the module gets
uninitialized memory instead. vLLM reports them as loaded.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from nrl_models.common.upstream_torch import BatchNorm


def load_statistics(model: nn.Module) -> list[RemovableHandle]:
    """Make `state_dict()` of batch norms return their buffers, not detached tensors, until the handles are removed."""
    norms = (module for module in model.modules() if isinstance(module, BatchNorm))
    return [norm.register_state_dict_post_hook(_return_buffers) for norm in norms]


def _return_buffers(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    for name, buffer in module.named_buffers(recurse=False):
        if prefix + name in state_dict:
            state_dict[prefix + name] = buffer
