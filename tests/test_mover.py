"""Mover: the right bytes in the right blocks, every job ends once, and nothing ever waits.

Real threads over test doubles: a gate, not a sleep, decides what happens first.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from fx_kvbackend.core import format as chunkfile
from fx_kvbackend.core.geometry import Geometry, Page, Run
from fx_kvbackend.engines.buffers import aligned
from fx_kvbackend.errors import ConfigError
from fx_kvbackend.records import (
    ChunkKey,
    JobDone,
    LoadChunk,
    LoadFailure,
    Reason,
    SaveChunk,
    SaveReport,
    Shard,
)
from fx_kvbackend.store import mover as mover_module
from fx_kvbackend.store.mover import Mover, MoverSettings
from fx_kvbackend.testing.faults import DictTier, Faulty, Gated, Medium, Stored
from fx_kvbackend.tiers.base import Tier
from tests.rig import WHOLE, ArrayPages, Clock, geometry, key, kv_bytes

BLOCKS = 64
SMALL = {0: geometry([64, 96, 32], blocks=4), 1: geometry([128], group=1, blocks=2)}
"""Two KV groups: three layers with four blocks per chunk, one layer with two."""


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("fxkv-")]
    assert left == []


@pytest.fixture
def build() -> Iterator[Callable[..., Mover]]:
    """Makes movers, and closes them when the test ends."""
    movers = []

    def one(
        tier: Tier,
        pages: Any,
        geometries: Mapping[int, Geometry] = SMALL,
        *,
        shard: Shard = WHOLE,
        slots: int = 8,
        read_threads: int = 2,
        write_threads: int = 2,
        deadline_s: float = 1000.0,
        **settings: Any,
    ) -> Mover:
        slot_bytes = max(g.payload_bytes for g in geometries.values()) // 4096 * 4096 + 8192
        mover = Mover(
            tier,
            pages,
            geometries,
            MoverSettings(
                shard=shard,
                writes=settings.pop("writes", True),
                staging_bytes=slots * slot_bytes,
                load_deadline_s=deadline_s,
                read_threads=read_threads,
                write_threads=write_threads,
            ),
            **settings,
        )
        assert mover.arena.slot_count == slots
        movers.append(mover)
        return mover

    yield one
    for mover in movers:
        mover.close()


class Held(ArrayPages):
    """Pages whose copies wait, or fail, when the test wants it."""

    def __init__(self, geometries: Mapping[int, Geometry] = SMALL) -> None:
        super().__init__(geometries, BLOCKS)
        self.go = threading.Event()
        self.go.set()
        self.inside = threading.Semaphore(0)
        """Released once by each copy that begins."""
        self.fault: Exception | None = None
        self.log: list[str] = []

    def _enter(self, what: str) -> None:
        self.inside.release()
        self.go.wait()
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        self.log.append(what)

    def gather(self, group: int, block_ids: Sequence[int], out: memoryview, after: Any) -> None:
        self._enter("gather")
        super().gather(group, block_ids, out, after)

    def scatter(
        self, group: int, block_ids: Sequence[int], payload: memoryview, after: Any = None
    ) -> None:
        self._enter("scatter")
        super().scatter(group, block_ids, payload, after)


def filled(geometries: Mapping[int, Geometry] = SMALL) -> Held:
    """Pages that hold something else in every block."""
    pages = Held(geometries)
    for group, geo in geometries.items():
        for block in range(BLOCKS):
            pages.fill(group, block, kv_bytes((group, block), geo.block_bytes))
    return pages


def snapshot(pages: ArrayPages) -> dict[tuple[int, int], bytes]:
    return {(g, b): pages.block(g, b) for g in pages.layers for b in range(BLOCKS)}


def patiently() -> Iterator[None]:
    """Turns of a loop that waits for another thread; only a hang makes them end."""
    pause, give_up_s = threading.Event(), time.monotonic() + 60.0
    while time.monotonic() < give_up_s:
        yield
        pause.wait(0.0005)
    raise TimeoutError("it did not come about within a minute")


def until(mover: Mover, so: Callable[[], bool]) -> None:
    """Return when something has come about on another thread."""
    for _ in patiently():
        with mover._lock:
            if so():
                return


def finish(mover: Mover, count: int) -> dict[int, JobDone]:
    """The ends of the next `count` jobs, each of which ends once."""
    done: dict[int, JobDone] = {}
    for _ in patiently():
        for one in mover.poll():
            assert one.job_id not in done
            done[one.job_id] = one
        if len(done) >= count:
            break
    assert len(done) == count
    return done


def reports(mover: Mover, count: int) -> list[SaveReport]:
    """The next `count` last words on saves."""
    out: list[SaveReport] = []
    for _ in patiently():
        out += mover.take_reports()
        if len(out) >= count:
            break
    assert len(out) == count
    return out


def save(mover: Mover, *chunks: SaveChunk, job_id: int = 1) -> list[Reason | None]:
    """Save chunks and wait until all are published or dropped; the reasons, in order."""
    mover.submit_save(job_id, chunks)
    finish(mover, 1)
    reasons = {report.key: report.reason for report in reports(mover, len(chunks))}
    return [reasons[chunk.key] for chunk in chunks]


def load(mover: Mover, *chunks: LoadChunk, job_id: int = 2) -> JobDone:
    mover.submit_load(job_id, chunks)
    return finish(mover, 1)[job_id]


def to_save(number: int, *blocks: int, group: int = 0, overwrite: bool = False) -> SaveChunk:
    return SaveChunk(key(number), group, blocks, overwrite)


def to_load(number: int, *blocks: int, group: int = 0, first: int = 0, of: int = 1) -> LoadChunk:
    return LoadChunk(key(number), group, first, blocks, of)


def failed(number: int, reason: Reason, *blocks: int) -> LoadFailure:
    return LoadFailure(key(number), blocks, reason)


# --- round trips -------------------------------------------------------------------------


def torch_layers(torch: Any, row_bytes: int) -> dict[int, list[tuple[Any, int]]]:
    """Layers whose rows are longer than their pages, with random bytes everywhere."""
    dice = torch.Generator().manual_seed(1)
    return {
        group: [
            (
                torch.randint(0, 256, (BLOCKS, row_bytes), dtype=torch.uint8, generator=dice),
                page.page_bytes,
            )
            for page in geo.pages
        ]
        for group, geo in SMALL.items()
    }


@pytest.mark.parametrize("kind", ["HostPages", "DevicePages"])
def test_round_trip_through_tensors(build: Callable[..., Mover], kind: str) -> None:
    torch = pytest.importorskip("torch")
    from fx_kvbackend.engines import pages as engine_pages

    layers = torch_layers(torch, 160)
    before = {g: [tensor.clone() for tensor, _ in rows] for g, rows in layers.items()}
    medium = Medium()
    mover = build(DictTier(medium), getattr(engine_pages, kind)(layers))
    assert (
        save(
            mover,
            to_save(1, 3, 9, 0, 63),
            to_save(2, 5, 6, 7, 8),
            to_save(3, 1, 2, group=1),
        )
        == [None] * 3
    )
    for rows in layers.values():
        for tensor, _ in rows:
            tensor.fill_(0xEE)
    done = load(
        mover,
        to_load(1, 40, 41, 42, 43),
        to_load(2, 21, 20, first=2),  # the first two blocks are in the engine already
        to_load(3, 30, group=1),  # the last one is not wanted
    )
    assert done.failures == ()
    moves = {0: {40: 3, 41: 9, 42: 0, 43: 63, 21: 7, 20: 8}, 1: {30: 1}}
    for group, rows in layers.items():
        for layer, (tensor, size) in enumerate(rows):
            for block in range(BLOCKS):
                source = moves[group].get(block)
                expected = torch.full((160,), 0xEE, dtype=torch.uint8)
                if source is not None:
                    expected[:size] = before[group][layer][source, :size]
                assert torch.equal(tensor[block], expected), (group, layer, block)


def test_both_kinds_of_pages_store_the_same_bytes(build: Callable[..., Mover]) -> None:
    torch = pytest.importorskip("torch")
    from fx_kvbackend.engines.pages import DevicePages, HostPages

    stored = []
    for kind in (HostPages, DevicePages):
        medium = Medium()
        mover = build(DictTier(medium), kind(torch_layers(torch, 128)))
        assert save(mover, to_save(1, 3, 9, 0, 63), to_save(2, 7, 7, group=1)) == [None] * 2
        stored.append({at: shard.data for at, shard in medium.shards.items()})
    assert stored[0] == stored[1]
    assert len(stored[0]) == 2


def test_every_block_gets_its_own_bytes_and_no_other_is_touched(
    build: Callable[..., Mover],
) -> None:
    pages = filled()
    mover = build(DictTier(), pages)
    before = snapshot(pages)
    assert save(mover, to_save(1, 3, 1, 4, 1), to_save(2, 5, 9, group=1)) == [None] * 2
    assert snapshot(pages) == before
    load(mover, to_load(1, 10, 11, 12, 13), to_load(2, 20, group=1, first=1))
    moved = {(0, 10): (0, 3), (0, 11): (0, 1), (0, 12): (0, 4), (0, 13): (0, 1), (1, 20): (1, 9)}
    assert snapshot(pages) == {**before, **{to: before[source] for to, source in moved.items()}}


# --- other rank counts -------------------------------------------------------------------

HEADS = 4


def heads(shard: Shard, *, layers: int = 3, blocks: int = 3, head_bytes: int = 48) -> Geometry:
    """A rank's share of pages of K and V, [2][heads][bytes]: a piece of each."""
    size = HEADS * head_bytes // shard.count
    half = HEADS * head_bytes
    page = Page(2 * size, 2 * half, (Run(0, shard.index * size, size, 2, size, half),))
    return Geometry(0, blocks, (page,) * layers)


