"""What the planner must never wait for: looking at the medium, deleting, scanning.

Two threads, because a look-up is waited for and a scan may take minutes:
`fxkv-probe` answers `ask`, `fxkv-chores` deletes, touches, sweeps, scans and watches the
free space. Nothing is shared but the queues; answers are taken with `take`. Without
`start` nothing runs by itself and a test turns the crank with `run_probes`/`run_chores`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fx_kvbackend.core.index import Entry, Index, State
from fx_kvbackend.records import ChunkKey
from fx_kvbackend.tiers.base import Copies, Space, Tier

log = logging.getLogger(__name__)

# A scan takes at most this share of the time, however large the store is.
_SCAN_DUTY_RATIO = 0.05
_SCAN_INTERVAL_S = 60.0
_SCAN_RETRY_S = 5.0
_SPACE_INTERVAL_S = 1.0
_MAX_QUEUED_TOUCHES = 1 << 16
# How long `close` waits for each thread: a hung medium must not hang the exit.
_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Answered:
    """Answers to questions: what is stored of each chunk, None for nothing."""

    found: dict[ChunkKey, Copies | None]


@dataclass(frozen=True, slots=True)
class Deleted:
    """A chunk is gone from the medium."""

    key: ChunkKey


@dataclass(frozen=True, slots=True)
class ScanStarted:
    """From here on, changes are newer than the scan that is under way."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """Everything stored, coldest first, and how many leftovers were removed before."""

    index: Index
    swept_count: int


Answer = Answered | Deleted | ScanStarted | Scanned | Space


class Chores:
    """Runs the planner's slow work on threads of its own."""

    def __init__(self, tier: Tier, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tier = tier
        self._clock = clock
        self._asked: queue.SimpleQueue[ChunkKey | None] = queue.SimpleQueue()
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._next_scan_s = 0.0
        self._next_space_s = 0.0
        self.scanned_once = threading.Event()
        self._threads: list[threading.Thread] = []
        self._failing: set[str] = set()
        self._cpu_s = {"probe": 0.0, "chores": 0.0}

    def start(self) -> None:
        """Start both threads."""
        for name, loop in (("probe", self._probe_loop), ("chores", self._chores_loop)):
            thread = threading.Thread(target=loop, name=f"fxkv-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def ask(self, key: ChunkKey) -> None:
        """Look for a chunk on the medium; an `Answered` follows."""
        self._asked.put(key)

    def delete(self, key: ChunkKey) -> None:
        """Delete a chunk; a `Deleted` follows."""
        self._todo.put(lambda: self._delete(key))

    def touch(self, key: ChunkKey, shard_count: int) -> None:
        """Record a use on the medium; no answer. Left out when much is queued already."""
        if self._todo.qsize() < _MAX_QUEUED_TOUCHES:
            self._todo.put(lambda: self._tier.touch(key, shard_count))

    def take(self) -> list[Answer]:
        """Answers since the last call, in order."""
        out = []
        while not self._answers.empty():
            out.append(self._answers.get_nowait())
        return out

    def cpu_seconds(self) -> float:
        """CPU time of both threads so far."""
        return sum(self._cpu_s.values())

    def close(self) -> None:
        """Stop both threads; what is queued is left. Idempotent."""
        self._asked.put(None)
        self._todo.put(None)
        for thread in self._threads:
            thread.join(timeout=_CLOSE_S)
        self._threads = []
        self._tier.close()

    # --- turning the crank ------------------------------------------------------------

    def run_probes(self) -> bool:
        """Answer everything asked so far; False when told to stop."""
        keys: list[ChunkKey] = []
        going = True
        while not self._asked.empty():
            key = self._asked.get_nowait()
            if key is None:
                going = False
            else:
                keys.append(key)
        if keys:
            found: dict[ChunkKey, Copies] = {}
            with self._surviving("probe"):  # what cannot be looked at is not there
                found = self._tier.find(keys)
            self._answers.put(Answered({key: found.get(key) for key in keys}))
        return going

    def run_chores(self) -> bool:
        """Do everything queued so far, and a scan when due; False when told to stop."""
        while not self._todo.empty():
            work = self._todo.get_nowait()
            if work is None:
                return False
            with self._surviving("delete or touch"):
                work()
        now = self._clock()
        if now >= self._next_space_s:
            self._next_space_s = now + _SPACE_INTERVAL_S
            with self._surviving("look at the free space"):
                self._answers.put(self._tier.space())
        if now >= self._next_scan_s:
            self._next_scan_s = now + _SCAN_RETRY_S
            with self._surviving("scan"):
                self.scan()
                took_s = self._clock() - now
                pause_s = max(_SCAN_INTERVAL_S, took_s / _SCAN_DUTY_RATIO)
                self._next_scan_s = self._clock() + pause_s
        return True

    def scan(self) -> None:
        """Sweep leftovers of dead writers, then read the whole medium.

        A scan that fails answers nothing: what it did not see may still be there.
        """
        swept = self._tier.sweep()
        self._answers.put(ScanStarted())
        self._answers.put(Scanned(build_index(self._tier), swept))
        self.scanned_once.set()

    def _delete(self, key: ChunkKey) -> None:
        try:
            self._tier.delete(key)
        finally:  # what is left after all is seen by the next scan
            self._answers.put(Deleted(key))

    def _probe_loop(self) -> None:
        while self.run_probes():
            self._cpu_s["probe"] = time.thread_time()
            self._asked.put(self._asked.get())  # sleep until there is something to do

    def _chores_loop(self) -> None:
        while self.run_chores():
            self._cpu_s["chores"] = time.thread_time()
            with contextlib.suppress(queue.Empty):
                self._todo.put(self._todo.get(timeout=_SPACE_INTERVAL_S))

    @contextlib.contextmanager
    def _surviving(self, doing: str) -> Iterator[None]:
        """One bad chore must not end the thread that all later ones need."""
        try:
            yield
            self._failing.discard(doing)
        except Exception:
            # A broken medium fails every second: one traceback says it all.
            level = logging.DEBUG if doing in self._failing else logging.ERROR
            log.log(level, "%s tier: failed to %s", self._tier.name, doing, exc_info=True)
            self._failing.add(doing)


def build_index(tier: Tier) -> Index:
    """Everything stored, coldest first. Chunks with missing shards are SUSPECT."""
    seen: dict[ChunkKey, list[float]] = {}  # [bytes, last use, count, shards, count, shards...]
    for found in tier.scan():
        row = seen.setdefault(found.key, [0, 0.0])
        row[0] += found.stored_bytes
        row[1] = max(row[1], found.used_s)
        if row[-2:-1] != [found.shard.count] or len(row) == 2:
            row += [found.shard.count, 0]
        row[-1] += 1
    # Sorted in slices of a few minutes: one sort of a million entries would hold the
    # interpreter lock, and with it the engine, for a second.
    slices: dict[int, list[tuple[float, ChunkKey]]] = {}
    for key, row in seen.items():
        slices.setdefault(int(row[1]) >> 8, []).append((row[1], key))
    index = Index()
    for number in sorted(slices):
        for _, key in sorted(slices[number]):
            row = seen[key]
            pairs = zip(row[2::2], row[3::2], strict=True)
            complete = tuple(int(count) for count, shards in pairs if count == shards)
            state = State.READY if complete else State.SUSPECT
            index.put(key, Entry(state, int(row[0]), complete))
    return index
