"""Reading and damaging stored chunks behind the product's back."""

from __future__ import annotations

from pathlib import Path

from fx_kvbackend.core import format as chunkfile
from fx_kvbackend.core.format import Header
from fx_kvbackend.records import ChunkKey, Refusal, Shard


def identity(file: Path) -> tuple[ChunkKey, Shard]:
    """Key and shard that a chunk file's path stands for."""
    name, index, _ = file.name.split(".")
    namespace, count = file.parts[-4], int(file.parts[-3][2:])
    return ChunkKey(namespace, bytes.fromhex(name)), Shard(int(index), count)


def read(file: Path) -> tuple[Header, bytes]:
    """Header and payload of a sound chunk file."""
    data = memoryview(file.read_bytes())
    header = chunkfile.open_header(data, *identity(file))
    assert not isinstance(header, Refusal), header
    assert chunkfile.verify_payload(data, header) is None
    start = header.header_bytes
    return header, bytes(data[start : start + header.payload_bytes])


def replace_payload(file: Path, payload: bytes) -> None:
    """Put other bytes into a chunk file so that every checksum is right."""
    header, old = read(file)
    assert len(payload) == len(old)
    data = bytearray(file.read_bytes())
    data[header.header_bytes : header.header_bytes + len(payload)] = payload
    chunkfile.seal(memoryview(data), header.key, header.shard, header.geometry, len(payload))
    file.write_bytes(data)


def of_prompt(store: Path, hashes: list[bytes], group: int = 0) -> list[Path]:
    """Chunk files of consecutive blocks (chunk = block), in order."""
    out = []
    for block_hash in hashes:
        name = (block_hash + group.to_bytes(4, "big")).hex()
        out += sorted(store.glob(f"*/of*/{name[:2]}/{name}.*.kv"))
    return out
