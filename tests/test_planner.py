"""Planner: what is a hit, what may be saved, what goes, and what is counted.

No threads and no real time: a test turns the crank of the background work and the clock.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator

import pytest

from fx_kvbackend import metrics
from fx_kvbackend.core.index import State
from fx_kvbackend.records import ChunkKey, Found, Reason, SaveReport, Shard
from fx_kvbackend.store.chores import Chores
from fx_kvbackend.store.planner import Answer
from fx_kvbackend.testing.faults import DictTier, Gated, Medium, Over, Stored
from fx_kvbackend.tiers.base import Tier
from tests.rig import CHUNK_BYTES, NAMESPACE, WHOLE, Bench, Clock, chunk_file, key, name, names

HIT, MISS, RETRY, PENDING = Answer.HIT, Answer.MISS, Answer.RETRY, Answer.PENDING


def put(medium: Medium, number: int, shard: Shard = WHOLE, *, used_s: float = 0.0) -> None:
    """Place a chunk on the medium behind the planner's back."""
    medium.shards[key(number), shard] = Stored(bytes(chunk_file(key(number), shard)), used_s)


# --- lookups -----------------------------------------------------------------------------


def test_an_unknown_chunk_is_asked_for_before_it_is_a_miss() -> None:
    bench = Bench()
    assert bench.lookup(1) is RETRY
    assert bench.lookup(1) is RETRY, "nobody has looked yet"
    bench.chores.run_probes()
    assert bench.lookup(1) is MISS
    assert bench.lookup(1) is MISS
    assert bench.tier.calls["find"] == 1, "a request asks once"


def test_a_chunk_of_an_earlier_process_is_a_hit_before_any_scan() -> None:
    bench = Bench(scanned=False)
    put(bench.medium, 1)
    assert bench.lookup(1) is RETRY
    bench.chores.run_probes()
    assert bench.lookup(1) is HIT
    assert bench.tier.calls["scan"] == 0


def test_expect_asks_ahead_and_lookup_has_the_answer_at_once() -> None:
    bench = Bench()
    put(bench.medium, 2)
    bench.planner.expect(names(1, 2, 3), "r")
    bench.chores.run_probes()
    assert [bench.lookup(n) for n in (1, 2, 3)] == [MISS, HIT, MISS]
    assert bench.tier.calls["find"] == 1


def test_a_miss_is_remembered_for_its_request_only() -> None:
    bench = Bench()
    assert bench.found(1, "first") is MISS
    put(bench.medium, 1)  # another engine saves it
    assert bench.lookup(1, "first") is MISS
    assert bench.found(1, "second") is HIT
    assert bench.lookup(1, "first") is HIT


def test_finish_request_forgets_the_misses() -> None:
    bench = Bench()
    assert bench.found(1, "r") is MISS
    bench.planner.finish_request("r")
    bench.planner.finish_request("r")
    put(bench.medium, 1)
    assert bench.lookup(1, "r") is RETRY


def test_requests_that_ask_for_the_same_share_one_question() -> None:
    bench = Bench()
    for request in ("a", "b", "c"):
        bench.planner.expect(names(1, 2), request)
    assert bench.chores._asked.qsize() == 2
    bench.chores.run_probes()
    for request in ("a", "b", "c"):
        assert bench.lookup(1, request) is MISS
    assert bench.planner._asking == {}


def test_a_probe_that_takes_too_long_is_a_miss_and_its_late_answer_still_counts() -> None:
    bench = Bench()
    put(bench.medium, 1)
    assert bench.lookup(1) is RETRY
    bench.clock.advance(1.9)
    assert bench.lookup(1) is RETRY
    bench.clock.advance(0.2)
    assert bench.lookup(1) is MISS
    bench.chores.run_probes()
    assert bench.lookup(1) is HIT


def test_questions_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fx_kvbackend.store.planner._MAX_QUESTIONS", 3)
    bench = Bench()
    put(bench.medium, 9)
    bench.planner.expect(names(1, 2, 3), "r")
    assert bench.lookup(9) is MISS
    bench.chores.run_probes()
    assert bench.found(9) is HIT


def test_a_probe_that_raises_is_a_miss_at_once_and_the_next_request_asks_again() -> None:
    bench = Bench()
    put(bench.medium, 1)
    bench.tier.fail("find", RuntimeError("broken on purpose"))
    assert bench.lookup(1, "first") is RETRY
    assert bench.chores.run_probes()
    assert bench.lookup(1, "first") is MISS
    assert bench.found(1, "second") is HIT


def test_a_chunk_being_written_is_pending_and_after_the_wait_a_miss() -> None:
    bench = Bench()
    ((chunk, overwrite),) = bench.prepare(1)
    assert not overwrite
    assert bench.lookup(1, "other") is PENDING
    bench.clock.advance(4.9)
    assert bench.lookup(1, "other") is PENDING
    bench.clock.advance(0.2)
    assert bench.lookup(1, "other") is MISS
    bench.write(chunk)
    assert bench.lookup(1, "other") is HIT


@pytest.mark.parametrize("reason", [r for r in Reason if r not in (Reason.ABSENT, "cancelled")])
def test_a_failed_load_is_a_miss_until_the_chunk_is_saved_anew(reason: Reason) -> None:
    bench = Bench()
    bench.save(1)
    assert bench.lookup(1) is HIT
    bench.load(1, fail=reason)
    bench.clock.advance(1000.0)  # however sick the tier was found
    assert bench.lookup(1) is MISS
    assert bench.found(1, "a new request") is MISS, "what lies there is not asked for again"
    ((chunk, overwrite),) = bench.prepare(1)
    assert overwrite, "what is there must be replaced, not kept"
    assert bench.lookup(1) is PENDING
    bench.write(chunk, overwrite=True)
    assert bench.lookup(1) is HIT


def test_a_failure_is_remembered_over_scans_that_find_the_copy_in_order() -> None:
    bench = Bench()
    bench.save(1)
    bench.load(1, fail=Reason.CORRUPT)
    for _ in range(4):
        bench.scan()
        assert bench.found(1) is MISS


def test_a_bad_copy_counts_with_the_size_that_a_scan_finds() -> None:
    bench = Bench()
    bench.save(1)
    stored = bench.medium.shards[key(1), WHOLE]
    stored.data = stored.data[:100]
    bench.load(1, fail=Reason.TRUNCATED)
    assert bench.planner.used_bytes == CHUNK_BYTES
    for _ in range(3):
        bench.scan()
    assert bench.planner.used_bytes == 100
    assert bench.found(1) is MISS
    assert bench.save(1) == [1]
    assert bench.planner.used_bytes >= CHUNK_BYTES


