"""The index against a plain list of rows: the sum, the order, who may go, who may not."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fx_kvbackend.core.index import MOVES, Entry, Index, State
from fx_kvbackend.errors import Bug
from fx_kvbackend.records import ChunkKey

KEYS = [ChunkKey("ab" * 16, bytes([number])) for number in range(8)]
ALL_STATES: list[State | None] = [None, *State]

# Written down a second time: what may follow what. None is "not in the index".
LEGAL = {
    (None, State.WRITING),
    (None, State.READY),
    (None, State.SUSPECT),
    (State.WRITING, State.READY),
    (State.WRITING, State.EVICTING),
    (State.READY, State.SUSPECT),
    (State.READY, State.EVICTING),
    (State.SUSPECT, State.WRITING),
    (State.SUSPECT, State.READY),
    (State.SUSPECT, State.EVICTING),
}

keys = st.sampled_from(KEYS)
states = st.sampled_from(list(State))
sizes = st.integers(0, 1000)


def entry_in(state: State, stored_bytes: int = 10, pins: int = 0) -> Entry:
    return Entry(state, stored_bytes, (1,), pins)


def index_of(*entries: tuple[ChunkKey, Entry]) -> Index:
    """An index with entries of any state, reached by legal moves."""
    index = Index()
    for key, entry in entries:
        if entry.state is State.EVICTING:
            index.put(key, Entry(State.READY, entry.stored_bytes, entry.shard_counts, entry.pins))
            index.move(key, State.EVICTING)
        else:
            index.put(key, entry)
    return index


class Rows(RuleBasedStateMachine):
    """Model: rows [key, state, bytes, pins], coldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.rows: list[list] = []
        self.scanned = Index()

    def row(self, key: ChunkKey) -> list | None:
        return next((row for row in self.rows if row[0] == key), None)

    @rule(key=keys, state=states, size=sizes)
    def put(self, key: ChunkKey, state: State, size: int) -> None:
        row = self.row(key)
        old = row[1] if row else None
        if old is not state and (old, state) not in LEGAL:
            with pytest.raises(Bug, match="illegal move"):
                self.index.put(key, Entry(state, size))
            return
        self.index.put(key, Entry(state, size))
        if row:
            self.rows.remove(row)
        self.rows.append([key, state, size, row[3] if row else 0])

    @rule(key=keys, state=states)
    def move(self, key: ChunkKey, state: State) -> None:
        row = self.row(key)
        if row is None:
            with pytest.raises(KeyError):
                self.index.move(key, state)
        elif (row[1], state) not in LEGAL:
            with pytest.raises(Bug, match="illegal move"):
                self.index.move(key, state)
        else:
            assert self.index.move(key, state) is self.index.get(key)
            row[1] = state

    @rule(key=keys)
    def drop(self, key: ChunkKey) -> None:
        row = self.row(key)
        dropped = self.index.drop(key)
        if row is None:
            assert dropped is None
        else:
            assert dropped is not None
            assert dropped.stored_bytes == row[2]
            self.rows.remove(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        self.index.touch(row[0])
        self.rows.remove(row)
        self.rows.append(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), pins=st.integers(0, 2))
    def pin(self, data: st.DataObject, pins: int) -> None:
        row = data.draw(st.sampled_from(self.rows))
        entry = self.index.get(row[0])
        assert entry is not None
        self.index.pin(row[0], pins - entry.pins)
        row[3] = pins

    @rule(need=st.integers(0, 4000))
    def victims(self, need: int) -> None:
        before = [(key, entry.state) for key, entry in self.index]
        victims = self.index.victims(need)
        assert [(key, entry.state) for key, entry in self.index] == before
        may_go = [row for row in self.rows if self.evictable(row)]
        assert victims == [row[0] for row in may_go[: len(victims)]], "coldest first"
        freed = sum(row[2] for row in may_go[: len(victims)])
        assert freed >= need or len(victims) == len(may_go)
        if victims:
            assert freed - may_go[len(victims) - 1][2] < need, "and no more than needed"

    @staticmethod
    def evictable(row: list) -> bool:
        return row[3] == 0 and row[1] in (State.READY, State.SUSPECT)

    @rule(
        found=st.lists(
            st.tuples(keys, st.sampled_from([State.READY, State.SUSPECT]), sizes),
            unique_by=lambda f: f[0],
        ),
        newer=st.sets(keys),
    )
    def adopt(self, found: list[tuple[ChunkKey, State, int]], newer: set[ChunkKey]) -> None:
        note(f"adopt {found} newer {newer}")
        scanned = Index()
        for key, state, size in found:
            scanned.put(key, Entry(state, size, (1,) if state is State.READY else ()))
        ours = {
            row[0]: row
            for row in self.rows
            if row[0] in newer or row[3] or row[1] in (State.WRITING, State.EVICTING)
        }
        # A chunk that failed us stays suspect as long as a copy is there.
        seen = {key for key, _, _ in found}
        ours |= {
            row[0]: row
            for row in self.rows
            if row[1] is State.SUSPECT and row[0] in seen and self.was_complete(row[0])
        }
        expected = [
            [key, state, size, 0] for key, state, size in found if key not in newer | ours.keys()
        ]
        self.index.adopt(scanned, newer)
        got = [[key, e.state, e.stored_bytes, e.pins] for key, e in self.index]
        assert got[: len(expected)] == expected, "what the scan found, in its order, is colder"
        kept = got[len(expected) :]
        assert {row[0]: row for row in kept} == ours
        self.rows = got

    def was_complete(self, key: ChunkKey) -> bool:
        entry = self.index.get(key)
        return entry is not None and entry.shard_counts != ()

    @invariant()
    def the_sum_is_right(self) -> None:
        assert self.index.used_bytes == sum(row[2] for row in self.rows)
        assert self.index.used_bytes == sum(entry.stored_bytes for _, entry in self.index)

    @invariant()
    def the_unusual_are_known(self) -> None:
        unusual = {row[0] for row in self.rows if row[3] or row[1] is not State.READY}
        assert {key for key, _ in self.index.unusual()} == unusual

    @invariant()
    def order_and_content_are_right(self) -> None:
        assert [[k, e.state, e.stored_bytes, e.pins] for k, e in self.index] == self.rows
        assert len(self.index) == len(self.rows)


