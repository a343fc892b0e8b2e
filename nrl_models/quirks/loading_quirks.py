"""Problems when a model is loaded."""

from nrl_models.quirks import predicates
from nrl_models.quirks.quirk import Quirk

LOADING = (
    Quirk(
        name="fp32-masters",
        symptom="A trainer loads bf16 weights instead of fp32 master weights. Small optimizer steps are lost to "
        "rounding.",
        where=("load", "trainer"),
        every_model=True,
        handling="With `dtype=torch.float32`, all parameters load in fp32. If parameters in bf16 are trained, a log "
        "message says so.",
        code=("nrl_models.loading.weights:load_weights", "nrl_models.loading.pretrained:load"),
        off='`from_pretrained(path, dtype="auto")`',
        probe="behavioral",
        asks="a bf16 weight of 1 stays 1 when torch adds 1e-6 to it",
        sources=("https://github.com/NVIDIA-NeMo/Automodel/pull/2419",),
    ),
    Quirk(
        name="strict-config-types",
        symptom="transformers raises an error if a float in the configuration is written as an integer, such as "
        "`router_aux_loss_coef: 0`.",
        where=("load",),
        every_model=True,
        handling="Integers are converted to floats where the class accepts only floats, with a warning. Other "
        "types raise an error that names the key.",
        code=("nrl_models.common.config.types:with_declared_types",),
        probe="behavioral",
        asks="transformers rejects an integer for a float",
        sources=("https://github.com/NVIDIA-NeMo/RL/pull/2224",),
    ),
    Quirk(
        name="tower-names",
        symptom="Some transformers releases before 5.6 do not rename the prefix `visual.` of checkpoints. The vision "
        "tower keeps its initial weights.",
        where=("load",),
        applies=predicates.declares("tower-names"),
        handling="Keys are renamed by transformers' rules. nrl_models also matches keys with and without the base "
        "model's prefix, so keys that these rules miss are found. A missing tensor raises an error before "
        "any weight is loaded.",
        code=(
            "nrl_models.loading.names.checkpoint_names:CheckpointNames",
            "nrl_models.common.state_dict.matching:match",
        ),
        off="load with transformers' class",
        fixed="transformers>=5.6",
        kept_for="trainers with an older transformers",
        probe="data",
        asks="transformers does not recognize the towers' older names",
        sources=("https://github.com/huggingface/transformers/pull/45358",),
        explains=lambda evidence: (
            evidence.kind.is_trainers and any("visual" in name for name in (evidence.module, *evidence.weights))
        ),
    ),
    Quirk(
        name="unequal-parts",
        symptom="transformers concatenates tensors of different sizes when it loads a checkpoint. When it saves, "
        "it splits the result into equal parts, which vLLM cannot load.",
        where=("load", "engine"),
        applies=predicates.declares("unequal-parts"),
        handling="nrl_models knows the sizes of these tensors. Exports and saved files have the published shapes. So "
        "do files that transformers' `save_pretrained` writes in the same process. Files with equal parts also load.",
        code=("nrl_models.common.views.hub_parts:register_part_sizes",),
        off="load and save with transformers' class, in a process without nrl_models",
        probe="data",
        asks="transformers saves these tensors as equal parts",
    ),
    Quirk(
        name="own-configuration",
        symptom="transformers has no class for some model types. Their checkpoints need remote code, which breaks "
        "with new releases.",
        where=("load",),
        applies=predicates.brings_its_own_configuration,
        handling="nrl_models includes configuration and modeling code.",
        code=("nrl_models.registry:_CUSTOM_CONFIG_REGISTRATIONS", "nrl_models.registry:register_custom_configs"),
        off="`AutoConfig.from_pretrained(path, trust_remote_code=True)` of transformers, in a process without "
        "nrl_models",
        probe="data",
        asks="transformers has no configuration class for the checkpoint's `model_type`",
    ),
    Quirk(
        name="shared-kv-unused-weights",
        symptom="Some layers reuse the keys and values of an earlier layer, but published checkpoints still have "
        "key and value projections for them. transformers drops these weights, so an engine that loads "
        "the saved checkpoint reports them as missing.",
        where=("load", "export"),
        applies=predicates.has_unused_keys_and_values,
        handling="The weights stay memory-mapped and are saved unchanged.",
        code=("nrl_models.common.forward.kv_sharing:SharedKeyValues", "nrl_models.loading.weights:keep_unused"),
        probe="behavioral",
        asks="transformers drops these weights when it loads and saves",
    ),
    Quirk(
        name="mtp-weights",
        symptom="Published checkpoints have layers for multi-token prediction. transformers drops them silently. "
        "An engine that uses them for speculative decoding then fails, or runs them with random weights.",
        where=("load", "export"),
        applies=predicates.has_mtp_weights,
        handling='The weights stay memory-mapped and frozen, and are saved and exported unchanged. `mtp="drop"` '
        "leaves them out, with a warning.",
        code=(
            "nrl_models.common.state_dict.mtp:MTPNames",
            "nrl_models.loading.weights:keep_unused",
            "nrl_models.common.state_dict.adapter:StateDictAdapter.iter_export",
        ),
        probe="behavioral",
        asks="transformers drops these weights when it loads and saves",
        sources=(
            "https://github.com/huggingface/transformers/issues/46129",
            "https://github.com/vllm-project/vllm/issues/43456",
            "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4819",
        ),
    ),
    Quirk(
        name="frozen-parts",
        symptom="Parameters that a class freezes when it is built (position tables, a router's correction bias) "
        "become trainable when transformers loads a checkpoint.",
        where=("load", "trainer"),
        applies=predicates.freezes_parameters,
        handling="Loaded parameters are frozen where the class froze them, sharded or not.",
        code=("nrl_models.common.modules:install",),
        off="set `requires_grad` on the parameters",
        probe="behavioral",
        asks="transformers' from_pretrained unfreezes positions",
    ),
)