def test_a_bad_copy_stays_bad_when_its_replacement_is_dropped() -> None:
    bench = Bench()
    bench.save(1)
    bench.load(1, fail=Reason.CORRUPT)
    ((chunk, _),) = bench.prepare(1)
    bench.report(chunk, Reason.READ_ONLY)
    for _ in range(3):
        assert bench.found(1, "next") is MISS
        bench.scan()
    assert bench.planner.used_bytes == CHUNK_BYTES, "it still takes its room"
    assert bench.save(1) == [1]
    assert bench.found(1) is HIT


def test_a_chunk_that_was_absent_is_looked_for_again() -> None:
    bench = Bench()
    bench.save(1)
    bench.medium.shards.clear()
    bench.load(1, fail=Reason.ABSENT)
    assert bench.found(1) is MISS
    assert bench.planner.used_bytes == 0
    ((_, overwrite),) = bench.prepare(1)
    assert not overwrite


def test_a_cancelled_load_says_nothing_about_the_chunk() -> None:
    bench = Bench()
    bench.save(1)
    bench.load(1, fail=Reason.CANCELLED)
    assert bench.lookup(1) is HIT


def test_lookups_and_failures_are_counted_by_answer_and_reason() -> None:
    bench = Bench()
    bench.save(1, 2)
    bench.counts()
    bench.lookup(1)
    bench.lookup(2)
    bench.found(3)
    bench.load(1, 2, fail=Reason.CORRUPT)
    counts = bench.counts()
    assert counts["fxkv:lookup_chunks", "hit"] == 2
    assert counts["fxkv:lookup_chunks", "retry"] == 1
    assert counts["fxkv:lookup_chunks", "miss"] == 1
    assert counts["fxkv:failed_loads", "corrupt"] == 2


# --- reset -------------------------------------------------------------------------------


def test_after_a_reset_nothing_stored_is_a_hit_and_saves_go_to_a_private_namespace() -> None:
    bench = Bench()
    bench.save(1, 2)
    bench.planner.reset()
    assert bench.planner.namespace != NAMESPACE
    assert bench.hits([1, 2]) == []
    assert bench.save(1) == [1]
    assert bench.hits([1, 2]) == [1]
    assert bench.stored() == {1, 2}, "the old ones stay for a restart"
    assert bench.stored(bench.planner.namespace) == {1}
    again = Bench(medium=bench.medium, clock=bench.clock)
    assert again.hits([1, 2]) == [1, 2]


def test_a_save_in_flight_at_a_reset_does_not_come_back() -> None:
    bench = Bench()
    ((chunk, _),) = bench.prepare(1)
    bench.planner.reset()
    bench.write(chunk)
    assert bench.found(1) is MISS
    assert bench.planner.pending_saves == 0
    assert bench.planner.used_bytes == CHUNK_BYTES


def test_a_load_in_flight_at_a_reset_leaves_no_pin_and_no_blame() -> None:
    bench = Bench()
    bench.save(1)
    ((chunk, _),) = bench.planner.prepare_load(names(1))
    bench.planner.reset()
    bench.save(1)
    bench.planner.load_failed(chunk, Reason.CORRUPT)
    bench.planner.complete_load(names(1))
    assert bench.pins == 0
    assert bench.found(1) is HIT, "another namespace's chunk failed, not this one"


def test_every_reset_gets_a_namespace_of_its_own() -> None:
    bench = Bench()
    seen = {bench.planner.namespace}
    for _ in range(3):
        bench.planner.reset()
        assert bench.save(1) == [1]
        seen.add(bench.planner.namespace)
    assert len(seen) == 4


# --- loads and pins ----------------------------------------------------------------------


def test_loads_name_the_full_key_and_the_copy_in_the_order_asked() -> None:
    bench = Bench()
    bench.save(1, 2)
    assert bench.load(2, 1) == [(key(2), 1), (key(1), 1)]
    assert bench.planner.prepare_load(names(9)) == [(key(9), 1)], "an unknown one may still fail"


def test_a_copy_of_the_own_rank_count_is_read_first_and_any_other_will_do() -> None:
    medium = Medium()
    for index in range(4):
        put(medium, 1, Shard(index, 4))
        put(medium, 2, Shard(index, 4))
    for index in range(2):
        put(medium, 2, Shard(index, 2))
    bench = Bench(medium=medium, ranks=2)
    assert bench.hits([1, 2]) == [1, 2]
    assert bench.load(1, 2) == [(key(1), 4), (key(2), 2)]


def test_pins_protect_from_eviction_and_return_to_zero() -> None:
    bench = Bench(capacity_bytes=4 * CHUNK_BYTES)
    bench.save(1, 2)
    bench.planner.prepare_load(names(1, 2))
    bench.planner.prepare_load(names(1))
    assert bench.pins == 3
    bench.save(3, 4)
    bench.crank()
    bench.save(5, 6)
    bench.crank()
    assert {1, 2} <= bench.stored()
    bench.planner.complete_load(names(2, 1))
    assert bench.pins == 1
    bench.planner.complete_load(names(1))
    assert bench.pins == 0
    bench.save(7, 8, 9, 10)
    assert not {1, 2} & bench.stored()


def test_completing_twice_or_what_was_never_prepared_does_no_harm() -> None:
    bench = Bench()
    bench.save(1)
    bench.planner.prepare_load(names(1, 2))
    for _ in range(3):
        bench.planner.complete_load(names(1, 2, 3))
        assert bench.pins == 0
    bench.planner.prepare_load(names(1))
    assert bench.pins == 1


def test_an_aborted_request_leaves_nothing_behind() -> None:
    bench = Bench()
    bench.save(1)
    bench.planner.expect(names(1, 2, 3), "aborted in the queue")
    bench.lookup(2, "aborted while looking")
    bench.planner.finish_request("aborted in the queue")
    bench.planner.finish_request("aborted while looking")
    bench.planner.finish_request("never seen")
    bench.crank()
    assert bench.planner._requests == {}
    assert bench.planner._asking == {}
    assert bench.pins == 0


def test_a_chunk_replaced_while_another_load_holds_it_stays_pinned() -> None:
    bench = Bench(capacity_bytes=4 * CHUNK_BYTES)
    bench.save(1)
    bench.planner.prepare_load(names(1))
    bench.load(1, fail=Reason.CORRUPT)
    bench.save(1)
    assert bench.pins == 1
    for number in range(2, 20):
        bench.save(number)
        bench.crank()
    assert 1 in bench.stored()
    bench.planner.complete_load(names(1))
    assert bench.pins == 0


# --- order of last use -------------------------------------------------------------------


def survivors(bench: Bench, count: int, among: range) -> list[int]:
    """Which of these chunks are left when the cap leaves room for `count` of them."""
    bench.planner.capacity_bytes = count * CHUNK_BYTES
    bench.planner._need_bytes = 0
    bench.crank()
    bench.crank()
    return sorted(bench.stored() & set(among))


