"""What every tier must do. A tier is done when it passes (needs pytest).

    class TestMyTier(TierContract):
        @pytest.fixture
        def tier(self, tmp_path): ...               # an empty tier, closed after the test
        def another(self, tier): ...                # a second one over the same medium
        def raw_read(self, tier, key, shard): ...   # what lies on the medium for this shard
        def raw_write(self, tier, key, shard, data): ...
        def place_foreign(self, tier): ...          # things of somebody else on the medium
        def foreign(self, tier): ...

The raw helpers bypass the tier, so that a broken write cannot hide a broken read. What a
test expects is computed here from the definition of the format, not by the tier.
"""

from __future__ import annotations

import itertools
import random
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import xxhash

from fx_kvbackend.core import format as chunkfile
from fx_kvbackend.core.format import Header
from fx_kvbackend.engines.buffers import aligned
from fx_kvbackend.records import ChunkKey, Reason, Refusal, Shard
from fx_kvbackend.tiers.base import Copies, Tier

GEOMETRY = b'{"blocks":1,"group":0,"layers":[]}'
ONE = Shard(0, 1)
DAMAGED = frozenset({Reason.TRUNCATED, Reason.CORRUPT, Reason.MISMATCH})
"""Reasons for bytes that are there and are not what was asked for."""

_VERSION_OFFSET = 8
_CHECKSUM_OFFSET = 64


def some_key(number: int = 0, namespace: int = 0) -> ChunkKey:
    """A key like those of a host: a digest, and a group number behind it."""
    seed = random.Random(number)
    return ChunkKey(f"{namespace:032x}", seed.randbytes(32) + bytes(4))


def some_payload(seed: int, n_bytes: int) -> bytes:
    """Incompressible bytes that depend on `seed`."""
    return random.Random(f"payload {seed}").randbytes(n_bytes)


def sealed(key: ChunkKey, shard: Shard, payload: bytes, geometry: bytes = GEOMETRY) -> memoryview:
    """A chunk file in aligned memory, as the mover hands it to a tier."""
    head = chunkfile.header_bytes(len(key.name), len(geometry), len(payload))
    total = head + chunkfile.align_up(len(payload))
    buffer = aligned(total)
    buffer[head : head + len(payload)] = payload
    if chunkfile.seal(buffer, key, shard, geometry, len(payload)) != total:
        raise AssertionError("seal and header_bytes disagree")
    return buffer


def resigned(data: bytes) -> bytes:
    """The same file with a header checksum that is right again: a lie, but a proper one."""
    out = bytearray(data)
    (head,) = struct.unpack_from("<I", out, 12)
    out[_CHECKSUM_OFFSET : _CHECKSUM_OFFSET + 8] = bytes(8)
    digest = xxhash.xxh3_64_intdigest(bytes(out[:head]))
    struct.pack_into("<Q", out, _CHECKSUM_OFFSET, digest)
    return bytes(out)


def of_version(data: bytes, version: int) -> bytes:
    """The same file, claiming to be of another format version."""
    out = bytearray(data)
    struct.pack_into("<H", out, _VERSION_OFFSET, version)
    return resigned(bytes(out))


def flipped(data: bytes, at: int) -> bytes:
    """The same file with one bit of one byte wrong."""
    out = bytearray(data)
    out[at] ^= 0x10
    return bytes(out)


