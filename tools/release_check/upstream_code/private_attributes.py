"""Private attributes of torch's objects that nrl_models reads or sets, see `nrl_models.common.upstream_torch`.

The release check reads the literal below from the checkout that it checks, without importing it.
"""

from __future__ import annotations

PRIVATE_ATTRIBUTES = {
    ("torch._C", "TensorBase"): ("_make_wrapper_subclass", "_version"),
    ("torch.storage", "_StorageBase"): ("_cdata",),
    ("torch._ops", "OpOverload"): ("_schema",),
    ("torch.autograd.forward_ad", ""): ("_current_level",),
    ("torch.distributed._state_dict_utils", ""): ("_distribute_tensors",),
    ("torch.distributed.tensor._api", "DTensor"): (
        "__create_chunk_list__",
        "__create_write_items__",
        "__get_tensor_shard__",
        "_local_tensor",
    ),
    ("torch.nn.modules.module", "Module"): (
        "_backward_hooks",
        "_backward_pre_hooks",
        "_buffers",
        "_compiled_call_impl",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_metadata",
        "_modules",
        "_non_persistent_buffers_set",
        "_parameters",
    ),
    ("torch.nn.utils.prune", "BasePruningMethod"): ("_tensor_name",),
    ("torch.ao.nn.quantized.modules.linear", "Linear"): ("_packed_params",),
    ("torch.distributed.fsdp._fully_shard._fsdp_common", ""): ("FSDPMeshInfo", "ShardPlacementResult"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam"): (
        "_module_info",
        "_sharded_post_forward_param",
        "_unsharded_param",
    ),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup"): ("_reset_sharded_params",),
    ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState"): ("_fsdp_param_groups",),
    ("torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule"): ("_get_fsdp_state",),
}
"""Names by module and class. An empty class means attributes of the module."""
