"""What is stored, in which state, and what may be saved. Never blocks, never moves bytes.

Lives in the scheduler's process and belongs to its thread; slow work goes to `Chores`,
whose answers are absorbed at the start of every call. The medium is the truth: the index
is a cache of it, so an unknown chunk is asked for (RETRY) before it is a miss, and chunks
of other engines that share the medium are found.

Order of last use: what one request used counts as used when it ends, its tail first, so
that eviction shortens a prefix and never beheads it. The medium keeps the same order.
"""

from __future__ import annotations

import logging
import sys
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
# Chunks that the medium is being asked for at the same time; more are misses.
_MAX_QUESTIONS = 1 << 16
# How long one request's saves may be put off while victims are being deleted.
_DEFER_S = 2.0
# The engine is kept stepping for unpublished saves only while some get published.
_PROGRESS_S = 30.0
# Smaller news of CPU time would send statistics at every step.
_CPU_GRAIN_S = 0.01
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
    request: _Request
    replaced: Entry | None
    """What was known of the bad copy that is being replaced."""
    dropped: Reason | None = None
    stored_bytes: int = 0
    shard_count: int = 0


@dataclass(eq=False, slots=True)
class _Request:
    """What one request asked the medium and was told is not there, used, and has saved."""

    asked_s: dict[ChunkKey, float] = field(default_factory=dict)
    absent: set[ChunkKey] = field(default_factory=set)
    used: dict[ChunkKey, None] = field(default_factory=dict)
    """In order of first use: heads of a prefix first."""
    deferred_since_s: float | None = None
    deferred_count: int = 0
    saving_count: int = 0
    finished: bool = False