def ranks(count: int) -> list[Shard]:
    return [Shard(index, count) for index in range(count)]


def canonical(shares: Sequence[bytes], layers: int) -> bytes:
    """What one rank would hold of a block of which these are the shares of all ranks."""
    out = b""
    size = len(shares[0]) // layers
    for layer in range(layers):
        pages = [share[layer * size : (layer + 1) * size] for share in shares]
        out += b"".join(page[: size // 2] for page in pages)
        out += b"".join(page[size // 2 :] for page in pages)
    return out


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("reading", [1, 2, 4])
@pytest.mark.parametrize("stored", [1, 2, 4])
def test_any_rank_count_reads_what_another_one_stored(
    build: Callable[..., Mover], stored: int, reading: int, first: int
) -> None:
    medium = Medium()
    wrote: list[list[bytes]] = []
    for shard in ranks(stored):
        geometries = {0: heads(shard)}
        pages = Held(geometries)
        for block in range(3):
            pages.fill(0, block, kv_bytes((shard, block), geometries[0].block_bytes))
        wrote.append([pages.block(0, block) for block in range(3)])
        writer = build(DictTier(medium), pages, geometries, shard=shard)
        assert save(writer, to_save(1, 0, 1, 2)) == [None]
    got: list[list[bytes]] = []
    for shard in ranks(reading):
        geometries = {0: heads(shard)}
        pages = Held(geometries)
        mover = build(DictTier(medium), pages, geometries, shard=shard)
        blocks = tuple(range(10, 13 - first))
        done = load(mover, to_load(1, *blocks, first=first, of=stored))
        assert done.failures == ()
        assert done.moved_bytes == len(blocks) * geometries[0].block_bytes
        got.append([pages.block(0, block) for block in blocks])
        assert not any(any(pages.block(0, b)) for b in range(BLOCKS) if b not in blocks)
    for block in range(3 - first):
        wanted = canonical([shares[first + block] for shares in wrote], layers=3)
        assert canonical([shares[block] for shares in got], layers=3) == wanted


@pytest.mark.parametrize(
    "theirs",
    [
        pytest.param([Geometry(0, 3, (Page(192),) * 3)] * 2, id="not canonical"),
        pytest.param([heads(s, head_bytes=64) for s in ranks(2)], id="another page size"),
        pytest.param([heads(s, layers=2) for s in ranks(2)], id="fewer layers"),
        pytest.param([heads(s, blocks=2) for s in ranks(2)], id="fewer blocks"),
        pytest.param([heads(s) for s in ranks(4)][:2], id="shares that leave a hole"),
        pytest.param([Geometry(1, 3, heads(s).pages) for s in ranks(2)], id="another group"),
    ],
)
def test_shards_that_do_not_make_up_our_pages_are_a_mismatch(
    build: Callable[..., Mover], theirs: list[Geometry]
) -> None:
    medium = Medium()
    for shard, geo in zip(ranks(2), theirs, strict=True):
        writer = build(DictTier(medium), Held({geo.group: geo}), {geo.group: geo}, shard=shard)
        blocks = tuple(range(geo.blocks))
        assert save(writer, SaveChunk(key(1), geo.group, blocks)) == [None]
    ours = {0: heads(WHOLE)}
    done = load(build(DictTier(medium), Held(ours), ours), to_load(1, 1, 2, 3, of=2))
    assert done.failures == (failed(1, Reason.MISMATCH, 1, 2, 3),)


def test_a_missing_shard_of_another_rank_count_is_absent(build: Callable[..., Mover]) -> None:
    medium = Medium()
    for shard in ranks(2):
        geometries = {0: heads(shard)}
        writer = build(DictTier(medium), Held(geometries), geometries, shard=shard)
        save(writer, to_save(1, 0, 1, 2))
    del medium.shards[key(1), Shard(1, 2)]
    ours = {0: heads(WHOLE)}
    done = load(build(DictTier(medium), Held(ours), ours), to_load(1, 1, 2, 3, of=2))
    assert done.failures == (failed(1, Reason.ABSENT, 1, 2, 3),)


def test_each_rank_writes_its_own_shard(build: Callable[..., Mover]) -> None:
    medium = Medium()
    for shard in ranks(4):
        geometries = {0: heads(shard)}
        mover = build(DictTier(medium), Held(geometries), geometries, shard=shard)
        mover.submit_save(1, [to_save(1, 0, 1, 2)])
        (report,) = reports(mover, 1)
        assert report.shard_count == 4
        assert report.stored_bytes == len(medium.shards[key(1), shard].data)
    assert medium.shards.keys() == {(key(1), shard) for shard in ranks(4)}


def test_copies_are_ordered_behind_the_compute_issued_before_their_job(
    build: Callable[..., Mover],
) -> None:
    seen: list[tuple[str, int]] = []

    class Marked(ArrayPages):
        now = 0

        def mark(self) -> int:
            return self.now

        def gather(self, *args: Any) -> None:
            seen.append(("gather", args[-1]))
            super().gather(*args)

        def scatter(self, *args: Any, after: Any = None) -> None:
            seen.append(("scatter", after))
            super().scatter(*args)

        def scatter_pieces(self, *args: Any, after: Any = None) -> None:
            seen.append(("pieces", after))
            super().scatter_pieces(*args)

    medium = Medium()
    for shard in (WHOLE, Shard(0, 2)):
        geometries = {0: heads(shard)}
        pages = Marked(geometries, BLOCKS)
        mover = build(DictTier(medium), pages, geometries, shard=shard, start=False)
        pages.now = 1
        mover.submit_save(1, [to_save(1, 0, 1, 2)])
        pages.now = 2
        assert mover.run_copy()
        assert mover.run_write()
        mover.submit_load(2, [to_load(1, 3, 4, 5, of=shard.count)])
        mover.submit_load(3, [to_load(1, 3, 4, 5, of=1)])
        pages.now = 3
        assert mover.run_load()
        assert mover.run_load()
    first, second = seen[:3], seen[3:]
    assert first == [("gather", 1), ("scatter", 2), ("scatter", 2)]
    assert second == [("gather", 1), ("scatter", 2), ("pieces", 2)]


# --- staging -----------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [2, 3, 16])
def test_few_slots_stall_nothing_and_change_nothing(
    build: Callable[..., Mover], slots: int
) -> None:
    pages = filled()
    mover = build(DictTier(), pages, slots=slots, read_threads=4, write_threads=3)
    for job in range(60):
        first = (job * 5) % (BLOCKS - 4)
        mover.submit_save(job, [to_save(job, *range(first, first + 4))])
    finish(mover, 60)
    assert [report.reason for report in reports(mover, 60)] == [None] * 60
    before = snapshot(pages)
    expected = dict(before)
    for job in range(15):  # each into blocks of its own, several at once
        mover.submit_load(100 + job, [to_load(job, *range(4 * job, 4 * job + 4))])
        for block in range(4):
            expected[0, 4 * job + block] = before[0, (job * 5) % (BLOCKS - 4) + block]
    assert all(done.failures == () for done in finish(mover, 15).values())
    assert snapshot(pages) == expected
    assert mover.arena.free_count == slots


def test_a_job_larger_than_the_staging_goes_through(build: Callable[..., Mover]) -> None:
    pages = filled()
    mover = build(DictTier(), pages, slots=2)
    chunks = [to_save(n, *range(4 * n, 4 * n + 4)) for n in range(16)]
    assert save(mover, *chunks) == [None] * 16
    before = snapshot(pages)
    back = [to_load(n, *range(60 - 4 * n, 64 - 4 * n)) for n in range(16)]
    assert load(mover, *back).failures == ()
    for n in range(16):
        for i in range(4):
            assert pages.block(0, 60 - 4 * n + i) == before[0, 4 * n + i]


def test_staging_that_cannot_hold_two_chunks_is_refused_in_numbers() -> None:
    slot_bytes = 8192
    for staging_bytes in (0, slot_bytes, 2 * slot_bytes - 1):
        settings = MoverSettings(WHOLE, True, staging_bytes, 30.0, 1, 1)
        with pytest.raises(ConfigError, match=f"staging: {staging_bytes}.*{2 * slot_bytes}"):
            Mover(DictTier(), Held(), SMALL, settings)


def test_a_backlog_of_saves_on_a_slow_medium_never_keeps_a_load_from_starting(
    build: Callable[..., Mover],
) -> None:
    pages = filled()
    with Gated(DictTier()) as tier:
        mover = build(tier, pages, slots=4, read_threads=2, write_threads=4)
        save(mover, to_save(0, 0, 1, 2, 3))
        tier.shut("write")
        mover.submit_save(10, [to_save(n, 0, 1, 2, 3) for n in range(1, 100)])
        tier.wait_until("write", 2)  # two of four slots, the rest is for loads
        assert load(mover, to_load(0, 4, 5, 6, 7)).failures == ()
        assert mover.arena.free_count == 2
        tier.open("write")
        finish(mover, 1)
        reports(mover, 99)
        assert mover.arena.free_count == 4


def test_chunks_of_one_request_are_read_in_parallel(build: Callable[..., Mover]) -> None:
    with Gated(DictTier(), shut=["read"]) as tier:
        mover = build(tier, filled(), read_threads=4)
        save(mover, *[to_save(n, 0, 1, 2, 3) for n in range(4)])
        mover.submit_load(5, [to_load(n, 4, 5, 6, 7) for n in range(4)])
        tier.wait_until("read", 4)
        tier.open("read")
        finish(mover, 1)


# --- released, published, waited for -----------------------------------------------------


def test_a_save_is_released_before_it_is_published(build: Callable[..., Mover]) -> None:
    pages = filled()
    with Gated(DictTier(), shut=["write"]) as tier:
        mover = build(tier, pages)
        mover.submit_save(1, [to_save(1, 0, 1, 2, 3), to_save(2, 4, 5, group=1)])
        done = finish(mover, 1)[1]
        assert (done.is_load, done.failures) == (False, ())
        assert mover.take_reports() == []
        before = snapshot(pages)
        for block in range(8):  # the engine reuses the blocks at once
            for group in (0, 1):
                pages.fill(group, block, bytes(SMALL[group].block_bytes))
        tier.open("write")
        assert [report.reason for report in reports(mover, 2)] == [None, None]
        load(mover, to_load(1, 0, 1, 2, 3), to_load(2, 4, 5, group=1))
        for at in ((0, 0), (0, 3), (1, 4), (1, 5)):
            assert pages.block(*at) == before[at]


def test_wait_drops_what_has_no_slot_and_never_waits_for_the_medium(
    build: Callable[..., Mover],
) -> None:
    pages = filled()
    medium = Medium()
    with Gated(DictTier(medium), shut=["write"]) as tier:
        mover = build(tier, pages, slots=2)
        mover.submit_save(1, [to_save(1, 0, 1, 2, 3)])
        tier.wait_until("write")
        finish(mover, 1)
        mover.submit_save(2, [to_save(n, 4, 5, 6, 7) for n in (20, 21, 22)])
        mover.submit_save(3, [to_save(n, 8, 9, 10, 11) for n in (30, 31)])
        mover.wait({2})
        assert set(finish(mover, 1)) == {2}, "3 was not waited for, so it keeps its place"
        assert [(r.key, r.reason, r.stored_bytes) for r in reports(mover, 3)] == [
            (key(n), Reason.STAGING, 0) for n in (20, 21, 22)
        ]
        before = snapshot(pages)
        for block in range(8):
            pages.fill(0, block, bytes(SMALL[0].block_bytes))
        tier.open("write")
        assert set(finish(mover, 1)) == {3}
        assert [report.reason for report in reports(mover, 3)] == [None] * 3
        assert {chunk for chunk, _ in medium.shards} == {key(n) for n in (1, 30, 31)}
        load(mover, to_load(1, 40, 41, 42, 43), to_load(30, 44, 45, 46, 47))
        assert [pages.block(0, b) for b in range(40, 44)] == [before[0, b] for b in range(4)]
        assert [pages.block(0, b) for b in range(44, 48)] == [before[0, b] for b in range(8, 12)]


def test_what_is_waited_for_goes_before_what_is_not_and_is_saved_when_there_is_a_slot(
    build: Callable[..., Mover],
) -> None:
    pages = filled()
    pages.go.clear()
    mover = build(DictTier(), pages, slots=6, write_threads=1, read_threads=1)
    mover.submit_save(1, [to_save(1, 0, 1, 2, 3)])
    pages.inside.acquire()  # the copying thread is busy with job 1
    mover.submit_save(2, [to_save(2, 4, 5, 6, 7)])
    mover.submit_save(3, [to_save(3, 8, 9, 10, 11)])
    waiter = threading.Thread(target=mover.wait, args=([3],))
    waiter.start()
    until(mover, lambda: bool(mover._urgent))
    pages.go.set()
    waiter.join()
    order = [done.job_id for done in finish(mover, 3).values()]
    assert order == [1, 3, 2]
    assert [report.reason for report in reports(mover, 3)] == [None] * 3


def test_wait_returns_only_when_the_blocks_are_left_alone(build: Callable[..., Mover]) -> None:
    pages = filled()
    pages.go.clear()
    mover = build(DictTier(), pages)
    mover.submit_save(1, [to_save(1, 0, 1, 2, 3)])
    pages.inside.acquire()

    def wait() -> None:
        mover.wait({1})
        pages.log.append("waited")

    waiter = threading.Thread(target=wait)
    waiter.start()
    until(mover, lambda: mover._saves[1].waited_for)
    pages.go.set()
    waiter.join()
    assert pages.log == ["gather", "waited"]
    assert reports(mover, 1)[0].reason is None


def test_wait_for_what_is_over_or_unknown_returns_at_once(build: Callable[..., Mover]) -> None:
    mover = build(DictTier(), filled())
    save(mover, to_save(1, 0, 1, 2, 3), job_id=1)
    mover.wait({1, 2, 99})
    mover.wait([])
    assert mover.poll() == []


def test_wait_takes_any_iterable_and_ends_saves_and_loads(build: Callable[..., Mover]) -> None:
    with Gated(DictTier(), shut=["write", "read"]) as tier:
        mover = build(tier, filled(), slots=2)
        mover.submit_save(1, [to_save(1, 0, 1, 2, 3), to_save(2, 0, 1, 2, 3)])
        mover.submit_load(2, [to_load(9, 4, 5, 6, 7)])
        mover.wait(job for job in (2, 1))
        assert {done.job_id for done in mover.poll()} == {1, 2}


# --- deadlines and the gate --------------------------------------------------------------


def test_a_load_ends_at_its_deadline_and_late_bytes_do_not_land(
    build: Callable[..., Mover],
) -> None:
    pages, clock = filled(), Clock()
    with Gated(DictTier()) as tier:
        mover = build(tier, pages, deadline_s=30.0, clock=clock, read_threads=1)
        save(mover, to_save(1, 0, 1, 2, 3), to_save(2, 4, 5, 6, 7))
        tier.shut("read")
        mover.submit_load(7, [to_load(1, 10, 11, 12, 13), to_load(2, 14, 15, 16, 17)])
        tier.wait_until("read")
        clock.advance(29.9)
        assert mover.poll() == []
        clock.advance(0.2)
        (done,) = mover.poll()
        assert done.failures == (
            failed(1, Reason.DEADLINE, 10, 11, 12, 13),
            failed(2, Reason.DEADLINE, 14, 15, 16, 17),
        )
        assert done.moved_bytes == 0
        assert done.duration_s == pytest.approx(30.1)
        before = snapshot(pages)  # the engine has given these blocks to others
        tier.open("read")
        after = load(mover, to_load(1, 20, 21, 22, 23), job_id=8)  # behind it in the one thread
        assert after.failures == ()
        moved = {(0, 20 + i): before[0, i] for i in range(4)}
        assert snapshot(pages) == {**before, **moved}
        assert mover.poll() == []
        assert mover.arena.free_count == mover.arena.slot_count


def test_what_arrived_in_time_counts_when_the_rest_is_late(build: Callable[..., Mover]) -> None:
    pages, clock = filled(), Clock()
    with Gated(DictTier()) as tier:
        mover = build(tier, pages, deadline_s=30.0, clock=clock, read_threads=1)
        save(mover, to_save(1, 0, 1, 2, 3), to_save(2, 4, 5, 6, 7))
        tier.shut("read")
        mover.submit_load(7, [to_load(1, 10, 11, 12, 13), to_load(2, 14, 15, 16, 17)])
        tier.wait_until("read")
        tier.let_one_go("read")
        until(mover, lambda: bool(mover._loads[7].arrived))
        tier.wait_until("read")
        clock.advance(31.0)
        (done,) = mover.poll()
        assert done.failures == (failed(2, Reason.DEADLINE, 14, 15, 16, 17),)
        assert done.moved_bytes == 4 * SMALL[0].block_bytes
        assert [pages.block(0, 10 + i) for i in range(4)] == [pages.block(0, i) for i in range(4)]


@pytest.mark.parametrize("end", ["deadline", "wait", "close"])
def test_a_job_does_not_end_while_bytes_are_landing(build: Callable[..., Mover], end: str) -> None:
    pages, clock = filled(), Clock()
    mover = build(DictTier(), pages, deadline_s=30.0, clock=clock)
    save(mover, to_save(1, 0, 1, 2, 3))
    pages.log.clear()
    pages.inside.acquire()
    pages.go.clear()
    mover.submit_load(7, [to_load(1, 10, 11, 12, 13)])
    pages.inside.acquire()
    clock.advance(31.0)
    job = mover._loads[7]
    done: list[JobDone] = []

    def end_it() -> None:
        if end == "wait":
            mover.wait({7})
        elif end == "close":
            mover.close()
        done.extend(mover.poll())
        pages.log.append("ended")

    ender = threading.Thread(target=end_it)
    ender.start()
    until(mover, lambda: job.closed)
    pages.go.set()
    ender.join()
    assert pages.log == ["scatter", "ended"]
    assert [one.job_id for one in done] == [7]
    reason = Reason.DEADLINE if end == "deadline" else Reason.CANCELLED
    assert done[0].failures == (failed(1, reason, 10, 11, 12, 13),)


def test_a_load_that_is_waited_for_ends_failed_and_its_bytes_do_not_land(
    build: Callable[..., Mover],
) -> None:
    pages = filled()
    with Gated(DictTier()) as tier:
        mover = build(tier, pages, read_threads=1)
        save(mover, to_save(1, 0, 1, 2, 3))
        tier.shut("read")
        mover.submit_load(7, [to_load(1, 10, 11, 12, 13)])
        tier.wait_until("read")
        mover.wait({7})
        assert finish(mover, 1)[7].failures == (failed(1, Reason.CANCELLED, 10, 11, 12, 13),)
        before = snapshot(pages)
        tier.open("read")
        load(mover, to_load(1, 20, 21, 22, 23), job_id=8)
        assert [pages.block(0, b) for b in range(10, 14)] == [before[0, b] for b in range(10, 14)]


def test_a_load_waiting_for_a_slot_gives_up_when_its_job_ends(build: Callable[..., Mover]) -> None:
    clock = Clock()
    with Gated(DictTier(), shut=["read"]) as tier:
        mover = build(tier, filled(), deadline_s=30.0, clock=clock, slots=2, read_threads=3)
        mover.submit_load(1, [to_load(n, 0, 1, 2, 3) for n in range(3)])
        tier.wait_until("read", 2)
        clock.advance(31.0)
        assert len(mover.poll()) == 1
        tier.open("read")
        done = load(mover, to_load(5, 0, 1, 2, 3))
        assert done.failures == (failed(5, Reason.ABSENT, 0, 1, 2, 3),)
    mover.close()
    assert mover.arena.free_count == 2


# --- what media and pages do wrong -------------------------------------------------------


def damaged(medium: Medium, number: int, change: Callable[[bytes], bytes]) -> None:
    stored = medium.shards[key(number), WHOLE]
    medium.shards[key(number), WHOLE] = Stored(change(stored.data), stored.used_s)


def test_each_kind_of_bad_copy_has_its_reason_and_harms_no_neighbour(
    build: Callable[..., Mover],
) -> None:
    pages, medium = filled(), Medium()
    tier = Faulty(DictTier(medium))
    mover = build(tier, pages)
    save(mover, *[to_save(n, 0, 1, 2, 3) for n in range(10)])
    expected = {
        0: Reason.ABSENT,
        1: Reason.TRUNCATED,
        2: Reason.TRUNCATED,
        3: Reason.CORRUPT,
        4: Reason.CORRUPT,
        5: Reason.MISMATCH,
        6: Reason.IO_ERROR,
        7: Reason.NO_FDS,
    }
    del medium.shards[key(0), WHOLE]
    damaged(medium, 1, lambda data: data[:10])
    damaged(medium, 2, lambda data: data[: 4096 + 100])
    damaged(medium, 3, lambda data: data[:4200] + bytes([data[4200] ^ 1]) + data[4201:])
    damaged(medium, 4, lambda data: bytes(len(data)))
    damaged(medium, 5, lambda data: medium.shards[key(9), WHOLE].data)
    tier.fail("read", Reason.IO_ERROR, key=key(6))
    tier.fail("read", Reason.NO_FDS, key=key(7))
    before = snapshot(pages)
    done = load(mover, *[to_load(n, *range(10 + 4 * n, 14 + 4 * n)) for n in range(10)])
    assert done.failures == tuple(
        failed(n, reason, *range(10 + 4 * n, 14 + 4 * n)) for n, reason in expected.items()
    )
    assert done.moved_bytes == 2 * 4 * SMALL[0].block_bytes
    good = {(0, 10 + 4 * n + i): before[0, i] for n in (8, 9) for i in range(4)}
    assert snapshot(pages) == {**before, **good}


def test_another_geometry_of_the_same_rank_count_is_a_mismatch(
    build: Callable[..., Mover],
) -> None:
    medium = Medium()
    save(build(DictTier(medium), filled()), to_save(1, 0, 1, 2, 3))
    for pages_bytes in ([96, 64, 32], [64, 96, 40], [192]):
        other = {0: geometry(pages_bytes, blocks=4)}
        done = load(build(DictTier(medium), Held(other), other), to_load(1, 0, 1, 2, 3))
        assert done.failures == (failed(1, Reason.MISMATCH, 0, 1, 2, 3),)


@pytest.mark.parametrize("payload_bytes", [1, 700, 769, 4096])
def test_a_payload_of_another_size_is_a_mismatch_whatever_its_header_says(
    build: Callable[..., Mover], payload_bytes: int
) -> None:
    geo = SMALL[0]
    assert geo.payload_bytes == 768
    buffer = aligned(8192)
    total = chunkfile.seal(buffer, key(1), WHOLE, geo.encoded, payload_bytes)
    medium = Medium()
    medium.shards[key(1), WHOLE] = Stored(bytes(buffer[:total]), 0.0)
    pages = filled()
    before = snapshot(pages)
    done = load(build(DictTier(medium), pages), to_load(1, 0, 1, 2, 3))
    assert done.failures == (failed(1, Reason.MISMATCH, 0, 1, 2, 3),)
    assert snapshot(pages) == before


def test_a_bad_copy_is_replaced_when_the_planner_says_so(build: Callable[..., Mover]) -> None:
    pages, medium = filled(), Medium()
    mover = build(DictTier(medium), pages)
    save(mover, to_save(1, 0, 1, 2, 3))
    damaged(medium, 1, lambda data: bytes(len(data)))
    assert save(mover, to_save(1, 0, 1, 2, 3)) == [None], "one of this length is there: kept"
    assert load(mover, to_load(1, 8, 9, 10, 11)).failures != ()
    assert save(mover, to_save(1, 0, 1, 2, 3, overwrite=True)) == [None]
    assert load(mover, to_load(1, 8, 9, 10, 11)).failures == ()


@pytest.mark.parametrize("reason", [Reason.NO_SPACE, Reason.READ_ONLY, Reason.IO_ERROR])
def test_a_write_that_fails_is_a_dropped_save(build: Callable[..., Mover], reason: Reason) -> None:
    medium = Medium()
    tier = Faulty(DictTier(medium))
    mover = build(tier, filled())
    tier.fail("write", reason, key=key(1))
    mover.submit_save(5, [to_save(n, 0, 1, 2, 3) for n in range(3)])
    assert finish(mover, 1)[5].failures == (), "the blocks were let go all the same"
    got = {r.key: (r.reason, r.stored_bytes > 0) for r in reports(mover, 3)}
    assert got == {key(0): (None, True), key(1): (reason, False), key(2): (None, True)}
    assert {chunk for chunk, _ in medium.shards} == {key(0), key(2)}


class BrokenOnPurpose(Exception):
    pass


@pytest.mark.parametrize("thread", ["read", "scatter", "write", "gather"])
def test_an_exception_on_an_io_thread_fails_its_chunk_and_the_thread_lives_on(
    build: Callable[..., Mover], thread: str, caplog: pytest.LogCaptureFixture
) -> None:
    pages = filled()
    tier = Faulty(DictTier())
    mover = build(tier, pages, read_threads=1, write_threads=1)
    save(mover, to_save(0, 0, 1, 2, 3))
    for job in range(3):
        if thread in ("read", "write"):
            tier.fail(thread, BrokenOnPurpose())
        else:
            pages.fault = BrokenOnPurpose()
        if thread in ("read", "scatter"):
            done = load(mover, to_load(0, 4, 5, 6, 7), job_id=10 + job)
            assert done.failures == (failed(0, Reason.INTERNAL, 4, 5, 6, 7),)
            assert done.moved_bytes == 0
        else:
            assert save(mover, to_save(50 + job, 0, 1, 2, 3)) == [Reason.INTERNAL]
    assert save(mover, to_save(1, 0, 1, 2, 3)) == [None]
    assert load(mover, to_load(1, 4, 5, 6, 7)).failures == ()
    assert mover.arena.free_count == mover.arena.slot_count
    traced = [r for r in caplog.records if r.exc_info and r.exc_info[0] is BrokenOnPurpose]
    assert len(traced) == 3, "the traceback is in the log"


def test_a_chunk_of_an_unknown_group_fails_alone(build: Callable[..., Mover]) -> None:
    mover = build(DictTier(), filled())
    assert save(mover, to_save(1, 0, 1, group=7), to_save(2, 0, 1, group=1)) == [
        Reason.INTERNAL,
        None,
    ]
    done = load(mover, to_load(2, 0, 1, group=7), to_load(2, 4, 5, group=1))
    assert [failure.reason for failure in done.failures] == [Reason.INTERNAL]


# --- one end for every job ---------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_every_job_ends_exactly_once_whatever_happens(
    build: Callable[..., Mover], seed: int
) -> None:
    dice = random.Random(seed)
    pages, clock = filled(), Clock()
    ratios = {"read": 0.2, "write": 0.2}
    tier = Faulty(DictTier(), seed=seed, fail_ratios=ratios)
    mover = build(
        tier, pages, slots=dice.choice([2, 3, 8]), read_threads=3, deadline_s=5.0, clock=clock
    )
    ended: Counter[int] = Counter()
    words: Counter[ChunkKey] = Counter()
    jobs: list[int] = []
    saved: list[ChunkKey] = []
    numbers = iter(range(10_000))

    def take_in() -> None:
        for done in mover.poll():
            ended[done.job_id] += 1
            if done.is_load:
                keys = [failure.key for failure in done.failures]
                assert len(keys) == len(set(keys))
        words.update(report.key for report in mover.take_reports())

    for job in range(150):
        jobs.append(job)
        count = dice.choice([0, 1, 1, 2, 5])
        if dice.random() < 0.5:
            chunks = [to_save(next(numbers), 0, 1, 2, 3) for _ in range(count)]
            saved += [chunk.key for chunk in chunks]
            mover.submit_save(job, chunks)
        else:
            wanted = dice.sample(range(200), count)
            mover.submit_load(job, [to_load(n, 4, 5, 6, 7) for n in wanted])
        match dice.randrange(6):
            case 0:
                mover.wait(dice.sample(jobs, min(len(jobs), 3)))
            case 1:
                clock.advance(dice.choice([0.1, 6.0]))
            case 2:
                tier.fail(dice.choice(["read", "write"]), BrokenOnPurpose())
            case 3:
                pages.fault = BrokenOnPurpose()
            case _:
                pass
        if dice.random() < 0.7:
            take_in()
    if seed % 2:
        mover.close()
    for _ in patiently():
        take_in()
        if len(ended) >= len(jobs) and len(words) >= len(saved):
            break
    mover.close()
    take_in()
    assert ended == Counter(jobs)
    assert words == Counter(saved)
    assert mover.arena.free_count == mover.arena.slot_count


@pytest.mark.parametrize("submit", ["submit_save", "submit_load"])
def test_a_job_without_chunks_ends_at_once(build: Callable[..., Mover], submit: str) -> None:
    mover = build(DictTier(), filled())
    getattr(mover, submit)(3, [])
    (done,) = mover.poll()
    assert (done.job_id, done.is_load, done.moved_bytes) == (3, submit == "submit_load", 0)
    assert done.failures == ()
    mover.wait({3})
    assert mover.poll() == []


def test_bytes_and_durations_are_what_really_happened(build: Callable[..., Mover]) -> None:
    clock, medium = Clock(), Medium()
    with Gated(DictTier(medium)) as tier:
        mover = build(tier, filled(), clock=clock, read_threads=1)
        mover.submit_save(1, [to_save(1, 0, 1, 2, 3), to_save(2, 4, 5, group=1)])
        done = finish(mover, 1)[1]
        assert done.moved_bytes == 4 * SMALL[0].block_bytes + 2 * SMALL[1].block_bytes
        for report in reports(mover, 2):
            assert report.stored_bytes == len(medium.shards[report.key, WHOLE].data)
            assert report.shard_count == 1
        tier.shut("read")
        mover.submit_load(2, [to_load(1, 8, first=3), to_load(2, 9, 10, group=1)])
        clock.advance(2.5)
        tier.open("read")
        done = finish(mover, 1)[2]
        assert done == JobDone(2, True, SMALL[0].block_bytes + 256, 2.5)
        assert mover.cpu_seconds() > 0


def test_a_rank_whose_shard_another_one_writes_touches_nothing(build: Callable[..., Mover]) -> None:
    pages = filled()
    tier = Faulty(DictTier())
    mover = build(tier, pages, writes=False)
    mover.submit_save(1, [to_save(1, 0, 1, 2, 3), to_save(2, 4, 5, 6, 7)])
    (done,) = mover.poll()
    assert (done.job_id, done.moved_bytes) == (1, 0)
    assert mover.take_reports() == [SaveReport(key(n), None, 1, 0) for n in (1, 2)]
    mover.wait({1})
    assert pages.log == []
    assert tier.calls["write"] == 0
    save(build(tier, pages), to_save(1, 0, 1, 2, 3))
    assert load(mover, to_load(1, 8, 9, 10, 11)).failures == (), "it reads as any other"


# --- the end -----------------------------------------------------------------------------


def test_close_writes_what_was_copied_and_cancels_the_rest(build: Callable[..., Mover]) -> None:
    pages, medium = filled(), Medium()
    tier = Gated(DictTier(medium), shut=["write"])
    mover = build(tier, pages, slots=4, read_threads=2, write_threads=1)
    mover.submit_save(1, [to_save(n, 0, 1, 2, 3) for n in range(5)])
    tier.wait_until("write")
    until(mover, lambda: bool(mover._to_write))  # copied as well; no slot for a third
    closer = threading.Thread(target=mover.close)
    closer.start()
    until(mover, lambda: mover._closed)
    tier.open("write")
    closer.join()
    assert [done.job_id for done in mover.poll()] == [1]
    reasons = {report.key: report.reason for report in mover.take_reports()}
    cancelled = {key(n): Reason.CANCELLED for n in (2, 3, 4)}
    assert reasons == {key(0): None, key(1): None, **cancelled}
    assert {chunk for chunk, _ in medium.shards} == {key(0), key(1)}
    assert mover.arena.free_count == 4


def test_a_chunk_being_copied_when_close_comes_is_still_written(
    build: Callable[..., Mover],
) -> None:
    pages, medium = filled(), Medium()
    pages.go.clear()
    mover = build(DictTier(medium), pages, write_threads=2)
    mover.submit_save(1, [to_save(1, 0, 1, 2, 3)])
    pages.inside.acquire()
    closer = threading.Thread(target=mover.close)
    closer.start()
    until(mover, lambda: mover._closed)
    pages.go.set()
    closer.join()
    assert [done.job_id for done in mover.poll()] == [1]
    assert [report.reason for report in mover.take_reports()] == [None]
    assert {chunk for chunk, _ in medium.shards} == {key(1)}
    assert mover.arena.free_count == mover.arena.slot_count


def test_writers_outlive_the_copy_that_is_under_way_when_close_comes(
    build: Callable[..., Mover],
) -> None:
    pages, medium = filled(), Medium()
    tier = Gated(DictTier(medium), shut=["write"])
    mover = build(tier, pages, write_threads=1)
    mover.submit_save(1, [to_save(1, 0, 1, 2, 3)])
    pages.inside.acquire()
    tier.wait_until("write")
    pages.go.clear()
    mover.submit_save(2, [to_save(2, 0, 1, 2, 3)])
    pages.inside.acquire()
    closer = threading.Thread(target=mover.close)
    closer.start()
    until(mover, lambda: mover._closed)
    tier.open("write")
    until(mover, lambda: bool(mover._reports))  # the writer has nothing left to do
    pages.go.set()
    closer.join()
    assert [report.reason for report in mover.take_reports()] == [None, None]
    assert {chunk for chunk, _ in medium.shards} == {key(1), key(2)}


def test_close_does_not_wait_for_a_hung_medium(
    build: Callable[..., Mover], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover_module, "_CLOSE_S", 0.01)
    pages = filled()
    with Gated(DictTier()) as tier:
        mover = build(tier, pages, slots=4, read_threads=2, write_threads=2)
        save(mover, to_save(9, 0, 1, 2, 3))
        tier.shut("read", "write")
        mover.submit_save(1, [to_save(n, 0, 1, 2, 3) for n in range(6)])
        mover.submit_load(2, [to_load(9, 10, 11, 12, 13), to_load(9, 14, 15, 16, 17)])
        tier.wait_until("read", 2)
        tier.wait_until("write", 2)
        mover.close()
        mover.close()
        ended = {done.job_id: done for done in mover.poll()}
        assert set(ended) == {1, 2}
        assert {failure.reason for failure in ended[2].failures} == {Reason.CANCELLED}
        assert [r.reason for r in mover.take_reports()] == [Reason.CANCELLED] * 4
        before = snapshot(pages)
        tier.open("read", "write")
        for thread in mover._threads:
            thread.join()
        assert snapshot(pages) == before, "nothing lands in blocks that are no longer ours"
        assert mover.poll() == []


def test_after_close_jobs_end_at_once_as_cancelled(build: Callable[..., Mover]) -> None:
    mover = build(DictTier(), filled())
    mover.close()
    mover.submit_save(1, [to_save(1, 0, 1, 2, 3)])
    mover.submit_load(2, [to_load(1, 4, 5, 6, 7)])
    mover.wait({1, 2})
    done = {one.job_id: one for one in mover.poll()}
    assert set(done) == {1, 2}
    assert done[2].failures == (failed(1, Reason.CANCELLED, 4, 5, 6, 7),)
    assert [report.reason for report in mover.take_reports()] == [Reason.CANCELLED]


# --- by hand -----------------------------------------------------------------------------


def test_without_threads_each_step_is_turned_by_hand(build: Callable[..., Mover]) -> None:
    pages, medium = filled(), Medium()
    mover = build(DictTier(medium), pages, slots=2, start=False)
    mover.submit_save(1, [to_save(1, 0, 1, 2, 3), to_save(2, 4, 5, 6, 7)])
    assert mover.poll() == []
    assert mover.run_copy()
    assert not mover.run_copy(), "no slot"
    assert medium.shards == {}
    assert mover.run_write()
    assert not mover.run_write()
    assert mover.run_copy()
    assert [done.job_id for done in mover.poll()] == [1]
    assert mover.run_write()
    assert [report.reason for report in mover.take_reports()] == [None, None]
    mover.submit_load(2, [to_load(1, 8, 9, 10, 11)])
    assert mover.run_load()
    assert not mover.run_load()
    assert [done.failures for done in mover.poll()] == [()]
    assert not any(t.name.startswith("fxkv-") for t in threading.enumerate())
