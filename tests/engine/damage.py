"""Kinds of damage to stored chunks, and what a load says of each."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fx_kvbackend.records import Reason
from tests.engine.models import BLOCK

BAD = 3
"""The chunk that is damaged, of 7."""
TOKENS = 7 * BLOCK + 40


def _missing(files: list[Path]) -> None:
    files[BAD].unlink()


def _truncated(files: list[Path]) -> None:
    os.truncate(files[BAD], files[BAD].stat().st_size // 2)


def _empty(files: list[Path]) -> None:
    os.truncate(files[BAD], 0)


def _flipped(files: list[Path]) -> None:
    data = bytearray(files[BAD].read_bytes())
    data[len(data) // 2] ^= 1
    files[BAD].write_bytes(data)


def _swapped(files: list[Path]) -> None:
    mine, other = files[BAD].read_bytes(), files[BAD + 1].read_bytes()
    files[BAD].write_bytes(other)
    files[BAD + 1].write_bytes(mine)


def _zeroed(files: list[Path]) -> None:
    files[BAD].write_bytes(bytes(files[BAD].stat().st_size))


DAMAGE: dict[str, tuple[Callable[[list[Path]], None], Reason]] = {
    "missing": (_missing, Reason.ABSENT),
    "truncated": (_truncated, Reason.TRUNCATED),
    "empty": (_empty, Reason.TRUNCATED),
    "flipped": (_flipped, Reason.CORRUPT),
    "swapped": (_swapped, Reason.MISMATCH),
    "zeroed": (_zeroed, Reason.CORRUPT),
}
