"""Gather and scatter of KV pages against an oracle in numpy, for both kinds of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fx_kvbackend.core.geometry import Geometry, Page, Run, plan_copies  # noqa: E402
from fx_kvbackend.engines.pages import DevicePages, HostPages, pages_for  # noqa: E402

BLOCKS = 9
# (row bytes, page bytes): two layers fill their rows, one has padding behind its page.
LAYERS = [(96, 96), (160, 128), (48, 48)]
BLOCK_BYTES = sum(page for _, page in LAYERS)


class Host:
    """Byte tensors as an engine hands them over, and the same bytes in numpy."""

    def __init__(self, kind: Any, seed: int = 0) -> None:
        dice = np.random.default_rng(seed)
        self.rows = [dice.integers(0, 256, (BLOCKS, row), np.uint8) for row, _ in LAYERS]
        tensors = [torch.from_numpy(rows.copy()) for rows in self.rows]
        # One layer comes as another type, as from an engine that knows of no bytes.
        tensors[0] = tensors[0].view(torch.float32)
        self.tensors = tensors
        layers = [(tensor, page) for tensor, (_, page) in zip(tensors, LAYERS, strict=True)]
        self.pages = kind({0: layers, 7: layers[1:2]})

    def now(self) -> list[np.ndarray]:
        return [tensor.view(torch.uint8).numpy() for tensor in self.tensors]

    def payload(self, blocks: list[int]) -> bytes:
        return b"".join(
            rows[block, :page].tobytes()
            for block in blocks
            for rows, (_, page) in zip(self.rows, LAYERS, strict=True)
        )


@pytest.fixture(params=[HostPages, DevicePages])
def host(request: pytest.FixtureRequest) -> Host:
    return Host(request.param)


@pytest.mark.parametrize("blocks", [[0], [3, 1, 8], list(range(BLOCKS))])
def test_gather_takes_pages_in_order_and_no_padding(host: Host, blocks: list[int]) -> None:
    out = bytearray(BLOCK_BYTES * len(blocks))
    host.pages.gather(0, blocks, memoryview(out), host.pages.mark())
    assert bytes(out) == host.payload(blocks)


def test_gather_of_another_group(host: Host) -> None:
    out = bytearray(128)
    host.pages.gather(7, [4], memoryview(out), host.pages.mark())
    assert bytes(out) == host.rows[1][4, :128].tobytes()


@pytest.mark.parametrize("blocks", [[5], [2, 0, 6]])
def test_scatter_touches_these_pages_and_nothing_else(host: Host, blocks: list[int]) -> None:
    payload = np.random.default_rng(9).integers(0, 256, BLOCK_BYTES * len(blocks), np.uint8)
    host.pages.scatter(0, blocks, memoryview(bytearray(payload.tobytes())))
    at = 0
    for block in blocks:
        for rows, (_, page) in zip(host.rows, LAYERS, strict=True):
            rows[block, :page] = payload[at : at + page]
            at += page
    for got, expected in zip(host.now(), host.rows, strict=True):
        assert np.array_equal(got, expected)


def test_what_was_gathered_is_scattered_back(host: Host) -> None:
    out = bytearray(BLOCK_BYTES * 2)
    host.pages.gather(0, [1, 2], memoryview(out), host.pages.mark())
    host.pages.scatter(0, [7, 8], memoryview(out))
    for got, rows, (_, page) in zip(host.now(), host.rows, LAYERS, strict=True):
        assert np.array_equal(got[7:9, :page], rows[1:3, :page])
        assert np.array_equal(got[:7], rows[:7])


def test_pieces_of_another_ranks_blocks_land_where_they_belong(host: Host) -> None:
    """We hold everything; shard 1 of 2 brings the second half of every page, split K/V."""

    def page(index: int, count: int, size: int) -> Page:
        half = size // 2 // count
        return Page(size // count, size, (Run(0, index * half, half, 2, half, size // 2),))

    ours = Geometry(0, 2, tuple(page(0, 1, size) for _, size in LAYERS))
    theirs = Geometry(0, 2, tuple(page(1, 2, size) for _, size in LAYERS))
    payload = np.random.default_rng(3).integers(0, 256, theirs.payload_bytes, np.uint8)
    host.pages.scatter_pieces(
        0,
        [6, 2],
        memoryview(bytearray(payload.tobytes())),
        theirs.block_bytes,
        plan_copies(theirs, ours),
    )
    at = 0
    for block in (6, 2):
        for rows, (_, size) in zip(host.rows, LAYERS, strict=True):
            quarter = size // 4
            for side in range(2):
                start = side * size // 2 + quarter
                rows[block, start : start + quarter] = payload[at : at + quarter]
                at += quarter
    for got, expected in zip(host.now(), host.rows, strict=True):
        assert np.array_equal(got, expected)


def test_memory_decides_the_kind_of_pages() -> None:
    layers = [(torch.zeros((2, 64), dtype=torch.uint8), 64)]
    assert isinstance(pages_for({0: layers}), HostPages)
