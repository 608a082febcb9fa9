"""The host's KV pages: gather blocks into a staging buffer, scatter a buffer into blocks.

The host hands over one byte tensor per layer, shape (num_blocks, row_bytes), of which the
first `page_bytes` of a row are the page. `HostPages` serves tensors in DRAM, `DevicePages`
those on an accelerator.

Order: `mark()` at submission names all compute issued so far; `after=mark` reads or writes
the blocks only behind it (a block that is given to a load may still be written by the step
before). All calls return when the bytes are where they belong.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from fx_kvbackend.core.geometry import Copy

Layers = Sequence[tuple[torch.Tensor, int]]
"""(byte tensor of shape (num_blocks, row_bytes), page_bytes) of each layer of a group."""


class Pages(Protocol):
    """What the mover needs of the host's KV cache. Thread-safe for disjoint blocks."""

    def mark(self) -> Any:
        """A point in time behind all compute issued so far by the calling thread."""
        ...

    def gather(self, group: int, block_ids: Sequence[int], out: memoryview, after: Any) -> None:
        """Copy the blocks, in order, into `out` as [block][layer][page]."""
        ...

    def scatter(
        self, group: int, block_ids: Sequence[int], payload: memoryview, after: Any = None
    ) -> None:
        """Copy `payload` ([block][layer][page]) into the blocks."""
        ...

    def scatter_pieces(
        self,
        group: int,
        block_ids: Sequence[int],
        payload: memoryview,
        stored_block_bytes: int,
        copies: Sequence[Copy],
        after: Any = None,
    ) -> None:
        """Copy pieces of another rank's blocks into ours, see `core.geometry.plan_copies`."""
        ...


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


class HostPages:
    """KV pages in DRAM. One memcpy per page; numpy lets other threads run meanwhile."""

    def __init__(self, groups: Mapping[int, Layers]) -> None:
        self._groups = {
            group: [(_bytes_of(tensor).numpy(), size) for tensor, size in layers]
            for group, layers in groups.items()
        }

    def mark(self) -> None:
        """Host compute is finished when its call returns: nothing to wait for."""

    def gather(self, group: int, block_ids: Sequence[int], out: memoryview, after: Any) -> None:
        """See Pages."""
        target = np.frombuffer(out, np.uint8)
        at = 0
        for block in block_ids:
            for rows, size in self._groups[group]:
                target[at : at + size] = rows[block, :size]
                at += size

    def scatter(
        self, group: int, block_ids: Sequence[int], payload: memoryview, after: Any = None
    ) -> None:
        """See Pages."""
        source = np.frombuffer(payload, np.uint8)
        at = 0
        for block in block_ids:
            for rows, size in self._groups[group]:
                rows[block, :size] = source[at : at + size]
                at += size

    def scatter_pieces(
        self,
        group: int,
        block_ids: Sequence[int],
        payload: memoryview,
        stored_block_bytes: int,
        copies: Sequence[Copy],
        after: Any = None,
    ) -> None:
        """See Pages."""
        source = np.frombuffer(payload, np.uint8)
        layers = self._groups[group]
        for number, block in enumerate(block_ids):
            base = number * stored_block_bytes
            for layer, start, to, length in copies:
                rows, _ = layers[layer]
                rows[block, to : to + length] = source[base + start : base + start + length]


class DevicePages:
    """KV pages on an accelerator: gathered on it, then moved in one copy per chunk.

    A side stream keeps transfers off the compute stream. It waits for the event of `mark`, so
    a save never reads a block before the step that fills it, and a load never writes one
    before a step that still uses it for somebody else.
    """

    def __init__(self, groups: Mapping[int, Layers]) -> None:
        self._groups = {
            group: [(_bytes_of(tensor), size) for tensor, size in layers]
            for group, layers in groups.items()
        }
        first = next(iter(self._groups.values()))[0][0]
        self._device = first.device
        self._cuda = self._device.type == "cuda"
        self._streams: dict[int, torch.cuda.Stream] = {}

    def mark(self) -> torch.cuda.Event | None:
        """See Pages."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def gather(self, group: int, block_ids: Sequence[int], out: memoryview, after: Any) -> None:
        """See Pages."""
        with self._side_stream(after):
            chunk = torch.cat(self._rows(group, block_ids), dim=1)
            torch.frombuffer(out, dtype=torch.uint8).copy_(chunk.reshape(-1), non_blocking=True)
            self._settle()

    def scatter(
        self, group: int, block_ids: Sequence[int], payload: memoryview, after: Any = None
    ) -> None:
        """See Pages."""
        with self._side_stream(after):
            chunk = self._upload(payload, len(block_ids))
            index = self._index(block_ids)
            at = 0
            for rows, size in self._groups[group]:
                rows[:, :size].index_copy_(0, index, chunk[:, at : at + size])
                at += size
            self._settle()

    def scatter_pieces(
        self,
        group: int,
        block_ids: Sequence[int],
        payload: memoryview,
        stored_block_bytes: int,
        copies: Sequence[Copy],
        after: Any = None,
    ) -> None:
        """See Pages."""
        with self._side_stream(after):
            chunk = self._upload(payload[: len(block_ids) * stored_block_bytes], len(block_ids))
            index = self._index(block_ids)
            layers = self._groups[group]
            for layer, start, to, length in copies:
                rows, _ = layers[layer]
                rows[:, to : to + length].index_copy_(0, index, chunk[:, start : start + length])
            self._settle()

    def _rows(self, group: int, block_ids: Sequence[int]) -> list[torch.Tensor]:
        index = self._index(block_ids)
        return [rows[:, :size].index_select(0, index) for rows, size in self._groups[group]]

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(block_ids), dtype=torch.int64, device=self._device)

    def _upload(self, payload: memoryview, blocks: int) -> torch.Tensor:
        host = torch.frombuffer(payload, dtype=torch.uint8).view(blocks, -1)
        return host.to(self._device, non_blocking=True)

    def _side_stream(self, after: torch.cuda.Event | None) -> Any:
        if not self._cuda:
            return torch.no_grad()
        # One stream per thread of the mover: a load never queues behind a save.
        key = threading.get_ident()
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = torch.cuda.Stream(self._device)
        if after is not None:
            stream.wait_event(after)
        return torch.cuda.stream(stream)

    def _settle(self) -> None:
        if self._cuda:
            torch.cuda.current_stream(self._device).synchronize()


def pages_for(groups: Mapping[int, Layers]) -> HostPages | DevicePages:
    """The right kind of pages for where the host keeps its KV cache."""
    tensor = next(iter(groups.values()))[0][0]
    return HostPages(groups) if tensor.device.type == "cpu" else DevicePages(groups)


def pin(memory: memoryview) -> str | None:
    """Page-lock memory for fast device copies; None when done, else why not.

    Failing is normal under a low memlock limit: transfers then go through the driver's
    own pinned buffer and are slower, never wrong.
    """
    if not torch.cuda.is_available():
        return "no CUDA device"
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    result = int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0))
    return None if result == 0 else f"cudaHostRegister answered {result}"