class TierContract:
    """Subclass this in a test module; see the module's docstring."""

    payload_bytes = (1 << 20) + 8192 + 77
    """Payload of the larger chunks here: two checksum segments, the end unaligned."""

    # --- what a subclass gives --------------------------------------------------------

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        """An empty tier; closed when the test ends."""
        raise NotImplementedError

    def another(self, tier: Tier) -> Tier:
        """A second tier over the same medium, as another process would open it."""
        raise NotImplementedError

    def raw_read(self, tier: Tier, key: ChunkKey, shard: Shard) -> bytes | None:
        """What lies on the medium for this shard, None for nothing."""
        raise NotImplementedError

    def raw_write(self, tier: Tier, key: ChunkKey, shard: Shard, data: bytes) -> None:
        """Put bytes on the medium where the tier looks for this shard."""
        raise NotImplementedError

    def place_foreign(self, tier: Tier) -> None:
        """Put things that are not ours, and look a little like ours, on the medium."""
        raise NotImplementedError

    def foreign(self, tier: Tier) -> Any:
        """Those things as they are now, for comparison."""
        raise NotImplementedError

    # --- helpers ----------------------------------------------------------------------

    def read(self, tier: Tier, key: ChunkKey, shard: Shard = ONE) -> bytes | Refusal:
        """The payload, or why not, through a buffer with room to spare."""
        into = aligned(chunkfile.align_up(self.payload_bytes) + 8 * chunkfile.ALIGN_BYTES)
        into[:] = b"\xee" * len(into)
        header = tier.read(key, shard, into)
        if isinstance(header, Refusal):
            return header
        return self.payload_of(into, header)

    @staticmethod
    def payload_of(buffer: memoryview, header: Header) -> bytes:
        """The payload that a verified header describes."""
        return bytes(buffer[header.header_bytes : header.header_bytes + header.payload_bytes])

    def put(
        self, tier: Tier, key: ChunkKey, payload: bytes, shard: Shard = ONE, *, new: bool = False
    ) -> None:
        """Write through the tier, and insist that it is there."""
        assert tier.write(key, shard, sealed(key, shard, payload), overwrite=new) is None

    def scanned(self, tier: Tier) -> dict[tuple[ChunkKey, Shard], int]:
        """(key, shard) -> stored bytes of everything that a scan finds."""
        found = list(tier.scan())
        out = {(f.key, f.shard): f.stored_bytes for f in found}
        assert len(out) == len(found), "a scan names nothing twice"
        return out

    def by_last_use(self, tier: Tier) -> list[ChunkKey]:
        """Keys, coldest first, as a restarted process would order them."""
        return [f.key for f in sorted(tier.scan(), key=lambda f: f.used_s)]

    def assert_refused(
        self, tier: Tier, key: ChunkKey, reasons: Sequence[Reason], shard: Shard = ONE
    ) -> None:
        """A read of this chunk is refused for one of these reasons."""
        got = self.read(tier, key, shard)
        assert isinstance(got, Refusal), "bytes were accepted that must not be"
        assert got.reason in reasons, got
        assert got.detail, "a refusal says what was wrong"

    # --- reading and writing ----------------------------------------------------------

    def test_says_what_it_is(self, tier: Tier) -> None:
        assert tier.name
        assert tier.path_taken

    def test_what_was_never_written_is_absent(self, tier: Tier) -> None:
        self.assert_refused(tier, some_key(), [Reason.ABSENT])
        size = tier.stored_bytes(some_key(), ONE)
        assert isinstance(size, Refusal)
        assert size.reason is Reason.ABSENT
        assert tier.find([some_key()]) == {}
        assert self.scanned(tier) == {}

    @pytest.mark.parametrize("size", [1, 4096, 4097, (1 << 20) - 1, (1 << 20) + 8192 + 77])
    def test_write_puts_exactly_these_bytes_on_the_medium(self, tier: Tier, size: int) -> None:
        data = sealed(some_key(), ONE, some_payload(1, size))
        assert tier.write(some_key(), ONE, data, overwrite=False) is None
        assert self.raw_read(tier, some_key(), ONE) == bytes(data)

    @pytest.mark.parametrize("size", [1, 4096, 4097, (1 << 20) - 1, (1 << 20) + 8192 + 77])
    def test_read_takes_exactly_what_is_on_the_medium(self, tier: Tier, size: int) -> None:
        payload = some_payload(2, size)
        self.raw_write(tier, some_key(), ONE, bytes(sealed(some_key(), ONE, payload)))
        assert self.read(tier, some_key()) == payload

    def test_round_trip_into_a_buffer_that_just_fits(self, tier: Tier) -> None:
        payload = some_payload(3, self.payload_bytes)
        data = sealed(some_key(), ONE, payload)
        assert tier.write(some_key(), ONE, data, overwrite=False) is None
        assert tier.stored_bytes(some_key(), ONE) == len(data)
        into = aligned(len(data))
        header = tier.read(some_key(), ONE, into)
        assert isinstance(header, Header)
        assert self.payload_of(into, header) == payload

    def test_keys_of_every_length_are_kept_apart(self, tier: Tier) -> None:
        names = [b"\x00", b"\x00" * 2, b"\xff" * chunkfile.MAX_NAME_BYTES, b"name/../../x", b"."]
        for number, name in enumerate(names):
            self.put(tier, ChunkKey("ab" * 16, name), some_payload(number, 500))
        for number, name in enumerate(names):
            assert self.read(tier, ChunkKey("ab" * 16, name)) == some_payload(number, 500)
        assert {key.name for key, _ in self.scanned(tier)} == set(names)

    def test_geometry_comes_back_as_it_was(self, tier: Tier) -> None:
        geometry = random.Random(5).randbytes(9000)  # more than one page of header
        data = sealed(some_key(), ONE, b"x" * 100, geometry)
        assert tier.write(some_key(), ONE, data, overwrite=False) is None
        into = aligned(len(data))
        header = tier.read(some_key(), ONE, into)
        assert isinstance(header, Header)
        assert header.geometry == geometry
        assert (header.key, header.shard) == (some_key(), ONE)

    def test_a_copy_of_the_same_length_is_kept_without_overwrite(self, tier: Tier) -> None:
        key, first, second = some_key(), some_payload(1, 5000), some_payload(2, 5000)
        self.raw_write(tier, key, ONE, bytes(sealed(key, ONE, first)))
        self.put(tier, key, second)
        assert self.raw_read(tier, key, ONE) == bytes(sealed(key, ONE, first))

    def test_a_copy_of_another_length_is_replaced_without_overwrite(self, tier: Tier) -> None:
        key = some_key()
        whole = bytes(sealed(key, ONE, some_payload(1, 9000)))
        self.raw_write(tier, key, ONE, whole[:4096])
        self.put(tier, key, some_payload(1, 9000))
        assert self.raw_read(tier, key, ONE) == whole

    def test_overwrite_replaces_a_damaged_copy(self, tier: Tier) -> None:
        key, payload = some_key(), some_payload(1, 5000)
        bad = flipped(bytes(sealed(key, ONE, payload)), 6000)
        self.raw_write(tier, key, ONE, bad)
        self.assert_refused(tier, key, [Reason.CORRUPT])
        self.put(tier, key, payload, new=True)
        assert self.read(tier, key) == payload

    # --- what is on the medium is not trusted ------------------------------------------

    @pytest.mark.parametrize("keep", [0, 1, 71, 72, 4095, 4096, 4097, 8192, 1 << 20])
    def test_a_shortened_copy_is_refused(self, tier: Tier, keep: int) -> None:
        whole = bytes(sealed(some_key(), ONE, some_payload(1, self.payload_bytes)))
        self.raw_write(tier, some_key(), ONE, whole[:keep])
        self.assert_refused(tier, some_key(), sorted(DAMAGED))

    def test_zeros_in_place_of_the_end_are_refused(self, tier: Tier) -> None:
        whole = bytes(sealed(some_key(), ONE, some_payload(1, self.payload_bytes)))
        half = len(whole) // 2
        self.raw_write(tier, some_key(), ONE, whole[:half] + bytes(len(whole) - half))
        self.assert_refused(tier, some_key(), [Reason.CORRUPT])

    def test_all_zeros_are_refused(self, tier: Tier) -> None:
        self.raw_write(tier, some_key(), ONE, bytes(12288))
        self.assert_refused(tier, some_key(), sorted(DAMAGED))

    def test_only_a_header_is_refused(self, tier: Tier) -> None:
        whole = bytes(sealed(some_key(), ONE, some_payload(1, 9000)))
        self.raw_write(tier, some_key(), ONE, whole[:4096])
        self.assert_refused(tier, some_key(), [Reason.TRUNCATED])

    def test_appended_garbage_changes_nothing_or_is_refused(self, tier: Tier) -> None:
        payload = some_payload(1, 9000)
        whole = bytes(sealed(some_key(), ONE, payload))
        self.raw_write(tier, some_key(), ONE, whole + b"garbage" * 1000)
        got = self.read(tier, some_key())
        if isinstance(got, Refusal):
            assert got.reason in DAMAGED
        else:
            assert got == payload

    @pytest.mark.parametrize(
        "at", [0, 8, 12, 40, 56, 58, 64, 75, 110, 2000, 4095], ids=lambda at: f"byte{at}"
    )
    def test_a_flipped_byte_in_the_header_is_refused(self, tier: Tier, at: int) -> None:
        whole = bytes(sealed(some_key(), ONE, some_payload(1, 9000)))
        self.raw_write(tier, some_key(), ONE, flipped(whole, at))
        self.assert_refused(tier, some_key(), sorted(DAMAGED))

    def test_a_flipped_byte_in_the_payload_is_refused(self, tier: Tier) -> None:
        whole = bytes(sealed(some_key(), ONE, some_payload(1, self.payload_bytes)))
        last = 4096 + self.payload_bytes - 1
        for at in (4096, 4096 + (1 << 20) - 1, 4096 + (1 << 20), last):
            self.raw_write(tier, some_key(), ONE, flipped(whole, at))
            self.assert_refused(tier, some_key(), [Reason.CORRUPT])

    def test_a_flipped_byte_in_the_padding_is_harmless(self, tier: Tier) -> None:
        payload = some_payload(1, 9000)
        whole = bytes(sealed(some_key(), ONE, payload))
        for at in (4096 + 9000, len(whole) - 1):
            self.raw_write(tier, some_key(), ONE, flipped(whole, at))
            got = self.read(tier, some_key())
            assert got == payload or (isinstance(got, Refusal) and got.reason in DAMAGED)

    def test_swapped_copies_are_refused(self, tier: Tier) -> None:
        one, two = some_key(1), some_key(2)
        self.raw_write(tier, one, ONE, bytes(sealed(two, ONE, some_payload(2, 5000))))
        self.raw_write(tier, two, ONE, bytes(sealed(one, ONE, some_payload(1, 5000))))
        self.assert_refused(tier, one, [Reason.MISMATCH])
        self.assert_refused(tier, two, [Reason.MISMATCH])

    def test_a_chunk_of_another_namespace_is_refused(self, tier: Tier) -> None:
        ours, theirs = some_key(1, namespace=1), some_key(1, namespace=2)
        self.raw_write(tier, ours, ONE, bytes(sealed(theirs, ONE, some_payload(1, 5000))))
        self.assert_refused(tier, ours, [Reason.MISMATCH])

    @pytest.mark.parametrize("stored", [Shard(0, 2), Shard(1, 4), Shard(0, 1)])
    def test_another_shard_is_refused(self, tier: Tier, stored: Shard) -> None:
        asked = Shard(1, 2)
        data = bytes(sealed(some_key(), stored, some_payload(1, 5000)))
        self.raw_write(tier, some_key(), asked, data)
        self.assert_refused(tier, some_key(), [Reason.MISMATCH], asked)

    @pytest.mark.parametrize("version", [0, chunkfile.VERSION + 1, 65535])
    def test_another_format_version_is_refused(self, tier: Tier, version: int) -> None:
        whole = bytes(sealed(some_key(), ONE, some_payload(1, 5000)))
        self.raw_write(tier, some_key(), ONE, of_version(whole, version))
        self.assert_refused(tier, some_key(), [Reason.MISMATCH])

    # --- finding and deleting -----------------------------------------------------------

    def test_find_names_complete_copies_only(self, tier: Tier) -> None:
        whole, half, none = some_key(1), some_key(2), some_key(3)
        sizes = []
        for index in range(2):
            data = sealed(whole, Shard(index, 2), some_payload(index, 5000 + 9000 * index))
            sizes.append(len(data))
            assert tier.write(whole, Shard(index, 2), data, overwrite=False) is None
        self.put(tier, half, some_payload(9, 5000), Shard(1, 2))
        assert tier.find([whole, half, none]) == {whole: Copies((2,), sum(sizes))}
        assert tier.find([]) == {}

    def test_find_knows_copies_of_several_shard_counts(self, tier: Tier) -> None:
        key, total = some_key(), 0
        for count in (4, 1, 2):
            for index in range(count):
                data = sealed(key, Shard(index, count), some_payload(index, 3000))
                total += len(data)
                assert tier.write(key, Shard(index, count), data, overwrite=False) is None
        assert tier.find([key]) == {key: Copies((1, 2, 4), total)}
        assert self.scanned(tier).keys() == {
            (key, Shard(index, count)) for count in (1, 2, 4) for index in range(count)
        }

    def test_find_counts_the_bytes_of_incomplete_copies_too(self, tier: Tier) -> None:
        key = some_key()
        self.put(tier, key, some_payload(1, 3000))
        self.put(tier, key, some_payload(1, 3000), Shard(1, 2))
        assert tier.find([key]) == {key: Copies((1,), sum(self.scanned(tier).values()))}

    def test_find_keeps_namespaces_apart(self, tier: Tier) -> None:
        self.put(tier, some_key(1, namespace=1), b"x" * 100)
        keys = [some_key(1, namespace=1), some_key(1, namespace=2)]
        assert list(tier.find(keys)) == keys[:1]

    def test_what_another_process_writes_is_found(self, tier: Tier) -> None:
        other = self.another(tier)
        try:
            self.put(other, some_key(), some_payload(1, 5000), Shard(0, 1))
            assert some_key() in tier.find([some_key()])
            assert self.read(tier, some_key()) == some_payload(1, 5000)
        finally:
            other.close()

    def test_delete_removes_every_shard_of_every_copy_and_nothing_else(self, tier: Tier) -> None:
        key, other = some_key(1), some_key(2)
        for shard in (ONE, Shard(0, 2), Shard(1, 2), Shard(3, 4)):
            self.put(tier, key, some_payload(1, 3000), shard)
        self.put(tier, other, some_payload(2, 3000))
        tier.delete(key)
        assert self.scanned(tier).keys() == {(other, ONE)}
        assert self.raw_read(tier, key, ONE) is None
        self.assert_refused(tier, key, [Reason.ABSENT])
        assert self.read(tier, other) == some_payload(2, 3000)

    def test_delete_is_idempotent(self, tier: Tier) -> None:
        tier.delete(some_key())
        self.put(tier, some_key(), some_payload(1, 3000))
        tier.delete(some_key())
        tier.delete(some_key())
        assert self.scanned(tier) == {}
        self.put(tier, some_key(), some_payload(1, 3000))
        assert self.read(tier, some_key()) == some_payload(1, 3000)

    # --- the whole medium ---------------------------------------------------------------

    def test_scan_tells_everything_that_is_stored(self, tier: Tier) -> None:
        expected = {}
        for number, shard in itertools.product(range(10), (ONE, Shard(0, 2), Shard(1, 2))):
            key = some_key(number, namespace=number % 3)
            data = sealed(key, shard, some_payload(number, 1000 * (number + 1)))
            assert tier.write(key, shard, data, overwrite=False) is None
            expected[key, shard] = len(data)
        assert self.scanned(tier) == expected

    def test_what_is_foreign_is_left_alone_and_not_counted(self, tier: Tier) -> None:
        self.put(tier, some_key(), some_payload(1, 3000))
        self.place_foreign(tier)
        before = self.foreign(tier)
        assert before, "the test places nothing"
        assert self.scanned(tier).keys() == {(some_key(), ONE)}
        tier.sweep()
        tier.announce("cd" * 16, {"a": 1})
        tier.find([some_key(), some_key(2)])
        tier.delete(some_key())
        assert self.scanned(tier) == {}
        assert self.foreign(tier) == before

    def test_touch_makes_a_chunk_the_last_used_and_survives_a_restart(self, tier: Tier) -> None:
        keys = [some_key(number) for number in range(4)]
        for key in keys:
            self.put(tier, key, some_payload(1, 3000))
            tier.touch(key, 1)
        assert self.by_last_use(tier) == keys
        tier.touch(keys[0], 1)
        tier.touch(keys[2], 1)
        tier.touch(some_key(99), 1)  # not there: no matter
        tier.close()
        again = self.another(tier)
        try:
            assert self.by_last_use(again) == [keys[1], keys[3], keys[0], keys[2]]
        finally:
            again.close()

    def test_a_sweep_leaves_published_chunks_and_living_writers_alone(self, tier: Tier) -> None:
        other = self.another(tier)
        try:
            self.put(tier, some_key(1), some_payload(1, 3000))
            assert other.sweep() == 0
            self.put(tier, some_key(2), some_payload(2, 3000))
            assert tier.sweep() == 0
            self.put(other, some_key(3), some_payload(3, 3000))
            for number in (1, 2, 3):
                assert self.read(tier, some_key(number)) == some_payload(number, 3000)
        finally:
            other.close()

    def test_space_is_plausible(self, tier: Tier) -> None:
        space = tier.space()
        assert 0 < space.free_bytes <= space.total_bytes

    def test_announce_names_the_one_field_that_differs(self, tier: Tier) -> None:
        mine = {"weights": "a", "dtype": "bf16", "groups": [1, 2]}
        assert tier.announce("aa" * 16, mine) == []
        assert tier.announce("aa" * 16, mine) == []  # a restart
        notes = tier.announce("bb" * 16, {**mine, "dtype": "fp8"})
        assert len(notes) == 1
        assert all(word in notes[0] for word in ("dtype", "bf16", "fp8"))
        assert tier.announce("cc" * 16, {"weights": "b", "dtype": "x", "groups": 3}) == []
        assert self.scanned(tier) == {}

    # --- several at once, and the end ---------------------------------------------------

    def test_32_threads_on_one_key(self, tier: Tier) -> None:
        key = some_key()
        payloads = {some_payload(number, 70_000) for number in range(8)}
        ready = threading.Barrier(32)

        def writer(number: int) -> None:
            data = sealed(key, ONE, some_payload(number, 70_000))
            ready.wait()
            for _ in range(5):
                assert tier.write(key, ONE, data, overwrite=True) is None

        def reader() -> None:
            ready.wait()
            for _ in range(5):
                got = self.read(tier, key)
                assert got in payloads or (isinstance(got, Refusal) and got.reason is Reason.ABSENT)

        def remover() -> None:
            ready.wait()
            for _ in range(5):
                tier.delete(key)

        jobs: list[Callable[[], None]] = [remover] * 4 + [reader] * 12
        jobs += [lambda number=number: writer(number) for number in range(8)] * 2
        with ThreadPoolExecutor(32) as pool:
            for future in [pool.submit(job) for job in jobs]:
                future.result()
        self.put(tier, key, some_payload(0, 70_000), new=True)
        assert self.read(tier, key) == some_payload(0, 70_000)
        assert len(self.scanned(tier)) == 1

    def test_32_threads_write_one_key_at_once_without_overwrite(self, tier: Tier) -> None:
        key, payload = some_key(), some_payload(1, 70_000)
        data = sealed(key, ONE, payload)
        with ThreadPoolExecutor(32) as pool:
            writes = [pool.submit(tier.write, key, ONE, data, overwrite=False) for _ in range(32)]
            assert [write.result() for write in writes] == [None] * 32
        assert self.read(tier, key) == payload

    def test_everything_is_there_again_after_a_restart(self, tier: Tier) -> None:
        for number in range(5):
            self.put(tier, some_key(number), some_payload(number, 5000))
        before = self.scanned(tier)
        tier.close()
        again = self.another(tier)
        try:
            assert self.scanned(again) == before
            for number in range(5):
                assert self.read(again, some_key(number)) == some_payload(number, 5000)
        finally:
            again.close()

    def test_a_closed_tier_refuses_and_never_raises(self, tier: Tier) -> None:
        self.put(tier, some_key(1), some_payload(1, 5000))
        tier.close()
        tier.close()
        refusal = tier.write(
            some_key(2), ONE, sealed(some_key(2), ONE, some_payload(2, 5000)), overwrite=False
        )
        assert isinstance(refusal, Refusal)
        assert refusal.reason is Reason.CANCELLED
        assert self.raw_read(tier, some_key(2), ONE) is None
        got = self.read(tier, some_key(1))
        assert got == some_payload(1, 5000) or isinstance(got, Refusal)
        again = self.another(tier)
        try:
            assert self.read(again, some_key(1)) == some_payload(1, 5000)
        finally:
            again.close()
