"""Keys of a configuration and its parts: list them, find those that code reads, and those unrelated to the model."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from nrl_models.common.cached import cached
from nrl_models.common.config.walk import own_values, parts

BOOKKEEPING = frozenset(
    {
        # Origin of the file, and class names.
        *("architectures", "auto_map", "model_type", "name_or_path", "transformers_version", "transformers_weights"),
        *("transformers.js_config", "unsloth_version", "unsloth_fixed", "task_specific_params", "finetuning_task"),
        *("tokenizer_class", "processor_class", "prefix", "neuron", "adapters", "model_name", "license", "sub_configs"),
        # Precision, kernels and devices, which are chosen when a model is loaded.
        *("dtype", "torch_dtype", "params_dtype", "quantization_config", "compression_config", "quantize"),
        *("attn_implementation", "experts_implementation", "use_flash_attn", "use_flash_attention", "flash_attn"),
        *("use_bfloat16", "torchscript", "ep_size", "tp_size", "pretraining_tp"),
        # Losses of pretraining only.
        *("aux_loss_alpha", "seq_aux", "z_loss_weight", "num_nextn_predict_layers"),
        # Names of labels; their number is set elsewhere.
        *("id2label", "label2id", "num_labels"),
    }
)
"""Keys that never affect a model's outputs."""

SHARED = tuple(
    f"transformers.{name}"
    for name in (
        *("cache_utils", "masking_utils", "modeling_layers", "modeling_rope_utils", "utils.output_capturing"),
        *("modeling_flash_attention_utils", "loss.loss_utils", "integrations.moe"),
    )
)
"""Modules of transformers, in addition to `modeling_utils`, that read configurations of all models."""

FORMER = frozenset(
    {
        *("add_cross_attention", "cross_attention_hidden_size", "is_decoder", "pruned_heads", "tf_legacy_loss"),
        *("tie_encoder_decoder", "output_attentions"),
    }
)
"""Keys that transformers once wrote into every configuration, mostly unset. Never treated as misspelled."""

FORMER_ROPE = ("partial_rotary_factor", "rope_scaling", "rope_theta")
"""Keys from before `rope_parameters`. All classes with `rope_parameters` handle them."""

NO_VALUES = frozenset(
    {
        *("model_type", "transformers_version", "name_or_path", "torch_dtype"),
        *("allow_global_per_layer_attribute_access", "serialize_explicit_per_layer_config"),
    }
)
"""Attributes of a configuration that its class or other code sets, never a caller."""

TOKEN_IDS = ("_token_id", "_token_ids", "_token_index")
"""Endings of keys for token ids."""


def value_at(config: PreTrainedConfig, path: str) -> Any:
    """Return the value of the key at `path`."""
    *parents, key = path.split(".")
    for parent in parents:
        config = getattr(config, parent)
    return own_values(config)[key]


