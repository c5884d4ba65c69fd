"""Weights through buckets: begin, send, verify, commit, or tell every engine to keep what it had."""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch import Tensor

from relax_sdk.errors import WeightSyncError
from relax_sdk.protocols import EngineCall, FullWeightManifest, SyncReport, WeightBucket
from relax_sdk.weights import TensorDigest

__all__ = ["StreamedSync"]


class StreamedSync:
    """A `WeightSync` that sends buckets of host tensors through the engines' `receive`.

    Args:
        bucket_size_mb: a bucket is sent once it holds this many MiB.
    """

    def __init__(self, *, bucket_size_mb: int = 512) -> None:
        self._bucket_bytes = bucket_size_mb * 2**20

    def run(
        self,
        named_tensors: Iterator[tuple[str, Tensor]],
        engines: EngineCall,
        *,
        manifest: FullWeightManifest,
        policy_version: int,
        adapter: dict[str, object] | None,
    ) -> SyncReport:
        """See `WeightSync.run`."""
        started = time.perf_counter()
        try:
            engines("begin_sync", manifest, adapter)
            checksum = self._send(named_tensors, engines, manifest)
            answers = engines("commit_sync", policy_version)
            wrong = [index for index, answer in enumerate(answers) if answer != checksum]
            if wrong:
                raise WeightSyncError(
                    f"engines {wrong} hold other weights than were sent",
                    expected=f"checksum {checksum}, came {[answers[index] for index in wrong]}",
                )
        except Exception as error:
            # The other ranks are inside the same sequence of collectives: it has to be drawn to its end.
            for _ in named_tensors:
                pass
            self._abort(engines, error)
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(f"weight sync to version {policy_version} failed: {error}") from error
        return SyncReport(policy_version=policy_version, manifest=manifest, seconds=time.perf_counter() - started)

    def _send(
        self, named_tensors: Iterator[tuple[str, Tensor]], engines: EngineCall, manifest: FullWeightManifest
    ) -> str:
        digest = TensorDigest()
        pending: dict[str, Tensor] = {}
        pending_bytes = buckets = sent = sent_bytes = 0
        for name, tensor in named_tensors:
            host = tensor.cpu()
            digest.add(name, host)
            size = host.numel() * host.element_size()
            pending[name] = host
            pending_bytes += size
            sent += 1
            sent_bytes += size
            if pending_bytes >= self._bucket_bytes:
                engines("receive", WeightBucket(index=buckets, tensors=pending))
                buckets, pending, pending_bytes = buckets + 1, {}, 0
        if pending:
            engines("receive", WeightBucket(index=buckets, tensors=pending))
        if (sent, sent_bytes) != (manifest.tensors, manifest.bytes):
            raise WeightSyncError(
                f"sent {sent} tensors and {sent_bytes} bytes",
                expected=f"{manifest.tensors} tensors and {manifest.bytes} bytes, as announced",
            )
        return digest.hexdigest()

    @staticmethod
    def _abort(engines: EngineCall, cause: Exception) -> None:
        try:
            engines("abort_sync")
        except Exception as error:  # noqa: BLE001 - whatever it was, it is raised again with its cause
            # An engine that cannot even abort may hold anything: say so together with the first cause.
            raise WeightSyncError(
                f"weight sync failed ({cause}), and an engine did not answer the abort: {error}",
                next_step="restart the run: the engines' weights are unknown",
            ) from cause
