"""How the bytes of a chunk are laid out, and how one rank's share maps to another's.

A chunk of one KV group holds `blocks` blocks; a block holds one page per layer, in layer
order: payload = [block][layer][page]. A page is the bytes that one rank keeps for one
layer and block.

With the canonical layout, `runs` say where each piece of this rank's page lies in the
*canonical page*, the page that a single rank without parallelism would hold. Two ranks of
different runs with different tensor-parallel sizes can then exchange bytes: cut both
sides at every border and copy the pieces that overlap.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Run(NamedTuple):
    """`pieces` times `size` bytes; the i-th lies at offset + i * stride on each side."""

    local_offset: int
    canonical_offset: int
    size: int
    pieces: int
    local_stride: int
    canonical_stride: int


class Page(NamedTuple):
    """One layer's page of a block: its size here, and its canonical size and place.

    `runs` is empty for the direct layout, where only the same rank reads it back.
    """

    page_bytes: int
    canonical_bytes: int = 0
    runs: tuple[Run, ...] = ()


class Copy(NamedTuple):
    """`length` bytes from `source` in a block of a stored shard to `target` in ours.

    `layer` counts pages of the block; offsets are within the block on the stored side
    and within the layer's page on ours.
    """

    layer: int
    source_offset: int
    target_offset: int
    length: int


@dataclass(frozen=True)
class Geometry:
    """Layout of one rank's share of the chunks of one KV group."""

    group: int
    blocks: int
    pages: tuple[Page, ...]

    @cached_property
    def block_bytes(self) -> int:
        """Payload bytes of one block."""
        return sum(page.page_bytes for page in self.pages)

    @property
    def payload_bytes(self) -> int:
        """Payload bytes of a whole chunk share."""
        return self.blocks * self.block_bytes

    def span(self, first_block: int, blocks: int) -> slice:
        """Where `blocks` blocks from `first_block` on lie in the payload."""
        start = first_block * self.block_bytes
        return slice(start, start + blocks * self.block_bytes)

    @cached_property
    def encoded(self) -> bytes:
        """Stable text form, stored in every chunk file; equal layers are folded."""
        folded: list[list[object]] = []
        for page in self.pages:
            row = [page.page_bytes, page.canonical_bytes, [list(r) for r in page.runs]]
            if folded and folded[-1][1:] == row:
                folded[-1][0] = int(str(folded[-1][0])) + 1
            else:
                folded.append([1, *row])
        body = {"group": self.group, "blocks": self.blocks, "layers": folded}
        return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, encoded: bytes) -> Geometry:
        """Inverse of `encoded`. Raises ValueError for anything else."""
        try:
            body = json.loads(encoded)
            pages = tuple(
                page
                for times, size, canonical, runs in body["layers"]
                for page in [Page(size, canonical, tuple(Run(*run) for run in runs))] * times
            )
            return cls(body["group"], body["blocks"], pages)
        except (KeyError, TypeError) as exc:
            raise ValueError(f"not a geometry: {exc!r}") from exc


def whole_page(page_bytes: int) -> Page:
    """The page of a rank that holds everything: canonical and local are the same."""
    run = Run(0, 0, page_bytes, 1, page_bytes, page_bytes)
    return Page(page_bytes, page_bytes, (run,))


def shards_needed(index: int, count: int, stored_count: int) -> range:
    """Stored shards (of `stored_count`) that overlap share `index` of `count`.

    Shares are equal consecutive parts, as tensor parallelism cuts KV heads.
    """
    first = index * stored_count // count
    last = -(-(index + 1) * stored_count // count)
    return range(first, last)


def plan_copies(stored: Geometry, ours: Geometry) -> list[Copy]:
    """Copies that bring the overlap of a stored shard's block into our block.

    Both sides must be canonical with the same canonical pages; raises ValueError when
    they cannot belong to the same model.
    """
    if stored.group != ours.group or stored.blocks != ours.blocks:
        raise ValueError("stored chunk belongs to another group or block count")
    if len(stored.pages) != len(ours.pages):
        raise ValueError(f"{len(stored.pages)} layers stored, {len(ours.pages)} here")
    copies: list[Copy] = []
    base = 0
    for layer, (there, here) in enumerate(zip(stored.pages, ours.pages, strict=True)):
        if not there.runs or not here.runs or there.canonical_bytes != here.canonical_bytes:
            raise ValueError(f"layer {layer} has no common canonical page")
        sources, targets = _pieces(there.runs), _pieces(here.runs)
        i = j = 0
        while i < len(sources) and j < len(targets):
            s_start, s_end, s_local = sources[i]
            t_start, t_end, t_local = targets[j]
            start, end = max(s_start, t_start), min(s_end, t_end)
            if start < end:
                copies.append(
                    Copy(
                        layer,
                        base + s_local + start - s_start,
                        t_local + start - t_start,
                        end - start,
                    )
                )
            if s_end <= t_end:
                i += 1
            else:
                j += 1
        base += there.page_bytes
    return copies


def _pieces(runs: Sequence[Run]) -> list[tuple[int, int, int]]:
    """(canonical start, canonical end, local offset) of every piece, in canonical order."""
    return sorted(
        (
            run.canonical_offset + i * run.canonical_stride,
            run.canonical_offset + i * run.canonical_stride + run.size,
            run.local_offset + i * run.local_stride,
        )
        for run in runs
        for i in range(run.pieces)
    )
