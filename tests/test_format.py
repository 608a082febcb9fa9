"""The chunk file: everything comes back, nothing damaged passes, and version 1 stays as it is."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
import xxhash
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fx_kvbackend.core import format as chunkfile
from fx_kvbackend.core.format import Header
from fx_kvbackend.records import ChunkKey, Reason, Refusal, Shard
from fx_kvbackend.testing.contracts import flipped, of_version, resigned

GOLDEN = Path(__file__).parent / "golden" / "chunk_v1.kv"
FIXED_BYTES = 72

KEYS = st.builds(
    ChunkKey,
    st.binary(min_size=16, max_size=16).map(bytes.hex),
    st.binary(min_size=1, max_size=chunkfile.MAX_NAME_BYTES),
)
SHARDS = st.integers(1, 65535).flatmap(
    lambda count: st.builds(Shard, st.integers(0, count - 1), st.just(count))
)


def file_of(key: ChunkKey, shard: Shard, geometry: bytes, payload: bytes) -> bytes:
    head = chunkfile.header_bytes(len(key.name), len(geometry), len(payload))
    size = chunkfile.file_bytes(len(key.name), len(geometry), len(payload))
    # Not zeroed: a reused staging slot holds what it held before.
    buffer = bytearray(b"\xaa" * (size + 100))
    buffer[head : head + len(payload)] = payload
    assert chunkfile.seal(memoryview(buffer), key, shard, geometry, len(payload)) == size
    assert buffer[size:] == b"\xaa" * 100, "nothing is written behind the file"
    return bytes(buffer[:size])


def opened(data: bytes, key: ChunkKey, shard: Shard) -> Header | Refusal:
    """What a reader concludes: the header if and only if header and payload are right."""
    view = memoryview(data)
    header = chunkfile.open_header(view, key, shard)
    if isinstance(header, Refusal):
        return header
    return chunkfile.verify_payload(view, header) or header


def reason_of(got: Header | Refusal) -> Reason:
    assert isinstance(got, Refusal), "it was accepted"
    return got.reason


KEY = ChunkKey("00112233445566778899aabbccddeeff", bytes(range(36)))
SHARD = Shard(1, 2)
GEOMETRY = b'{"blocks":1}'
SMALL = file_of(KEY, SHARD, GEOMETRY, bytes(range(250)) * 2)


# --- round trip ------------------------------------------------------------------------


@given(
    key=KEYS,
    shard=SHARDS,
    geometry=st.binary(max_size=9000),
    payload=st.binary(max_size=3000),
    times=st.integers(1, 3),
)
def test_what_was_sealed_is_opened(
    key: ChunkKey, shard: Shard, geometry: bytes, payload: bytes, times: int
) -> None:
    payload = payload * times
    data = file_of(key, shard, geometry, payload)
    assert len(data) % chunkfile.ALIGN_BYTES == 0
    header = opened(data, key, shard)
    assert isinstance(header, Header)
    assert (header.key, header.shard, header.geometry) == (key, shard, geometry)
    assert header.header_bytes % chunkfile.ALIGN_BYTES == 0
    end = header.header_bytes + header.payload_bytes
    assert data[header.header_bytes : end] == payload
    assert data[end:] == bytes(len(data) - end), "the padding is zero"


@pytest.mark.parametrize("size", [0, 1, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20 + 5])
def test_one_checksum_per_mebibyte(size: int) -> None:
    payload = b"".join(i.to_bytes(4, "little") for i in range(-(-size // 4)))[:size]
    data = file_of(KEY, SHARD, GEOMETRY, payload)
    header = opened(data, KEY, SHARD)
    assert isinstance(header, Header)
    parts = [payload[at : at + 2**20] for at in range(0, size, 2**20)]
    assert header.checksums == tuple(xxhash.xxh3_64_intdigest(part) for part in parts)
    for number, at in enumerate(range(0, size, 2**20)):
        assert reason_of(opened(flipped(data, 4096 + at), KEY, SHARD)) is Reason.CORRUPT
        refusal = opened(flipped(data, min(4096 + at + 2**20, 4096 + size) - 1), KEY, SHARD)
        assert isinstance(refusal, Refusal)
        assert f"segment {number}" in refusal.detail


def test_a_larger_buffer_behind_the_file_does_not_matter() -> None:
    assert isinstance(opened(SMALL + b"\xee" * 5000, KEY, SHARD), Header)


def test_the_header_is_opened_before_the_payload_is_there() -> None:
    header = chunkfile.open_header(memoryview(SMALL[:4096]), KEY, SHARD)
    assert isinstance(header, Header)
    refusal = chunkfile.verify_payload(memoryview(SMALL[:4096]), header)
    assert refusal is not None
    assert refusal.reason is Reason.TRUNCATED


# --- damage ----------------------------------------------------------------------------


def test_every_flipped_byte_is_refused_or_harmless() -> None:
    """No flipped byte of header or payload passes; of the padding every one does."""
    payload_end = 4096 + 500
    for at in range(len(SMALL)):
        got = opened(flipped(SMALL, at), KEY, SHARD)
        if at < payload_end:
            assert isinstance(got, Refusal), f"byte {at} was wrong and nobody noticed"
        else:
            assert isinstance(got, Header), f"byte {at} holds nothing, and a chunk was lost"


@given(st.integers(0, len(SMALL)))
def test_every_shortened_file_is_refused(keep: int) -> None:
    assume(keep < 4096 + 500)
    assert reason_of(opened(SMALL[:keep], KEY, SHARD)) in (Reason.TRUNCATED, Reason.CORRUPT)


@given(st.binary(max_size=300), st.integers(0, len(SMALL) - 1))
def test_overwritten_bytes_never_change_what_is_read(noise: bytes, at: int) -> None:
    data = (SMALL[:at] + noise + SMALL[at + len(noise) :])[: len(SMALL)]
    got = opened(data, KEY, SHARD)
    if isinstance(got, Header):
        assert data[4096 : 4096 + 500] == SMALL[4096 : 4096 + 500]
        assert data[:4096] == SMALL[:4096]


@given(st.binary(max_size=5000))
def test_noise_is_refused(noise: bytes) -> None:
    assert isinstance(opened(noise, KEY, SHARD), Refusal)
    assert isinstance(opened(b"FXKVCHNK\x01\x00" + noise, KEY, SHARD), Refusal)


@example(at=12, lie=struct.pack("<I", 0))
@example(at=12, lie=struct.pack("<I", 72))
@example(at=12, lie=struct.pack("<I", 4095))
@example(at=12, lie=struct.pack("<I", 8192))
@example(at=16, lie=struct.pack("<Q", 2**63))
@example(at=16, lie=struct.pack("<Q", 499))
@example(at=16, lie=struct.pack("<QII", 0, 1 << 20, 0))  # consistent, and empty
@example(at=24, lie=struct.pack("<I", 0))
@example(at=24, lie=struct.pack("<I", 1))
@example(at=24, lie=struct.pack("<I", 250))
@example(at=28, lie=struct.pack("<I", 0))
@example(at=28, lie=struct.pack("<I", 2))
@example(at=28, lie=struct.pack("<I", 2**32 - 1))
@example(at=48, lie=struct.pack("<H", 65535))
@example(at=48, lie=struct.pack("<H", 0))
@example(at=56, lie=struct.pack("<I", 2**32 - 1))
@example(at=56, lie=struct.pack("<I", 4000))
@given(at=st.integers(0, FIXED_BYTES - 9), lie=st.binary(min_size=1, max_size=8))
def test_a_header_that_lies_with_a_right_checksum_is_refused_not_believed(
    at: int, lie: bytes
) -> None:
    """A writer with a fault of its own: fields that contradict each other or the request."""
    data = SMALL[:at] + lie + SMALL[at + len(lie) :]
    got = opened(resigned(data), KEY, SHARD)
    if isinstance(got, Header):
        # Then it describes itself, rightly; whether that is what was wanted (the geometry, the
        # length) is compared by who asked.
        start = got.header_bytes
        assert start + got.payload_bytes <= len(data)
        assert (got.key, got.shard) == (KEY, SHARD)


def test_another_identity_is_a_mismatch() -> None:
    other = ChunkKey("ff" * 16, KEY.name)
    longer = ChunkKey(KEY.namespace, KEY.name + b"\0")
    shorter = ChunkKey(KEY.namespace, KEY.name[:-1])
    for key, shard in (
        (other, SHARD),
        (longer, SHARD),
        (shorter, SHARD),
        (KEY, Shard(0, 2)),
        (KEY, Shard(1, 4)),
    ):
        assert reason_of(opened(SMALL, key, shard)) is Reason.MISMATCH


@pytest.mark.parametrize("version", [0, 2, 256, 65535])
def test_another_version_is_a_mismatch_that_names_both(version: int) -> None:
    got = opened(of_version(SMALL, version), KEY, SHARD)
    assert isinstance(got, Refusal)
    assert got.reason is Reason.MISMATCH
    assert str(version) in got.detail
    assert str(chunkfile.VERSION) in got.detail


# --- the bytes are an API --------------------------------------------------------------


def golden_payload() -> bytes:
    return bytes(7 * i % 251 for i in range(5000))


GOLDEN_KEY = ChunkKey("000102030405060708090a0b0c0d0e0f", b"golden chunk of version 1")
GOLDEN_SHARD = Shard(2, 4)
GOLDEN_GEOMETRY = b'{"blocks":1,"group":3,"layers":[[2,2500,0,[]]]}'


def test_version_1_is_written_as_it_always_was() -> None:
    """See tests/golden/README.md when this fails."""
    assert chunkfile.VERSION == 1
    written = file_of(GOLDEN_KEY, GOLDEN_SHARD, GOLDEN_GEOMETRY, golden_payload())
    assert written == GOLDEN.read_bytes()


def test_version_1_is_still_read() -> None:
    header = opened(GOLDEN.read_bytes(), GOLDEN_KEY, GOLDEN_SHARD)
    assert isinstance(header, Header)
    assert header.geometry == GOLDEN_GEOMETRY
    assert GOLDEN.read_bytes()[4096 : 4096 + 5000] == golden_payload()


def test_every_byte_of_version_1_is_where_the_documentation_says() -> None:
    """Taken apart by hand, without the code under test."""
    data = GOLDEN.read_bytes()
    name, geometry = GOLDEN_KEY.name, GOLDEN_GEOMETRY
    assert len(data) == 4096 + 8192
    assert data[0:8] == b"FXKVCHNK"
    assert data[8:10] == b"\x01\x00"  # version
    assert data[10:12] == bytes(2)  # flags
    assert data[12:16] == struct.pack("<I", 4096)  # header bytes
    assert data[16:24] == struct.pack("<Q", 5000)  # payload bytes
    assert data[24:28] == struct.pack("<I", 1 << 20)  # segment bytes
    assert data[28:32] == struct.pack("<I", 1)  # segments
    assert data[32:48] == bytes(range(16))  # namespace
    assert data[48:50] == struct.pack("<H", len(name))
    assert data[50:54] == struct.pack("<HH", 2, 4)  # shard 2 of 4
    assert data[54:56] == bytes(2)  # reserved
    assert data[56:60] == struct.pack("<I", len(geometry))
    assert data[60:64] == bytes(4)  # padding of the fixed part
    at = FIXED_BYTES
    assert data[at : at + len(name)] == name
    at += len(name)
    assert data[at : at + len(geometry)] == geometry
    at += len(geometry)
    assert data[at : at + 8] == struct.pack("<Q", xxhash.xxh3_64_intdigest(golden_payload()))
    at += 8
    assert data[at:4096] == bytes(4096 - at)
    assert data[4096:9096] == golden_payload()
    assert data[9096:] == bytes(12288 - 9096)
    unsigned = data[:64] + bytes(8) + data[72:4096]
    assert data[64:72] == struct.pack("<Q", xxhash.xxh3_64_intdigest(unsigned))


def test_a_large_file_of_version_1_is_written_as_it_always_was() -> None:
    """Several segments, two pages of header: pinned by digest instead of by file."""
    geometry = b"g" * 5000
    payload = bytes(range(256)) * (3 * 4096) + b"end"
    data = file_of(GOLDEN_KEY, Shard(0, 1), geometry, payload)
    assert len(data) == 8192 + 3 * 2**20 + 4096
    assert hashlib.sha256(data).hexdigest() == (
        "2461ca255ede1146b36fbb31903a9013a36bfb25bd47c85371e0ea8d2020a866"
    )
