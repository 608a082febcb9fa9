"""KV pages on a device: every byte arrives, nothing else is touched, and in the right order.

What is about bytes runs on host memory too. What is about streams needs a GPU.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fx_kvbackend.core.geometry import Geometry, Page, Run, plan_copies
from fx_kvbackend.engines.buffers import aligned
from fx_kvbackend.engines.pages import DevicePages, HostPages
from fx_kvbackend.records import ChunkKey, JobDone, LoadChunk, SaveChunk, Shard
from fx_kvbackend.store.mover import Mover, MoverSettings
from fx_kvbackend.tiers.directory import DirectoryTier
from tests.gpu.device import needs_cuda

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]
BLOCKS = 16
LAYERS = 3
# A quarter of a second and more on any GPU of these years.
SLEEP_CYCLES = 600_000_000
LIMIT_S = 30.0

# (dtype, elements of a row, bytes of the page in it): whole rows, and rows with padding behind.
KINDS = [
    pytest.param(torch.float16, 512, 1024, id="float16"),
    pytest.param(torch.bfloat16, 640, 1024, id="bfloat16-padded"),
    pytest.param(torch.float32, 256, 1024, id="float32"),
    pytest.param(torch.float8_e4m3fn, 1024, 1000, id="float8-padded"),
    pytest.param(torch.int8, 1024, 1024, id="int8"),
    pytest.param(torch.uint8, 1040, 1024, id="uint8-padded"),
]


def tensors(dtype: torch.dtype, elements: int, device: str, seed: int = 1) -> list[torch.Tensor]:
    """One tensor of random bytes per layer, shape (blocks, elements)."""
    dice = torch.Generator().manual_seed(seed)
    size = elements * torch.empty(0, dtype=dtype).element_size()
    return [
        torch.randint(0, 256, (BLOCKS, size), dtype=torch.uint8, generator=dice)
        .to(device)
        .view(dtype)
        for _ in range(LAYERS)
    ]


def as_bytes(layers: list[torch.Tensor]) -> list[torch.Tensor]:
    return [layer.view(torch.uint8).cpu().clone() for layer in layers]


def on_host(layers: list[torch.Tensor], page_bytes: int) -> HostPages:
    """The same bytes as plain host pages: what the answer has to be."""
    return HostPages({0: [(layer, page_bytes) for layer in as_bytes(layers)]})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "elements", "page_bytes"), KINDS)
def test_gather_and_scatter_are_bit_exact(
    dtype: torch.dtype, elements: int, page_bytes: int, device: str
) -> None:
    layers = tensors(dtype, elements, device)
    pages = DevicePages({0: [(layer, page_bytes) for layer in layers]})
    source, target = (11, 3, 7, 0), (1, 15, 2, 8)
    chunk, expected = (aligned(len(source) * LAYERS * page_bytes) for _ in range(2))
    on_host(layers, page_bytes).gather(0, source, expected, None)
    pages.gather(0, source, chunk, pages.mark())
    assert chunk == expected
    assert bytes(chunk) != bytes(len(chunk))

    before = as_bytes(layers)
    pages.scatter(0, target, chunk)
    for layer, old in zip(as_bytes(layers), before, strict=True):
        for to, came_from in zip(target, source, strict=True):
            assert torch.equal(layer[to, :page_bytes], old[came_from, :page_bytes])
            assert torch.equal(layer[to, page_bytes:], old[to, page_bytes:]), "padding was touched"
        untouched = [b for b in range(BLOCKS) if b not in target]
        assert torch.equal(layer[untouched], old[untouched])


@pytest.mark.parametrize("device", DEVICES)
def test_pieces_of_another_ranks_share_are_bit_exact(device: str) -> None:
    """A rank of two reads its heads out of what a single rank stored."""
    half, whole = 512, 1024
    everything = Page(whole, whole, (Run(0, 0, whole, 1, whole, whole),))
    mine = Page(half, whole, (Run(0, 256, 256, 2, 256, 512),))
    stored = Geometry(0, 4, (everything,) * LAYERS)
    ours = Geometry(0, 4, (mine,) * LAYERS)
    copies = plan_copies(stored, ours)
    layers = tensors(torch.float16, half // 2, device)
    payload = memoryview(bytearray(random.Random(3).randbytes(stored.payload_bytes)))
    expected = on_host(layers, half)
    expected.scatter_pieces(0, (9, 4, 5, 0), payload, stored.block_bytes, copies)
    pages = DevicePages({0: [(layer, half) for layer in layers]})
    pages.scatter_pieces(0, (9, 4, 5, 0), payload, stored.block_bytes, copies)
    for layer, (rows, _) in zip(as_bytes(layers), expected._groups[0], strict=True):
        assert layer.numpy().tobytes() == rows.tobytes()


# --- through the mover ----------------------------------------------------------------------

PAGE_BYTES = 4096
CHUNK_BLOCKS = 4
GEOMETRY = Geometry(0, CHUNK_BLOCKS, (Page(PAGE_BYTES),) * LAYERS)


@contextmanager
def mover_over(pages: DevicePages, store: Path) -> Iterator[Mover]:
    settings = MoverSettings(
        shard=Shard(0, 1),
        writes=True,
        staging_bytes=8 << 20,
        load_deadline_s=LIMIT_S,
        read_threads=3,
        write_threads=2,
    )
    mover = Mover(DirectoryTier(store), pages, {0: GEOMETRY}, settings)
    try:
        yield mover
    finally:
        mover.close()


def until(done: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(LIMIT_S / 0.002)):
        if done():
            return
        pause.wait(0.002)
    raise AssertionError(f"not done in {LIMIT_S} s")


def key(number: int) -> ChunkKey:
    return ChunkKey("cd" * 16, number.to_bytes(36, "big"))


def save(mover: Mover, chunks: list[SaveChunk]) -> None:
    """Save and wait until every chunk is published."""
    mover.submit_save(1, chunks)
    reports = []

    def published() -> bool:
        mover.poll()
        reports.extend(mover.take_reports())
        return len(reports) == len(chunks)

    until(published)
    assert [report.reason for report in reports] == [None] * len(chunks)


def load(mover: Mover, chunks: list[LoadChunk]) -> None:
    """Load and wait until the engine would be told."""
    mover.submit_load(2, chunks)
    finish_load(mover)


def finish_load(mover: Mover) -> None:
    done: list[JobDone] = []

    def over() -> bool:
        done.extend(job for job in mover.poll() if job.is_load)
        return bool(done)

    until(over)
    assert done[0].failures == ()


@pytest.mark.parametrize("device", DEVICES)
def test_pages_to_chunks_to_pages(device: str, tmp_path: Path) -> None:
    layers = tensors(torch.bfloat16, PAGE_BYTES // 2, device)
    pages = DevicePages({0: [(layer, PAGE_BYTES) for layer in layers]})
    before = as_bytes(layers)
    order = random.Random(5).sample(range(BLOCKS), BLOCKS)
    with mover_over(pages, tmp_path) as mover:
        groups = [tuple(order[i : i + CHUNK_BLOCKS]) for i in range(0, BLOCKS, CHUNK_BLOCKS)]
        save(mover, [SaveChunk(key(i), 0, blocks) for i, blocks in enumerate(groups)])
        for layer in layers:
            layer.view(torch.uint8)[:] = 0
        # Each chunk comes back into the blocks of the next one.
        moved = groups[1:] + groups[:1]
        load(mover, [LoadChunk(key(i), 0, 0, blocks, 1) for i, blocks in enumerate(moved)])
    for layer, old in zip(as_bytes(layers), before, strict=True):
        for source, target in zip(groups, moved, strict=True):
            assert torch.equal(layer[list(target)], old[list(source)])


# --- the order of streams -------------------------------------------------------------------


def queue_fill(layers: list[torch.Tensor], blocks: torch.Tensor, value: int) -> None:
    """Let the compute stream write `value` into blocks, a good while from now."""
    torch.cuda._sleep(SLEEP_CYCLES)
    for layer in layers:
        layer.index_fill_(0, blocks, value)
    # An index given as a list would have waited for the stream, and the test would see nothing.
    assert not torch.cuda.current_stream().query()


def on_device(*blocks: int) -> torch.Tensor:
    return torch.tensor(blocks, device="cuda")


@pytest.mark.gpu
@needs_cuda
def test_order_of_a_gather_behind_the_compute_before_it() -> None:
    layers = tensors(torch.uint8, PAGE_BYTES, "cuda")
    pages = DevicePages({0: [(layer, PAGE_BYTES) for layer in layers]})
    chunk, early = aligned(LAYERS * PAGE_BYTES), aligned(LAYERS * PAGE_BYTES)
    pages.gather(0, (5,), chunk, None)  # the first call pays for its kernels
    block = on_device(5)
    torch.cuda.synchronize()
    queue_fill(layers, block, 7)
    mark = pages.mark()
    pages.gather(0, (5,), early, None)
    assert bytes(early) == bytes(chunk), "nothing was in flight: this test would see no fault"
    pages.gather(0, (5,), chunk, mark)
    assert bytes(chunk) == bytes([7]) * len(chunk)


@pytest.mark.gpu
@needs_cuda
def test_order_of_a_save_between_the_step_before_and_the_next_owner(tmp_path: Path) -> None:
    """A save holds what its step computed: not what was there before, nor what comes after."""
    layers = tensors(torch.uint8, PAGE_BYTES, "cuda")
    pages = DevicePages({0: [(layer, PAGE_BYTES) for layer in layers]})
    blocks = (4, 9, 2, 13)
    index = on_device(*blocks)
    with mover_over(pages, tmp_path) as mover:
        save(mover, [SaveChunk(key(1), 0, blocks)])  # warm
        for number in range(2, 6):
            queue_fill(layers, index, number)
            mover.submit_save(number, [SaveChunk(key(number), 0, blocks)])
            until(lambda: bool(mover.poll()))
            # The engine was told that the blocks are free: the next owner writes at once.
            for layer in layers:
                layer.index_fill_(0, index, 255)
            until(lambda: bool(mover.take_reports()))
            load(mover, [LoadChunk(key(number), 0, 0, (0, 1, 6, 7), 1)])
            torch.cuda.synchronize()
            for layer in layers:
                assert bool((layer[[0, 1, 6, 7]] == number).all())


@pytest.mark.gpu
@needs_cuda
def test_order_of_a_load_behind_writes_that_were_queued_before_it(tmp_path: Path) -> None:
    """vLLM may still have work queued that writes to a block's former owner, or zeroes it."""
    layers = tensors(torch.uint8, PAGE_BYTES, "cuda")
    pages = DevicePages({0: [(layer, PAGE_BYTES) for layer in layers]})
    source, target = (0, 1, 2, 3), (8, 9, 10, 11)
    with mover_over(pages, tmp_path) as mover:
        save(mover, [SaveChunk(key(1), 0, source)])
        expected = [layer[list(source)].cpu() for layer in layers]
        index = on_device(*target)
        torch.cuda.synchronize()
        queue_fill(layers, index, 0)
        load(mover, [LoadChunk(key(1), 0, 0, target, 1)])
        torch.cuda.synchronize()
        for layer, bytes_ in zip(layers, expected, strict=True):
            assert torch.equal(layer[list(target)].cpu(), bytes_)


@pytest.mark.gpu
@needs_cuda
def test_order_of_compute_behind_a_load_that_was_reported(tmp_path: Path) -> None:
    layers = tensors(torch.uint8, PAGE_BYTES, "cuda")
    pages = DevicePages({0: [(layer, PAGE_BYTES) for layer in layers]})
    with mover_over(pages, tmp_path) as mover:
        for layer in layers:
            layer[:4] = 3
        save(mover, [SaveChunk(key(1), 0, (0, 1, 2, 3))])
        load(mover, [LoadChunk(key(1), 0, 0, (8, 9, 10, 11), 1)])
        # No synchronisation here: what the engine enqueues next reads the loaded bytes.
        sums = [int(layer[8:12].sum(dtype=torch.int64)) for layer in layers]
    assert sums == [3 * 4 * PAGE_BYTES] * LAYERS


@pytest.mark.gpu
@needs_cuda
def test_staging_is_page_locked_or_says_why() -> None:
    from fx_kvbackend.engines.pages import pin

    memory = aligned(8 << 20)
    why = pin(memory)
    pinned = torch.frombuffer(memory, dtype=torch.uint8).is_pinned()
    assert pinned == (why is None), why
