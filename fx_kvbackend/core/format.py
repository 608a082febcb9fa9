"""The chunk file: a header that describes it completely, then the payload.

| offset | field                                                            |
|--------|------------------------------------------------------------------|
| 0      | fixed part (`_FIXED`), little endian                             |
| 72     | key name, geometry text, one checksum (u64) per payload segment  |
| h      | payload, h = header_bytes, a multiple of 4096                    |
| h + n  | zeros up to a multiple of 4096, so that O_DIRECT can write it    |

Checksums are xxh3_64 (30 GB/s per core; the fastest of the measured ones). Each covers
SEGMENT_BYTES of payload, so parts of a chunk can be verified as they arrive. The header
has its own checksum, taken with that field zero.

VERSION must rise whenever the meaning of any byte changes; tests/golden pins it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from fx_kvbackend.records import ChunkKey, Reason, Refusal, Shard

MAGIC = b"FXKVCHNK"
VERSION = 1
ALIGN_BYTES = 4096
SEGMENT_BYTES = 1 << 20
MAX_NAME_BYTES = 64

# magic, version, flags, header_bytes, payload_bytes, segment_bytes, segment_count,
# namespace, name_bytes, shard_index, shard_count, reserved, geometry_bytes, header_xxh3
_FIXED = struct.Struct("<8sHHIQII16sHHHHI4xQ")
_XXH3_OFFSET = _FIXED.size - 8


@dataclass(frozen=True, slots=True)
class Header:
    """What a chunk file says about itself."""

    key: ChunkKey
    shard: Shard
    geometry: bytes
    header_bytes: int
    payload_bytes: int
    segment_bytes: int
    checksums: tuple[int, ...]


def align_up(n_bytes: int, align_bytes: int = ALIGN_BYTES) -> int:
    """Smallest multiple of `align_bytes` that is not below `n_bytes`."""
    return -(-n_bytes // align_bytes) * align_bytes


def header_bytes(name_bytes: int, geometry_bytes: int, payload_bytes: int) -> int:
    """Size of the header of a chunk; a multiple of ALIGN_BYTES."""
    segments = -(-payload_bytes // SEGMENT_BYTES)
    return align_up(_FIXED.size + name_bytes + geometry_bytes + 8 * segments)


def file_bytes(name_bytes: int, geometry_bytes: int, payload_bytes: int) -> int:
    """Size of the whole file of a chunk; a multiple of ALIGN_BYTES."""
    return header_bytes(name_bytes, geometry_bytes, payload_bytes) + align_up(payload_bytes)


def seal(buffer: memoryview, key: ChunkKey, shard: Shard, geometry: bytes, payload: int) -> int:
    """Write the header into the front of `buffer`; returns the length of the file.

    The `payload` bytes must already stand at offset `header_bytes(...)`; they are
    checksummed as they are. The padding behind them is zeroed.
    """
    head = header_bytes(len(key.name), len(geometry), payload)
    total = head + align_up(payload)
    sums = [xxhash.xxh3_64_intdigest(part) for part in _segments(buffer[head:], payload)]
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        0,
        head,
        payload,
        SEGMENT_BYTES,
        len(sums),
        bytes.fromhex(key.namespace),
        len(key.name),
        shard.index,
        shard.count,
        0,
        len(geometry),
        0,
    )
    front = fixed + key.name + geometry + struct.pack(f"<{len(sums)}Q", *sums)
    buffer[:head] = front + bytes(head - len(front))
    buffer[head + payload : total] = bytes(total - head - payload)
    buffer[_XXH3_OFFSET : _XXH3_OFFSET + 8] = struct.pack(
        "<Q", xxhash.xxh3_64_intdigest(buffer[:head])
    )
    return total


def open_header(buffer: memoryview, key: ChunkKey, shard: Shard) -> Header | Refusal:
    """The header at the front of `buffer`, checked against what was asked for."""
    if len(buffer) < _FIXED.size:
        return Refusal(Reason.TRUNCATED, f"{len(buffer)} bytes are too few for a header")
    (
        magic,
        version,
        _flags,
        head,
        payload,
        segment,
        segment_count,
        namespace,
        name_len,
        index,
        count,
        _reserved,
        geometry_len,
        checksum,
    ) = _FIXED.unpack(buffer[: _FIXED.size])
    if magic != MAGIC:
        return Refusal(Reason.CORRUPT, f"magic is {magic!r}")
    if version != VERSION:
        return Refusal(Reason.MISMATCH, f"format version {version}, this is {VERSION}")
    if head > len(buffer):
        return Refusal(Reason.TRUNCATED, f"header of {head} bytes in a file of {len(buffer)}")
    front = bytearray(buffer[:head])
    front[_XXH3_OFFSET : _XXH3_OFFSET + 8] = bytes(8)
    if xxhash.xxh3_64_intdigest(front) != checksum:
        return Refusal(Reason.CORRUPT, "header checksum")
    # From here on the fields are what the writer wrote. Whether it knew how to is next.
    names = _FIXED.size + name_len
    at = names + geometry_len
    needed = -(-payload // segment) if segment else -1
    if segment_count != needed or at + 8 * segment_count > head or head % ALIGN_BYTES:
        return Refusal(Reason.CORRUPT, "the sizes in the header contradict each other")
    found = ChunkKey(namespace.hex(), bytes(front[_FIXED.size : names]))
    if found != key or Shard(index, count) != shard:
        return Refusal(Reason.MISMATCH, f"file is of chunk {found}, shard {index} of {count}")
    geometry = bytes(front[names : names + geometry_len])
    sums = struct.unpack_from(f"<{segment_count}Q", front, at)
    return Header(key, shard, geometry, head, payload, segment, sums)


def verify_payload(buffer: memoryview, header: Header) -> Refusal | None:
    """None when every payload byte in `buffer` (header in front) is what was written."""
    end = header.header_bytes + header.payload_bytes
    if len(buffer) < end:
        return Refusal(Reason.TRUNCATED, f"{len(buffer)} of {end} bytes")
    parts = _segments(buffer[header.header_bytes :], header.payload_bytes, header.segment_bytes)
    for number, (part, expected) in enumerate(zip(parts, header.checksums, strict=True)):
        if xxhash.xxh3_64_intdigest(part) != expected:
            return Refusal(Reason.CORRUPT, f"payload checksum of segment {number}")
    return None


def _segments(
    payload: memoryview, length: int, segment_bytes: int = SEGMENT_BYTES
) -> Iterator[memoryview]:
    for start in range(0, length, segment_bytes):
        yield payload[start : min(start + segment_bytes, length)]
