"""A cheap fingerprint of model weights that is the same on every host.

A git commit of the hub and the folder in it when the files lie in a hub cache; else names,
sizes, the safetensors headers (tensor names, shapes, dtypes) and a sample of bytes from the
middle of the tensors. Two fine-tunes saved under the same path differ; the path does not
matter.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import BinaryIO

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40}(?:/.*)?)$")
_SAMPLE_BYTES = 256
_MAX_HEADER_BYTES = 100 << 20  # the safetensors format's own limit
# Enough to meet every layer of a large model; 480B models have tens of thousands of tensors.
_MAX_SAMPLES = 2048


def fingerprint(path: Path) -> str | None:
    """Identity of the weights at `path` (a directory or one file).

    None when there are none. Raises OSError when they cannot be read.
    """
    commit = _COMMIT.search(str(path.absolute()))
    if commit:
        return f"commit:{commit[1]}"
    if path.is_file():
        files = [path]
    else:
        files = sorted({f for pattern in _WEIGHTS for f in path.glob(pattern)})
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            for offset, length in _samples(stream, file.stat().st_size):
                stream.seek(offset)
                digest.update(stream.read(length))
    return f"sample:{digest.hexdigest()[:32]}"


def _samples(stream: BinaryIO, size_bytes: int) -> list[tuple[int, int]]:
    """(offset, length) of what is hashed: a safetensors header whole, tensors in part."""
    try:
        header_bytes, brace = struct.unpack("<Qc", stream.read(9))
        # In any other file this number is noise: then read no more, and fail as JSON.
        fits = brace == b"{" and header_bytes <= min(size_bytes - 8, _MAX_HEADER_BYTES)
        header = json.loads(brace + stream.read(header_bytes - 1 if fits else 0))
        start = 8 + header_bytes
        middles = [
            start + sum(entry["data_offsets"]) // 2
            for name, entry in sorted(header.items())
            if name != "__metadata__"
        ]
        return [(0, start), *((at, _SAMPLE_BYTES) for at in _thin(middles))]
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        step = max(1, size_bytes // _MAX_SAMPLES)
        return [(at, _SAMPLE_BYTES) for at in range(0, size_bytes, step)]


def _thin(offsets: list[int]) -> list[int]:
    step = -(-len(offsets) // _MAX_SAMPLES) or 1
    return offsets[::step]
