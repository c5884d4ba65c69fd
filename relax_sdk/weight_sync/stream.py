"""Weights through a double buffer: announce, send bucket by bucket, verify, commit on every engine or on none.

Every rank of the actor runs `StreamedSync.run`. Each fills a buffer on its own device; the first rank of an engine,
its leader, speaks to the engine, which copies bucket k out of one slot while the ranks fill the other with k + 1.

Who can fail where, and what becomes of it:

- Opening the buffer, or the announcement (an engine that refuses). The ranks agree before anybody draws, so nothing is
  gathered.
- The engine, in `receive`: its leader learns of it before it fills that slot again. That engine's ranks stop sending,
  all at the same bucket, and every rank of every engine draws on to the end, since drawing is a collective.
- A rank's own work on a tensor that has been gathered (a merge or a copy that runs out of memory, another tensor than
  announced): the same.
- The gather of a tensor, on all ranks alike: the iterator is at its end on all of them, and they meet in `agree`.
- The gather on some ranks only, or the death of a rank: the others wait in a collective that nobody completes, until
  its timeout. Then it fails for them as well, and they meet in `agree`; where NCCL ends the process instead, `agree`
  fails for the rest. This is the one case that costs a timeout.
- The commit of an engine, or a checksum that is not that of the sent bytes: the ranks agree before any of them believes
  in the new version, and engines that have committed are told to abort too.
- `agree` itself: each leader aborts its engine without knowing about the others, and the rank raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from relax_sdk.errors import RelaxError, WeightSyncError
from relax_sdk.protocols import (
    AdapterConfig,
    EngineLink,
    FullWeightManifest,
    SyncOffer,
    SyncReport,
    WeightBucket,
)
from relax_sdk.weight_sync.plan import BucketPlan, BucketSpan, plan_buckets
from relax_sdk.weights import SendBuffer, bytes_checksum, combine_checksums

__all__ = ["StreamedSync"]

_ABORTED, _NOT_BEGUN = "aborted", "not begun"

_T = TypeVar("_T")


class StreamedSync:
    """A `WeightSync` that sends through shared memory, on CUDA and on a CPU.

    Args:
        bucket_size_mb: size of a bucket in MiB; a larger tensor gets a bucket of its own.
        device: this rank's, where the buffer is made.
    """

    def __init__(self, *, bucket_size_mb: int, device: torch.device) -> None:
        self._bucket_bytes = bucket_size_mb * 2**20
        self._device = device

    def run(
        self,
        named_tensors: Iterator[tuple[str, Tensor]],
        link: EngineLink,
        *,
        manifest: FullWeightManifest,
        tensors: tuple[tuple[str, tuple[int, ...]], ...],
        dtype: str,
        policy_version: int,
        adapter: AdapterConfig | None,
    ) -> SyncReport:
        """See `WeightSync.run`."""
        rank = _RankSync(link, tensors, policy_version)
        marks = [time.perf_counter()]
        with contextlib.ExitStack() as stack:
            try:
                buffer, plan = rank.open(stack, self._device, dtype, self._bucket_bytes)
                rank.announce(buffer, dtype, manifest, adapter)
                rank.agree()
                marks.append(time.perf_counter())
                assert buffer, "without a buffer the ranks do not agree"
                assert plan
                rank.send(named_tensors, buffer, plan)
                rank.agree()
                marks.append(time.perf_counter())
                rank.commit()
                rank.agree()
                marks.append(time.perf_counter())
            except _Failed as failed:
                rank.abort(failed)
        phases = zip(("open", "send", "commit"), marks, marks[1:], strict=False)
        return SyncReport(
            policy_version=policy_version,
            manifest=manifest,
            seconds=time.perf_counter() - marks[0],
            timings={name: end - start for name, start, end in phases},
        )


@dataclasses.dataclass(frozen=True)
class _Problem:
    """What went wrong on a rank, and when (seconds since the epoch), so that the first cause can be told first."""

    at: float
    engine: str
    text: str


class _Failed(Exception):  # noqa: N818 - a signal inside this module
    """The ranks know that the sync has failed; ``agreed`` unless they could not even exchange that."""

    def __init__(self, problems: Sequence[_Problem], *, agreed: bool) -> None:
        super().__init__()
        self.problems = list(problems)
        self.agreed = agreed


class _RankSync:
    """One rank's part in one sync. Its first problem is kept, and what follows is skipped, except collectives."""

    def __init__(self, link: EngineLink, tensors: tuple[tuple[str, tuple[int, ...]], ...], policy_version: int) -> None:
        self._link, self._tensors, self._version = link, tensors, policy_version
        self._problem: _Problem | None = None
        self._cause: Exception | None = None
        self._sending = True
        self._sent: list[str] = []
        self._waiting: dict[int, Callable[[], Any]] = {}
        self._manifest: FullWeightManifest | None = None
        self._begun = False

    def open(
        self, stack: contextlib.ExitStack, device: torch.device, dtype: str, bucket_bytes: int
    ) -> tuple[SendBuffer | None, BucketPlan | None]:
        """Plan the buckets and make the buffer, which ``stack`` closes."""
        plan = self._attempt(lambda: plan_buckets(self._tensors, dtype=dtype, bucket_bytes=bucket_bytes))
        if plan is None:
            return None, None
        opening = SendBuffer.open(device, plan.slot_bytes, slots=plan.slots)
        return self._attempt(lambda: stack.enter_context(opening)), plan

    def announce(
        self, buffer: SendBuffer | None, dtype: str, manifest: FullWeightManifest, adapter: AdapterConfig | None
    ) -> None:
        """Show the engine what will come and where; it may refuse."""
        self._manifest = manifest
        handles = self._together(None if buffer is None else buffer.handle)
        if handles is None or not self._link.is_leader:
            return

        def begin() -> None:
            offer = SyncOffer(
                manifest=manifest,
                dtype=cast(Any, dtype),
                tensors=self._tensors,
                buffers=tuple(handles),
                adapter=adapter,
            )
            self._begun = True
            self._link.submit("begin_sync", offer)()

        self._attempt(begin)

    def send(self, named_tensors: Iterator[tuple[str, Tensor]], buffer: SendBuffer, plan: BucketPlan) -> None:
        """Draw everything, and send it for as long as nothing has gone wrong at this engine."""
        for index, span in enumerate(plan.spans):
            slot = index % plan.slots
            if index >= plan.slots:
                self._await(slot)
                # The other ranks of the engine learn here that the slot is free, or that sending is over.
                self._together(None)
            self._fill(named_tensors, buffer, slot, span, plan.dtype)
            checksum = self._attempt(lambda slot=slot, span=span: _finished(buffer, slot, span))  # type: ignore[misc]
            checksums = self._together(checksum)
            if checksums is None:
                continue
            if len(set(checksums)) != 1:
                self._sending = False
                self._refuse(f"the engine's ranks filled bucket {index} with different bytes: {checksums}")
            elif self._link.is_leader:
                bucket = WeightBucket(
                    index=index,
                    slot=slot,
                    first=span.first,
                    count=span.count,
                    bytes=span.bytes,
                    checksum=checksums[0],
                )
                self._submit(bucket)
        self._end(named_tensors)
        for slot in sorted(self._waiting, key=lambda slot: (slot - len(plan.spans)) % plan.slots):
            self._await(slot)

    def commit(self) -> None:
        """Have the engine adopt the version, and compare what it holds with what was sent."""
        if not self._link.is_leader:
            return

        def adopt() -> None:
            held, sent = self._link.submit("commit_sync", self._version)(), combine_checksums(self._sent)
            if held != sent:
                raise WeightSyncError(f"it holds other weights than were sent: checksum {held!r}", expected=repr(sent))

        self._attempt(adopt)

    def agree(self) -> None:
        """Find out whether all is well everywhere, and whether all ranks send the same.

        Raises:
            _Failed: it is not.
        """
        try:
            values = self._link.agree((self._problem, self._manifest))
        except Exception as error:
            self._keep(error, "the ranks could not agree")
            raise _Failed(self._own(), agreed=False) from error
        problems = [problem for problem, _ in values if problem is not None]
        if not problems and any(manifest != self._manifest for _, manifest in values):
            # Every rank sees the same values: one says it for all.
            counts = [f"{item.tensors} tensors, {item.bytes} bytes" for _, item in values]
            problems = [_Problem(time.time(), "the actor", f"its ranks would send different weights: {counts}")]
        if problems:
            raise _Failed(problems, agreed=True)

    def abort(self, failed: _Failed) -> None:
        """Tell the engine to drop the sync, hear what came of that elsewhere, and raise."""
        answer: str | None = None
        if self._link.is_leader and not self._begun:
            # An abort would take back the sync before this one.
            answer = _NOT_BEGUN
        elif self._link.is_leader:
            answer = _ABORTED
            try:
                self._link.submit("abort_sync")()
            except Exception as error:  # noqa: BLE001 - reported in the error raised below
                answer = f"the abort failed: {_text(error)}"
        answers = [(self._link.engine, answer)]
        if failed.agreed:
            try:
                answers = self._link.agree((self._link.engine, answer))
            except Exception as error:  # noqa: BLE001 - likewise
                failed.problems.append(_Problem(time.time(), self._link.engine, _text(error)))
        raise self._error(failed.problems, [(engine, text) for engine, text in answers if text]) from self._cause

    def _error(self, problems: Sequence[_Problem], answers: Sequence[tuple[str, str]]) -> WeightSyncError:
        """One error for all ranks: the first cause, then a line for every engine."""
        problems = sorted(problems, key=lambda problem: problem.at)
        first = problems[0]
        outcomes = []
        for engine, answer in answers:
            # The first cause is told above.
            own = [problem.text for problem in problems if problem.engine == engine and problem is not first]
            outcomes.append(f"{engine}: {'; '.join([*own[:1], answer])}")
        bad = any(answer not in (_ABORTED, _NOT_BEGUN) for _, answer in answers)
        return WeightSyncError(
            f"weight sync to version {self._version} failed at {first.engine}: {first.text}",
            where="\n            ".join(outcomes) or None,
            next_step="restart the run: an engine did not answer the abort and may hold anything" if bad else None,
        )

    # --- one bucket ---------------------------------------------------------------------------------------------------

    def _fill(
        self,
        named_tensors: Iterator[tuple[str, Tensor]],
        buffer: SendBuffer,
        slot: int,
        span: BucketSpan,
        dtype: torch.dtype,
    ) -> None:
        """Draw a bucket's tensors and lay them back to back into the slot."""
        offset = 0
        for expected in self._tensors[span.first : span.first + span.count]:
            drawn = self._draw(named_tensors)
            if drawn is None:
                self._refuse(f"{expected[0]!r} was announced but not drawn")
            elif self._sending and self._problem is None:
                name, tensor = drawn
                size = tensor.nbytes
                came = (name, tuple(tensor.shape), tensor.dtype)
                if came != (*expected, dtype):
                    self._refuse(f"drew {came}, announced {(*expected, dtype)}")
                    continue
                room = buffer.slot(slot)[offset : offset + size]
                self._attempt(lambda room=room, tensor=tensor: _lay(room, tensor))  # type: ignore[misc]
                offset += size

    def _draw(self, named_tensors: Iterator[tuple[str, Tensor]]) -> tuple[str, Tensor] | None:
        """The next tensor; None at the end, or when the draw fails. The iterator says whether more can be drawn."""
        try:
            return next(named_tensors, None)
        except Exception as error:  # noqa: BLE001 - kept as this rank's problem
            self._keep(error, "gathering a tensor failed")
            return None

    def _end(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Nothing may be left to draw; what is left is drawn, since the other ranks draw it too."""
        while (drawn := self._draw(named_tensors)) is not None:
            self._refuse(f"{drawn[0]!r} was drawn beyond the {len(self._tensors)} announced tensors")

    def _submit(self, bucket: WeightBucket) -> None:
        answer = self._attempt(lambda: self._link.submit("receive", bucket))
        if answer is not None:
            self._waiting[bucket.slot] = answer
            self._sent.append(bucket.checksum)

    def _await(self, slot: int) -> None:
        """Wait until the engine has read a slot. After a problem nobody waits: the abort is answered after it."""
        answer = self._waiting.pop(slot, None)
        if answer is not None:
            self._attempt(answer)

    # --- problems -----------------------------------------------------------------------------------------------------

    def _together(self, value: _T) -> list[_T] | None:
        """Exchange a value with the engine's ranks; None once any of them has a problem, on all at the same call."""
        if not self._sending:
            return None
        try:
            values = self._link.share((self._problem is None, value))
        except Exception as error:  # noqa: BLE001 - kept as this rank's problem
            self._keep(error, "the engine's ranks lost each other")
            values = [(False, value)]
        if not all(well for well, _ in values):
            self._sending = False
            return None
        return [item for _, item in values]

    def _attempt(self, action: Callable[[], _T]) -> _T | None:
        """Run it unless something has gone wrong before; None when it has, or does now."""
        if self._problem is not None:
            return None
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - kept as this rank's problem
            self._keep(error)
            return None

    def _refuse(self, text: str) -> None:
        self._keep(WeightSyncError(text))

    def _keep(self, error: Exception, what: str = "") -> None:
        if self._problem is None:
            self._cause = error
            text = f"{what}: {_text(error)}" if what else _text(error)
            self._problem = _Problem(time.time(), self._link.engine, text)

    def _own(self) -> list[_Problem]:
        return [] if self._problem is None else [self._problem]


def _lay(room: Tensor, tensor: Tensor) -> None:
    """Copy a tensor into its bytes of a slot, in one kernel even when it is strided."""
    room.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)


def _finished(buffer: SendBuffer, slot: int, span: BucketSpan) -> str:
    """Wait for the copies into a slot, and sum what they left there."""
    buffer.flush()
    return bytes_checksum(buffer.slot(slot)[: span.bytes])


def _text(error: Exception) -> str:
    """One line: the project's own errors with their place and what was expected, others with their class."""
    if not isinstance(error, RelaxError):
        return f"{type(error).__name__}: {error}"
    where = f" ({error.where})" if error.where else ""
    expected = f", expected {error.expected}" if error.expected else ""
    return f"{error.what}{where}{expected}"
