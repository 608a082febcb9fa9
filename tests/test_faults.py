"""The test doubles keep their own promises: a double that is broken makes a test blind."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from fx_kvbackend.core.format import Header
from fx_kvbackend.engines.buffers import aligned
from fx_kvbackend.errors import Bug, TierUnavailable
from fx_kvbackend.records import ChunkKey, Reason, Refusal, Shard
from fx_kvbackend.testing.contracts import ONE, TierContract, sealed, some_key, some_payload
from fx_kvbackend.testing.faults import VERBS, DictTier, Faulty, Gated, Medium, Over, Stored
from fx_kvbackend.tiers.base import Tier


class TestDictTier(TierContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        tier = DictTier()
        yield tier
        tier.close()

    def medium(self, tier: Tier) -> Medium:
        while isinstance(tier, Over):
            tier = tier.tier
        assert isinstance(tier, DictTier)
        return tier.medium

    def another(self, tier: Tier) -> Tier:
        return DictTier(self.medium(tier))

    def raw_read(self, tier: Tier, key: ChunkKey, shard: Shard) -> bytes | None:
        stored = self.medium(tier).shards.get((key, shard))
        return stored.data if stored else None

    def raw_write(self, tier: Tier, key: ChunkKey, shard: Shard, data: bytes) -> None:
        self.medium(tier).shards[key, shard] = Stored(data, 0.0)

    def place_foreign(self, tier: Tier) -> None:
        # A dict has no room for anything foreign but another namespace's manifest.
        self.medium(tier).manifests["ef" * 16] = {"not": "ours"}

    def foreign(self, tier: Tier) -> Any:
        return self.medium(tier).manifests["ef" * 16]


class TestFaultyWithoutFaults(TestDictTier):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        tier = Faulty(DictTier(), fail_ratios={"read": 0.0})
        yield tier
        tier.close()


class TestOpenGates(TestDictTier):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        with Gated(DictTier(), shut=VERBS) as tier:
            tier.open(*VERBS)
            yield tier
        tier.close()


def write(tier: Tier, number: int, *, overwrite: bool = False) -> Refusal | None:
    key = some_key(number)
    data = sealed(key, ONE, some_payload(number, 5000))
    return tier.write(key, ONE, data, overwrite=overwrite)


def read(tier: Tier, number: int) -> bytes | Reason:
    into = aligned(16384)
    header = tier.read(some_key(number), ONE, into)
    if isinstance(header, Refusal):
        return header.reason
    assert isinstance(header, Header)
    return bytes(into[header.header_bytes : header.header_bytes + header.payload_bytes])


# --- DictTier ----------------------------------------------------------------------------


def test_a_full_medium_refuses_and_keeps_what_it_has() -> None:
    tier = DictTier(Medium(total_bytes=20_000))
    assert write(tier, 1) is None
    refusal = write(tier, 2)
    assert refusal is not None
    assert refusal.reason is Reason.NO_SPACE
    assert read(tier, 1) == some_payload(1, 5000)
    assert write(tier, 1, overwrite=True) is None, "replacing needs no more room"
    assert tier.space().free_bytes == 20_000 - tier.medium.used_bytes == 20_000 - 12_288


def test_use_is_timed_by_the_clock_passed_in() -> None:
    times = iter([5.0, 7.0])
    tier = DictTier(clock=lambda: next(times))
    write(tier, 1)
    assert [found.used_s for found in tier.scan()] == [5.0]
    tier.touch(some_key(1), 1)
    assert [found.used_s for found in tier.scan()] == [7.0]


# --- Faulty ------------------------------------------------------------------------------


def test_chance_is_close_to_the_ratio_and_repeats_with_the_seed() -> None:
    def outcomes(seed: int) -> list[bool]:
        tier = Faulty(DictTier(), seed=seed, fail_ratios={"read": 0.3})
        write(tier, 1)
        return [isinstance(read(tier, 1), Reason) for _ in range(1000)]

    assert outcomes(1) == outcomes(1)
    assert outcomes(1) != outcomes(2)
    assert 250 < sum(outcomes(1)) < 350


def test_chance_fails_only_the_verbs_named_and_counts_them() -> None:
    tier = Faulty(DictTier(), fail_ratios={"read": 1.0}, reason=Reason.NO_FDS)
    assert write(tier, 1) is None
    assert read(tier, 1) is Reason.NO_FDS
    assert some_key(1) in tier.find([some_key(1)])
    assert tier.calls == Counter(write=1, read=1, find=1)
    assert tier.failed == Counter(read=1, write=0, find=0)


def test_a_script_hits_its_verb_its_key_and_its_times() -> None:
    tier = Faulty(DictTier())
    for number in (1, 2):
        write(tier, number)
    tier.fail("read", Reason.NO_FDS, key=some_key(1), times=2)
    assert read(tier, 2) == some_payload(2, 5000)
    assert read(tier, 1) is Reason.NO_FDS
    assert read(tier, 1) is Reason.NO_FDS
    assert read(tier, 1) == some_payload(1, 5000)


def test_a_failed_write_writes_nothing_and_a_lost_answer_does() -> None:
    tier = Faulty(DictTier())
    tier.fail("write", Reason.NO_SPACE)
    tier.fail("write", Reason.IO_ERROR, done_anyway=True)
    refusals = [write(tier, 1), write(tier, 2)]
    assert [refusal and refusal.reason for refusal in refusals] == [
        Reason.NO_SPACE,
        Reason.IO_ERROR,
    ]
    assert read(tier, 1) is Reason.ABSENT
    assert read(tier, 2) == some_payload(2, 5000)


def test_an_exception_of_the_script_is_raised() -> None:
    tier = Faulty(DictTier())
    tier.fail("read", ZeroDivisionError("here"))
    with pytest.raises(ZeroDivisionError, match="here"):
        read(tier, 1)
    assert read(tier, 1) is Reason.ABSENT


def test_every_verb_can_fail_as_its_promise_has_it() -> None:
    tier = Faulty(DictTier())
    write(tier, 1)
    for verb in VERBS:
        tier.fail(verb)
    key = some_key(1)
    assert read(tier, 1) is Reason.IO_ERROR
    assert isinstance(tier.stored_bytes(key, ONE), Refusal)
    assert write(tier, 2) is not None
    assert tier.find([key]) == {}
    tier.delete(key)
    tier.touch(key, 1)
    with pytest.raises(TierUnavailable):
        list(tier.scan())
    assert tier.sweep() == 0
    with pytest.raises(OSError, match="space"):
        tier.space()
    assert tier.failed == Counter(VERBS)
    assert [found.key for found in tier.scan()] == [key], "the failed delete deleted nothing"
    assert tier.space().free_bytes > 0


def test_damage_is_seen_by_verification_until_the_chunk_is_replaced() -> None:
    tier = Faulty(DictTier(), seed=3)
    for number in (1, 2):
        write(tier, number)
    tier.damage(some_key(1))
    for _ in range(200):  # each time another bit, of header or payload
        assert read(tier, 1) in (Reason.CORRUPT, Reason.MISMATCH, Reason.TRUNCATED)
    assert read(tier, 2) == some_payload(2, 5000)
    write(tier, 1)  # kept, because something of this length is there
    assert isinstance(read(tier, 1), Reason)
    write(tier, 1, overwrite=True)
    assert read(tier, 1) == some_payload(1, 5000)


def test_drop_deletes_beneath() -> None:
    tier = Faulty(DictTier())
    write(tier, 1)
    tier.drop(some_key(1))
    assert read(tier, 1) is Reason.ABSENT
    assert tier.calls["delete"] == 0


def test_a_lie_passes_for_the_truth() -> None:
    tier = Faulty(DictTier())
    for number in (1, 2):
        write(tier, number)
    tier.lie(some_key(1))
    told = read(tier, 1)
    assert isinstance(told, bytes)
    assert told != some_payload(1, 5000)
    assert read(tier, 2) == some_payload(2, 5000)
    tier.lie()
    assert read(tier, 2) != some_payload(2, 5000)


@pytest.mark.parametrize("verb", ["reed", "announce", ""])
def test_a_misspelt_verb_is_refused(verb: str) -> None:
    with pytest.raises(Bug):
        Faulty(DictTier(), fail_ratios={verb: 0.5})
    with pytest.raises(Bug):
        Faulty(DictTier()).fail(verb)
    with pytest.raises(Bug):
        Gated(DictTier(), shut=[verb])
    with pytest.raises(Bug):
        Gated(DictTier()).shut(verb)


# --- Gated -------------------------------------------------------------------------------


def test_a_call_waits_at_a_shut_gate_and_others_pass() -> None:
    with Gated(DictTier(), shut=["read"]) as tier:
        write(tier, 1)
        got: list[bytes | Reason] = []
        threads = [threading.Thread(target=lambda: got.append(read(tier, 1))) for _ in range(3)]
        for thread in threads:
            thread.start()
        tier.wait_until("read", 3)
        assert (got, tier.waiting("read"), tier.waiting("write")) == ([], 3, 0)
        tier.let_one_go("read")
        while not got:
            tier.wait_until("read", 0)
        assert tier.waiting("read") == 2
        tier.open("read")
        for thread in threads:
            thread.join()
        assert got == [some_payload(1, 5000)] * 3
        assert read(tier, 1) == some_payload(1, 5000)


def test_a_pass_given_before_the_call_is_kept_for_it() -> None:
    with Gated(DictTier(), shut=["find"]) as tier:
        tier.let_one_go("find")
        assert tier.find([]) == {}
        waiter = threading.Thread(target=tier.find, args=([],))
        waiter.start()
        tier.wait_until("find")
        assert waiter.is_alive()
    waiter.join()


def test_wait_until_gives_up() -> None:
    with pytest.raises(TimeoutError, match="0 calls of read came, not 1"):
        Gated(DictTier(), shut=["read"]).wait_until("read", timeout_s=0.0)
