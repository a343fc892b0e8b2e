"""The trainer's side of an update: all weights, or what changed since the engine last had all of them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from nrl_models.engines.base import buckets
from nrl_models.engines.engine_types import NamedTensor
from nrl_models.engines.transfer.deltas import DeltaWriter
from nrl_models.engines.transfer.segments import Segment
from nrl_models.engines.transfer.updates import PROTOCOL, Kind, Update, Weights, digest_of, fast_digest, made_of
from nrl_models.errors import EngineError, listed

BUCKET_BYTES = 2**28
"""Bytes that are copied at a time at most, beside tensors that are larger."""

ABANDON = {"abandon": True}
"""The update that drops what was sent before it."""


class SyncClient(Protocol):
    """vLLM's `VLLMWeightSyncClient`: what takes an update to the engine's workers."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Prepare the workers, once."""

    def start_weight_update(self) -> None:
        """Begin an update."""

    def update_weights(self, update_info: Any) -> None:
        """Announce weights."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, and name its version."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One update.

    Args:
        version: its name.
        kind: what was sent.
        nbytes: size of what was sent.
        dense_nbytes: size of all weights.
        tensors: how many there are.
        changed: names of those that changed since the version before; of a dense update all.
    """

    version: str
    kind: Kind
    nbytes: int
    dense_nbytes: int
    tensors: int
    changed: tuple[str, ...]


class Sender:
    """Sends versions of a model's weights to engines on this machine, through shared memory.

    An engine that was sent a version is sent what changed since; before, and after any failure, it is sent everything.

    Args:
        client: reaches the engine. Its backend of weight transfer has to be
            `nrl_models.engines.transfer.vllm_plugin.NAME`.
        deltas: whether to send what changed alone. Trainer and engine then keep the last version, in memory that they
            share as long as it is the first; otherwise neither keeps anything.
        bucket_bytes: bytes that are copied at a time at most.

    Attributes:
        version: how many updates there were, also those that failed: the name of the last.
        last_version: the name of the version that the engine was sent last; None before, and after a failure.
        in_doubt: whether the last update failed while it took effect: the engine may have either version, or parts of
            both and answer nothing.
    """

    def __init__(self, client: SyncClient, *, deltas: bool = True, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.client, self.deltas, self.bucket_bytes = client, deltas, bucket_bytes
        self.version = 0
        self.last_version: str | None = None
        self.in_doubt = False
        self._last: Weights | None = None
        self._is_ready = False

    def forget(self) -> None:
        """Send all weights next time: the engine has others than it was sent."""
        self._last, self.last_version = None, None

    def prepare(self) -> None:
        """Tell the engine what is going to come, if that has not been done.

        Raises:
            EngineError, or whatever the client raises: the engine is out of reach, or has another backend.
        """
        if not self._is_ready:
            self.client.init_weight_transfer_engine({"protocol": PROTOCOL, "deltas": self.deltas})
            self._is_ready = True

    def send(self, tensors: Iterable[NamedTensor], version: str | None = None) -> Sent:
        """Give the engine new weights. Afterwards it has all of them, or those of before, or it answers nothing.

        Args:
            tensors: all weights by hub name, as `StateDictAdapter.iter_export` yields them.
            version: its name; by default a number, counted up.

        Raises:
            EngineError: the engine is no vLLM with this library's backend, is out of reach, or refuses the weights.
        """
        last = self._last
        self.forget()  # whatever fails now, all weights are sent next
        self.version += 1
        version = str(self.version) if version is None else version
        segments: list[Segment] = []
        try:
            if last is None:
                update, sent = self._dense(tensors, version, segments)
            else:
                update, sent = self._delta(tensors, version, last, segments)
            if self.deltas:
                # As the engine makes it, of the same memory.
                last = made_of(update, last)[0]
            self._deliver(update)
        finally:
            for segment in segments:
                segment.close()
        self._last, self.last_version = last if self.deltas else None, version
        return sent

    def _dense(self, tensors: Iterable[NamedTensor], version: str, segments: list[Segment]) -> tuple[Update, Sent]:
        digests: dict[str, str] = {}
        size = 0
        for bucket in buckets(tensors, self.bucket_bytes):
            digests |= {name: fast_digest(tensor) for name, tensor in bucket}
            size += sum(tensor.nbytes for _, tensor in bucket)
            segments.append(Segment.write(dict(bucket)))
        update = Update(Kind.DENSE, version, digest_of(digests), tuple(segments))
        return update, Sent(version, Kind.DENSE, size, size, len(digests), tuple(digests))

    def _delta(
        self, tensors: Iterable[NamedTensor], version: str, last: Weights, segments: list[Segment]
    ) -> tuple[Update, Sent]:
        digests, seen, dense_size = dict(last.digests), set(), 0
        changed: list[str] = []
        size = 0
        writer = DeltaWriter()

        def flush() -> None:
            nonlocal size, writer
            size += writer.nbytes
            changed.extend(writer.names)
            if writer.names:
                segments.append(Segment.write(*writer.message()))
            writer = DeltaWriter()

        for name, tensor in tensors:
            if last.specs.get(name) != (tensor.dtype, tuple(tensor.shape)):
                raise EngineError(
                    f"{name}, {tensor.dtype} {tuple(tensor.shape)}, is no tensor of the version sent before: another "
                    "model needs another Sender. The next update of this one sends all weights"
                )
            seen.add(name)
            dense_size += tensor.nbytes
            if writer.add(name, last.tensors[name], tensor):
                digests[name] = fast_digest(tensor)
            if writer.nbytes > self.bucket_bytes:
                flush()
        flush()
        if missing := sorted(last.specs.keys() - seen):
            raise EngineError(f"{len(missing)} tensors of the version sent before are missing: {listed(missing)}")
        update = Update(Kind.DELTA, version, digest_of(digests), tuple(segments), last.version, last.digest)
        return update, Sent(version, Kind.DELTA, size, dense_size, len(seen), tuple(changed))

    def _deliver(self, update: Update) -> None:
        """Take an update to the engine; if a step fails, have it dropped."""
        self.prepare()
        try:
            self.client.start_weight_update()
        except Exception as refused:
            try:
                self._drop()  # what another trainer, or this one, left open
            except Exception:
                raise refused from None
            self.client.start_weight_update()
        try:
            self.client.update_weights(update.to_json())
            self.in_doubt = True
            self.client.finish_weight_update(update.version)
            self.in_doubt = False
        except BaseException:
            with suppress(Exception):  # the engine may have closed it, or died
                self._drop()
            raise

    def _drop(self) -> None:
        self.client.update_weights(ABANDON)
        self.client.finish_weight_update()


def consumed(tensors: Iterable[Any]) -> None:
    """Read all of `tensors`, as ranks do that send nothing: gathering them is for all ranks together."""
    for _ in tensors:
        pass
