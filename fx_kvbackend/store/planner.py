"""What is stored, in which state, and what may be saved. Never blocks, never moves bytes.

Lives in the scheduler's process and belongs to its thread; slow work goes to `Chores`,
whose answers are absorbed at the start of every call. The medium is the truth: the index
is a cache of it, so an unknown chunk is asked for (RETRY) before it is a miss, and chunks
of other engines that share the medium are found.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from fx_kvbackend import metrics
from fx_kvbackend.core.index import Entry, Index, State
from fx_kvbackend.metrics import Tally
from fx_kvbackend.records import ChunkKey, Reason, SaveReport
from fx_kvbackend.store.chores import Answered, Chores, Deleted, Scanned, ScanStarted
from fx_kvbackend.tiers.base import Copies, Space

log = logging.getLogger(__name__)

# Evict ahead of need down to this share below the cap, so that saves rarely wait for room.
_HEADROOM_RATIO = 0.05
# A chunk being written is worth a short wait: reading it back beats computing it. A write
# that hangs is not.
_PENDING_WAIT_S = 5.0
# An answer from the medium that takes longer is a miss for this request.
_PROBE_WAIT_S = 2.0
# How long one request's saves may be put off while victims are being deleted.
_DEFER_S = 2.0
# The engine is kept stepping for unpublished saves only while some get published.
_PROGRESS_S = 30.0
_SICK_AFTER_FAILURES = 3
_SICK_MIN_S = 10.0
_SICK_MAX_S = 300.0
_NOT_THE_CHUNKS_FAULT = frozenset(
    {Reason.IO_ERROR, Reason.NO_FDS, Reason.DEADLINE, Reason.INTERNAL}
)


class Answer(Enum):
    """What a lookup says."""

    HIT = "hit"
    PENDING = "pending"
    RETRY = "retry"
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """What the planner must know of its surroundings.

    `chunk_bytes` is an upper bound of what all ranks together store for one chunk;
    `rank_count` is how many ranks report on every save. A cap or floor of None is taken
    from the medium: half of what was free without our chunks, and 5 % of its size.
    """

    namespace: str
    rank_count: int
    shard_count: int
    chunk_bytes: int
    capacity_bytes: int | None
    free_floor_bytes: int | None


@dataclass(slots=True)
class _Writing:
    """One accepted save until every rank has had its last word."""

    ranks_left: int
    started_s: float
    dropped: Reason | None = None
    stored_bytes: int = 0
    shard_count: int = 0


@dataclass(slots=True)
class _Request:
    """What one request asked the medium, and what it was told is not there."""

    asked_s: dict[ChunkKey, float] = field(default_factory=dict)
    absent: set[ChunkKey] = field(default_factory=set)
    deferred_since_s: float | None = None


class Planner:
    """Decides hits, saves and evictions for one engine."""

    def __init__(
        self,
        settings: PlannerSettings,
        chores: Chores,
        *,
        clock: Callable[[], float] = time.monotonic,
        new_namespace: Callable[[], str],
    ) -> None:
        self._settings = settings
        self._chores = chores
        self._clock = clock
        self._new_namespace = new_namespace
        self.namespace = settings.namespace
        self._index = Index()
        self._scanned = False
        # Two generations: a change may fall between the start of a scan and our hearing of it.
        self._changed_since_scan: set[ChunkKey] = set()
        self._changed_before: set[ChunkKey] = set()
        self._writing: dict[ChunkKey, _Writing] = {}
        self._last_progress_s = clock()
        self._requests: dict[str, _Request] = {}
        self._need_bytes = 0
        self._evicting_bytes = 0
        self._space: Space | None = None
        self.capacity_bytes = settings.capacity_bytes or 0
        self._free_floor_bytes = settings.free_floor_bytes or 0
        self._failures_in_row = 0
        self._sick_until_s = 0.0
        self._sick_for_s = _SICK_MIN_S
        self._said: set[str] = set()
        self.tally = Tally()
        self.events: list[tuple[ChunkKey, bool]] = []
        """(chunk, removed) in order, for hosts that publish cache events; emptied by them."""

    # --- lookups ----------------------------------------------------------------------

    def lookup(self, name: bytes, request_id: str) -> Answer:
        """Is this chunk stored? RETRY means: ask again soon, somebody is looking."""
        self._absorb()
        answer = self._lookup(ChunkKey(self.namespace, name), request_id)
        self.tally.add(metrics.LOOKUP_CHUNKS, 1, answer.value)
        return answer

    def expect(self, names: Iterable[bytes], request_id: str) -> None:
        """Start looking for chunks that a new request is going to ask for."""
        self._absorb()
        request = self._requests.setdefault(request_id, _Request())
        for name in names:
            key = ChunkKey(self.namespace, name)
            if self._index.get(key) is None:
                self._ask(key, request)

    def _lookup(self, key: ChunkKey, request_id: str) -> Answer:
        now = self._clock()
        if now < self._sick_until_s:
            return Answer.MISS
        entry = self._index.get(key)
        if entry is not None:
            if entry.state is State.READY:
                return Answer.HIT
            if entry.state is State.WRITING:
                fresh = now - self._writing[key].started_s < _PENDING_WAIT_S
                return Answer.PENDING if fresh else Answer.MISS
            return Answer.MISS
        request = self._requests.setdefault(request_id, _Request())
        if key in request.absent:
            return Answer.MISS
        if key not in request.asked_s:
            self._ask(key, request)
        elif now - request.asked_s[key] > _PROBE_WAIT_S:
            return Answer.MISS
        return Answer.RETRY

    def _ask(self, key: ChunkKey, request: _Request) -> None:
        request.asked_s[key] = self._clock()
        self._chores.ask(key)

    def finish_request(self, request_id: str) -> None:
        """Forget what was answered to this request."""
        self._requests.pop(request_id, None)

    # --- loads ------------------------------------------------------------------------

    def prepare_load(self, names: Sequence[bytes]) -> list[tuple[ChunkKey, int]]:
        """Pin the chunks; (full key, shard count of the copy to read) of each, in order."""
        self._absorb()
        out = []
        for name in names:
            key = ChunkKey(self.namespace, name)
            entry = self._index.get(key)
            count = self._settings.shard_count
            if entry is not None:
                entry.pins += 1
                if entry.shard_counts and count not in entry.shard_counts:
                    count = entry.shard_counts[0]
            out.append((key, count))
        return out

    def complete_load(self, names: Iterable[bytes]) -> None:
        """Unpin chunks; they were used just now. Heads of a prefix stay longest."""
        self._absorb()
        for name in reversed(list(names)):
            key = ChunkKey(self.namespace, name)
            entry = self._index.get(key)
            if entry is None:
                continue
            entry.pins = max(0, entry.pins - 1)
            if entry.state is State.READY:
                self._use(key, entry)

    def load_failed(self, key: ChunkKey, reason: Reason) -> None:
        """The chunk did not arrive: it is no hit again before it has been saved anew."""
        self._absorb()
        self.tally.add(metrics.FAILED_LOADS, 1, reason.value)
        entry = self._index.get(key)
        if entry is not None and entry.state in (State.READY, State.SUSPECT):
            if reason is Reason.ABSENT:
                self._forget(key)
            elif reason is not Reason.CANCELLED and entry.state is State.READY:
                self._index.move(key, State.SUSPECT)
                self._changed_since_scan.add(key)
        if reason in _NOT_THE_CHUNKS_FAULT:
            self._failures_in_row += 1
            if reason is Reason.DEADLINE or self._failures_in_row >= _SICK_AFTER_FAILURES:
                self._fall_sick(reason)

    def loads_succeeded(self) -> None:
        """Some chunk arrived: the tier is well."""
        self._failures_in_row = 0
        if self._clock() >= self._sick_until_s:
            self._sick_for_s = _SICK_MIN_S

    def _fall_sick(self, reason: Reason) -> None:
        now = self._clock()
        if now < self._sick_until_s:
            return
        self._sick_until_s = now + self._sick_for_s
        log.warning(
            "the store failed to answer (%s); it is left alone for %.0f s", reason, self._sick_for_s
        )
        self._sick_for_s = min(2 * self._sick_for_s, _SICK_MAX_S)
        self._failures_in_row = 0

    # --- saves ------------------------------------------------------------------------

    def prepare_save(
        self, names: Sequence[bytes], request_id: str
    ) -> list[tuple[ChunkKey, bool]] | None:
        """Which of these chunks to save, in order, each with "replace what is there".

        Chunks that are stored or being written are left out. None: nothing now, room is
        being made, try again at the next step.
        """
        self._absorb()
        wanted = []
        for name in names:
            key = ChunkKey(self.namespace, name)
            entry = self._index.get(key)
            if entry is None or entry.state is State.SUSPECT:
                wanted.append(key)
        for name in reversed(names):  # a use; in this order tails go before heads
            key = ChunkKey(self.namespace, name)
            entry = self._index.get(key)
            if entry is not None and entry.state is State.READY:
                self._index.touch(key)
        if not wanted:
            return []
        refusal = self._may_save()
        if refusal is not None:
            self._drop_saves(len(wanted), refusal)
            return []
        room = self._room_bytes() // self._settings.chunk_bytes
        if room < len(wanted):
            self._need_bytes = max(self._need_bytes, len(wanted) * self._settings.chunk_bytes)
            self._evict()
            if self._put_off(request_id):
                self.tally.add(metrics.DEFERRED_SAVES)
                return None
            self._drop_saves(len(wanted) - room, Reason.FULL)
            wanted = wanted[:room]
        else:
            self._requests.setdefault(request_id, _Request()).deferred_since_s = None
        now = self._clock()
        accepted = []
        for key in wanted:
            accepted.append((key, self._index.get(key) is not None))
            self._writing[key] = _Writing(self._settings.rank_count, now)
        for key in reversed(wanted):
            self._index.put(key, Entry(State.WRITING, self._settings.chunk_bytes))
            self._changed_since_scan.add(key)
        self._evict()
        return accepted

    def _may_save(self) -> Reason | None:
        if not self._scanned:
            return Reason.SCANNING
        if self._clock() < self._sick_until_s:
            return Reason.SICK
        if self._space is not None:
            promised = len(self._writing) * self._settings.chunk_bytes
            if self._space.free_bytes - promised < self._free_floor_bytes:
                return Reason.NO_SPACE
        return None

    def _room_bytes(self) -> int:
        return max(0, self.capacity_bytes - self._index.used_bytes)

    def _put_off(self, request_id: str) -> bool:
        """True while waiting for deletions can still make room for this request."""
        request = self._requests.setdefault(request_id, _Request())
        if self._evicting_bytes == 0:
            request.deferred_since_s = None
            return False
        now = self._clock()
        if request.deferred_since_s is None:
            request.deferred_since_s = now
        return now - request.deferred_since_s < _DEFER_S

    def _drop_saves(self, count: int, reason: Reason) -> None:
        self.tally.add(metrics.DROPPED_SAVES, count, reason.value)
        if reason is not Reason.SCANNING and reason not in self._said:
            self._said.add(reason)
            log.warning("saves are being dropped: %s (said once; see fxkv:dropped_saves)", reason)

    def save_reported(self, report: SaveReport) -> None:
        """One rank's last word on one save."""
        self._absorb()
        writing = self._writing.get(report.key)
        if writing is None:
            return
        self._last_progress_s = self._clock()
        writing.ranks_left -= 1
        writing.dropped = writing.dropped or report.reason
        writing.stored_bytes += report.stored_bytes
        writing.shard_count = max(writing.shard_count, report.shard_count)
        if writing.ranks_left:
            return
        del self._writing[report.key]
        self._changed_since_scan.add(report.key)
        if writing.dropped is None:
            entry = self._index.move(report.key, State.READY)
            self._index.used_bytes += writing.stored_bytes - entry.stored_bytes
            entry.stored_bytes = writing.stored_bytes
            entry.shard_counts = (writing.shard_count,)
            self.events.append((report.key, False))
            self.tally.add(metrics.SAVES)
            self.tally.add(metrics.SAVED_BYTES, writing.stored_bytes)
            return
        self._drop_saves(1, writing.dropped)
        if writing.stored_bytes:  # some ranks published: what they wrote is no use alone
            self._start_deleting(report.key)
        else:
            self._forget(report.key)

    @property
    def pending_saves(self) -> int:
        """Accepted saves that are not published yet."""
        return len(self._writing)

    def has_pending_work(self) -> bool:
        """True while stepping the engine brings news of saves."""
        return bool(self._writing) and self._clock() - self._last_progress_s < _PROGRESS_S

    # --- the cap ----------------------------------------------------------------------

    def _evict(self) -> None:
        """Start deleting cold chunks when less than the headroom is left."""
        if not self._scanned:
            return
        capacity = self.capacity_bytes
        headroom = min(max(int(capacity * _HEADROOM_RATIO), self._need_bytes), capacity)
        excess = self._index.used_bytes - self._evicting_bytes - (capacity - headroom)
        if excess <= 0:
            return
        for key in self._index.victims(excess):
            self.tally.add(metrics.EVICTIONS)
            self._start_deleting(key)
        # The largest need seen fades, or one giant request would halve the cache for good.
        self._need_bytes //= 2

    def _start_deleting(self, key: ChunkKey) -> None:
        entry = self._index.move(key, State.EVICTING)
        self._evicting_bytes += entry.stored_bytes
        self._changed_since_scan.add(key)
        self._chores.delete(key)

    def _forget(self, key: ChunkKey) -> None:
        entry = self._index.drop(key)
        self._changed_since_scan.add(key)
        if entry is not None and entry.shard_counts:
            self.events.append((key, True))

    def _use(self, key: ChunkKey, entry: Entry) -> None:
        self._index.touch(key)
        self._chores.touch(key, entry.shard_counts[0])

    # --- everything else --------------------------------------------------------------

    def reset(self) -> None:
        """Nothing stored so far is a hit any more, and later saves are ours alone.

        A reset often follows a change of weights that no fingerprint shows, so chunks go
        to a namespace that no other process knows. The old ones stay for restarts with the
        old weights and age out.
        """
        self._absorb()
        self.namespace = self._new_namespace()
        self._requests.clear()
        for _, entry in self._index:
            entry.pins = 0
        log.info(
            "cache reset: chunks saved from now on are in namespace %s, which ends with this "
            "process",
            self.namespace,
        )

    def tick(self) -> None:
        """Once per step: take in news and keep the headroom."""
        self._absorb()
        self._evict()

    def refresh_gauges(self) -> None:
        """Bring the gauges in `tally` up to date."""
        self.tally.set(metrics.PENDING_SAVES, self.pending_saves)
        self.tally.set(metrics.USED_BYTES, self._index.used_bytes)
        self.tally.set(metrics.CAPACITY_BYTES, self.capacity_bytes)
        self.tally.set(metrics.TIER_SICK, int(self._clock() < self._sick_until_s))

    @property
    def used_bytes(self) -> int:
        """Bytes stored, with those reserved for saves and those being deleted."""
        return self._index.used_bytes

    def close(self) -> None:
        """Stop the background work. Nothing is owed to the medium."""
        self._chores.close()

    def _absorb(self) -> None:
        for answer in self._chores.take():
            match answer:
                case Answered(found):
                    for key, copies in found.items():
                        self._answered(key, copies)
                case Deleted(key):
                    entry = self._index.get(key)
                    if entry is not None and entry.state is State.EVICTING:
                        self._evicting_bytes -= entry.stored_bytes
                        self._forget(key)
                case ScanStarted():
                    self._changed_before = self._changed_since_scan
                    self._changed_since_scan = set()
                case Scanned(index, swept_count):
                    self._index.adopt(index, self._changed_since_scan | self._changed_before)
                    if not self._scanned:
                        self._scanned = True
                        self._settle_limits()
                    if swept_count:
                        self.tally.add(metrics.SWEPT_TEMPORARIES, swept_count)
                case Space():
                    self._space = answer

    def _settle_limits(self) -> None:
        """Derive what the settings leave open; only now it is known what is ours."""
        space = self._space or Space(0, 0)
        if self._settings.capacity_bytes is None:
            # With our own bytes, or every restart would halve the store.
            self.capacity_bytes = (space.free_bytes + self._index.used_bytes) // 2
        if self._settings.free_floor_bytes is None:
            self._free_floor_bytes = space.total_bytes // 20
        log.info(
            "store: %d chunks in %.3f GB, cap %.3f GB, free floor %.3f GB",
            len(self._index),
            self._index.used_bytes / 1e9,
            self.capacity_bytes / 1e9,
            self._free_floor_bytes / 1e9,
        )

    def _answered(self, key: ChunkKey, copies: Copies | None) -> None:
        for request in self._requests.values():
            if request.asked_s.pop(key, None) is not None and copies is None:
                request.absent.add(key)
        if copies is not None and self._index.get(key) is None:
            self._index.put(key, Entry(State.READY, copies.stored_bytes, copies.shard_counts))
            self._changed_since_scan.add(key)
