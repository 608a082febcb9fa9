"""Moves bytes between the host's KV pages and a tier: one mover per rank.

Threads: `fxkv-load-*` read, verify and scatter; `fxkv-copy` gathers blocks into staging;
`fxkv-save-*` seal and write. The engine's thread only submits, polls, and - when it must
have blocks back now - waits for memory copies, never for a medium.

A save is *released* when its blocks are in staging (the engine may reuse them) and
*published* when the tier has it. A load's bytes reach the engine's blocks only after they
were verified in staging, and only while its job is open: a job that ended at its deadline
closes the gate, so late bytes stay in our own memory.

Without `start` nothing runs by itself and a test turns the crank with `run_copy`,
`run_write` and `run_load`.

`_lock` guards every queue and every job's counters; no I/O or copy happens under it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fx_kvbackend.core import format as chunkfile
from fx_kvbackend.core.format import Header
from fx_kvbackend.core.geometry import Copy, Geometry, plan_copies, shards_needed
from fx_kvbackend.engines.buffers import Arena, Slot, aligned
from fx_kvbackend.errors import Bug, ConfigError
from fx_kvbackend.records import (
    JobDone,
    LoadChunk,
    LoadFailure,
    Reason,
    Refusal,
    SaveChunk,
    SaveReport,
    Shard,
)
from fx_kvbackend.tiers.base import Tier

if TYPE_CHECKING:
    from fx_kvbackend.engines.pages import Pages

log = logging.getLogger(__name__)

# How long `close` waits for all threads together: a hung medium must not hang the exit.
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class MoverSettings:
    """What one rank's mover must know. `writes` is False on ranks whose shard another writes."""

    shard: Shard
    writes: bool
    staging_bytes: int
    load_deadline_s: float
    read_threads: int
    write_threads: int


@dataclass(eq=False)
class _Save:
    """One save job: done (released) when every chunk is copied or dropped."""

    job_id: int
    mark: Any
    left: int
    started_s: float
    copied_bytes: int = 0
    waited_for: bool = False


@dataclass(eq=False)
class _Load:
    """One load job. Its gate is open while bytes may go into the engine's blocks."""

    job_id: int
    left: int
    started_s: float
    deadline_s: float
    chunks: Sequence[LoadChunk]
    mark: Any
    arrived: set[int] = field(default_factory=set)
    failures: dict[int, Reason] = field(default_factory=dict)
    loaded_bytes: int = 0
    closed: bool = False
    scattering: int = 0

    def over(self) -> bool:
        """True once the gate is closed."""
        return self.closed


