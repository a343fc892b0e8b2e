"""DeepSeek-V3 and R1: multi-head latent attention over a mixture of stacked and shared experts."""

from nrl_models.families.facts import Family

FAMILY = Family(("DeepseekV3ForCausalLM", "DeepseekV3ForSequenceClassification", "DeepseekV3ForTokenClassification"))
