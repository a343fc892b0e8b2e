"""The head of a model: its output embedding, and the scale or soft cap that follows it.

A model's forward ends with `logits = lm_head(hidden)`, and in some models a scale (`logit_scale`, `logits_scaling`) or
a soft cap (`final_logit_softcapping`). Computing log-probabilities without full logits has to apply this last step to
chunks of tokens. The step is measured, because its configuration keys differ between models:

1. Run the model with a function in place of the output embedding, which keeps the hidden states and returns numbers.
2. Fit `a * tanh(b * x)`, which covers scales, soft caps and both.

If the fit fails, or if the head does not reproduce the model's logits on a short text, an error is raised.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nrl_models.common.config.causality import why_not_causal
from nrl_models.common.documents.layers import BOUNDARIES
from nrl_models.common.forward.evaluation import evaluating, modules_around
from nrl_models.common.forward.routing import own_routing
from nrl_models.common.model_components.meta_weights import require_head_values, require_values
from nrl_models.common.modules import class_name, innermost, peft_types, reads_complete_rows, virtual_tokens
from nrl_models.common.recording import (
    code_around,
    code_of,
    forward_replaced,
    hooks_that_change,
    may_act_later,
    one_thread_per_model,
)
from nrl_models.errors import HeadError, UnknownArgumentError, one_line
from nrl_models.logprobs.logit_buffers import (
    ADVICE,
    PROBE,
    OutputHead,
    autocast_dtype,
    fitted_head,
    gathered_units,
    sharded_around,
    whole,
)

CHECKED_TOKENS = 4
"""Length of the text on which a head is compared with the model's own logits."""