class Planner:
    """Decides hits, saves and evictions for one engine."""

    def __init__(
        self,
        settings: PlannerSettings,
        chores: Chores,
        *,
        clock: Callable[[], float] = time.monotonic,
        new_namespace: Callable[[], str],
        wants_events: bool = True,
    ) -> None:
        self._settings = settings
        self._wants_events = wants_events
        self._chores = chores
        self._clock = clock
        self._new_namespace = new_namespace
        self.namespace = settings.namespace
        self._index = Index()
        self._scanned = False
        # Two generations: a change may fall between the start of a scan and our hearing of it.
        self._changed_since_scan: set[ChunkKey] = set()
        self._changed_before: set[ChunkKey] = set()
        # Used since then, least recently first: a scan may have read older times of use.
        self._used_since_scan: dict[ChunkKey, None] = {}
        self._used_before: dict[ChunkKey, None] = {}
        self._writing: dict[ChunkKey, _Writing] = {}
        self._last_progress_s = clock()
        self._requests: dict[str, _Request] = {}
        self._asking: dict[ChunkKey, list[_Request]] = {}
        self._need_bytes = 0
        self._evicting_bytes = 0
        self._space: Space | None = None
        self._saved_since_space_bytes = 0
        self._limits_known = False
        self.capacity_bytes = settings.capacity_bytes or 0
        self._free_floor_bytes = settings.free_floor_bytes or 0
        self._failures_in_row = 0
        self._sick_until_s = 0.0
        self._sick_for_s = _SICK_MIN_S
        self._said: set[str] = set()
        self._cpu_told_s = 0.0
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
        if self._clock() < self._sick_until_s:
            return
        request = self._request(request_id)
        for name in names:
            key = ChunkKey(self.namespace, name)
            if _unknown(self._index.get(key)):
                self._ask(key, request)

    def _lookup(self, key: ChunkKey, request_id: str) -> Answer:
        now = self._clock()
        if now < self._sick_until_s:
            return Answer.MISS
        request = self._request(request_id)
        entry = self._index.get(key)
        if entry is not None and not _unknown(entry):
            if entry.state is State.READY:
                request.used[key] = None
                return Answer.HIT
            if entry.state is State.WRITING:
                fresh = now - self._writing[key].started_s < _PENDING_WAIT_S
                return Answer.PENDING if fresh else Answer.MISS
            return Answer.MISS
        if key in request.absent:
            return Answer.MISS
        if key not in request.asked_s:
            return Answer.RETRY if self._ask(key, request) else Answer.MISS
        return Answer.MISS if now - request.asked_s[key] > _PROBE_WAIT_S else Answer.RETRY

    def _ask(self, key: ChunkKey, request: _Request) -> bool:
        """Have the medium asked for a chunk; False when too many questions are open."""
        if key not in self._asking:
            if len(self._asking) >= _MAX_QUESTIONS:
                return False
            self._asking[key] = []
            self._chores.ask(key)
        self._asking[key].append(request)
        request.asked_s[key] = self._clock()
        return True

    def _request(self, request_id: str) -> _Request:
        return self._requests.setdefault(request_id, _Request())

    def finish_request(self, request_id: str) -> None:
        """The request asks for nothing more; its loads and saves may still be under way."""
        self._absorb()
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request.deferred_count:
            self._drop_saves(request.deferred_count, Reason.FULL)
        request.finished = True
        if request.saving_count == 0:
            self._use_all(request)

    def _use_all(self, request: _Request) -> None:
        for key in reversed(request.used):
            entry = self._index.get(key)
            if entry is not None and entry.state is State.READY:
                self._use(key, entry)

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
                self._index.pin(key, 1)
                if entry.shard_counts and count not in entry.shard_counts:
                    count = entry.shard_counts[0]
            out.append((key, count))
        return out

    def complete_load(self, names: Iterable[bytes]) -> None:
        """Unpin chunks; they were used just now."""
        self._absorb()
        for name in names:
            key = ChunkKey(self.namespace, name)
            entry = self._index.get(key)
            if entry is None:
                continue
            self._index.pin(key, -1)
            if entry.state is State.READY:
                self._use(key, entry)

    def load_failed(self, key: ChunkKey, reason: Reason) -> None:
        """The chunk did not arrive: it is no hit again before it has been saved anew."""
        self._absorb()
        self.tally.add(metrics.FAILED_LOADS, 1, reason.value)
        entry = self._index.get(key)
        if entry is not None and entry.state in (State.READY, State.SUSPECT):
            if reason is Reason.ABSENT:
                self._lost(key, entry)
            elif reason is not Reason.CANCELLED and entry.state is State.READY:
                self._index.move(key, State.SUSPECT)
                self._changed_since_scan.add(key)
        if reason in _NOT_THE_CHUNKS_FAULT and self._clock() >= self._sick_until_s:
            self._failures_in_row += 1
            if reason is Reason.DEADLINE or self._failures_in_row >= _SICK_AFTER_FAILURES:
                self._fall_sick(reason)

    def _lost(self, key: ChunkKey, entry: Entry) -> None:
        if not entry.shard_counts:
            return
        if entry.shard_counts == (1,):
            self._forget(key)
            return
        # Other shards may be left, and count until a scan has seen what there is.
        self._tell(key, removed=True)
        entry.shard_counts = ()
        if entry.state is State.READY:
            self._index.move(key, State.SUSPECT)
        self._changed_since_scan.add(key)

    def loads_succeeded(self) -> None:
        """Some chunk arrived: the tier is well."""
        self._failures_in_row = 0
        if self._clock() >= self._sick_until_s:
            self._sick_for_s = _SICK_MIN_S

    def _fall_sick(self, reason: Reason) -> None:
        self._sick_until_s = self._clock() + self._sick_for_s
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
        request = self._request(request_id)
        wanted, stored = [], []
        for name in dict.fromkeys(names):
            key = ChunkKey(self.namespace, name)
            request.used[key] = None
            entry = self._index.get(key)
            if entry is None or entry.state is State.SUSPECT:
                wanted.append(key)
            elif entry.state is State.READY:
                stored.append(key)
        for key in reversed(stored):
            self._touch(key)
        kept = self._fitting(wanted, request)
        if kept is None:
            self.tally.add(metrics.DEFERRED_SAVES)
            return None
        request.deferred_since_s, request.deferred_count = None, 0
        return self._accept(kept, request)

    def _fitting(self, wanted: list[ChunkKey], request: _Request) -> list[ChunkKey] | None:
        """Those there is room for now; the others are counted as dropped. None: wait."""
        refusal = self._may_save()
        if refusal is not None:
            self._drop_saves(len(wanted), refusal)
            return []
        room_count = self._room_bytes() // self._settings.chunk_bytes
        if room_count < len(wanted) and self._above_floor_count() > 0:
            self._need_bytes = max(self._need_bytes, len(wanted) * self._settings.chunk_bytes)
            self._evict()
            if self._put_off(request, len(wanted)):
                return None
        for limit, reason in (
            (self._above_floor_count(), Reason.NO_SPACE),
            (room_count, Reason.FULL),
        ):
            self._drop_saves(len(wanted) - limit, reason)
            wanted = wanted[:limit]
        return wanted

    def _accept(self, keys: Sequence[ChunkKey], request: _Request) -> list[tuple[ChunkKey, bool]]:
        now = self._clock()
        accepted = []
        for key in reversed(keys):  # in this order tails are colder than heads
            old = self._index.get(key)
            # Until it has been replaced, a bad copy takes its room beside the new one.
            reserved_bytes = self._settings.chunk_bytes + (old.stored_bytes if old else 0)
            self._writing[key] = _Writing(self._settings.rank_count, now, request, old)
            self._index.put(key, Entry(State.WRITING, reserved_bytes))
            self._changed_since_scan.add(key)
            self._touch(key)
            accepted.append((key, old is not None))
        request.saving_count += len(accepted)
        if accepted:
            self._last_progress_s = now
            self._evict()
        return accepted[::-1]

    def _may_save(self) -> Reason | None:
        if not self._limits_known:
            return Reason.SCANNING
        if self._clock() < self._sick_until_s:
            return Reason.SICK
        return None

    def _room_bytes(self) -> int:
        return max(0, self.capacity_bytes - self._index.used_bytes)

    def _above_floor_count(self) -> int:
        """Chunks that fit on the medium without going below the free-space floor."""
        if self._space is None:
            return sys.maxsize
        promised_bytes = len(self._writing) * self._settings.chunk_bytes
        free_bytes = self._space.free_bytes - self._saved_since_space_bytes - promised_bytes
        return max(0, free_bytes - self._free_floor_bytes) // self._settings.chunk_bytes

    def _put_off(self, request: _Request, count: int) -> bool:
        """True while waiting for deletions can still make room for this request."""
        if self._evicting_bytes == 0:
            return False
        now = self._clock()
        if request.deferred_since_s is None:
            request.deferred_since_s = now
        request.deferred_count = count
        return now - request.deferred_since_s < _DEFER_S

    def _drop_saves(self, count: int, reason: Reason) -> None:
        if count <= 0:
            return
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
            self._published(report.key, writing)
        else:
            self._drop_saves(1, writing.dropped)
            self._not_published(report.key, writing)
        request = writing.request
        request.saving_count -= 1
        if request.finished and request.saving_count == 0:
            self._use_all(request)

    def _published(self, key: ChunkKey, writing: _Writing) -> None:
        entry = self._index.move(key, State.READY)
        stored_bytes = writing.stored_bytes
        if writing.replaced is not None:
            # Copies of other shard counts may lie beside it: the medium knows.
            stored_bytes += writing.replaced.stored_bytes
            self._chores.ask(key)
        self._index.resize(key, stored_bytes)
        entry.shard_counts = (writing.shard_count,)
        self._saved_since_space_bytes += writing.stored_bytes
        self._tell(key, removed=False)
        self.tally.add(metrics.SAVES)
        self.tally.add(metrics.SAVED_BYTES, writing.stored_bytes)

    def _not_published(self, key: ChunkKey, writing: _Writing) -> None:
        if writing.stored_bytes:  # some ranks published: what they wrote is no use alone
            self._start_deleting(key)
            return
        self._forget(key)
        if writing.replaced is not None:  # still there, and still bad
            bad = writing.replaced
            self._index.put(key, Entry(State.SUSPECT, bad.stored_bytes, bad.shard_counts))

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
        if not self._limits_known:
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
            self._tell(key, removed=True)

    def _tell(self, key: ChunkKey, *, removed: bool) -> None:
        if self._wants_events:
            self.events.append((key, removed))

    def _use(self, key: ChunkKey, entry: Entry) -> None:
        self._touch(key)
        self._chores.touch(key, entry.shard_counts[0])

    def _touch(self, key: ChunkKey) -> None:
        self._index.touch(key)
        self._used_since_scan.pop(key, None)
        self._used_since_scan[key] = None

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
        for key, entry in self._index.unusual():
            self._index.pin(key, -entry.pins)
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
        """Bring the gauges in `tally`, and the CPU time of the background, up to date."""
        cpu_s = self._chores.cpu_seconds()
        if cpu_s - self._cpu_told_s > _CPU_GRAIN_S:
            self.tally.add(metrics.THREAD_CPU_SECONDS, cpu_s - self._cpu_told_s)
            self._cpu_told_s = cpu_s
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
                    self._used_before = self._used_since_scan
                    self._used_since_scan = {}
                case Scanned(index, swept_count):
                    self._adopt(index)
                    self._scanned = True
                    if swept_count:
                        self.tally.add(metrics.SWEPT_TEMPORARIES, swept_count)
                case Space():
                    self._space = answer
                    self._saved_since_space_bytes = 0
        if self._scanned and not self._limits_known:
            self._settle_limits()

    def _adopt(self, scanned: Index) -> None:
        newer = self._changed_since_scan | self._changed_before
        for key, entry in self._index.unusual():
            seen = scanned.get(key)
            if seen is not None and entry.state is State.SUSPECT and not entry.live:
                self._index.resize(key, seen.stored_bytes)  # our word on it stays, not its size
        if self._wants_events:  # else not worth a walk through a million chunks
            for key, entry in self._index:
                known = entry.shard_counts and not entry.live
                if known and key not in newer and scanned.get(key) is None:
                    self._tell(key, removed=True)  # somebody deleted it
        self._index.adopt(scanned, newer)
        for used in (self._used_before, self._used_since_scan):
            for key in used:
                if self._index.get(key) is not None:
                    self._index.touch(key)

    def _settle_limits(self) -> None:
        """Derive what the settings leave open; only now it is known what is ours."""
        settings = self._settings
        space = self._space
        if space is None:
            if settings.capacity_bytes is None or settings.free_floor_bytes is None:
                return  # a cap of half of nothing would throw the store away
            space = Space(0, 0)
        self._limits_known = True
        if settings.capacity_bytes is None:
            # With our own bytes, or every restart would halve the store.
            self.capacity_bytes = (space.free_bytes + self._index.used_bytes) // 2
        if settings.free_floor_bytes is None:
            self._free_floor_bytes = space.total_bytes // 20
        log.info(
            "store: %d chunks in %.3f GB, cap %.3f GB, free floor %.3f GB",
            len(self._index),
            self._index.used_bytes / 1e9,
            self.capacity_bytes / 1e9,
            self._free_floor_bytes / 1e9,
        )

    def _answered(self, key: ChunkKey, copies: Copies | None) -> None:
        for request in self._asking.pop(key, ()):
            request.asked_s.pop(key, None)
            if copies is None:
                request.absent.add(key)
        if copies is None:
            return
        entry = self._index.get(key)
        if _unknown(entry):
            self._index.put(key, Entry(State.READY, copies.stored_bytes, copies.shard_counts))
            self._changed_since_scan.add(key)
        elif entry is not None and entry.state is State.READY:
            self._index.resize(key, copies.stored_bytes)
            entry.shard_counts = copies.shard_counts


def _unknown(entry: Entry | None) -> bool:
    """Whether only the medium can say: never seen, or seen while somebody was writing it."""
    return entry is None or (entry.state is State.SUSPECT and not entry.shard_counts)
