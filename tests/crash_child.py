"""The process that test_crash.py kills: saves without end, through a real mover and tier.

Run as a program it is a nursery: it imports torch once, then forks one saver per command, so
that a kill costs milliseconds and not the seconds of an import. Commands are lines of JSON on
stdin, answers lines of JSON on stdout:

    {"do": "save", "root": ..., "board": ..., "seed": n}  -> {"pid": ...}
    {"do": "wait", "pid": ...}                            -> {"status": ...}
    {"do": "stampede", "root": ..., "count": n}           -> {"statuses": [...]}

What a chunk holds follows from its key, so whoever reads it can tell whether it is right.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from fx_kvbackend.core.geometry import Geometry, Page
from fx_kvbackend.engines.pages import HostPages
from fx_kvbackend.records import ChunkKey, JobDone, LoadChunk, Refusal, SaveChunk, Shard
from fx_kvbackend.store.mover import Mover, MoverSettings
from fx_kvbackend.tiers.base import Tier
from fx_kvbackend.tiers.directory import DirectoryTier

WHOLE = Shard(0, 1)
PAGES = (40_000, 40_000, 24_576)
BLOCKS_PER_CHUNK = 4
CHUNKS_AT_ONCE = 16
GEOMETRY = Geometry(0, BLOCKS_PER_CHUNK, tuple(Page(size) for size in PAGES))

# The board: what a process did, in memory that survives it.
BEGUN, ENDED, REFUSED = 0, 8, 16
BOARD_BYTES = 4096


def key_of(seed: int, number: int) -> ChunkKey:
    """Key of the `number`-th chunk of one saver."""
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return ChunkKey(f"{seed % 3:032x}", digest + struct.pack("<II", seed, number))


def content_of(key: ChunkKey) -> np.ndarray:
    """What this chunk holds, of shape (blocks, bytes of a block)."""
    dice = np.random.Generator(np.random.PCG64(int.from_bytes(key.name[:16], "big")))
    whole = np.frombuffer(dice.bytes(GEOMETRY.payload_bytes), np.uint8)
    return whole.reshape(BLOCKS_PER_CHUNK, -1)


class Kv:
    """The KV cache of an engine: one tensor a layer, room for several chunks."""

    def __init__(self) -> None:
        blocks = BLOCKS_PER_CHUNK * CHUNKS_AT_ONCE
        self.tensors = [torch.zeros((blocks, size), dtype=torch.uint8) for size in PAGES]
        layers = list(zip(self.tensors, PAGES, strict=True))
        self.pages = HostPages({0: layers})

    @staticmethod
    def block_ids(place: int) -> tuple[int, ...]:
        start = place * BLOCKS_PER_CHUNK
        return tuple(range(start, start + BLOCKS_PER_CHUNK))

    def fill(self, place: int, content: np.ndarray) -> None:
        at = 0
        for tensor, size in zip(self.tensors, PAGES, strict=True):
            tensor.numpy()[list(self.block_ids(place))] = content[:, at : at + size]
            at += size

    def content(self, place: int) -> np.ndarray:
        rows = [t.numpy()[list(self.block_ids(place))] for t in self.tensors]
        return np.concatenate(rows, axis=1)


def mover_on(tier: Tier, kv: Kv) -> Mover:
    """A mover as an engine's rank has one."""
    settings = MoverSettings(
        shard=WHOLE,
        writes=True,
        staging_bytes=16 << 20,
        load_deadline_s=60.0,
        read_threads=2,
        write_threads=2,
    )
    return Mover(tier, kv.pages, {0: GEOMETRY}, settings)


def load_all(tier: Tier, keys: Iterable[ChunkKey]) -> list[str]:
    """Loads every key into KV pages through a mover; complaints about those not right."""
    kv = Kv()
    mover = mover_on(tier, kv)
    wrong: list[str] = []
    todo = list(keys)
    for start in range(0, len(todo), CHUNKS_AT_ONCE):
        batch = todo[start : start + CHUNKS_AT_ONCE]
        for place in range(CHUNKS_AT_ONCE):
            kv.fill(place, np.zeros((BLOCKS_PER_CHUNK, GEOMETRY.block_bytes), np.uint8))
        chunks = [LoadChunk(key, 0, 0, kv.block_ids(n), 1) for n, key in enumerate(batch)]
        mover.submit_load(start, chunks)
        done: list[JobDone] = []
        while not done:
            done = mover.poll()
            time.sleep(0.0005)
        failed = {failure.key: failure.reason for failure in done[0].failures}
        for place, key in enumerate(batch):
            if key in failed:
                wrong.append(f"{key.name.hex()} did not load: {failed[key]}")
            elif not np.array_equal(kv.content(place), content_of(key)):
                wrong.append(f"{key.name.hex()} holds other bytes")
    mover.close()
    return wrong


