"""The output embedding as a function, logits of a chunk of tokens in reused memory, and the statistics of each row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nrl_models.common.recording import backward_hooks
from nrl_models.common.upstream_torch import is_traceable_wrapper_subclass
from nrl_models.errors import HeadError
from nrl_models.logprobs.fused import fuses, log_sum_exp, logprob_gradient_, run_fused

CHUNK_ELEMENTS, FUSED_CHUNK_ELEMENTS = 2**25, 2**27
"""Maximum number of logits in memory, in forward and backward: 128 MiB in fp32, and 256 MiB in bf16 if fused. With
smaller chunks, a GPU would wait for kernel launches."""

FLOOR = -1e30
"""Replaces -inf where it would be multiplied by a probability of zero."""

PROBE = (0.0, 2.0**-10, -(2.0**-10), 0.5, -0.5, 1.0, -1.0, 3.0, -7.0, 20.0, -45.0, 100.0, 2.0**20, -(2.0**20))
"""Numbers to use as logits: small ones show the slope, large ones a cap."""

ADVICE = "Pass chunk_size=None to compute from the model's own full logits instead."


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The end of a model as a function of its last hidden states.

    Args:
        module: The output embedding.
        scale: Factor of small logits after the output embedding.
        cap: Bound of the logits; None if there is none.
        autocast: dtype of autocast where the model calls the output embedding; None if it is off there. Trainers may
            enable it inside the model's forward (accelerate's mixed precision).
        units: Modules sharded by FSDP2 that contain an output embedding that is not a plain linear. Their weights are
            gathered before it runs.
    """

    module: nn.Module
    scale: float = 1.0
    cap: float | None = None
    autocast: torch.dtype | None = None
    units: tuple[FSDPModule, ...] = ()

    @property
    def weight(self) -> torch.Tensor | None:
        """`(vocab_size, hidden_size)` if logits before scale and cap are `hidden @ weight.T + bias`; else None.

        Also None for a weight that is loaded only while the module runs (accelerate's offloading).
        """
        return whole(cast(torch.Tensor, self.module.weight)) if self.is_plain else None

    @property
    def is_plain(self) -> bool:
        """Whether logits are computed from `weight`, without calling `module` and its forward hooks.

        False for a weight that torchao quantized in place, for a forward that was replaced on the instance (except by
        accelerate, whose hook moves weights), and for backward hooks.
        """
        module = self.module
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            return False
        if ("forward" in module.__dict__ and not hasattr(module, "_hf_hook")) or backward_hooks(module):
            return False
        weight = module.weight
        return not weight.is_meta and (isinstance(weight, DTensor) or not is_traceable_wrapper_subclass(weight))

    @property
    def bias(self) -> torch.Tensor | None:
        """`(vocab_size,)`, or None."""
        bias = getattr(self.module, "bias", None)
        return None if bias is None else whole(bias)

    def vocabulary(self, hidden: torch.Tensor) -> int:
        """Return the number of logits per token.

        Args:
            hidden: Hidden states of the model, for modules that are not a plain linear (LoRA, `modules_to_save`).
        """
        if (weight := self.weight) is not None:
            return len(weight)
        with torch.no_grad():
            return self._run(hidden.reshape(-1, hidden.shape[-1])[:1]).shape[-1]

    def autocasting(self, hidden: torch.Tensor) -> AbstractContextManager[Any]:
        """Return a context manager with the autocast state in which the model calls the output embedding."""
        if self.autocast == autocast_dtype(hidden):
            return nullcontext()
        return torch.autocast(hidden.device.type, self.autocast, enabled=self.autocast is not None)

    def finish_(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale and cap the output embedding's result in place and in its dtype, as the model does."""
        if self.cap is None:
            return logits if self.scale == 1.0 else logits.mul_(self.scale)
        return logits.div_(self.cap / self.scale).tanh_().mul_(self.cap)

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Return scaled and capped logits, like `finish_`, as a new tensor with gradients."""
        if self.cap is None:
            return logits if self.scale == 1.0 else logits * self.scale
        return torch.tanh(logits / (self.cap / self.scale)) * self.cap

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """Return the derivative of `finish`, computed from its result."""
        return self.scale if self.cap is None else self.scale * (1.0 - (logits / self.cap) ** 2)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits of hidden states in the same way as the model."""
        if (weight := self.weight) is not None:
            bias = None if self.bias is None else self.bias.to(hidden.dtype)
            with self.autocasting(hidden):
                return self.finish(nn.functional.linear(hidden, weight.to(hidden.dtype), bias))
        return self.finish(self._run(hidden))

    def _run(self, hidden: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            unit.unshard()
        with self.autocasting(hidden):
            return self.module(hidden)

    def free(self) -> None:
        """Free the gathered weights of `units`. With gradients, the backward frees them."""
        if not torch.is_grad_enabled():
            for unit in self.units:
                unit.reshard()


def fitted_head(observed: torch.Tensor, name: str) -> OutputHead:
    """Fit the head that converts `PROBE` to the observed values, `(batch, seq_len, len(PROBE))`.

    Raises:
        HeadError: If the model `name` converts them by something other than a scale or a soft cap.
    """
    rows = observed.detach().reshape(-1, observed.shape[-1])
    values, *bounds = torch.stack([rows[0], *torch.aminmax(rows, dim=0)]).double().cpu()  # one wait for a GPU
    if bool(values.isnan().any()):
        made = ", ".join(f"{x:g} -> {y:g}" for x, y in zip(PROBE, values.tolist(), strict=False) if y != y)
        raise HeadError(
            f"{name} changes finite logits to NaN: {made}. Correct the scale or soft cap in its configuration: a cap "
            f"of 0 divides by zero. {ADVICE}"
        )
    # Equal but for rounding, which a hook may change (`nrl_models.parity.noise`).
    if len(values) != len(PROBE) or not all(torch.allclose(bound, values, rtol=1e-5, atol=1e-9) for bound in bounds):
        raise HeadError(f"{name} treats logits of different tokens differently. {ADVICE}")
    probe = torch.tensor(PROBE, dtype=torch.float64)
    scale = (values[5]).item()
    largest = values[12].item()
    if math.isclose(largest, scale * PROBE[12], rel_tol=1e-4):
        head = OutputHead(nn.Identity(), scale)
        expected = scale * probe
    else:
        # The smallest numbers give the slope. If the cap is below all of them, it is 1 until logits are compared.
        share = values[1].item() / largest if largest else 0.0
        scale = largest * math.atanh(share) / PROBE[1] if abs(share) < 1.0 else 1.0
        head = OutputHead(nn.Identity(), 1.0 if math.isclose(scale, 1.0, rel_tol=1e-5) else scale, largest)
        expected = largest * torch.tanh(probe * head.scale / largest)
    tolerance = 1e-5 * expected.abs().clamp(min=abs(head.scale) * 0.01)
    if not bool(((values - expected).abs() <= tolerance).all()) or head.scale == 0.0:
        made = ", ".join(f"{x:g} -> {y:g}" for x, y in zip(PROBE[3:], values[3:].tolist(), strict=True))
        raise HeadError(f"{name} changes its logits by something other than a scale or a soft cap: {made}. {ADVICE}")
    return head


def autocast_dtype(hidden: torch.Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast multiplies a tensor at present; None if it is off."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded parameter (DTensor). Gradients go back to its shards."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class TokenStatistics(NamedTuple):
    """Statistics of each row of logits, `(tokens,)` each, at least fp32.

    Attributes:
        logprobs: Log-probability of the token; -inf if it cannot be sampled.
        entropy: Entropy of the sampling distribution, in nats.
        kl: Kullback-Leibler divergence from the reference's distribution, in nats; zero without a reference.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor


class Reference(NamedTuple):
    """Hidden states `(tokens, hidden_size)` of another model for the same tokens, and its head."""

    hidden: torch.Tensor
    head: OutputHead

    def logits(self, temperature: float, elements: int) -> Logits:
        """Return a `Logits` of this model in the dtype of its hidden states, for at most `elements` per call."""
        weight, bias = self.head.weight, self.head.bias
        assert weight is not None
        dtype = self.hidden.dtype
        return Logits(self.head, weight.to(dtype), None if bias is None else bias.to(dtype), temperature, elements)


def slices(length: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` that cover `range(length)`."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


class Logits:
    """Logits of some tokens and some rows of the weight, in buffers that are reused.

    Args:
        head, weight, bias: The output embedding, and its parameters in the dtype of the matmul.
        temperature: Divisor of processed logits.
        elements: Maximum number of logits.

    Attributes:
        wide: Dtype of processed logits: fp32, or fp64 for fp64 weights.
        fuses: Whether compiled functions compute sums and gradients, see `nrl_models.logprobs.fused`.
    """

    def __init__(
        self, head: OutputHead, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float, elements: int
    ) -> None:
        self.head, self.weight, self.bias, self.temperature = head, weight, bias, temperature
        self.wide = torch.promote_types(weight.dtype, torch.float32)
        self.buffer = weight.new_empty(elements)
        self.fuses = fuses(weight.device)
        self._wide_buffer: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """Return processed logits of the vocabulary entries in `rows`, at least fp32. Valid until the next call."""
        return self._processed(self.before_temperature(hidden, rows))

    def before_temperature(self, hidden: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """Return the model's logits of the entries in `rows`, in the weight's dtype. Valid until the next call."""
        weight = self.weight[rows]
        shape = (len(hidden), len(weight))
        logits = self.buffer[: shape[0] * shape[1]].view(shape)
        if self.bias is None:
            torch.mm(hidden, weight.t(), out=logits)
        else:
            torch.addmm(self.bias[rows], hidden, weight.t(), out=logits)
        return self.head.finish_(logits)

    def _processed(self, logits: torch.Tensor) -> torch.Tensor:
        """Divide by the temperature, in the wide buffer."""
        if self.wide != logits.dtype:
            if self._wide_buffer is None:
                self._wide_buffer = self.buffer.new_empty(self.buffer.shape, dtype=self.wide)
            logits = self._wide_buffer[: logits.numel()].view(logits.shape).copy_(logits)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def of_tokens(self, logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the processed logit of one column per row of `before_temperature`, `(tokens,)`."""
        return logits.gather(1, places[:, None])[:, 0].to(self.wide) / self.temperature

    def log_sum_exp(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the log of the sum of exponentials of processed logits, `(tokens,)`. May overwrite `logits`.

        `logits` is the result of `before_temperature`.
        """
        if self.fuses:
            return run_fused(log_sum_exp, logits, self.temperature, self.wide)
        logits = self._processed(logits)
        largest = logits.amax(1).clamp(min=FLOOR)  # finite, so that the sum is zero for a row of -inf
        return largest + logits.sub_(largest[:, None]).exp_().sum(1).log()

    def logprob_gradient(
        self, logits: torch.Tensor, log_sum: torch.Tensor, by_logprobs: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of a loss by the output embedding's result, in the memory of `logits`.

        Args:
            logits, log_sum: Result of `before_temperature`, and the log of the sum of exponentials over the vocabulary.
            by_logprobs: Derivatives of the loss by log-probabilities, `(tokens,)`.
            places: Column of each token. If a token's column is not in `logits`, any number that is not a column.
        """
        head = self.head
        return run_fused(
            logprob_gradient_, logits, log_sum, by_logprobs, places, self.temperature, head.scale, head.cap
        )

    def narrowed(self, gradient: torch.Tensor) -> torch.Tensor:
        """Cast a gradient of logits to the weight's dtype for a matmul. May overwrite the logits."""
        if gradient.dtype == self.buffer.dtype:
            return gradient
        return self.buffer[: gradient.numel()].view_as(gradient).copy_(gradient)

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """Return the derivative of processed logits by the output embedding's result."""
        if self.head.cap is None:
            return self.head.scale / self.temperature
        return self.head.slope(logits * self.temperature) / self.temperature


def multiply_(gradient: torch.Tensor, slope: torch.Tensor | float) -> torch.Tensor:
    """Multiply `gradient` by `slope` in place."""
    return gradient if isinstance(slope, float) and slope == 1.0 else gradient.mul_(slope)


def add_product(target: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """Add `first @ second` to `target` in place. If their dtypes differ, the product is rounded before it is added."""
    if target.dtype == first.dtype:
        target.addmm_(first, second)
    else:
        target.add_(first @ second)


def sharded_around(model: nn.Module, head: nn.Module) -> list[FSDPModule]:
    """Return the modules sharded by FSDP2 that contain the head.

    FSDP gathers their weights for the backward when a gradient reaches the model's output. Here the head's backward
    runs before that, so they are gathered again after the forward. The backward frees them as usual.
    """
    units = [part for part in model.modules() if isinstance(part, FSDPModule)]
    return [unit for unit in units if any(inner is head for inner in cast(nn.Module, unit).modules())]


def gathered_units(model: nn.Module, head: nn.Module) -> tuple[FSDPModule, ...]:
    """Return `OutputHead.units`."""
    return () if OutputHead(head).is_plain else tuple(sharded_around(model, head))
