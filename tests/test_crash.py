"""SIGKILL at random moments of saving: what reads back is right, and nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from fx_kvbackend.records import ChunkKey
from fx_kvbackend.store.chores import build_index
from fx_kvbackend.tiers.directory import DirectoryTier
from tests import crash_child as child

pytestmark = pytest.mark.crash

ROOT = Path(__file__).resolve().parent.parent
KILLS = 20
# Any seed will do; FXKV_ names are settings, so this is not one.
SEED = int(os.environ.get("CRASH_SEED", "20250"))


class Nursery:
    """Forks savers; see crash_child."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.alive: set[int] = set()
        env = {k: v for k, v in os.environ.items() if not k.startswith("FXKV_")}
        # One thread only: this process forks.
        env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=ROOT,
        )

    def order(self, **words: Any) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        for pid in list(self.alive):
            os.kill(pid, signal.SIGKILL)
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(30)
        assert self.process.stdout
        self.process.stdout.close()


class Saver:
    """A process that saves until it is killed."""

    def __init__(self, nursery: Nursery, root: Path, seed: int) -> None:
        self.seed = seed
        self.board = nursery.home / f"board-{seed}"
        self.board.write_bytes(bytes(child.BOARD_BYTES))
        self._nursery = nursery
        answer = nursery.order(do="save", root=str(root), board=str(self.board), seed=seed)
        self.pid: int = answer["pid"]
        nursery.alive.add(self.pid)

    def count(self, what: int) -> int:
        value: int = struct.unpack_from("<Q", self.board.read_bytes(), what)[0]
        return value

    def until(self, writes: int) -> None:
        """Return when so many writes have begun."""
        give_up = time.monotonic() + 60
        while self.count(child.BEGUN) < writes:
            assert time.monotonic() < give_up, "the saver does not save"
            time.sleep(0.001)

    def until_writing(self) -> None:
        """Return as soon as a write is in flight."""
        give_up = time.monotonic() + 60
        while self.count(child.BEGUN) == self.count(child.ENDED):
            assert time.monotonic() < give_up, "the saver does not save"

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._nursery.alive.remove(self.pid)
        status = self._nursery.order(do="wait", pid=self.pid)["status"]
        assert status == -signal.SIGKILL, "it died of something else; see its stderr above"

    def published(self) -> set[ChunkKey]:
        """Chunks whose write had returned."""
        log = Path(f"{self.board}.log")
        data = log.read_bytes() if log.exists() else b""
        return {child.key_of(*struct.unpack_from("<II", data, at)) for at in range(0, len(data), 8)}


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()


def bytes_on_disk(root: Path) -> int:
    """Bytes of chunk files, by walking the directory without the tier."""
    return sum(path.stat().st_size for path in root.glob("*/of*/*/*.kv"))


def left_in_tmp(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in (root / "tmp").rglob("*"))


def test_20_kills_while_saving(nursery: Nursery, tmp_path: Path) -> None:
    dice = random.Random(SEED)
    root = tmp_path / "store"
    in_flight_kills = torn_temporaries = read_back = 0
    known: set[ChunkKey] = set()
    for number in range(KILLS):
        saver = Saver(nursery, root, SEED + number)
        saver.until(writes=dice.randint(1, 25))
        time.sleep(dice.uniform(0, 0.02))  # the random moment
        if number % 2:  # on a fast medium most moments are between two writes
            saver.until_writing()
        saver.kill()
        in_flight = saver.count(child.BEGUN) - saver.count(child.ENDED)
        assert in_flight >= 0
        assert saver.count(child.REFUSED) == 0
        in_flight_kills += in_flight > 0

        # The next start.
        tier = DirectoryTier(root)
        torn_temporaries += tier.sweep()
        assert len(left_in_tmp(root)) == 2, "this process's own place and lock, and nothing else"
        index = build_index(tier)
        stored = {key for key, _ in index}
        assert index.used_bytes == bytes_on_disk(root)
        assert index.used_bytes == sum(found.stored_bytes for found in tier.scan())
        assert saver.published() <= stored, "a chunk that was reported published is gone"
        assert known <= stored, "a chunk of an earlier run is gone"
        fresh = stored - known
        assert {key.name[-8:-4] for key in fresh} <= {struct.pack("<I", saver.seed)}
        keys = sorted(fresh) + dice.sample(sorted(known), min(10, len(known)))
        read_back += len(fresh)
        known = stored
        assert child.load_all(tier, keys) == []  # closes the tier
        assert left_in_tmp(root) == []

    print(
        f"seed {SEED}: {KILLS} kills, {in_flight_kills} with a write in flight, "
        f"{torn_temporaries} temporaries swept, {read_back} keys read back"
    )
    assert in_flight_kills >= KILLS // 2
    assert torn_temporaries > 0
    assert read_back == len(known) >= 100
    assert child.load_all(DirectoryTier(root), sorted(known)) == []
    modes = {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*.kv")}
    assert modes == {0o600}


def test_two_living_writers_and_the_sweeps_of_others(nursery: Nursery, tmp_path: Path) -> None:
    root = tmp_path / "store"
    one, two = Saver(nursery, root, 1), Saver(nursery, root, 2)
    one.until(writes=5)
    two.until(writes=5)
    looker = DirectoryTier(root, writable=False)
    sweeps = 0
    while sweeps < 50 or one.count(child.ENDED) < 60 or two.count(child.ENDED) < 60:
        assert looker.sweep() == 0, "a sweep took what a living writer was writing"
        sweeps += 1
    one.kill()
    before = two.count(child.ENDED)
    looker.sweep()
    two.until(writes=before + 30)
    assert looker.sweep() == 0
    assert one.count(child.REFUSED) == two.count(child.REFUSED) == 0
    assert len([name for name in left_in_tmp(root) if name.endswith(".lock")]) == 1
    two.kill()
    looker.sweep()
    assert left_in_tmp(root) == []
    stored = {found.key for found in looker.scan()}
    assert stored >= one.published() | two.published()
    assert child.load_all(DirectoryTier(root), sorted(stored)) == []


def test_64_processes_open_one_missing_path_at_once(nursery: Nursery, tmp_path: Path) -> None:
    root = tmp_path / "not" / "there" / "yet"
    statuses = nursery.order(do="stampede", root=str(root), count=64)["statuses"]
    assert statuses == [0] * 64
    tier = DirectoryTier(root)
    assert tier.sweep() == 0
    keys = {found.key for found in tier.scan()}
    assert keys == {child.key_of(number, 0) for number in range(64)}
    assert child.load_all(tier, sorted(keys)) == []
    assert left_in_tmp(root) == []