@one_thread_per_model
def hidden_states_and_head(model: nn.Module, input_ids: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, OutputHead]:
    """Run `model` up to its output embedding.

    Args:
        model: A model with an output embedding (`get_output_embeddings()`).
        input_ids: Token ids, `(batch, seq_len)`.
        inputs: Further keyword arguments of its forward.

    Returns:
        The input of the output embedding, `(batch, seq_len, hidden_size)`, with its autograd graph, and the head.

    Raises:
        HeadError: If the model has no output embedding, does not call it exactly once on all tokens, or changes the
            result by anything but a scale and a soft cap.
    """
    module = output_embedding(model)
    if isinstance(module, peft_types()) and (reads_complete_rows(model) or inputs.get("adapter_names")):
        raise HeadError(f"{class_name(model)} has an adapter on its output embedding that depends on the row. {ADVICE}")
    sharded = sharded_around(model, module) if torch.is_grad_enabled() else []
    caller = (id(module), type(module), autocast_dtype(input_ids), model.training)
    hooks = (*code_around(model), *code_of(module), bool(module._forward_hooks) and module.training)
    checked = _checked.setdefault(model, {})
    is_checked = caller in checked and checked[caller][-1] == hooks and not may_act_later(model, module)
    sample = None if is_checked else _HeadSample.of(model, module, input_ids, inputs)
    hidden_states: list[torch.Tensor] = []
    autocast: list[torch.dtype | None] = []

    def stand_in(hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        hidden_states.append(hidden)
        autocast.append(autocast_dtype(hidden))
        probe = torch.tensor(PROBE, dtype=torch.float32, device=hidden.device, requires_grad=bool(sharded))
        return probe.repeat(*hidden.shape[:-1], 1)

    with _naming_hooks(model, module, input_ids, inputs), forward_replaced(module, stand_in, other_threads=False):
        try:
            observed = _logits_of(model(input_ids=input_ids, use_cache=False, **inputs))
        except Exception as error:
            if hidden_states:
                raise HeadError(
                    f"{class_name(model)} fails after its output embedding when its logits are {len(PROBE)} numbers "
                    f"({one_line(error)}), so that step depends on the vocabulary. {ADVICE}"
                ) from error
            raise
    _require_one_call(model, module, hidden_states, input_ids)
    hidden = _columns_of_tokens(model, hidden_states[0], input_ids)
    with _naming_hooks(model, module, input_ids, inputs):
        units = gathered_units(model, module)
        head = replace(fitted_head(observed, class_name(model)), module=module, autocast=autocast[0], units=units)
        if not is_checked or checked[caller] != (head.scale, head.cap, head.autocast, hooks):
            (sample or _HeadSample.of(model, module, input_ids, inputs)).compare(model, head)
            checked[caller] = head.scale, head.cap, head.autocast, hooks
    for part in sharded:
        part.unshard()
    if sharded:  # adds zero, so that the backward passes through the model's output, where FSDP starts its own
        hidden = hidden + 0.0 * _columns_of_tokens(model, observed[..., :1], input_ids).to(hidden.dtype)
    return hidden, head


@contextmanager
def _naming_hooks(
    model: nn.Module, module: nn.Module, input_ids: torch.Tensor, inputs: Mapping[str, Any]
) -> Iterator[None]:
    """Replace a `HeadError` by one that names the hooks of the output embedding, if they change its values.

    Forward pre-hooks of a plain linear are right: the hidden states are those that they return.
    """
    try:
        yield
    except HeadError as error:
        with hooks_that_change(module, inputs=not OutputHead(module).is_plain) as hooks, torch.no_grad():
            _run_sample(model, input_ids, inputs, hooks)
        if not hooks:
            raise
        name = next((name for name, part in model.named_modules() if part is module), type(module).__name__)
        raise HeadError(
            f"{name}: {', '.join(dict.fromkeys(hooks))} changes the input or output of {class_name(model)}'s output "
            f"embedding, and chunks of tokens cannot reproduce the result. {ADVICE}"
        ) from error


def _run_sample(model: nn.Module, input_ids: torch.Tensor, inputs: Mapping[str, Any], *seen: list[Any]) -> Any:
    """Run the model on the first tokens. If it does not run on these alone (images), it runs on all inputs.

    Args:
        model, input_ids, inputs: The model and its inputs.
        seen: Lists that hooks fill. They are cleared before a second run.
    """
    with own_routing(model):
        try:
            return model(input_ids=input_ids.reshape(-1)[:CHECKED_TOKENS][None], use_cache=False)
        except Exception:  # of any type: the text may need the images, and classes report that differently
            require_values(model)
            if not inputs:
                raise
            for values in seen:
                values.clear()
            return model(input_ids=input_ids, use_cache=False, **inputs)


def _require_one_call(
    model: nn.Module, module: nn.Module, hidden_states: Sequence[torch.Tensor], input_ids: torch.Tensor
) -> None:
    """Check that a forward called the output embedding once, on hidden states `(batch, seq_len, hidden_size)`.

    Raises:
        HeadError: If it did not.
    """
    if len(hidden_states) != 1 or hidden_states[0].ndim != 3:
        called = f"{len(hidden_states)} times" + (f", on {tuple(hidden_states[0].shape)}" if hidden_states else "")
        raise HeadError(
            f"{class_name(model)} calls its output embedding ({type(module).__name__}) {called}; expected once, on "
            f"every token of {tuple(input_ids.shape)}. If it is compiled as a whole, compile its layers or its base "
            f"model instead. {ADVICE}"
        )


_LANGUAGE_MODEL = "log-probabilities need a language model, as of AutoModelForCausalLM or AutoModelForMultimodalLM"


def output_embedding(model: nn.Module) -> nn.Module:
    """Return a model's output embedding.

    Raises:
        HeadError: If it has none.
    """
    module = getattr(model, "get_output_embeddings", lambda: None)()
    if module is None:
        raise HeadError(
            f"{class_name(model)} has no output embedding: {_LANGUAGE_MODEL}. If it has logits, pass chunk_size=None"
        )
    return module


def require_head(models: Iterable[Any], chunk_size: int | str | None, inputs: Collection[str]) -> None:
    """Check that models predict each token from the tokens before it, and have an output embedding.

    Complete logits (`chunk_size=None`) need no output embedding. `inputs` are names of further arguments of forwards.

    Raises:
        HeadError: If a model has an encoder, attends in both directions or has no output embedding.
        DeviceError, UnknownArgumentError: If its output embedding is on meta, or it is a class.
    """
    for model in models:
        if isinstance(model, type):
            raise UnknownArgumentError(f"the model is the class {model.__name__}, expected a model of this class")
        if isinstance(model, nn.Module) and (reason := why_not_causal(model, inputs)) is not None:
            raise HeadError(
                f"{class_name(innermost(model))} {reason}; expected a model that predicts each token from earlier ones"
            )
        if chunk_size is not None or not isinstance(model, nn.Module):
            output_embedding(model)
        require_head_values(model)


def logits_at(
    model: nn.Module, input_ids: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor], inputs: Mapping[str, Any]
) -> torch.Tensor:
    """Return the model's own logits at some positions, `(positions, vocab_size)`.

    Skips other columns if the model supports that, except with inputs (images) for which it may add columns, and with
    adapters that read complete rows.

    Args:
        model: A model whose output has logits.
        input_ids: Token ids, `(batch, seq_len)`.
        places: Rows and columns of the positions.
        inputs: Further keyword arguments of its forward.

    Raises:
        HeadError: If it has no logits, or not one column for each token.
    """
    rows, columns = places
    others = (value for name, value in inputs.items() if name not in BOUNDARIES and value is not None)
    has_argument = "logits_to_keep" in inspect.signature(innermost(model).forward).parameters
    skips = has_argument and len(columns) > 0 and not reads_complete_rows(model)
    if not skips or any(getattr(value, "shape", ())[:2] != input_ids.shape for value in others):
        logits = _full_logits(model(input_ids=input_ids, use_cache=False, **inputs), model)
        return _columns_of_tokens(model, logits, input_ids)[rows, columns]
    unique_columns, inverse = columns.unique(return_inverse=True)
    output = model(input_ids=input_ids, use_cache=False, logits_to_keep=unique_columns, **inputs)
    return _full_logits(output, model)[rows, inverse]


