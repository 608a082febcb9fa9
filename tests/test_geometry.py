"""Chunks cut into any number of shards are put together again, byte for byte.

The expectation is computed with numpy slices of the canonical page along its head axis, not
with the runs that the code under test works on.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fx_kvbackend.core.geometry import (
    Copy,
    Geometry,
    Page,
    Run,
    plan_copies,
    shards_needed,
    whole_page,
)

COUNTS = (1, 2, 4, 8)
PACKED_HND, SPLIT_HND, PACKED_NHD, SPLIT_NHD, PAIRED_NHD = LAYOUTS = (
    "packed HND",
    "split HND",
    "packed NHD",
    "split NHD",
    "paired NHD",  # K and V of a token side by side: strided on both sides
)


class Layer(NamedTuple):
    """One attention layer as a single rank would hold it; `item` is bytes per head and token."""

    layout: str
    heads: int
    tokens: int
    item: int

    @property
    def shape(self) -> tuple[int, ...]:
        heads, tokens, item = self.heads, self.tokens, self.item
        return {
            PACKED_HND: (heads, tokens, item),
            SPLIT_HND: (2, heads, tokens, item),
            PACKED_NHD: (tokens, heads, item),
            SPLIT_NHD: (2, tokens, heads, item),
            PAIRED_NHD: (tokens, 2, heads, item),
        }[self.layout]

    @property
    def head_axis(self) -> int:
        return {PACKED_HND: 0, SPLIT_HND: 1, PACKED_NHD: 1, SPLIT_NHD: 2, PAIRED_NHD: 2}[
            self.layout
        ]

    def cut(self, canonical: np.ndarray, index: int, count: int) -> bytes:
        """The page that rank `index` of `count` holds."""
        share = self.heads // count
        heads = range(index * share, (index + 1) * share)
        return canonical.reshape(self.shape).take(heads, self.head_axis).tobytes()

    def page(self, index: int, count: int) -> Page:
        """The same, as the host describes it to us."""
        share, total = self.heads // count, self.heads
        one_token = share * self.item  # of our heads
        runs: tuple[Run, ...]
        match self.layout:
            case "packed HND":
                size = share * self.tokens * self.item
                runs = (Run(0, index * size, size, 1, size, size),)
            case "split HND":
                size = share * self.tokens * self.item
                runs = (Run(0, index * size, size, 2, size, total * self.tokens * self.item),)
            case "packed NHD":
                stride = total * self.item
                runs = (Run(0, index * one_token, one_token, self.tokens, one_token, stride),)
            case "paired NHD":
                stride = total * self.item
                runs = tuple(
                    Run(
                        side * one_token,
                        side * stride + index * one_token,
                        one_token,
                        self.tokens,
                        2 * one_token,
                        2 * stride,
                    )
                    for side in range(2)
                )
            case _:
                stride, half = total * self.item, total * self.tokens * self.item
                ours = self.tokens * one_token
                runs = tuple(
                    Run(
                        side * ours,
                        side * half + index * one_token,
                        one_token,
                        self.tokens,
                        one_token,
                        stride,
                    )
                    for side in range(2)
                )
        return Page(self.canonical_bytes // count, self.canonical_bytes, runs)

    @property
    def canonical_bytes(self) -> int:
        return int(np.prod(self.shape))


LAYERS = st.builds(
    Layer,
    layout=st.sampled_from(LAYOUTS),
    heads=st.sampled_from([8, 16]),
    tokens=st.integers(1, 5),
    item=st.integers(1, 6),
)


def geometry_of(layers: list[Layer], blocks: int, index: int, count: int) -> Geometry:
    return Geometry(0, blocks, tuple(layer.page(index, count) for layer in layers))


def random_pages(layers: list[Layer], blocks: int, seed: int) -> list[list[np.ndarray]]:
    dice = np.random.default_rng(seed)
    return [
        [dice.integers(0, 256, layer.canonical_bytes, np.uint8) for layer in layers]
        for _ in range(blocks)
    ]


def payload_of(layers: list[Layer], pages: list[list[np.ndarray]], index: int, count: int) -> bytes:
    """What rank `index` of `count` stores: [block][layer][page]."""
    return b"".join(
        layer.cut(page, index, count)
        for block in pages
        for layer, page in zip(layers, block, strict=True)
    )


def rebuilt(
    layers: list[Layer], pages: list[list[np.ndarray]], stored: int, index: int, count: int
) -> bytes:
    """Rank `index` of `count` reads what `stored` ranks wrote; 0xEE where nothing arrives."""
    ours = geometry_of(layers, len(pages), index, count)
    starts = list(itertools.accumulate((p.page_bytes for p in ours.pages), initial=0))
    out = bytearray(b"\xee" * ours.payload_bytes)
    hits = bytearray(ours.payload_bytes)
    for shard in shards_needed(index, count, stored):
        theirs = geometry_of(layers, len(pages), shard, stored)
        payload = payload_of(layers, pages, shard, stored)
        for block, (layer, source, target, length) in itertools.product(
            range(len(pages)), plan_copies(theirs, ours)
        ):
            at = block * ours.block_bytes + starts[layer] + target
            start = block * theirs.block_bytes + source
            assert target + length <= ours.pages[layer].page_bytes
            out[at : at + length] = payload[start : start + length]
            for i in range(at, at + length):
                hits[i] += 1
    assert set(hits) == {1}, "every byte arrives exactly once"
    return bytes(out)


# --- across ranks ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("stored", "count"), list(itertools.product(COUNTS, COUNTS)))
def test_any_number_of_ranks_reads_what_any_number_wrote(
    layout: str, stored: int, count: int
) -> None:
    layers = [Layer(layout, 8, 3, 4)] * 2
    pages = random_pages(layers, 2, seed=stored * 10 + count)
    for index in range(count):
        expected = payload_of(layers, pages, index, count)
        assert rebuilt(layers, pages, stored, index, count) == expected


@given(
    layers=st.lists(LAYERS, min_size=1, max_size=3),
    blocks=st.integers(1, 3),
    stored=st.sampled_from(COUNTS),
    count=st.sampled_from(COUNTS),
    index=st.integers(0, 7),
    seed=st.integers(0, 2**32 - 1),
)
def test_layers_of_any_layouts_together(
    layers: list[Layer], blocks: int, stored: int, count: int, index: int, seed: int
) -> None:
    index %= count
    pages = random_pages(layers, blocks, seed)
    assert rebuilt(layers, pages, stored, index, count) == payload_of(layers, pages, index, count)


def test_equal_shares_are_copied_in_as_few_pieces_as_there_are_runs() -> None:
    layer = Layer(SPLIT_HND, 8, 16, 64)
    same = geometry_of([layer], 1, 1, 2)
    size = 4 * 16 * 64
    assert plan_copies(same, same) == [Copy(0, 0, 0, size), Copy(0, size, size, size)]


def test_whole_page_is_what_a_single_rank_holds() -> None:
    layer = Layer(SPLIT_NHD, 8, 3, 4)
    whole = Geometry(0, 1, (whole_page(layer.canonical_bytes),))
    pages = random_pages([layer], 1, seed=1)
    out = bytearray(layer.canonical_bytes)
    for shard in shards_needed(0, 1, 4):
        payload = payload_of([layer], pages, shard, 4)
        for copy in plan_copies(geometry_of([layer], 1, shard, 4), whole):
            piece = payload[copy.source_offset : copy.source_offset + copy.length]
            out[copy.target_offset : copy.target_offset + copy.length] = piece
    assert bytes(out) == pages[0][0].tobytes()


@given(count=st.integers(1, 12), stored=st.integers(1, 12), index=st.integers(0, 11))
def test_shards_needed_are_those_that_overlap(count: int, stored: int, index: int) -> None:
    index %= count
    low, high = Fraction(index, count), Fraction(index + 1, count)
    overlapping = [
        shard
        for shard in range(stored)
        if Fraction(shard, stored) < high and Fraction(shard + 1, stored) > low
    ]
    assert list(shards_needed(index, count, stored)) == overlapping


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group": 1}, "another group"),
        ({"blocks": 3}, "another group or block count"),
        ({"pages": ()}, "0 layers here|2 layers stored, 0 here"),
        ({"pages": (whole_page(10), whole_page(96))}, "layer 0 has no common canonical page"),
        ({"pages": (whole_page(96), Page(96))}, "layer 1 has no common canonical page"),
    ],
)
def test_what_cannot_belong_together_is_refused(change: dict, words: str) -> None:
    stored = geometry_of([Layer(PACKED_HND, 8, 3, 4)] * 2, 2, 0, 1)
    ours = dataclasses.replace(stored, **change)
    with pytest.raises(ValueError, match=words):
        plan_copies(stored, ours)
    with pytest.raises(ValueError):
        plan_copies(ours, stored)


# --- one rank --------------------------------------------------------------------------

RUNS = st.builds(Run, *[st.integers(0, 2**40)] * 6)
PAGES = st.builds(Page, st.integers(0, 2**40), st.integers(0, 2**40), st.lists(RUNS).map(tuple))
GEOMETRIES = st.builds(
    Geometry,
    st.integers(0, 100),
    st.integers(1, 64),
    st.lists(PAGES, max_size=5)
    .flatmap(
        # Equal layers in a row are what real models have.
        lambda pages: st.lists(st.sampled_from(pages), max_size=80) if pages else st.just([])
    )
    .map(tuple),
)


@given(GEOMETRIES)
def test_the_encoded_form_tells_everything(geometry: Geometry) -> None:
    back = Geometry.decode(geometry.encoded)
    assert back == geometry
    assert back.encoded == geometry.encoded


def test_the_encoded_form_is_stable_and_short() -> None:
    """It is compared at load: another spelling of the same layout would be a miss."""
    layers = [Layer(SPLIT_HND, 8, 16, 128)] * 62
    encoded = geometry_of(layers, 4, 1, 2).encoded
    assert encoded == (
        b'{"blocks":4,"group":0,"layers":[[62,16384,32768,[[0,8192,8192,2,8192,16384]]]]}'
    )
    assert len(geometry_of([Layer(SPLIT_NHD, 8, 16, 128)] * 62, 4, 1, 2).encoded) < 200


def test_unequal_layers_keep_their_order() -> None:
    a, b = Page(10), Page(20)
    geometry = Geometry(0, 1, (a, a, b, a, b, b))
    assert json.loads(geometry.encoded)["layers"] == [
        [2, 10, 0, []],
        [1, 20, 0, []],
        [1, 10, 0, []],
        [2, 20, 0, []],
    ]
    assert Geometry.decode(geometry.encoded).pages == (a, a, b, a, b, b)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(["group", "blocks", "layers"]), inner)
    ),
    max_leaves=12,
)


@given(st.binary(max_size=100) | JSON.map(lambda body: json.dumps(body).encode()))
def test_anything_else_is_no_geometry(encoded: bytes) -> None:
    try:
        geometry = Geometry.decode(encoded)
    except ValueError:
        return
    assert isinstance(geometry, Geometry)


def test_sizes_add_up() -> None:
    geometry = Geometry(0, 3, (Page(10), Page(20)))
    assert geometry.block_bytes == 30
    assert geometry.payload_bytes == 90
    assert geometry.span(1, 2) == slice(30, 90)
    assert geometry.span(0, 3) == slice(0, 90)
    assert Geometry(0, 3, ()).payload_bytes == 0
