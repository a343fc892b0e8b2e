"""The trainer's side of an update: send all weights, or only the changes since the engine's last version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from nrl_models.common.state_dict.buckets import grouped_tensors, on_host
from nrl_models.engines.digests import tensor_digest
from nrl_models.engines.engine_types import BUCKET_BYTES, NamedTensor
from nrl_models.engines.transfer.deltas import DeltaWriter
from nrl_models.engines.transfer.segments import Segment
from nrl_models.engines.transfer.updates import PROTOCOL, Update, Weights, digest_of, made_of
from nrl_models.errors import EngineError, listed

ABANDON = {"abandon": True}
"""Update that discards the data sent before it."""


class SyncClient(Protocol):
    """Interface of vLLM's `VLLMWeightSyncClient`, which passes updates to the engine's workers."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Prepare the workers, once."""

    def start_weight_update(self) -> None:
        """Begin an update."""

    def update_weights(self, update_info: Any) -> None:
        """Announce weights."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, and name its version."""


class Sender:
    """Sends versions of a model's weights to engines on this machine through shared memory.

    The first update, and any update after a failure, has all weights. Other updates have only the changes.

    Args:
        client: Client of the engine, whose weight-transfer backend must be
            `nrl_models.engines.transfer.vllm_plugin.NAME`.
        deltas: Whether to send only changes. Trainer and engine then keep the last version in memory, shared as long as
            it is the first one. Without deltas, neither keeps a copy.
        bucket_bytes: Maximum bytes per copy.

    Attributes:
        version: Number of updates, including failed ones. It is the name of the last update.
        last_version: Name of the last version that was sent successfully; None if there is none.
        in_doubt: Whether the last update failed while it was applied. The engine may then have either version, or parts
            of both, in which case it raises on every call.
    """

    def __init__(self, client: SyncClient, *, deltas: bool = True, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.client, self.deltas, self.bucket_bytes = client, deltas, bucket_bytes
        self.version = 0
        self.last_version: str | None = None
        self.in_doubt = False
        self._last: Weights | None = None
        self._is_ready = False

    def forget(self) -> None:
        """Send all weights and announce updates again next time: the engine was replaced, or has other weights."""
        self._last, self.last_version, self._is_ready = None, None, False

    def prepare(self) -> None:
        """Announce the updates to the engine, unless already done.

        Raises:
            EngineError, or any error of the client: If the engine cannot be reached, or has another backend.
        """
        if not self._is_ready:
            self.client.init_weight_transfer_engine({"protocol": PROTOCOL, "deltas": self.deltas})
            self._is_ready = True

    def send(self, tensors: Iterable[NamedTensor], version: str | None = None) -> tuple[Update, Mapping[str, str]]:
        """Send all weights, as pairs of hub name and tensor from `StateDictAdapter.iter_export`: see `send_buckets`."""
        return self.send_buckets(grouped_tensors(tensors, self.bucket_bytes), version)

    def send_buckets(
        self, buckets: Iterable[list[NamedTensor]], version: str | None = None
    ) -> tuple[Update, Mapping[str, str]]:
        """Send new weights to the engine.

        Afterwards the engine has all new weights or all old weights. If neither is possible, it raises on every call.

        Args:
            buckets: All weights, from `grouped_tensors`. Grouping them again would read further ahead, so that a
                generator that reuses memory could overwrite tensors before they are sent.
            version: Name of the version. Default: a counter.

        Returns:
            The update, whose segments are closed, and the `tensor_digest` of each tensor by hub name.

        Raises:
            EngineError: If the engine is not a vLLM with this library's backend, cannot be reached, or rejects the
                weights.
        """
        last = self._last
        self._last, self.last_version = None, None  # if anything fails from here on, the next update sends all weights
        self.version += 1
        version = str(self.version) if version is None else version
        segments: list[Segment] = []
        try:
            if last is None:
                digests = self._write_all(buckets, segments)
                update = Update(version, digest_of(digests), tuple(segments))
            else:
                digests = self._write_changes(buckets, last, segments)
                update = Update(version, digest_of(digests), tuple(segments), last.version, last.digest)
            if self.deltas:
                # The same computation as in the engine, from the same memory.
                last = made_of(update, last)[0]
            self._deliver(update)
        finally:
            for segment in segments:
                segment.close()
        self._last, self.last_version = last if self.deltas else None, version
        return update, digests

    def _write_all(self, buckets: Iterable[list[NamedTensor]], segments: list[Segment]) -> dict[str, str]:
        """Write all tensors into new segments. Returns their digests."""
        digests: dict[str, str] = {}
        for bucket in buckets:
            tensors = dict(on_host(bucket))
            digests |= {name: tensor_digest(tensor) for name, tensor in tensors.items()}
            segments.append(Segment.write(tensors))
            del tensors  # the memory can be reused for the next bucket
        return digests

    def _write_changes(
        self, buckets: Iterable[list[NamedTensor]], last: Weights, segments: list[Segment]
    ) -> dict[str, str]:
        """Write the changes since the last version into new segments. Returns the digests of all tensors."""
        digests: dict[str, str] = {}
        writer = DeltaWriter()
        for bucket in buckets:
            digests |= self._add_changes(bucket, last, writer)
            if writer.has_references or writer.nbytes > self.bucket_bytes:
                segments.append(Segment.write(*writer.message()))
                writer = DeltaWriter()
        if writer.nbytes:
            segments.append(Segment.write(*writer.message()))
        if missing := sorted(last.specs.keys() - digests.keys()):
            raise EngineError(f"{len(missing)} tensors of the version sent before are missing: {listed(missing)}")
        return digests

    @staticmethod
    def _add_changes(bucket: list[NamedTensor], last: Weights, writer: DeltaWriter) -> dict[str, str]:
        """Add the changes of a bucket's tensors to `writer`. Returns the digests of all its tensors."""
        digests: dict[str, str] = {}
        for name, tensor in on_host(bucket):
            if last.specs.get(name) != (tensor.dtype, tuple(tensor.shape)):
                raise EngineError(
                    f"{name}, {tensor.dtype} {tuple(tensor.shape)}, is not a tensor of the version sent before: use "
                    "another Sender for another model. The next update of this Sender sends all weights"
                )
            # Hashing is much faster than comparing elements, and the engine needs the digest.
            digests[name] = tensor_digest(tensor)
            if digests[name] != last.digests[name]:
                writer.add(name, last.tensors[name], tensor)
        return digests

    def _deliver(self, update: Update) -> None:
        """Send an update to the engine. If a step fails, the engine discards it."""
        self.prepare()
        try:
            self.client.start_weight_update()
        except Exception as refused:
            try:
                self._drop()  # an unfinished update of this or another trainer
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