def _full_logits(output: Any, model: nn.Module) -> torch.Tensor:
    logits = getattr(output, "logits", None)
    if logits is None:
        raise HeadError(f"{class_name(model)} returns no logits: {_LANGUAGE_MODEL}")
    return logits


def _columns_of_tokens(model: nn.Module, values: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Return hidden states or logits of the tokens, without those of virtual tokens (prompt tuning) before them.

    Raises:
        HeadError: If the model adds other columns, for example for images.
    """
    tokens = input_ids.shape[1]
    if values.shape[1] == tokens + virtual_tokens(model):
        values = values[:, -tokens:]
    if values.shape[:2] != input_ids.shape:
        raise HeadError(
            f"{class_name(model)} computes {tuple(values.shape[:2])} columns for input_ids {tuple(input_ids.shape)}; "
            "expected one column for each token, because the position of other columns is not known"
        )
    return values


def _logits_of(output: Any) -> torch.Tensor:
    return output.logits if hasattr(output, "logits") else output[0]


_checked: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""Scale, cap and autocast of heads that were compared with a model's logits, by output embedding, autocast and mode."""


@dataclass(frozen=True, slots=True)
class _HeadSample:
    """Results of a model and of its output embedding on the first tokens of a batch.

    The model runs before the batch's forward, so that hooks end with the batch: those that keep a module's last call,
    and those that compute the weight of the output embedding, with its graph.

    Attributes:
        expected: Logits of the model, `(1, CHECKED_TOKENS, vocab_size)`.
        embedded: Result of the output embedding for the same tokens, without scale and cap.
        unhooked: The same as the model computed it, before forward hooks; None if there are none, or if they run for
            each chunk of tokens.
        rounding: Largest `eps` of the hidden states and the logits.
    """

    expected: torch.Tensor
    embedded: torch.Tensor
    unhooked: torch.Tensor | None
    rounding: float

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module, module: nn.Module, input_ids: torch.Tensor, inputs: Mapping[str, Any]) -> _HeadSample:
        """Run the model on the first tokens.

        Raises:
            HeadError: If the model does not call its output embedding exactly once.
        """
        hidden_states: list[torch.Tensor] = []
        autocast: list[torch.dtype | None] = []
        unhooked: list[torch.Tensor] = []
        bypassed = bool(module._forward_hooks) and OutputHead(module).is_plain
        # The steps around the output embedding, and hooks, may depend on the mode.
        modes = [(part, part.training) for part in modules_around(model, module) if part is not module or bypassed]

        def note(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            hidden_states.append(args[0])
            autocast.append(autocast_dtype(args[0]))

        def keep(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            unhooked.append(whole(output[:, :CHECKED_TOKENS]).clone())

        with ExitStack() as stack:
            stack.callback(module.register_forward_pre_hook(note).remove)
            stack.enter_context(evaluating(model))
            if bypassed:
                stack.callback(module.register_forward_hook(keep, prepend=True).remove)
            for part, mode in modes:
                part.training = mode
            output = _run_sample(model, input_ids, inputs, hidden_states, autocast, unhooked)
        _require_one_call(model, module, hidden_states, input_ids.reshape(-1)[:CHECKED_TOKENS][None])
        hidden, expected = hidden_states[0][:, :CHECKED_TOKENS], _logits_of(output)[:, :CHECKED_TOKENS].clone()
        embedded = OutputHead(module, autocast=autocast[0], units=gathered_units(model, module))(hidden)
        # Some models compute their logits in another dtype than their hidden states.
        rounding = max(torch.finfo(each.dtype).eps for each in (hidden, expected, embedded))
        return cls(expected, embedded, unhooked[0] if bypassed else None, rounding)

    @torch.no_grad()
    def compare(self, model: nn.Module, head: OutputHead) -> None:
        """Check that `head` reproduces the model's logits, up to rounding of the dtype.

        Hooks may change logits by less than the rounding of a matmul, so their effect is compared with each logit.

        Raises:
            HeadError: If it does not.
        """
        actual, expected = head.finish(self.embedded).float(), self.expected.float()
        tolerance = 8 * self.rounding * max(1.0, expected.abs().nan_to_num(posinf=0.0).max().item())
        equal = actual.shape == expected.shape and torch.allclose(
            actual, expected, rtol=0.0, atol=tolerance, equal_nan=True
        )
        if equal and self.unhooked is not None and self.unhooked.shape == expected.shape:
            unhooked = head.finish(self.unhooked).float()
            equal = torch.allclose(unhooked, expected, rtol=8 * self.rounding, atol=1e-7, equal_nan=True)
        if not equal:
            raise HeadError(
                f"{class_name(model)}'s logits {tuple(expected.shape)} are not those of its output embedding with "
                f"scale {head.scale:g} and cap {head.cap} {tuple(actual.shape)}. {ADVICE}"
            )