@pytest.fixture(params=["as it is", "after a scan", "after four scans", "after a restart"])
def later(request: pytest.FixtureRequest) -> Callable[[Bench], Bench]:
    """The same store a while later: the order of last use must not depend on it."""

    def let_it_be_later(bench: Bench) -> Bench:
        bench.crank()
        if request.param == "after a restart":
            return Bench(medium=bench.medium, clock=bench.clock)
        for _ in range({"as it is": 0, "after a scan": 1}.get(request.param, 4)):
            bench.scan()
        return bench

    return let_it_be_later


@pytest.fixture(autouse=True)
def no_headroom(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap of n chunks holds n: what goes is then easy to say."""
    monkeypatch.setattr("fx_kvbackend.store.planner._HEADROOM_RATIO", 0.0)


def test_the_least_recently_used_goes_first(later: Callable[[Bench], Bench]) -> None:
    bench = Bench()
    for number in range(6):
        bench.save(number)
    bench.load(0)
    bench.load(2)
    assert survivors(later(bench), 4, range(6)) == [0, 2, 4, 5]


def test_tails_of_one_save_go_before_heads(later: Callable[[Bench], Bench]) -> None:
    bench = Bench()
    bench.save(*range(8))
    assert survivors(later(bench), 3, range(8)) == [0, 1, 2]


def test_tails_go_before_heads_when_a_prompt_is_saved_in_several_steps(
    later: Callable[[Bench], Bench],
) -> None:
    bench = Bench()
    for step in range(4):
        for chunk, _ in bench.prepare(2 * step, 2 * step + 1, request="long"):
            bench.write(chunk)
    bench.planner.finish_request("long")
    assert survivors(later(bench), 3, range(8)) == [0, 1, 2]


def test_tails_go_before_heads_when_saves_are_published_after_the_request(
    later: Callable[[Bench], Bench],
) -> None:
    bench = Bench()
    accepted = bench.prepare(*range(8), request="short")
    bench.planner.finish_request("short")
    for chunk, _ in accepted:
        bench.write(chunk)
    assert survivors(later(bench), 3, range(8)) == [0, 1, 2]


def test_tails_go_before_heads_that_were_loaded(later: Callable[[Bench], Bench]) -> None:
    bench = Bench()
    bench.save(0, 1, 2, request="first turn")
    bench.save(20, request="somebody else")
    assert bench.hits([0, 1, 2], "second turn") == [0, 1, 2]
    bench.planner.prepare_load(names(0, 1, 2))
    bench.planner.complete_load(set(names(0, 1, 2)))  # the host's order is none
    bench.save(3, 4, 5, request="second turn")
    assert survivors(later(bench), 4, range(30)) == [0, 1, 2, 3]


def test_offering_a_stored_chunk_is_a_use(later: Callable[[Bench], Bench]) -> None:
    bench = Bench()
    for number in range(4):
        bench.save(number)
    assert bench.save(0, 1, 9, request="hits in the engine's own cache") == [9]
    assert survivors(later(bench), 2, range(30)) == [0, 1]


def test_offering_a_stored_chunk_is_a_use_at_once() -> None:
    bench = Bench(capacity_bytes=5 * CHUNK_BYTES)
    for number in range(4):
        bench.save(number)
    bench.crank()
    assert bench.prepare(0, 1, request="still running") == []
    assert survivors(bench, 2, range(4)) == [0, 1]


def test_a_use_during_a_scan_is_not_undone_by_it() -> None:
    bench = Bench()
    for number in range(4):
        bench.save(number)
    bench.crank()
    bench.clock.advance(61.0)
    bench.tier.tier = Meanwhile(bench.tier.tier, lambda: bench.load(0))
    bench.crank()
    assert survivors(bench, 2, range(4)) == [0, 3]


def test_a_request_that_used_a_chunk_while_it_ran_keeps_it_warm_to_its_end() -> None:
    bench = Bench()
    bench.save(0, request="first")
    assert bench.lookup(0, "long") is HIT
    for number in range(1, 4):
        bench.save(number)
    bench.planner.finish_request("long")
    bench.crank()
    assert survivors(bench, 2, range(4)) == [0, 3]


# --- the cap -----------------------------------------------------------------------------


def test_the_cap_holds_at_every_moment_and_several_prompts_go_around() -> None:
    bench = Bench(capacity_bytes=10 * CHUNK_BYTES)
    first = 0
    for prompt in range(30):
        chunks = list(range(first, first + 1 + prompt % 7))
        first += len(chunks)
        while (accepted := bench.planner.prepare_save(names(*chunks), f"{prompt}")) is None:
            bench.crank()
        assert len(accepted) == len(chunks)
        for chunk, _ in accepted:
            bench.write(chunk)
            assert bench.medium.used_bytes <= bench.planner.used_bytes <= 10 * CHUNK_BYTES
        bench.planner.finish_request(f"{prompt}")
        bench.crank()
        assert bench.hits(chunks) == chunks, "what was saved last is there"
    assert bench.medium.used_bytes > 5 * CHUNK_BYTES, "the cap is made use of"


def test_the_cap_holds_over_restarts() -> None:
    medium, clock = Medium(), Clock()
    for run in range(5):
        bench = Bench(medium=medium, clock=clock, capacity_bytes=4 * CHUNK_BYTES)
        for number in range(10 * run, 10 * run + 3):
            assert bench.save(number) == [number]
            assert medium.used_bytes <= 4 * CHUNK_BYTES
        bench.planner.close()


def test_a_smaller_cap_after_a_restart_is_enforced_at_once() -> None:
    bench = Bench()
    for number in range(10):
        bench.save(number)
    bench.crank()
    again = Bench(medium=bench.medium, clock=bench.clock, capacity_bytes=3 * CHUNK_BYTES)
    again.crank()
    assert again.stored() == {7, 8, 9}


def test_headroom_is_made_ahead_of_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fx_kvbackend.store.planner._HEADROOM_RATIO", 0.25)
    bench = Bench(capacity_bytes=8 * CHUNK_BYTES)
    for number in range(6):
        bench.save(number)
    bench.crank()
    assert bench.stored() == set(range(6))
    bench.save(6)
    assert bench.counts()["fxkv:evictions",] == 1
    bench.crank()
    assert bench.stored() == set(range(1, 7))


def test_a_need_beyond_the_headroom_grows_it_for_a_while_only() -> None:
    bench = Bench(capacity_bytes=32 * CHUNK_BYTES)
    for number in range(32):
        bench.save(number)
    big = list(range(100, 116))
    assert bench.planner.prepare_save(names(*big), "big") is None
    bench.crank()
    assert len(bench.stored()) == 16
    assert len(bench.save(*big, request="big")) == 16
    bench.crank()
    for number in range(200, 260):
        bench.save(number)
        bench.crank()
    assert len(bench.stored()) >= 28, "one giant prompt must not shrink the store for good"


def test_saves_wait_for_room_and_go_on_when_it_is_there() -> None:
    bench = Bench(capacity_bytes=4 * CHUNK_BYTES)
    for number in range(4):
        bench.save(number)
    bench.counts()
    assert bench.planner.prepare_save(names(8, 9), "r") is None
    assert bench.planner.prepare_save(names(8, 9), "r") is None
    counts = bench.counts()
    assert counts["fxkv:deferred_saves",] == 2
    assert ("fxkv:dropped_saves", "full") not in counts
    assert bench.planner.pending_saves == 0
    bench.crank()
    assert [chunk for chunk, _ in bench.prepare(8, 9)] == [key(8), key(9)]
    bench.planner.finish_request("r")
    assert ("fxkv:dropped_saves", "full") not in bench.counts()


def test_saves_do_not_wait_for_ever() -> None:
    bench = Bench(capacity_bytes=4 * CHUNK_BYTES)
    for number in range(4):
        bench.save(number)
    bench.counts()
    assert bench.planner.prepare_save(names(8, 9, 10, 11, 12), "r") is None
    bench.clock.advance(1.9)
    assert bench.planner.prepare_save(names(8, 9, 10, 11, 12), "r") is None
    bench.clock.advance(0.2)  # the medium hangs: no deletion is ever done
    assert bench.planner.prepare_save(names(8, 9, 10, 11, 12), "r") == []
    assert bench.count(metrics.DROPPED_SAVES, "full") == 5


def test_a_request_that_ends_while_its_saves_wait_has_them_counted() -> None:
    bench = Bench(capacity_bytes=4 * CHUNK_BYTES)
    for number in range(4):
        bench.save(number)
    bench.counts()
    assert bench.planner.prepare_save(names(8, 9), "r") is None
    bench.planner.finish_request("r")
    assert bench.count(metrics.DROPPED_SAVES, "full") == 2


def test_what_does_not_fit_is_dropped_from_the_tail_when_nothing_may_go() -> None:
    bench = Bench(capacity_bytes=4 * CHUNK_BYTES)
    bench.save(1, 2, 3)
    bench.planner.prepare_load(names(1, 2, 3))
    bench.counts()
    assert bench.save(7, 8, 9) == [7]
    assert bench.count(metrics.DROPPED_SAVES, "full") == 2
    assert bench.medium.used_bytes == 4 * CHUNK_BYTES


def test_a_prompt_larger_than_the_store_is_saved_as_far_as_it_fits() -> None:
    bench = Bench(capacity_bytes=4 * CHUNK_BYTES)
    bench.save(1, 2)
    accepted = bench.planner.prepare_save(names(*range(10, 20)), "big")
    assert accepted is None
    bench.crank()
    assert bench.save(*range(10, 20), request="big") == [10, 11, 12, 13]
    assert bench.medium.used_bytes <= 4 * CHUNK_BYTES


def test_replacing_a_bad_copy_takes_its_room_until_it_is_done() -> None:
    bench = Bench(capacity_bytes=2 * CHUNK_BYTES)
    bench.save(1)
    bench.load(1, fail=Reason.CORRUPT)
    ((chunk, _),) = bench.prepare(1)
    assert bench.planner.used_bytes == 2 * CHUNK_BYTES, "both lie there for a moment"
    bench.write(chunk, overwrite=True)
    bench.crank()
    assert bench.planner.used_bytes == CHUNK_BYTES == bench.medium.used_bytes


def test_copies_of_another_rank_count_count_after_the_own_was_replaced() -> None:
    medium = Medium()
    put(medium, 1)
    for index in range(2):
        put(medium, 1, Shard(index, 2))
    bench = Bench(medium=medium)
    bench.load(1, fail=Reason.CORRUPT)
    assert bench.save(1) == [1]
    assert bench.planner.used_bytes >= medium.used_bytes
    bench.crank()
    assert bench.planner.used_bytes == medium.used_bytes == 3 * CHUNK_BYTES
    assert bench.load(1) == [(key(1), 1)]


def test_asking_for_the_same_twice_saves_it_once() -> None:
    bench = Bench()
    assert bench.prepare(1, 1, 2) == [(key(1), False), (key(2), False)]
    assert bench.prepare(2, 1, request="other") == []
    assert bench.planner.pending_saves == 2
    for chunk in (key(1), key(2)):
        bench.write(chunk)
    assert bench.prepare(1, 2) == []
    assert bench.planner.used_bytes == 2 * CHUNK_BYTES


def test_chunks_being_evicted_are_neither_hits_nor_saved_again() -> None:
    bench = Bench(capacity_bytes=4 * CHUNK_BYTES)
    for number in range(4):
        bench.save(number)
    assert bench.planner.prepare_save(names(9), "r") is None
    entry = bench.entry(0)
    assert entry is not None
    assert entry.state is State.EVICTING
    assert bench.lookup(0) is MISS
    assert bench.planner.prepare_save(names(0), "s") == []
    bench.crank()
    assert bench.found(0) is MISS
    assert bench.entry(0) is None


def test_a_deletion_that_raises_does_not_leak_the_room() -> None:
    bench = Bench(capacity_bytes=4 * CHUNK_BYTES)
    for number in range(4):
        bench.save(number)
    bench.tier.fail("delete", RuntimeError("broken on purpose"))
    assert bench.planner.prepare_save(names(9), "r") is None
    bench.crank()
    assert bench.planner._evicting_bytes == 0
    bench.scan()
    bench.scan()
    assert bench.stored() == {0, 1, 2, 3}
    assert bench.planner.used_bytes == 4 * CHUNK_BYTES, "a scan has found what was left"


# --- drops and the floor -----------------------------------------------------------------


def test_nothing_is_saved_before_the_first_scan() -> None:
    bench = Bench(scanned=False)
    assert bench.planner.prepare_save(names(1, 2), "r") == []
    assert bench.count(metrics.DROPPED_SAVES, "scanning") == 2
    bench.crank()
    assert bench.save(1) == [1]


def test_a_scan_that_fails_is_tried_again_and_changes_nothing() -> None:
    bench = Bench(scanned=False)
    put(bench.medium, 1)
    bench.tier.fail("scan", times=2)
    bench.crank()
    assert not bench.chores.scanned_once.is_set()
    assert bench.planner.prepare_save(names(2), "r") == []
    bench.crank()
    assert bench.tier.calls["scan"] == 1, "not again at once"
    bench.clock.advance(5.0)
    bench.crank()
    bench.clock.advance(5.0)
    bench.crank()
    assert bench.save(2) == [2]
    assert bench.planner.used_bytes == 2 * CHUNK_BYTES
    bench.tier.fail("scan")
    bench.scan()
    assert bench.hits([1, 2]) == [1, 2], "what a failed scan did not see is still there"


def test_trouble_in_the_background_is_told_once_and_again_when_it_returns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()

    def errors() -> int:
        bench.clock.advance(1.0)
        bench.crank()
        return sum(record.levelname == "ERROR" for record in caplog.records)

    bench.tier.fail("space", times=3)
    assert [errors() for _ in range(4)] == [1, 1, 1, 1]
    bench.tier.fail("space")
    assert errors() == 2
    assert all(record.exc_info for record in caplog.records)


def test_the_floor_is_kept_within_one_call_and_between_two_looks() -> None:
    floor = 10 * CHUNK_BYTES
    medium = Medium(total_bytes=15 * CHUNK_BYTES)
    bench = Bench(medium=medium, free_floor_bytes=floor)
    assert bench.save(1, 2, 3) == [1, 2, 3]
    assert bench.save(4, 5, 6) == [4, 5]
    assert bench.count(metrics.DROPPED_SAVES, "no_space") == 1
    assert bench.save(7) == []
    assert bench.tier.space().free_bytes == floor
    bench.clock.advance(1.0)
    bench.crank()
    assert bench.save(7) == []
    medium.total_bytes += 2 * CHUNK_BYTES
    bench.clock.advance(1.0)
    bench.crank()
    assert bench.save(7, 8, 9) == [7, 8]


def test_saves_accepted_and_not_written_yet_count_against_the_floor() -> None:
    bench = Bench(medium=Medium(total_bytes=4 * CHUNK_BYTES), free_floor_bytes=CHUNK_BYTES)
    assert len(bench.prepare(1, 2)) == 2
    assert len(bench.prepare(3, 4, request="other")) == 1
    assert bench.prepare(5, request="third") == []


def test_no_room_is_made_for_what_the_floor_forbids() -> None:
    medium = Medium(total_bytes=5 * CHUNK_BYTES)
    bench = Bench(medium=medium, capacity_bytes=4 * CHUNK_BYTES)
    for number in range(4):
        bench.save(number)
    bench.planner._free_floor_bytes = 5 * CHUNK_BYTES  # somebody else filled the disk
    assert bench.planner.prepare_save(names(9), "r") == []
    bench.crank()
    assert bench.stored() == {0, 1, 2, 3}


def test_an_unknown_free_space_is_no_reason_to_throw_the_store_away() -> None:
    medium = Medium()
    for number in range(8):
        put(medium, number, used_s=number)
    bench = Bench(medium=medium, capacity_bytes=None, free_floor_bytes=None, scanned=False)
    bench.tier.fail("space", times=2)
    bench.crank()
    assert bench.planner.prepare_save(names(9), "r") == []
    assert bench.count(metrics.DROPPED_SAVES, "scanning") == 1
    assert bench.stored() == set(range(8))
    assert bench.hits(range(8)) == list(range(8)), "and none to serve nothing"
    for _ in range(2):
        bench.clock.advance(1.0)
        bench.crank()
    assert bench.save(9) == [9]
    assert bench.stored() == {*range(8), 9}


def test_the_automatic_cap_does_not_shrink_with_restarts_and_the_floor_is_a_share() -> None:
    medium = Medium(total_bytes=100 * CHUNK_BYTES)
    caps, floors = [], []
    for run in range(6):
        bench = Bench(medium=medium, capacity_bytes=None, free_floor_bytes=None)
        caps.append(bench.planner.capacity_bytes)
        floors.append(bench.planner._free_floor_bytes)
        bench.save(*range(10 * run, 10 * run + 5))
        bench.planner.close()
    assert caps == [50 * CHUNK_BYTES] * 6
    assert floors == [5 * CHUNK_BYTES] * 6


def test_every_drop_is_counted_with_its_reason_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    for number, reason in enumerate([Reason.NO_SPACE, Reason.STAGING, Reason.NO_SPACE]):
        ((chunk, _),) = bench.prepare(number)
        bench.report(chunk, reason)
    counts = bench.counts()
    assert counts["fxkv:dropped_saves", "no_space"] == 2
    assert counts["fxkv:dropped_saves", "staging"] == 1
    assert ("fxkv:saves",) not in counts
    said = [r.getMessage() for r in caplog.records if "dropped" in r.getMessage()]
    assert len(said) == 2
    assert bench.planner.used_bytes == 0
    assert bench.hits(range(3)) == []


# --- a sick tier -------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [Reason.IO_ERROR, Reason.NO_FDS, Reason.INTERNAL])
def test_three_failures_in_a_row_make_the_tier_sick(reason: Reason) -> None:
    bench = Bench()
    bench.save(*range(10))
    for number in range(2):
        bench.load(number, fail=reason)
    assert bench.lookup(9) is HIT
    bench.load(2, fail=reason)
    assert bench.lookup(9) is MISS
    assert bench.count(metrics.TIER_SICK) == 1


def test_one_deadline_makes_the_tier_sick_and_it_recovers() -> None:
    bench = Bench()
    bench.save(*range(10))
    bench.load(0, fail=Reason.DEADLINE)
    assert bench.lookup(9) is MISS
    bench.counts()
    assert bench.save(20) == []
    assert bench.count(metrics.DROPPED_SAVES, "sick") == 1
    bench.planner.expect(names(30, 31), "r")
    assert bench.planner._asking == {}, "a sick tier is not even asked"
    bench.clock.advance(9.9)
    assert bench.lookup(9) is MISS
    bench.clock.advance(0.2)
    assert bench.lookup(9) is HIT
    assert bench.save(20) == [20]
    bench.planner.refresh_gauges()
    assert bench.count(metrics.TIER_SICK) == 0


@pytest.mark.parametrize(
    "reason", [Reason.ABSENT, Reason.CORRUPT, Reason.TRUNCATED, Reason.MISMATCH, Reason.CANCELLED]
)
def test_bad_chunks_are_no_sign_of_a_sick_tier(reason: Reason) -> None:
    bench = Bench()
    bench.save(*range(10))
    for number in range(9):
        bench.load(number, fail=reason)
    assert bench.lookup(9) is HIT


def test_a_success_in_between_starts_the_count_anew() -> None:
    bench = Bench()
    bench.save(*range(10))
    for number in range(6):
        bench.load(number, fail=Reason.IO_ERROR)
        if number % 2:
            bench.load(9)
    assert bench.lookup(9) is HIT


def test_the_pause_doubles_up_to_a_limit_and_a_success_ends_the_doubling() -> None:
    bench = Bench()
    bench.save(*range(30))
    pauses = []
    for number in range(8):
        bench.load(number, fail=Reason.DEADLINE)
        pauses.append(bench.planner._sick_until_s - bench.clock())
        bench.clock.advance(pauses[-1])
    assert pauses == [10, 20, 40, 80, 160, 300, 300, 300]
    bench.load(29)
    bench.load(20, fail=Reason.DEADLINE)
    assert bench.planner._sick_until_s - bench.clock() == 10


def test_late_failures_of_the_same_trouble_do_not_prolong_it() -> None:
    bench = Bench()
    bench.save(*range(30))
    for number in range(20):  # sixteen requests were loading when the disk hung
        bench.load(number, fail=Reason.IO_ERROR)
    bench.clock.advance(10.0)
    assert bench.lookup(29) is HIT
    bench.load(20, fail=Reason.IO_ERROR)
    assert bench.lookup(29) is HIT, "one failure after the pause is one failure"


# --- several ranks -----------------------------------------------------------------------


def test_a_chunk_is_a_hit_when_every_rank_has_it() -> None:
    bench = Bench(ranks=3)
    ((chunk, _),) = bench.prepare(1)
    for rank in range(3):
        assert bench.lookup(1, "other") is PENDING
        assert bench.planner.pending_saves == 1
        bench.tier.write(chunk, Shard(rank, 3), chunk_file(chunk, Shard(rank, 3)), overwrite=False)
        bench.report(chunk)
    assert bench.lookup(1, "other") is HIT
    assert bench.planner.used_bytes == 3 * CHUNK_BYTES == bench.medium.used_bytes
    assert bench.planner.pending_saves == 0
    counts = bench.counts()
    assert counts["fxkv:saves",] == 1
    assert counts["fxkv:saved_bytes",] == 3 * CHUNK_BYTES


@pytest.mark.parametrize("dropping", [0, 1, 2])
def test_one_rank_that_drops_makes_it_no_hit_and_the_rest_is_removed(dropping: int) -> None:
    bench = Bench(ranks=3)
    ((chunk, _),) = bench.prepare(1)
    for rank in range(3):
        if rank == dropping:
            bench.report(chunk, Reason.STAGING)
        else:
            shard = Shard(rank, 3)
            bench.tier.write(chunk, shard, chunk_file(chunk, shard), overwrite=False)
            bench.report(chunk)
        assert bench.lookup(1) is not HIT
    assert bench.count(metrics.DROPPED_SAVES, "staging") == 1
    bench.crank()
    assert bench.medium.shards == {}
    assert bench.planner.used_bytes == 0
    assert bench.found(1) is MISS
    assert bench.save(1) == [1], "the next one may save it"


def test_a_rank_that_shares_its_shard_adds_no_bytes() -> None:
    bench = Bench(ranks=2)
    ((chunk, _),) = bench.prepare(1)
    bench.planner.save_reported(SaveReport(chunk, None, 1, CHUNK_BYTES))
    bench.planner.save_reported(SaveReport(chunk, None, 1, 0))
    assert bench.lookup(1) is HIT
    assert bench.planner.used_bytes == CHUNK_BYTES
    assert bench.load(1) == [(key(1), 1)]


def test_a_rank_whose_window_moved_on_drops_with_no_shard_count() -> None:
    bench = Bench(ranks=2)
    ((chunk, _),) = bench.prepare(1)
    for _ in range(2):
        bench.planner.save_reported(SaveReport(chunk, Reason.PARTIAL, 0, 0))
    assert bench.count(metrics.DROPPED_SAVES, "partial") == 1
    assert bench.entry(1) is None


def test_reports_nobody_waits_for_are_passed_over() -> None:
    bench = Bench()
    bench.report(key(5))
    ((chunk, _),) = bench.prepare(1)
    bench.write(chunk)
    bench.report(chunk)
    bench.report(chunk, Reason.IO_ERROR)
    assert bench.lookup(1) is HIT
    assert bench.lookup(5) is RETRY
    assert bench.planner.used_bytes == CHUNK_BYTES


def test_an_incomplete_chunk_is_no_hit_and_is_saved_anew() -> None:
    medium = Medium()
    put(medium, 1, Shard(0, 2))
    bench = Bench(medium=medium, ranks=2)
    assert bench.found(1) is MISS
    assert bench.planner.used_bytes == CHUNK_BYTES, "it takes room all the same"
    assert bench.save(1) == [1]
    assert bench.found(1) is HIT
    bench.crank()
    assert bench.planner.used_bytes == 2 * CHUNK_BYTES == medium.used_bytes


def test_what_another_engine_was_writing_during_the_scan_is_a_hit_when_it_is_done() -> None:
    medium = Medium()
    put(medium, 1, Shard(0, 2))
    bench = Bench(medium=medium, ranks=2)
    put(medium, 1, Shard(1, 2))
    assert bench.found(1) is HIT
    assert bench.planner.used_bytes == 2 * CHUNK_BYTES
    assert bench.load(1) == [(key(1), 2)]


def test_the_shards_that_are_left_of_a_chunk_count_until_they_are_gone() -> None:
    bench = Bench(ranks=2)
    bench.save(1)
    del bench.medium.shards[key(1), Shard(0, 2)]
    bench.load(1, fail=Reason.ABSENT)
    assert bench.found(1) is MISS
    assert bench.planner.used_bytes >= bench.medium.used_bytes == CHUNK_BYTES
    for _ in range(3):
        bench.scan()
    assert bench.planner.used_bytes == CHUNK_BYTES
    assert bench.save(1) == [1]
    assert bench.found(1) is HIT


def test_every_rank_may_report_the_same_failure() -> None:
    bench = Bench(ranks=2)
    bench.save(1, 2)
    for reasons in ((Reason.ABSENT, Reason.CORRUPT), (Reason.CORRUPT, Reason.ABSENT)):
        for reason in reasons:
            bench.planner.load_failed(key(1), reason)
    assert bench.lookup(2) is HIT
    assert bench.lookup(1) is not HIT


# --- scans that race with changes --------------------------------------------------------


class Meanwhile(Over):
    """A tier during whose next scan something happens, after the medium was read."""

    def __init__(self, tier: Tier, happens: Callable[[], object]) -> None:
        super().__init__(tier)
        self._happens: Callable[[], object] | None = happens

    def scan(self) -> Iterator[Found]:
        yield from list(self.tier.scan())
        happens, self._happens = self._happens, None
        if happens is not None:
            happens()


def scan_with(bench: Bench, happens: Callable[[], object]) -> None:
    """A scan that has seen the medium as it was before `happens`, adopted after it."""
    bench.clock.advance(61.0)
    bench.tier.tier = Meanwhile(bench.tier.tier, happens)
    bench.crank()


def test_a_save_during_a_scan_is_kept() -> None:
    bench = Bench()
    scan_with(bench, lambda: bench.save(1))
    assert bench.lookup(1) is HIT
    assert bench.planner.used_bytes == CHUNK_BYTES
    bench.scan()
    bench.scan()
    assert bench.lookup(1) is HIT
    assert bench.planner.used_bytes == CHUNK_BYTES


def test_a_save_accepted_before_and_published_during_a_scan_is_kept() -> None:
    bench = Bench()
    ((chunk, _),) = bench.prepare(1)
    scan_with(bench, lambda: bench.write(chunk))
    assert bench.lookup(1) is HIT
    assert bench.planner.used_bytes == CHUNK_BYTES


def test_a_save_under_way_over_a_scan_is_kept() -> None:
    bench = Bench()
    ((chunk, _),) = bench.prepare(1)
    for _ in range(3):
        bench.scan()
    assert bench.planner.pending_saves == 1
    bench.write(chunk)
    assert bench.lookup(1) is HIT


def test_an_eviction_during_a_scan_is_not_undone() -> None:
    bench = Bench(capacity_bytes=4 * CHUNK_BYTES)
    for number in range(4):
        bench.save(number)

    def evict() -> None:
        assert bench.planner.prepare_save(names(9), "r") is None
        bench.chores._delete(key(0))  # done by the time the scan is adopted

    scan_with(bench, evict)
    assert bench.found(0) is MISS
    assert bench.planner.used_bytes == 3 * CHUNK_BYTES
    assert bench.planner._evicting_bytes == 0


def test_an_eviction_under_way_over_a_scan_is_not_undone() -> None:
    bench = Bench(capacity_bytes=4 * CHUNK_BYTES)
    for number in range(4):
        bench.save(number)
    scan_with(bench, lambda: bench.planner.prepare_save(names(9), "r"))
    entry = bench.entry(0)
    assert entry is not None
    assert entry.state is State.EVICTING
    assert bench.planner._evicting_bytes == CHUNK_BYTES
    bench.crank()
    assert bench.entry(0) is None
    assert bench.planner._evicting_bytes == 0


def test_a_failure_during_a_scan_is_not_undone() -> None:
    bench = Bench()
    bench.save(1)
    bench.crank()
    for _ in range(3):
        bench.scan()
    scan_with(bench, lambda: bench.load(1, fail=Reason.CORRUPT))
    assert bench.found(1) is MISS


def test_an_absence_found_during_a_scan_is_not_undone() -> None:
    bench = Bench()
    bench.save(1)
    for _ in range(3):
        bench.scan()

    def lose() -> None:
        bench.medium.shards.clear()
        bench.load(1, fail=Reason.ABSENT)

    scan_with(bench, lose)
    assert bench.found(1) is MISS
    assert bench.planner.used_bytes == 0


def test_a_pin_taken_during_a_scan_is_kept() -> None:
    bench = Bench()
    bench.save(1)
    for _ in range(3):
        bench.scan()
    scan_with(bench, lambda: bench.planner.prepare_load(names(1)))
    assert bench.pins == 1
    bench.planner.complete_load(names(1))
    assert bench.pins == 0


def test_a_change_between_the_start_of_a_scan_and_the_news_of_it_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    bench.save(1)
    for _ in range(3):
        bench.scan()
    take = bench.chores.take

    def take_just_before_a_scan() -> list[object]:
        answers = take()
        monkeypatch.setattr(bench.chores, "take", take)
        bench.chores.scan()
        return list(answers)

    monkeypatch.setattr(bench.chores, "take", take_just_before_a_scan)
    bench.planner.load_failed(key(1), Reason.ABSENT)  # it went while the scan was reading
    bench.medium.shards.clear()
    assert bench.found(1) is MISS
    assert bench.planner.used_bytes == 0


def test_a_chunk_found_by_a_probe_during_a_scan_is_kept() -> None:
    bench = Bench()

    def find() -> None:
        put(bench.medium, 1)
        assert bench.found(1) is HIT

    scan_with(bench, find)
    assert bench.lookup(1) is HIT
    assert bench.planner.used_bytes == CHUNK_BYTES


def test_a_chunk_deleted_by_somebody_is_noticed_by_a_scan_or_by_its_load() -> None:
    bench = Bench()
    bench.save(1, 2)
    bench.planner.events.clear()
    del bench.medium.shards[key(1), WHOLE]
    del bench.medium.shards[key(2), WHOLE]
    bench.load(1, fail=Reason.ABSENT)
    assert bench.planner.events == [(key(1), True)]
    assert bench.found(1) is MISS
    for _ in range(3):
        bench.scan()
    assert bench.found(2) is MISS
    assert bench.planner.used_bytes == 0
    assert bench.planner.events == [(key(1), True), (key(2), True)]


def test_a_deleted_chunk_that_is_being_loaded_is_let_go_when_the_load_is_over() -> None:
    bench = Bench()
    bench.save(1)
    bench.planner.prepare_load(names(1))
    bench.planner.events.clear()
    bench.medium.shards.clear()
    for _ in range(3):
        bench.scan()
    assert (bench.pins, bench.planner.events) == (1, [])
    bench.planner.complete_load(names(1))
    for _ in range(3):
        bench.scan()
    assert bench.planner.events == [(key(1), True)]
    assert bench.found(1) is MISS


def test_a_scan_counts_what_dead_writers_left() -> None:
    class Leftovers(Over):
        def sweep(self) -> int:
            return 3

    bench = Bench(tier=Leftovers(DictTier()))
    assert bench.count(metrics.SWEPT_TEMPORARIES) == 3


def test_scans_take_at_most_a_share_of_the_time() -> None:
    bench = Bench()
    assert bench.tier.calls["scan"] == 1
    bench.clock.advance(59.0)
    bench.crank()
    assert bench.tier.calls["scan"] == 1
    bench.clock.advance(1.5)
    bench.tier.tier = Meanwhile(bench.tier.tier, lambda: bench.clock.advance(30.0))
    bench.crank()
    assert bench.tier.calls["scan"] == 2
    bench.clock.advance(590.0)  # it took 30 s: the next one is 600 s away
    bench.crank()
    assert bench.tier.calls["scan"] == 2
    bench.clock.advance(20.0)
    bench.crank()
    assert bench.tier.calls["scan"] == 3


# --- two planners on one medium ----------------------------------------------------------


def test_two_planners_hit_each_others_chunks_at_once() -> None:
    medium = Medium()
    one, two = Bench(medium=medium), Bench(medium=medium)
    one.save(1)
    assert two.found(1) is HIT
    two.save(2)
    assert one.found(2) is HIT
    assert one.load(2) == [(key(2), 1)]
    assert two.prepare(1) == []


def test_two_planners_that_save_the_same_at_once_both_end_well() -> None:
    medium = Medium()
    one, two = Bench(medium=medium), Bench(medium=medium)
    for bench in (one, two):
        assert bench.prepare(1) == [(key(1), False)]
    for bench in (one, two):
        bench.write(key(1))
        assert bench.lookup(1) is HIT
    for bench in (one, two):
        bench.scan()
        assert bench.planner.used_bytes == CHUNK_BYTES == medium.used_bytes


def test_what_the_other_evicted_is_a_failed_load_and_then_a_miss() -> None:
    medium = Medium()
    one, two = Bench(medium=medium), Bench(medium=medium)
    one.save(1)
    assert two.found(1) is HIT
    one.tier.drop(key(1))
    assert two.lookup(1) is HIT
    two.load(1, fail=Reason.ABSENT)
    assert two.found(1) is MISS
    assert two.pins == 0


# --- gauges and events -------------------------------------------------------------------


def test_pending_saves_is_zero_exactly_when_all_is_published() -> None:
    bench = Bench(ranks=2)
    accepted = bench.prepare(1, 2, 3)
    assert bench.planner.pending_saves == 3
    assert bench.planner.has_pending_work()
    bench.write(accepted[0][0])
    assert bench.count(metrics.PENDING_SAVES) == 2
    for _ in range(2):
        bench.report(accepted[1][0], Reason.IO_ERROR)
    assert bench.planner.pending_saves == 1
    bench.write(accepted[2][0])
    assert bench.count(metrics.PENDING_SAVES) == 0
    assert not bench.planner.has_pending_work()


def test_the_engine_is_kept_stepping_for_saves_but_not_for_ever() -> None:
    bench = Bench()
    bench.clock.advance(3600.0)  # idle for an hour
    accepted = bench.prepare(1, 2)
    assert bench.planner.has_pending_work()
    bench.clock.advance(29.0)
    bench.write(accepted[0][0])
    bench.clock.advance(29.0)
    assert bench.planner.has_pending_work()
    bench.clock.advance(2.0)  # the medium hangs
    assert not bench.planner.has_pending_work()
    assert bench.planner.pending_saves == 1


def test_gauges_tell_the_room_and_stay_in_bounds() -> None:
    bench = Bench(capacity_bytes=4 * CHUNK_BYTES)
    for number in range(20):
        bench.save(number)
        bench.crank()
        counts = bench.counts()
        used = counts.get(("fxkv:used_bytes",), bench.planner.used_bytes)
        assert isinstance(used, int)
        assert 0 <= used <= 4 * CHUNK_BYTES
    assert bench.planner.used_bytes == bench.medium.used_bytes


def test_cpu_time_of_the_background_is_told_in_grains_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    bench.counts()
    told = []
    for seconds in (0.5, 0.5, 0.505, 0.75):
        monkeypatch.setattr(bench.chores, "cpu_seconds", lambda seconds=seconds: seconds)
        told.append(bench.count(metrics.THREAD_CPU_SECONDS))
    assert told == [0.5, 0, 0, 0.25]


def test_events_tell_what_happened_after_it_did() -> None:
    bench = Bench(capacity_bytes=3 * CHUNK_BYTES)
    ((chunk, _),) = bench.prepare(1)
    assert bench.planner.events == []
    bench.write(chunk)
    assert bench.planner.events == [(key(1), False)]
    bench.save(2, 3)
    bench.planner.events.clear()
    assert bench.planner.prepare_save(names(4), "r") is None
    assert bench.planner.events == [], "it is not gone yet"
    bench.crank()
    assert bench.planner.events == [(key(1), True)]
    ((chunk, _),) = bench.prepare(4)
    bench.report(chunk, Reason.IO_ERROR)
    assert bench.planner.events == [(key(1), True)], "a dropped save was never there"


def test_events_and_the_medium_agree_after_a_long_mix() -> None:
    bench = Bench(capacity_bytes=6 * CHUNK_BYTES)
    told: set[ChunkKey] = set()
    for step in range(200):
        number = (step * 7) % 23
        if bench.planner.prepare_save(names(number), "r") == [(key(number), False)]:
            bench.write(key(number))
        if step % 11 == 0:
            bench.medium.shards.pop((key((step * 5) % 23), Shard(0, 1)), None)
        if step % 3 == 0:
            bench.crank()
        if step % 13 == 0:
            bench.scan()
        for chunk, removed in bench.planner.events:
            (told.discard if removed else told.add)(chunk)
        bench.planner.events.clear()
    for _ in range(3):
        bench.scan()
    for chunk, removed in bench.planner.events:
        (told.discard if removed else told.add)(chunk)
    assert told == {chunk for chunk, _ in bench.medium.shards}


def test_events_nobody_wants_are_not_kept() -> None:
    bench = Bench(wants_events=False)
    bench.save(1, 2)
    bench.medium.shards.clear()
    bench.load(1, fail=Reason.ABSENT)
    for _ in range(3):
        bench.scan()
    assert bench.planner.events == []
    assert bench.planner.used_bytes == 0


# --- background threads ------------------------------------------------------------------


def test_threads_answer_by_themselves_and_end_when_closed() -> None:
    with Gated(DictTier(), shut=["find", "scan"]) as tier:
        bench = Bench(tier=tier, scanned=False)
        bench.chores.start()
        assert bench.lookup(1) is RETRY
        tier.wait_until("find")
        tier.wait_until("scan")
        assert bench.lookup(1) is RETRY, "never waits for the medium"
        assert bench.planner.prepare_save(names(1), "r") == []
        tier.open("find", "scan")
        assert bench.chores.scanned_once.wait(60.0)
        bench.planner.close()
    assert not any(thread.name.startswith("fxkv-") for thread in threading.enumerate())
    bench.planner.close()


def test_closing_does_not_wait_for_a_hung_medium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fx_kvbackend.store.chores._CLOSE_S", 0.01)
    with Gated(DictTier(), shut=["find"]) as tier:
        chores = Chores(tier)
        chores.start()
        chores.ask(key(1))
        tier.wait_until("find")
        chores.close()
        assert tier.waiting("find") == 1


def test_touches_queue_up_to_a_limit_and_deletions_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fx_kvbackend.store.chores._MAX_QUEUED_TOUCHES", 3)
    bench = Bench()
    bench.save(*range(5))
    bench.crank()
    calls = bench.tier.calls["touch"]
    for number in range(5):
        bench.chores.touch(key(number), 1)
    bench.chores.delete(key(0))
    bench.crank()
    assert bench.tier.calls["touch"] == calls + 3
    assert 0 not in bench.stored()


# --- imports -----------------------------------------------------------------------------


def test_a_planner_needs_neither_torch_nor_vllm() -> None:
    program = textwrap.dedent(
        """
        import sys
        for name in ("torch", "vllm", "lmcache", "kvikio"):
            sys.modules[name] = None  # importing it raises
        import fx_kvbackend.store.planner
        import fx_kvbackend.store.build
        import fx_kvbackend.store.mover
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_names_are_as_long_as_a_hosts() -> None:
    assert len(name(1)) == 36