TestRows = Rows.TestCase


# --- the same, said one by one ---------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), list(itertools.product(ALL_STATES, State)))
@pytest.mark.parametrize("verb", ["put", "move"])
def test_illegal_moves_are_bugs(verb: str, old: State | None, new: State) -> None:
    index = index_of() if old is None else index_of((KEYS[0], entry_in(old)))
    attempts: dict[str, Callable[[], object]] = {
        "put": lambda: index.put(KEYS[0], entry_in(new)),
        "move": lambda: index.move(KEYS[0], new),
    }
    legal = (old, new) in LEGAL or (verb == "put" and old is new)
    if verb == "move" and old is None:
        with pytest.raises(KeyError):
            attempts[verb]()
    elif legal:
        attempts[verb]()
        entry = index.get(KEYS[0])
        assert entry is not None
        assert entry.state is new
    else:
        before = [(key, entry.state, entry.stored_bytes) for key, entry in index]
        with pytest.raises(Bug, match="illegal move"):
            attempts[verb]()
        assert [(key, entry.state, entry.stored_bytes) for key, entry in index] == before
        assert index.used_bytes == sum(entry.stored_bytes for _, entry in index)


def test_the_table_of_moves_has_every_state() -> None:
    assert set(MOVES) == set(ALL_STATES)
    assert all(None in MOVES[state] for state in State), "everything may be forgotten"


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("pins", [0, 1, 3])
def test_nothing_in_flight_is_a_victim(state: State, pins: int) -> None:
    index = index_of((KEYS[0], entry_in(state, pins=pins)), (KEYS[1], entry_in(State.READY)))
    goes = pins == 0 and state in (State.READY, State.SUSPECT)
    assert (KEYS[0] in index.victims(10**9)) is goes
    assert KEYS[1] in index.victims(10**9)


def test_replacing_a_pinned_chunk_keeps_its_pins() -> None:
    """It is being saved anew while an older load still reads it."""
    index = index_of((KEYS[0], entry_in(State.SUSPECT, pins=2)))
    index.put(KEYS[0], Entry(State.WRITING, 10))
    index.move(KEYS[0], State.READY)
    assert index.victims(10) == []


def test_no_victims_for_nothing() -> None:
    index = index_of((KEYS[0], entry_in(State.READY)))
    assert index.victims(0) == []
    assert index.victims(-5) == []


@given(st.lists(st.tuples(keys, sizes), unique_by=lambda pair: pair[0]))
def test_adopting_a_scan_with_nothing_newer_is_the_scan(found: list[tuple[ChunkKey, int]]) -> None:
    index = index_of((KEYS[0], entry_in(State.READY)), (KEYS[1], entry_in(State.SUSPECT)))
    index.drop(KEYS[1])
    scanned = index_of(*((key, entry_in(State.READY, size)) for key, size in found))
    index.adopt(scanned, [])
    assert [(key, entry.stored_bytes) for key, entry in index] == found
    assert index.used_bytes == sum(size for _, size in found)


def test_what_was_forgotten_since_the_scan_began_stays_forgotten() -> None:
    index = Index()
    index.adopt(index_of((KEYS[0], entry_in(State.READY))), [KEYS[0]])
    assert index.get(KEYS[0]) is None
    assert (len(index), index.used_bytes) == (0, 0)


def test_a_chunk_that_failed_is_no_hit_again_only_because_a_scan_sees_it() -> None:
    index = index_of((KEYS[0], entry_in(State.SUSPECT)))
    index.adopt(index_of((KEYS[0], entry_in(State.READY))), [])
    entry = index.get(KEYS[0])
    assert entry is not None
    assert entry.state is State.SUSPECT
    index.adopt(Index(), [])
    assert index.get(KEYS[0]) is None, "and it is gone when the scan no longer sees it"


def test_missing_shards_that_arrived_make_a_hit() -> None:
    index = index_of((KEYS[0], Entry(State.SUSPECT, 10, ())))
    index.adopt(index_of((KEYS[0], Entry(State.READY, 20, (2,)))), [])
    entry = index.get(KEYS[0])
    assert entry is not None
    assert (entry.state, entry.shard_counts) == (State.READY, (2,))
