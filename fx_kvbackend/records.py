"""Frozen records that cross rooms.

A *chunk* is the KV of a fixed number of tokens of one KV group. Its name is the host's
block hash (which chains over the whole prefix) plus the group number; its *namespace*
names everything else that makes the bytes valid. Each chunk is stored as one or more
*shards*, one per rank that holds a different part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class ChunkKey(NamedTuple):
    """Full identity of a chunk: `namespace` is 32 hex digits, `name` at most 64 bytes."""

    namespace: str
    name: bytes


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of the `count` parts of a chunk; 0 <= index < count."""

    index: int
    count: int


class Reason(StrEnum):
    """Why a save was dropped or a load failed. Each is a label of a counter."""

    ABSENT = "absent"  # the chunk is not there (evicted, or deleted by somebody else)
    TRUNCATED = "truncated"  # shorter than its header says
    CORRUPT = "corrupt"  # a checksum does not match
    MISMATCH = "mismatch"  # another key, geometry or format version than asked for
    IO_ERROR = "io_error"  # the medium answered with an error
    NO_FDS = "no_fds"  # the process or system is out of file descriptors
    NO_SPACE = "no_space"  # ENOSPC, quota, or the free-space floor
    READ_ONLY = "read_only"  # the medium refuses writes
    FULL = "full"  # the capacity cap is reached and nothing may be evicted
    SCANNING = "scanning"  # used bytes are not known yet
    STAGING = "staging"  # no staging slot before the engine needed its blocks back
    PARTIAL = "partial"  # the host no longer holds all blocks of the chunk
    DEADLINE = "deadline"  # not finished in time
    CANCELLED = "cancelled"  # cache reset or shutdown
    SICK = "sick"  # the tier is paused after repeated failures
    INTERNAL = "internal"  # an unexpected exception; its traceback is in the log


class Refusal(NamedTuple):
    """An operation that did not happen, as a value: the reason and a text for the log."""

    reason: Reason
    detail: str


class Found(NamedTuple):
    """One shard file seen by a scan. `used_s` is its last use (epoch seconds)."""

    key: ChunkKey
    shard: Shard
    stored_bytes: int
    used_s: float


@dataclass(frozen=True, slots=True)
class SaveChunk:
    """One chunk to save: which blocks of the host, and whether to replace a bad copy."""

    key: ChunkKey
    group: int
    block_ids: tuple[int, ...]
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class LoadChunk:
    """One chunk to load.

    `block_ids[i]` receives block `first_block + i` of the chunk. `shard_count` says
    into how many shards the stored copy is cut.
    """

    key: ChunkKey
    group: int
    first_block: int
    block_ids: tuple[int, ...]
    shard_count: int


@dataclass(frozen=True, slots=True)
class SaveReport:
    """One rank's last word on one save: published (reason None) or dropped.

    `stored_bytes` is what it added to the medium: 0 from a rank that shares its shard with
    another one, or that dropped the save.
    """

    key: ChunkKey
    reason: Reason | None
    shard_count: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A chunk that did not arrive, and the host blocks that therefore hold no KV."""

    key: ChunkKey
    block_ids: tuple[int, ...]
    reason: Reason


@dataclass(frozen=True, slots=True)
class JobDone:
    """End of one job of the mover. Every submitted job ends in exactly one of these."""

    job_id: int
    is_load: bool
    moved_bytes: int
    duration_s: float
    failures: tuple[LoadFailure, ...] = ()