class Watched(DirectoryTier):
    """Writes down when a write begins and ends, and which chunks are published."""

    def __init__(self, root: Path, board: Path) -> None:
        super().__init__(root)
        self._guard = threading.Lock()
        with board.open("r+b") as file:
            self._board = mmap.mmap(file.fileno(), BOARD_BYTES)
        self._log = os.open(f"{board}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _count(self, at: int) -> None:
        with self._guard:
            (value,) = struct.unpack_from("<Q", self._board, at)
            struct.pack_into("<Q", self._board, at, value + 1)

    def write(
        self, key: ChunkKey, shard: Shard, data: memoryview, *, overwrite: bool
    ) -> Refusal | None:
        self._count(BEGUN)
        refusal = super().write(key, shard, data, overwrite=overwrite)
        if refusal is None:
            os.write(self._log, key.name[-8:])
        else:
            self._count(REFUSED)
        self._count(ENDED)
        return refusal


def save_for_ever(root: Path, board: Path, seed: int) -> None:
    """Saves new chunks, now and then an older one again, until somebody kills us."""
    dice = random.Random(seed)
    kv = Kv()
    mover = mover_on(Watched(root, board), kv)
    free = list(range(CHUNKS_AT_ONCE))
    busy: dict[int, int] = {}
    number = 0
    while True:
        while free:
            place = free.pop()
            again = number > 4 and dice.random() < 0.2
            chunk = dice.randrange(number) if again else number
            number += not again
            key = key_of(seed, chunk)
            kv.fill(place, content_of(key))
            job = max(busy, default=0) + 1
            busy[job] = place
            mover.submit_save(job, [SaveChunk(key, 0, kv.block_ids(place), overwrite=again)])
        for done in mover.poll():
            place = busy.pop(done.job_id)
            # Released: the engine would put the KV of somebody else there at once.
            kv.fill(place, np.full((BLOCKS_PER_CHUNK, GEOMETRY.block_bytes), 0xEE, np.uint8))
            free.append(place)
        time.sleep(0.0002)


def open_and_save(root: Path, number: int, start: int) -> None:
    """Waits for the end of the pipe `start`, then opens a store that is not there yet."""
    os.read(start, 1)
    tier = DirectoryTier(root)
    kv = Kv()
    kv.fill(0, content_of(key_of(number, 0)))
    mover = mover_on(tier, kv)
    mover.submit_save(0, [SaveChunk(key_of(number, 0), 0, kv.block_ids(0))])
    while not (reports := mover.take_reports()):
        time.sleep(0.0005)
    mover.close()
    if reports[0].reason is not None:
        raise RuntimeError(f"the save was dropped: {reports[0].reason}")


def fork(work, *args) -> int:
    """Pid of a child that does this and nothing else; its status is 1 when it raises."""
    pid = os.fork()
    if pid == 0:
        try:
            work(*args)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def stampede(root: Path, count: int) -> list[int]:
    """`count` processes open one missing path at the same moment; their exit statuses."""
    read_end, write_end = os.pipe()

    def one(number: int) -> None:
        os.close(write_end)
        open_and_save(root, number, read_end)

    pids = [fork(one, number) for number in range(count)]
    os.close(read_end)
    os.close(write_end)  # the moment
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def main() -> None:
    """Obey commands until stdin ends."""
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, object]
        match order["do"]:
            case "save":
                root, board = Path(order["root"]), Path(order["board"])
                answer = {"pid": fork(save_for_ever, root, board, order["seed"])}
            case "wait":
                _, status = os.waitpid(order["pid"], 0)
                answer = {"status": os.waitstatus_to_exitcode(status)}
            case "stampede":
                answer = {"statuses": stampede(Path(order["root"]), order["count"])}
            case other:
                raise SystemExit(f"unknown command {other}")
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