class Mover:
    """Saves and loads chunks of one rank. Every job ends in exactly one `JobDone`."""

    def __init__(
        self,
        tier: Tier,
        pages: Pages,
        geometries: Mapping[int, Geometry],
        settings: MoverSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        start: bool = True,
    ) -> None:
        self._tier = tier
        self._pages = pages
        self._geometries = dict(geometries)
        self._settings = settings
        self._clock = clock
        slot_bytes = max(self._file_bytes(g) for g in self._geometries.values())
        slots = settings.staging_bytes // slot_bytes
        if slots < 2:
            raise ConfigError(
                f"staging: {settings.staging_bytes} bytes hold {slots} chunks of {slot_bytes} "
                f"bytes; at least {2 * slot_bytes} are needed"
            )
        self.arena = Arena(slot_bytes, slots, reserved=min(settings.read_threads, slots // 2))
        self._lock = threading.Lock()
        self._load_ready = threading.Condition(self._lock)
        self._copy_ready = threading.Condition(self._lock)
        self._write_ready = threading.Condition(self._lock)
        self._settled = threading.Condition(self._lock)
        self._to_load: deque[tuple[_Load, int]] = deque()
        self._to_copy: deque[tuple[_Save, SaveChunk]] = deque()
        self._urgent: deque[tuple[_Save, SaveChunk]] = deque()
        self._to_write: deque[tuple[SaveChunk, Slot]] = deque()
        self._saves: dict[int, _Save] = {}
        self._loads: dict[int, _Load] = {}
        self._done: list[JobDone] = []
        self._reports: list[SaveReport] = []
        self._plans: dict[tuple[bytes, int], list[Copy]] = {}
        self._cpu_s: dict[str, float] = {}
        self._closed = False
        self._all_copied = False
        self._threads: list[threading.Thread] = []
        if start:
            self._threads.append(self._thread("copy", self._copy_loop))
            for i in range(settings.read_threads):
                self._threads.append(self._thread(f"load-{i}", self._load_loop))
            for i in range(settings.write_threads):
                self._threads.append(self._thread(f"save-{i}", self._write_loop))

    def _thread(self, name: str, loop: Callable[[str], None]) -> threading.Thread:
        thread = threading.Thread(target=loop, args=(name,), name=f"fxkv-{name}", daemon=True)
        thread.start()
        return thread

    # --- the engine's side ------------------------------------------------------------

    def submit_save(self, job_id: int, chunks: Sequence[SaveChunk]) -> None:
        """Save chunks whose blocks hold final KV by now. Returns at once."""
        job = _Save(job_id, self._pages.mark(), len(chunks), self._clock())
        with self._lock:
            self._saves[job_id] = job
            if not self._settings.writes:
                # Another rank holds the same bytes and writes them.
                for chunk in chunks:
                    self._report(chunk, None, 0)
                    self._chunk_released(job, 0)
            elif self._closed:
                for chunk in chunks:
                    self._report(chunk, Reason.CANCELLED, 0)
                    self._chunk_released(job, 0)
            else:
                self._to_copy.extend((job, chunk) for chunk in chunks)
                self._copy_ready.notify()
            if not chunks:
                self._finish_save(job)

    def submit_load(self, job_id: int, chunks: Sequence[LoadChunk]) -> None:
        """Load chunks into blocks. Returns at once; ends by the deadline whatever happens."""
        now = self._clock()
        deadline_s = now + self._settings.load_deadline_s
        job = _Load(job_id, len(chunks), now, deadline_s, chunks, self._pages.mark())
        with self._lock:
            self._loads[job_id] = job
            if not chunks:
                self._finish_load(job)
            elif self._closed:
                self._end_early(job, Reason.CANCELLED)
            else:
                self._to_load.extend((job, i) for i in range(len(chunks)))
                self._load_ready.notify_all()

    def poll(self) -> list[JobDone]:
        """Jobs that ended since the last call. Ends those that are past their deadline."""
        now = self._clock()
        with self._lock:
            for job in [j for j in self._loads.values() if now >= j.deadline_s]:
                log.warning(
                    "load %d ended at its deadline of %.1f s with %d of %d chunks missing",
                    job.job_id,
                    self._settings.load_deadline_s,
                    job.left,
                    len(job.chunks),
                )
                self._end_early(job, Reason.DEADLINE)
            done, self._done = self._done, []
        return done

    def take_reports(self) -> list[SaveReport]:
        """Last words on saves since the last call."""
        with self._lock:
            reports, self._reports = self._reports, []
        return reports

    def wait(self, job_ids: Iterable[int]) -> None:
        """Return when the blocks of these jobs are no longer touched by us.

        Waits for memory copies only: a save without a free staging slot is dropped, a load
        is ended as failed.
        """
        ids = set(job_ids)
        with self._lock:
            saves = [job for job in self._saves.values() if job.job_id in ids]
            loads = [job for job in self._loads.values() if job.job_id in ids]
            for job in saves:
                job.waited_for = True
            if saves:
                self._urgent.extend(c for c in self._to_copy if c[0].waited_for)
                self._to_copy = deque(c for c in self._to_copy if not c[0].waited_for)
                self._copy_ready.notify()
            for load in loads:
                self._end_early(load, Reason.CANCELLED)
            while any(job.job_id in self._saves for job in saves):
                self._settled.wait(0.05)

    def close(self) -> None:
        """Stop the threads. Copied saves are still written unless that takes long."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for job, chunk in [*self._urgent, *self._to_copy]:
                self._report(chunk, Reason.CANCELLED, 0)
                self._chunk_released(job, 0)
            self._urgent.clear()
            self._to_copy.clear()
            for load in list(self._loads.values()):
                self._end_early(load, Reason.CANCELLED)
            self._load_ready.notify_all()
            self._copy_ready.notify_all()
        give_up_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, give_up_s - time.monotonic()))
            with self._lock:  # the first is the one that copies: it had work for the writers
                self._all_copied = True
                self._write_ready.notify_all()
        self._tier.close()

    def cpu_seconds(self) -> float:
        """CPU time of this mover's threads so far."""
        with self._lock:
            return sum(self._cpu_s.values())

    # --- turning the crank ------------------------------------------------------------

    def run_copy(self) -> bool:
        """Copy the next chunk to staging; False when there is none or no slot for it."""
        with self._lock:
            work = self._next_copy()
        if work is not None:
            self._copy(*work)
        return work is not None

    def run_write(self) -> bool:
        """Write the next copied chunk; False when there is none."""
        with self._lock:
            work = self._to_write.popleft() if self._to_write else None
        if work is not None:
            self._write(*work)
        return work is not None

    def run_load(self) -> bool:
        """Load the next chunk; False when there is none."""
        with self._lock:
            work = self._to_load.popleft() if self._to_load else None
        if work is not None:
            self._load(*work)
        return work is not None

    # --- saves ------------------------------------------------------------------------

    def _copy_loop(self, name: str) -> None:
        while True:
            with self._lock:
                work = self._next_copy()
                while work is None:
                    if self._closed:
                        return
                    self._copy_ready.wait()
                    work = self._next_copy()
            self._copy(*work)
            self._count_cpu(name)

    def _next_copy(self) -> tuple[_Save, SaveChunk, Slot | None] | None:
        """The next chunk to copy with a slot for it; an urgent one never waits for a slot."""
        if self._urgent:
            job, chunk = self._urgent.popleft()
            return job, chunk, self.arena.lease_for_save()
        if self._to_copy and (slot := self.arena.lease_for_save()) is not None:
            job, chunk = self._to_copy.popleft()
            return job, chunk, slot
        return None

    def _copy(self, job: _Save, chunk: SaveChunk, slot: Slot | None) -> None:
        reason: Reason | None = None if slot is not None else Reason.STAGING
        size = 0
        if slot is not None:
            try:
                geometry = self._geometries[chunk.group]
                head = self._header_bytes(chunk.key.name, geometry)
                size = geometry.payload_bytes
                out = slot.buffer[head : head + size]
                self._pages.gather(chunk.group, chunk.block_ids, out, job.mark)
            except Exception:
                log.exception("copying chunk %s to staging failed", chunk.key.name.hex())
                reason, size = Reason.INTERNAL, 0
                slot.release()
        with self._lock:
            if reason is not None:
                self._report(chunk, reason, 0)
            elif slot is not None:
                self._to_write.append((chunk, slot))
                self._write_ready.notify()
            self._chunk_released(job, size)

    def _write_loop(self, name: str) -> None:
        while True:
            with self._lock:
                while not self._to_write:
                    if self._all_copied:
                        return
                    self._write_ready.wait()
                work = self._to_write.popleft()
            self._write(*work)
            self._count_cpu(name)

    def _write(self, chunk: SaveChunk, slot: Slot) -> None:
        geometry, shard = self._geometries[chunk.group], self._settings.shard
        refusal: Refusal | None
        total = 0
        try:
            total = chunkfile.seal(
                slot.buffer, chunk.key, shard, geometry.encoded, geometry.payload_bytes
            )
            refusal = self._tier.write(
                chunk.key, shard, slot.buffer[:total], overwrite=chunk.overwrite
            )
        except Exception as exc:
            log.exception("saving chunk %s failed", chunk.key.name.hex())
            refusal = Refusal(Reason.INTERNAL, str(exc))
        if refusal is not None:
            log.debug("chunk %s not saved: %s", chunk.key.name.hex(), refusal.detail)
        slot.release()
        with self._lock:
            self._report(chunk, refusal and refusal.reason, 0 if refusal else total)
            self._copy_ready.notify()  # it may be waiting for this slot

    def _report(self, chunk: SaveChunk, reason: Reason | None, stored_bytes: int) -> None:
        count = self._settings.shard.count
        self._reports.append(SaveReport(chunk.key, reason, count, stored_bytes))

    def _chunk_released(self, job: _Save, copied_bytes: int) -> None:
        job.left -= 1
        job.copied_bytes += copied_bytes
        if job.left == 0:
            self._finish_save(job)

    def _finish_save(self, job: _Save) -> None:
        del self._saves[job.job_id]
        took_s = self._clock() - job.started_s
        self._done.append(JobDone(job.job_id, False, job.copied_bytes, took_s))
        self._settled.notify_all()

    # --- loads ------------------------------------------------------------------------

    def _load_loop(self, name: str) -> None:
        while True:
            with self._lock:
                while not self._to_load:
                    if self._closed:
                        return
                    self._load_ready.wait()
                work = self._to_load.popleft()
            self._load(*work)
            self._count_cpu(name)

    def _load(self, job: _Load, number: int) -> None:
        chunk = job.chunks[number]
        refusal: Refusal | None
        if job.over():
            return
        try:
            slot = self.arena.lease_for_load(give_up=job.over)
            if slot is None:
                return
            with slot:
                refusal = self._fetch(job, chunk, slot)
        except Exception as exc:
            log.exception("loading chunk %s failed", chunk.key.name.hex())
            refusal = Refusal(Reason.INTERNAL, str(exc))
        if refusal is not None:
            log.warning("chunk %s not loaded: %s", chunk.key.name.hex(), refusal.detail)
        with self._lock:
            self._copy_ready.notify()  # a slot came back
            if job.over():
                return
            if refusal is not None:
                job.failures[number] = refusal.reason
            else:
                job.arrived.add(number)
                block_bytes = self._geometries[chunk.group].block_bytes
                job.loaded_bytes += len(chunk.block_ids) * block_bytes
            job.left -= 1
            if job.left == 0:
                self._finish_load(job)

    def _fetch(self, job: _Load, chunk: LoadChunk, slot: Slot) -> Refusal | None:
        geometry, shard = self._geometries[chunk.group], self._settings.shard
        if chunk.shard_count != shard.count:
            return self._fetch_from_others(job, chunk, geometry)
        into = slot.buffer[: self._file_bytes(geometry, chunk.key.name)]
        header = self._tier.read(chunk.key, shard, into)
        if isinstance(header, Refusal):
            return header
        same = (header.geometry, header.payload_bytes)
        if same != (geometry.encoded, geometry.payload_bytes):
            return Refusal(Reason.MISMATCH, "stored with another geometry")
        blocks = geometry.span(chunk.first_block, len(chunk.block_ids))
        payload = into[header.header_bytes : header.header_bytes + header.payload_bytes]
        return self._through_gate(
            job,
            lambda: self._pages.scatter(
                chunk.group, chunk.block_ids, payload[blocks], after=job.mark
            ),
        )

    def _fetch_from_others(
        self, job: _Load, chunk: LoadChunk, geometry: Geometry
    ) -> Refusal | None:
        """Our share of a chunk that ranks of another tensor-parallel size stored."""
        mine = self._settings.shard
        covered_bytes = 0
        for index in shards_needed(mine.index, mine.count, chunk.shard_count):
            shard = Shard(index, chunk.shard_count)
            size = self._tier.stored_bytes(chunk.key, shard)
            if isinstance(size, Refusal):
                return size
            # May be larger than a slot of ours; rare enough to allocate.
            into = aligned(chunkfile.align_up(max(size, 1)))
            header = self._tier.read(chunk.key, shard, into)
            if isinstance(header, Refusal):
                return header
            plan = self._plan(header, geometry)
            if isinstance(plan, Refusal):
                return plan
            copies, block_bytes = plan
            start = header.header_bytes + chunk.first_block * block_bytes
            payload = into[start : start + len(chunk.block_ids) * block_bytes]

            def scatter(
                payload: memoryview = payload,
                block_bytes: int = block_bytes,
                copies: Sequence[Copy] = copies,
            ) -> None:
                self._pages.scatter_pieces(
                    chunk.group, chunk.block_ids, payload, block_bytes, copies, after=job.mark
                )

            refusal = self._through_gate(job, scatter)
            if refusal is not None:
                return refusal
            covered_bytes += sum(copy.length for copy in copies)
        if covered_bytes != geometry.block_bytes:
            return Refusal(
                Reason.MISMATCH,
                f"its shards hold {covered_bytes} of the {geometry.block_bytes} bytes of a block",
            )
        return None

    def _plan(self, header: Header, geometry: Geometry) -> tuple[list[Copy], int] | Refusal:
        try:
            stored = Geometry.decode(header.geometry)
            at = (header.geometry, geometry.group)
            if at not in self._plans:
                self._plans[at] = plan_copies(stored, geometry)
            return self._plans[at], stored.block_bytes
        except ValueError as exc:
            return Refusal(Reason.MISMATCH, str(exc))

    def _through_gate(self, job: _Load, copy: Callable[[], None]) -> Refusal | None:
        """Run a copy into the engine's blocks, unless the job has ended."""
        with self._lock:
            if job.over():
                return Refusal(Reason.DEADLINE, "arrived after its job had ended")
            job.scattering += 1
        try:
            copy()
        finally:
            with self._lock:
                job.scattering -= 1
                self._settled.notify_all()
        return None

    def _end_early(self, job: _Load, reason: Reason) -> None:
        """Close the gate, wait for copies under way, and fail what has not arrived."""
        if job.over():
            return
        job.closed = True
        while job.scattering:
            self._settled.wait(0.05)
        for number in range(len(job.chunks)):
            if number not in job.arrived:
                job.failures.setdefault(number, reason)
        self._finish_load(job)

    def _finish_load(self, job: _Load) -> None:
        if self._loads.pop(job.job_id, None) is None:
            raise Bug(f"load job {job.job_id} ended twice")
        job.closed = True
        failures = tuple(
            LoadFailure(job.chunks[n].key, job.chunks[n].block_ids, reason)
            for n, reason in sorted(job.failures.items())
        )
        took_s = self._clock() - job.started_s
        self._done.append(JobDone(job.job_id, True, job.loaded_bytes, took_s, failures))

    # --- sizes and times --------------------------------------------------------------

    def _header_bytes(self, name: bytes, geometry: Geometry) -> int:
        return chunkfile.header_bytes(len(name), len(geometry.encoded), geometry.payload_bytes)

    def _file_bytes(
        self, geometry: Geometry, name: bytes = b"\0" * chunkfile.MAX_NAME_BYTES
    ) -> int:
        return chunkfile.file_bytes(len(name), len(geometry.encoded), geometry.payload_bytes)

    def _count_cpu(self, name: str) -> None:
        with self._lock:
            self._cpu_s[name] = time.thread_time()