def parts_of(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a configuration and its nested configurations."""
    yield config
    for part in parts(config).values():
        yield from parts_of(part)


@cached
def declared_keys(config_class: type[PreTrainedConfig]) -> frozenset[str]:
    """Return the keys that a configuration class declares, and their aliases."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    names = {*config_class.attribute_map, *config_class.attribute_map.values()}
    return frozenset(fields | names | set(config_class.sub_configs))


@cache
def generation_keys() -> frozenset[str]:
    """Return the keys of generation in older `config.json`s; transformers drops them."""
    return frozenset(GenerationConfig().to_dict())


def is_value(config: PreTrainedConfig, name: str) -> bool:
    """Return True if `name` is a value of `config` that a caller may set, and not an attribute of its class."""
    owner = type(config)
    if name in NO_VALUES or name.startswith("_"):
        return False
    member = getattr(owner, name, None)
    is_settable = isinstance(member, property) and member.fset is not None
    return is_settable or name in declared_keys(owner) or (hasattr(config, name) and not hasattr(owner, name))


def is_token_id(key: str) -> bool:
    """Return True if a key is the id of a token, which has no effect on a model that does not read it."""
    return key.endswith(TOKEN_IDS)


# Keys that code reads


@cached
def keys_in_class(config_class: type[PreTrainedConfig]) -> frozenset[str]:
    """Return names and strings in the methods of a configuration class: undeclared keys that it handles."""
    names: set[str] = set()
    for owner in config_class.__mro__:
        if owner in PreTrainedConfig.__mro__:
            continue
        for member in vars(owner).values():
            for function in (member, getattr(member, "fget", None), getattr(member, "fset", None)):
                function = inspect.unwrap(function) if callable(function) else getattr(function, "__func__", None)
                code = getattr(function, "__code__", None)
                if code is not None and code.co_filename != "<string>":  # generated by dataclasses, reads every field
                    names |= {*_names(code), *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    return frozenset(names)


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            names.add(constant)
        elif isinstance(constant, tuple):
            names |= {part for part in constant if isinstance(part, str)}
        elif isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def keys_in_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> frozenset[str]:
    """Return the configuration keys that the code of a model class, and of its configuration's parts, reads."""
    return frozenset().union(*map(_keys_in_module, _modules_of(model_class, config)))


def is_read(key: str, model_class: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """Return True if `key` is in `keys_in_model`. Parses only the definitions that contain it."""
    return any(key in _keys_beside(key, module) for module in _modules_of(model_class, config))


def is_named(value: str, model_class: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """Return True if the modeling code of a class, or of parts of its configuration, has `value` as a string."""
    return any(f'"{value}"' in _source(module) for module in _modules_of(model_class, config))


def _modules_of(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> list[str]:
    """Return names of modules whose code reads configurations for the model. The model's module is first."""
    modules = [base.__module__ for base in model_class.__mro__ if issubclass(base, PreTrainedModel)]
    for part in parts_of(config):
        package, _, name = type(part).__module__.rpartition(".")
        modules.append(f"{package}.{name.replace('configuration', 'modeling')}")
    return list(dict.fromkeys([*modules, *SHARED]))


@cache
def _source(module: str) -> str:
    """Return a module's source; empty if there is none."""
    try:
        return Path(find_spec(module).origin).read_text(encoding="utf-8")  # type: ignore[union-attr, arg-type]
    except (ImportError, AttributeError, OSError, TypeError, UnicodeDecodeError, ValueError):
        return ""


_DEFINITION = re.compile(r"^(?:@.*\n)*(?:class |def )", re.MULTILINE)
"""Start of a definition at the top level of a module. Also matches text in a docstring that looks like one."""


def _keys_beside(key: str, module: str) -> frozenset[str]:
    """Return the keys that are read in the definitions of a module that contain `key`."""
    source = _source(module)
    if key not in source:
        return frozenset()
    starts = [0, *(match.start() for match in _DEFINITION.finditer(source)), len(source)]
    parts = [source[start:end] for start, end in pairwise(starts)]
    key_sets = [_keys_in_source(part) for part in parts if key in part]
    parsed = [keys for keys in key_sets if keys is not None]
    # Part of a docstring cannot be parsed, nor can code that ends in a decorator of the next definition.
    return frozenset().union(*parsed) if len(parsed) == len(key_sets) else _keys_in_module(module)


def _keys_in_module(module: str) -> frozenset[str]:
    return _keys_in_source(_source(module)) or frozenset()


@cache
def _keys_in_source(source: str) -> frozenset[str] | None:
    """Return the keys that a source reads; None if it cannot be parsed."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    return frozenset(key for node in ast.walk(tree) for key in _key_read_by(node))


def _key_read_by(node: ast.AST) -> Iterator[str]:
    """Yield the keys in `config.key`, `getattr(config, "key")`, `hasattr(config, "key")` and `config.get("key")`."""
    if isinstance(node, ast.Attribute) and _is_config(node.value):
        yield node.attr
    if isinstance(node, ast.Call):
        strings = [
            argument.value
            for argument in node.args
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        ]
        function = node.func
        if isinstance(function, ast.Name) and function.id in ("getattr", "hasattr") and _is_config(node.args[0]):
            yield from strings
        if isinstance(function, ast.Attribute) and function.attr in ("get", "pop") and _is_config(function.value):
            yield from strings


def _is_config(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return "config" in name.lower() or name == "cfg"
