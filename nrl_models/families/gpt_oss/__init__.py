"""gpt-oss: attention with learned sinks over a mixture of stacked, biased experts."""

from nrl_models.families.facts import Family

FAMILY = Family(("GptOssForCausalLM", "GptOssForSequenceClassification", "GptOssForTokenClassification"))
