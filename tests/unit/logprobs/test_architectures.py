"""`token_logprobs` on every registered language model, parametrized like the equivalence tests."""

from __future__ import annotations

import re

import pytest
import torch

from nrl_models.common.upstream import has_reached
from nrl_models.errors import HeadError
from nrl_models.logprobs import token_logprobs
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.features import applies_to
from nrl_models.testing.suite.conditions import generates, takes_text

UNSUPPORTED = {
    "BlipForConditionalGeneration": "has no output embedding",
    "ChameleonForConditionalGeneration": "fails after its output embedding",  # it masks tokens by position
    "CpmAntForCausalLM": "attends in both directions",  # transformers' class makes every token context
    "Florence2ForConditionalGeneration": "has an encoder",
    "NemotronH_Omni_Reasoning_V3": "has no output embedding",  # the language model inside has it
    "PaliGemmaForConditionalGeneration": "attends in both directions without token_type_ids",
    "ProphetNetForCausalLM": "calls its output embedding",  # it calls it on several token streams
}
"""Architectures whose logits are not an output embedding of states that see earlier tokens only, with the message."""

if not has_reached("5.24"):  # its head had padding rows in the vocabulary, which it removed
    UNSUPPORTED |= dict.fromkeys(
        ("Inkling2ForCausalLM", "Inkling2ForConditionalGeneration"), "are not those of its output embedding"
    )


@applies_to(generates, takes_text)
def test_token_logprobs_match_reference_logits(family_case: FamilyCase) -> None:
    input_ids = family_case.inputs(images=False, length=14)["input_ids"]
    if message := UNSUPPORTED.get(family_case.architecture):
        with pytest.raises(HeadError, match=message):
            token_logprobs(family_case.model(), input_ids, chunk_size=5)
        return
    with torch.no_grad():
        try:
            logits = family_case.reference()(input_ids=input_ids, use_cache=False).logits
        except Exception as error:  # transformers' class does not run on text only
            with pytest.raises(type(error), match=re.escape(str(error))):
                token_logprobs(family_case.model(), input_ids, chunk_size=5, entropy=True)
            return
        result = token_logprobs(family_case.model(), input_ids, chunk_size=5, entropy=True)
        logs = logits.log_softmax(-1)[:, :-1]
    expected = logs.gather(-1, input_ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(result.logprobs[:, 1:], expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(result.entropy[:, 1:], -(logs.exp() * logs).sum(-1), rtol=1e-4, atol=1e-4)
