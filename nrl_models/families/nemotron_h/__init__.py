"""Nemotron-H: Mamba-2, attention and MLPs or experts."""

from nrl_models.families.facts import Family

FAMILY = Family(
    ("NemotronHForCausalLM",),
    requires={"NemotronHForCausalLM": ("transformers>=5.8",)},  # before, it had no gradient checkpointing
)
