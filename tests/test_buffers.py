"""Staging memory: aligned, leased one slot at a time, with some kept back for loads."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fx_kvbackend.engines.buffers import Arena, aligned
from fx_kvbackend.errors import Bug


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@pytest.mark.parametrize("n_bytes", [1, 4096, 5000, 1 << 20])
def test_memory_starts_on_a_page(n_bytes: int) -> None:
    memory = aligned(n_bytes)
    assert address_of(memory) % 4096 == 0
    assert len(memory) == n_bytes
    assert bytes(memory) == bytes(n_bytes)


def test_every_slot_starts_on_a_page_and_none_overlap() -> None:
    arena = Arena(8192, 5, reserved=1)
    slots = [arena.lease_for_load(lambda: True) for _ in range(5)]
    starts = sorted(address_of(slot.buffer) for slot in slots if slot)
    assert all(start % 4096 == 0 for start in starts)
    assert [start - starts[0] for start in starts] == [0, 8192, 16384, 24576, 32768]
    assert {len(slot.buffer) for slot in slots if slot} == {8192}


def test_saves_leave_the_reserve_to_loads() -> None:
    arena = Arena(4096, 4, reserved=2)
    saves = [arena.lease_for_save() for _ in range(4)]
    assert [slot is not None for slot in saves] == [True, True, False, False]
    loads = [arena.lease_for_load(lambda: True) for _ in range(3)]
    assert [slot is not None for slot in loads] == [True, True, False]
    assert arena.free_count == 0
    for slot in (*saves, *loads):
        if slot:
            slot.release()
    assert arena.free_count == 4


def test_loads_that_hang_leave_the_rest_to_saves() -> None:
    arena = Arena(4096, 4, reserved=2)
    loads = [arena.lease_for_load(lambda: True) for _ in range(2)]
    saves = [arena.lease_for_save() for _ in range(3)]
    assert [slot is not None for slot in saves] == [True, True, False]
    for slot in (*saves, *loads):
        if slot:
            slot.release()
    assert [arena.lease_for_save() is not None for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(("count", "reserved"), [(1, 1), (4, 4), (4, 5), (4, -1), (0, 0)])
def test_an_arena_that_never_lets_a_save_in_is_a_bug(count: int, reserved: int) -> None:
    with pytest.raises(Bug, match="slots reserved"):
        Arena(4096, count, reserved)


def test_a_slot_comes_back_once() -> None:
    arena = Arena(4096, 2, reserved=0)
    with arena.lease_for_load(lambda: True) or pytest.fail("no slot") as slot:
        slot.release()
        slot.release()
    assert arena.free_count == 2
    first, second = (arena.lease_for_load(lambda: True) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.number != second.number


def test_the_slot_used_last_is_used_next() -> None:
    """A quiet arena touches little memory."""
    arena = Arena(4096, 8, reserved=0)
    seen = set()
    for _ in range(10):
        with arena.lease_for_load(lambda: True) or pytest.fail("no slot") as slot:
            seen.add(slot.number)
    assert len(seen) == 1


def test_a_load_waits_for_a_slot_and_a_save_does_not() -> None:
    arena = Arena(4096, 1, reserved=0)
    held = arena.lease_for_save()
    assert held is not None
    assert arena.lease_for_save() is None
    waiting = threading.Event()

    def asked() -> bool:
        waiting.set()
        return False

    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(arena.lease_for_load, asked)
        assert waiting.wait(10)
        held.release()
        assert load.result(10) is not None


def test_a_load_gives_up_when_its_job_has_ended() -> None:
    arena = Arena(4096, 1, reserved=0)
    held = arena.lease_for_save()
    ended, waiting = threading.Event(), threading.Event()

    def asked() -> bool:
        waiting.set()
        return ended.is_set()

    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(arena.lease_for_load, asked)
        assert waiting.wait(10)
        ended.set()
        assert load.result(10) is None
    assert held is not None
    held.release()
    assert arena.free_count == 1


def test_no_slot_is_leased_twice_and_none_is_lost() -> None:
    arena = Arena(4096, 6, reserved=2)
    out: set[int] = set()
    guard = threading.Lock()

    def use(number: int) -> int:
        taken = 0
        for _ in range(200):
            slot = arena.lease_for_load(lambda: False) if number % 2 else arena.lease_for_save()
            if slot is None:
                continue
            with guard:
                assert slot.number not in out
                out.add(slot.number)
            slot.buffer[0] = number
            assert slot.buffer[0] == number
            with guard:
                out.remove(slot.number)
            slot.release()
            taken += 1
        return taken

    with ThreadPoolExecutor(12) as pool:
        taken = list(pool.map(use, range(12)))
    assert taken[1::2] == [200] * 6, "a load always gets one"
    assert arena.free_count == 6
