"""Baichuan: packed projections on the hub, rotary positions or ALiBi."""

from nrl_models.families.facts import Family

FAMILY = Family(
    (
        "BaichuanForCausalLM",
        "BaiChuanForCausalLM",
        "BaichuanForSequenceClassification",
        "BaichuanForTokenClassification",
    ),
    configs={"baichuan": "configuration:BaichuanConfig"},
)
