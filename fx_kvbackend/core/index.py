"""The planner's memory of what is stored: states, bytes, order of last use. Pure.

Coldest first: the order of the mapping is the order of last use. Not thread-safe; the
planner's thread owns it. A scan builds a fresh Index on its own thread and hands it over
whole (`adopt`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from fx_kvbackend.errors import Bug
from fx_kvbackend.records import ChunkKey


class State(Enum):
    """Life of a chunk in the index."""

    WRITING = auto()  # accepted for saving, not published by every rank yet
    READY = auto()  # a hit
    SUSPECT = auto()  # its bytes failed us, or shards are missing: never a hit, may be replaced
    EVICTING = auto()  # being deleted; its bytes still count


# None is "not in the index".
MOVES: dict[State | None, set[State | None]] = {
    None: {State.WRITING, State.READY, State.SUSPECT},
    State.WRITING: {State.READY, State.EVICTING, None},
    State.READY: {State.SUSPECT, State.EVICTING, None},
    State.SUSPECT: {State.WRITING, State.READY, State.EVICTING, None},
    State.EVICTING: {None},
}


@dataclass(slots=True)
class Entry:
    """One chunk: `stored_bytes` over all ranks; `shard_counts` lists complete copies."""

    state: State
    stored_bytes: int
    shard_counts: tuple[int, ...] = ()
    pins: int = 0

    @property
    def live(self) -> bool:
        """True while something in flight depends on this entry."""
        return self.pins > 0 or self.state in (State.WRITING, State.EVICTING)


class Index:
    """Chunks by key, coldest first, with the sum of their bytes."""

    def __init__(self) -> None:
        self._entries: OrderedDict[ChunkKey, Entry] = OrderedDict()
        # Not READY, or pinned: few among millions, and all that `adopt` has to look at.
        self._unusual: dict[ChunkKey, None] = {}
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[ChunkKey, Entry]]:
        return iter(self._entries.items())

    def get(self, key: ChunkKey) -> Entry | None:
        """The entry, or None when this chunk is not known."""
        return self._entries.get(key)

    def unusual(self) -> list[tuple[ChunkKey, Entry]]:
        """Those that are not READY, or pinned."""
        return [(key, self._entries[key]) for key in self._unusual]

    def put(self, key: ChunkKey, entry: Entry) -> None:
        """Add or replace, as the most recently used; pins stay. Raises Bug on an illegal move."""
        old = self._entries.get(key)
        if old is None or old.state is not entry.state:
            _check_move(key, old.state if old else None, entry.state)
        if old is not None:
            entry.pins += old.pins
            self.used_bytes -= old.stored_bytes
            del self._entries[key]
        self._set(key, entry)

    def move(self, key: ChunkKey, state: State) -> Entry:
        """Change the state of a known chunk. Raises Bug on an illegal move."""
        entry = self._entries[key]
        _check_move(key, entry.state, state)
        entry.state = state
        self._classify(key, entry)
        return entry

    def resize(self, key: ChunkKey, stored_bytes: int) -> None:
        """Correct the bytes of a known chunk."""
        entry = self._entries[key]
        self.used_bytes += stored_bytes - entry.stored_bytes
        entry.stored_bytes = stored_bytes

    def pin(self, key: ChunkKey, by: int) -> None:
        """Change the pins of a known chunk; they never go below 0."""
        entry = self._entries[key]
        entry.pins = max(0, entry.pins + by)
        self._classify(key, entry)

    def drop(self, key: ChunkKey) -> Entry | None:
        """Forget a chunk; None when it was not known."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._unusual.pop(key, None)
            self.used_bytes -= entry.stored_bytes
        return entry

    def touch(self, key: ChunkKey) -> None:
        """Make a known chunk the most recently used."""
        self._entries.move_to_end(key)

    def victims(self, need_bytes: int) -> list[ChunkKey]:
        """Coldest chunks whose removal frees at least `need_bytes`.

        Never names one that is pinned, being written or being deleted. Names fewer when
        there are not enough; nothing changes either way.
        """
        out: list[ChunkKey] = []
        freed = 0
        for key, entry in self._entries.items():
            if freed >= need_bytes:
                break
            if not entry.live:
                out.append(key)
                freed += entry.stored_bytes
        return out

    def adopt(self, scanned: Index, newer: Iterable[ChunkKey]) -> None:
        """Replace everything by `scanned`, but keep our own word on the `newer` keys.

        `newer` are the keys that changed since the scan began, and those in flight.
        """
        keep = {key: self._entries.get(key) for key in newer}
        for key, entry in self.unusual():
            # A complete copy that failed us looks as good as any to a scan.
            failed = entry.state is State.SUSPECT and entry.shard_counts
            if entry.live or (failed and scanned.get(key) is not None):
                keep[key] = entry
        self._entries, self._unusual = scanned._entries, scanned._unusual
        self.used_bytes = scanned.used_bytes
        for key, kept in keep.items():
            self.drop(key)
            if kept is not None:
                self._set(key, kept)

    def _set(self, key: ChunkKey, entry: Entry) -> None:
        self._entries[key] = entry
        self.used_bytes += entry.stored_bytes
        self._classify(key, entry)

    def _classify(self, key: ChunkKey, entry: Entry) -> None:
        if entry.pins or entry.state is not State.READY:
            self._unusual[key] = None
        else:
            self._unusual.pop(key, None)


def _check_move(key: ChunkKey, old: State | None, new: State | None) -> None:
    if new not in MOVES[old]:
        raise Bug(f"chunk {key}: illegal move {old} -> {new}")
