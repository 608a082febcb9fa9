"""DirectoryTier: the contract of all tiers, and what is special about files in a directory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fx_kvbackend.core import format as chunkfile
from fx_kvbackend.errors import TierUnavailable
from fx_kvbackend.records import ChunkKey, Reason, Refusal, Shard
from fx_kvbackend.testing.contracts import ONE, TierContract, sealed, some_key, some_payload
from fx_kvbackend.tiers.base import Tier
from fx_kvbackend.tiers.directory import DirectoryTier

NAMESPACE = "ab" * 16


def path_of(root: Path, key: ChunkKey, shard: Shard = ONE) -> Path:
    """Where the documented layout puts a shard; written down here a second time on purpose."""
    name = key.name.hex()
    return root / key.namespace / f"of{shard.count}" / name[:2] / f"{name}.{shard.index}.kv"


def everything(root: Path) -> dict[str, os.stat_result]:
    return {str(path.relative_to(root)): path.lstat() for path in sorted(root.rglob("*"))}


def temporaries(root: Path) -> list[str]:
    return sorted(p.name for p in (root / "tmp").glob("*/*"))


class TestDirectoryTier(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = DirectoryTier(tmp_path / "store")
        yield tier
        tier.close()

    def another(self, tier: Tier) -> Tier:
        assert isinstance(tier, DirectoryTier)
        return DirectoryTier(tier.root)

    def raw_read(self, tier: Tier, key: ChunkKey, shard: Shard) -> bytes | None:
        assert isinstance(tier, DirectoryTier)
        path = path_of(tier.root, key, shard)
        return path.read_bytes() if path.exists() else None

    def raw_write(self, tier: Tier, key: ChunkKey, shard: Shard, data: bytes) -> None:
        assert isinstance(tier, DirectoryTier)
        path = path_of(tier.root, key, shard)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def place_foreign(self, tier: Tier) -> None:
        assert isinstance(tier, DirectoryTier)
        namespace = tier.root / some_key().namespace
        fan = namespace / "of1" / "ab"
        fan.mkdir(parents=True, exist_ok=True)
        for path in (
            tier.root / "README.txt",
            tier.root / f"{NAMESPACE}.bak",
            tier.root / "tmp" / "notes",
            tier.root / "tmp" / "abc.lock",
            namespace / "of1.tar",
            namespace / "of01",
            namespace / "of1" / "zz",
            fan / "readme",
            fan / "abcd.kv",
            fan / "abcd.0.kv.part",
            fan / "abcd.00.kv",  # we never write leading zeros
            fan / "abcd.0.kv\n",
            fan / "ABCD.0.kv",
            fan / "abc.0.kv",  # half a byte
            fan / "abcd.1.kv",  # there is no shard 1 of 1
            fan / "cdcd.0.kv",  # in the wrong place
            fan / f"{'ab' * 65}.0.kv",  # longer than any name
        ):
            path.write_bytes(b"foreign")
        (fan / "abab.0.kv").mkdir()
        (fan / "abac.0.kv").symlink_to(path_of(tier.root, some_key()))
        (tier.root / "ababab").mkdir()
        (tier.root / "tmp" / "somebody").mkdir()
        (tier.root / "tmp" / "somebody" / "file").write_bytes(b"foreign")

    def foreign(self, tier: Tier) -> Any:
        assert isinstance(tier, DirectoryTier)
        ours = (path_of(tier.root, some_key()), tier.root / ("cd" * 16))
        return {
            name: (info.st_mode, info.st_mtime_ns if stat.S_ISREG(info.st_mode) else 0)
            for name, info in everything(tier.root).items()
            if not any((tier.root / name).is_relative_to(our) for our in ours)
        }


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DirectoryTier]:
    tier = DirectoryTier(tmp_path / "store")
    yield tier
    tier.close()


def put(tier: DirectoryTier, key: ChunkKey, payload: bytes, shard: Shard = ONE) -> Path:
    assert tier.write(key, shard, sealed(key, shard, payload), overwrite=True) is None
    return path_of(tier.root, key, shard)


def reason_of(refusal: object) -> Reason:
    assert isinstance(refusal, Refusal), refusal
    return refusal.reason


# --- files, modes, times ---------------------------------------------------------------


def test_an_existing_copy_is_not_written_again(tier: DirectoryTier) -> None:
    path = put(tier, some_key(), some_payload(1, 5000))
    os.utime(path, ns=(1, 1))
    before = path.stat()
    data = sealed(some_key(), ONE, some_payload(1, 5000))
    assert tier.write(some_key(), ONE, data, overwrite=False) is None
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, 1)


def test_a_touch_keeps_the_time_of_writing(tier: DirectoryTier) -> None:
    path = put(tier, some_key(), some_payload(1, 5000))
    os.utime(path, ns=(10**9, 2 * 10**9))
    tier.touch(some_key(), 1)
    info = path.stat()
    assert info.st_mtime_ns == 2 * 10**9
    assert info.st_atime_ns > 10**18
    assert next(iter(tier.scan())).used_s == pytest.approx(info.st_atime_ns / 1e9)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_owner_can_look(tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        tier = DirectoryTier(tmp_path / "a" / "store")
        tier.announce(NAMESPACE, {"model": "m"})
        put(tier, ChunkKey(NAMESPACE, b"\x01\x02"), some_payload(1, 5000), Shard(1, 2))
        put(tier, some_key(), some_payload(1, 5000))
        left = tier.root / "tmp"
        assert [p for p in left.iterdir() if p.is_dir()], "the writer's own place is checked too"
        found = {"": tier.root.lstat(), **everything(tier.root)}
    finally:
        os.umask(old)
    modes = {name: stat.S_IMODE(info.st_mode) for name, info in found.items()}
    files = {name for name, info in found.items() if stat.S_ISREG(info.st_mode)}
    assert {name for name in files if name.endswith((".kv", "namespace.json"))}
    assert modes == {name: 0o600 if name in files else 0o700 for name in modes}
    tier.close()


def test_a_temporary_is_private_while_it_is_written(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int]] = []
    rename = os.rename

    def spy(source: str, target: str) -> None:
        seen.append((source, stat.S_IMODE(os.stat(source).st_mode), os.stat(source).st_size))
        rename(source, target)

    monkeypatch.setattr(os, "rename", spy)
    put(tier, some_key(1), some_payload(1, 5000))
    put(tier, some_key(1), some_payload(1, 5000))
    done = [row for row in seen if row[2]]
    assert {mode for _, mode, _ in done} == {0o600}
    assert {size for _, _, size in done} == {4096 + 8192}
    assert len({source for source, _, _ in done}) == 2, "no name is used twice"
    assert all(Path(source).parent.parent == tier.root / "tmp" for source, _, _ in done)


def test_two_writers_never_share_a_temporary_name(tmp_path: Path) -> None:
    one, two = DirectoryTier(tmp_path), DirectoryTier(tmp_path)
    places = {p.name for p in (tmp_path / "tmp").iterdir() if p.is_dir()}
    assert len(places) == 2
    one.close()
    two.close()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_names_stay_short_whatever_the_host_calls_its_model(tmp_path: Path) -> None:
    root = tmp_path / ("größerer Name mit Leerzeichen " * 6)
    tier = DirectoryTier(root)
    key = ChunkKey("f" * 32, b"\xff" * chunkfile.MAX_NAME_BYTES)
    path = put(tier, key, some_payload(1, 100), Shard(65534, 65535))
    assert max(len(part) for part in path.relative_to(root).parts) < 160
    assert [f.shard for f in tier.scan()] == [Shard(65534, 65535)]
    tier.close()


def test_nothing_is_published_before_it_is_complete(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at after every single write call: the final name is absent until it is whole."""
    final = path_of(tier.root, some_key())
    calls: list[bool] = []
    pwrite = os.pwrite

    def small(fd: int, data: memoryview, at: int) -> int:
        calls.append(final.exists())
        return pwrite(fd, data[:4096], at)

    monkeypatch.setattr(os, "pwrite", small)
    put(tier, some_key(), some_payload(1, 40_000))
    assert len(calls) == 11
    assert not any(calls)
    assert final.read_bytes() == bytes(sealed(some_key(), ONE, some_payload(1, 40_000)))


@pytest.mark.parametrize("sync", [False, True])
def test_durability_decides_whether_data_is_flushed_before_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    tier = DirectoryTier(tmp_path, sync=sync)
    order: list[str] = []

    def noted(name: str, real: Callable[..., None], *args: object) -> None:
        order.append(name)
        real(*args)

    for name in ("fdatasync", "rename"):
        monkeypatch.setattr(os, name, partial(noted, name, getattr(os, name)))
    put(tier, some_key(1), some_payload(1, 100))
    assert order[0] == ("fdatasync" if sync else "rename")
    assert order.count("fdatasync") == sync
    tier.close()


# --- failures of the medium ------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.ENOSPC, Reason.NO_SPACE),
        (errno.EDQUOT, Reason.NO_SPACE),
        (errno.EROFS, Reason.READ_ONLY),
        (errno.EACCES, Reason.READ_ONLY),
        (errno.EMFILE, Reason.NO_FDS),
        (errno.ENFILE, Reason.NO_FDS),
        (errno.EIO, Reason.IO_ERROR),
        (errno.ENOENT, Reason.IO_ERROR),
        (errno.ENAMETOOLONG, Reason.IO_ERROR),
    ],
)
@pytest.mark.parametrize("call", ["open", "pwrite", "rename"])
def test_a_failed_write_leaves_nothing_and_says_why(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch, call: str, code: int, reason: Reason
) -> None:
    def fail(*args: object, **_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        data = sealed(some_key(), ONE, some_payload(1, 5000))
        assert reason_of(tier.write(some_key(), ONE, data, overwrite=True)) is reason
    assert list(tier.scan()) == []
    assert temporaries(tier.root) == []
    put(tier, some_key(), some_payload(1, 5000))  # and all is well when the medium is


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.ENOENT, Reason.ABSENT),
        (errno.ESTALE, Reason.ABSENT),
        (errno.EMFILE, Reason.NO_FDS),
        (errno.EIO, Reason.IO_ERROR),
        (errno.EACCES, Reason.IO_ERROR),
        (errno.ENOSPC, Reason.IO_ERROR),
    ],
)
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_failed_read_says_why(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch, call: str, code: int, reason: Reason
) -> None:
    put(tier, some_key(), some_payload(1, 5000))

    def fail(*args: object, **_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    into = sealed(some_key(), ONE, some_payload(1, 5000))
    assert reason_of(tier.read(some_key(), ONE, into)) is reason


def test_a_scan_that_cannot_see_everything_says_so(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a listing would look like free space, and the cap would be exceeded."""
    put(tier, some_key(), some_payload(1, 5000))

    def fail(path: object) -> object:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(TierUnavailable, match="Too many open files"):
        list(tier.scan())
    # What only looks for one chunk answers no, and deletes nothing: both are legal.
    assert tier.find([some_key()]) == {}
    tier.delete(some_key())
    assert tier.sweep() == 0
    assert tier.announce(NAMESPACE, {}) == []
    monkeypatch.undo()
    assert some_key() in tier.find([some_key()])


def test_directories_of_other_users_are_passed_over(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier, some_key(1, namespace=1), some_payload(1, 5000))
    put(tier, some_key(2, namespace=2), some_payload(2, 5000))
    scandir = os.scandir

    def closed_to_us(path: Any) -> Any:
        if str(path).endswith(some_key(1, namespace=1).namespace):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed_to_us)
    assert [f.key for f in tier.scan()] == [some_key(2, namespace=2)]


def test_files_deleted_by_somebody_else_during_a_scan_are_passed_over(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        put(tier, some_key(number), some_payload(1, 100))
    scan = tier.scan()
    next(scan)
    shutil.rmtree(tier.root / some_key().namespace)
    assert len(list(scan)) < 20


def test_somebody_removes_the_whole_store_under_us(tier: DirectoryTier) -> None:
    put(tier, some_key(1), some_payload(1, 5000))
    shutil.rmtree(tier.root)
    assert reason_of(tier.read(some_key(1), ONE, sealed(some_key(1), ONE, b""))) is Reason.ABSENT
    assert tier.find([some_key(1)]) == {}
    tier.delete(some_key(1))
    tier.touch(some_key(1), 1)
    assert list(tier.scan()) == []
    assert tier.sweep() == 0
    assert tier.space().free_bytes > 0, "a write would make the directory again"
    put(tier, some_key(2), some_payload(2, 5000))
    assert [f.key for f in tier.scan()] == [some_key(2)]
    other = DirectoryTier(tier.root)
    assert other.sweep() == 0, "the new place is as safe as the first one"
    other.close()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tier.root, tier.root / "tmp")}
    assert modes == {0o700}


def test_somebody_removes_tmp_under_eight_writers(tier: DirectoryTier) -> None:
    stop = threading.Event()
    refusals: list[Refusal] = []

    def write(number: int) -> None:
        data = sealed(some_key(number), ONE, some_payload(number, 5000))
        while not stop.is_set():
            refusal = tier.write(some_key(number), ONE, data, overwrite=True)
            if refusal is not None:
                refusals.append(refusal)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        shutil.rmtree(tier.root / "tmp", ignore_errors=True)
    stop.set()
    for thread in threads:
        thread.join()
    assert {refusal.reason for refusal in refusals} <= {Reason.IO_ERROR}
    for number in range(8):
        put(tier, some_key(number), some_payload(number, 5000))
    assert temporaries(tier.root) == []


def test_a_foreign_directory_in_place_of_a_chunk_is_an_error_not_a_crash(
    tier: DirectoryTier,
) -> None:
    path = path_of(tier.root, some_key())
    (path / "sub").mkdir(parents=True)
    into = sealed(some_key(), ONE, some_payload(1, 5000))
    assert reason_of(tier.read(some_key(), ONE, into)) is Reason.IO_ERROR
    refusal = tier.write(some_key(), ONE, into, overwrite=True)
    assert reason_of(refusal) is Reason.IO_ERROR
    tier.delete(some_key())
    assert (path / "sub").is_dir()
    assert temporaries(tier.root) == []


# --- start and stop --------------------------------------------------------------------


def test_a_path_that_cannot_be_a_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TierUnavailable, match=r"file as a store: .*local\.path"):
        DirectoryTier(tmp_path / "file")


def test_a_medium_that_gives_back_other_bytes_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv

    def lying(fd: int, buffers: list[memoryview], at: int) -> int:
        got = preadv(fd, buffers, at)
        buffers[0][:1] = bytes([buffers[0][0] ^ 1])
        return got

    monkeypatch.setattr(os, "preadv", lying)
    with pytest.raises(TierUnavailable, match="reads back other than it was written"):
        DirectoryTier(tmp_path)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("call", ["mkdir", "pwrite"])
def test_a_full_disk_at_start_still_serves_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    first = DirectoryTier(tmp_path)
    put(first, some_key(), some_payload(1, 5000))
    first.close()
    real = getattr(os, call)

    def full(*args: Any, **kwargs: Any) -> Any:
        if call == "mkdir" and Path(args[0]).exists():
            return real(*args, **kwargs)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        tier = DirectoryTier(tmp_path)
        assert "not probed: No space left on device" in tier.path_taken
        into = sealed(some_key(), ONE, bytes(5000))
        assert tier.read(some_key(), ONE, into)
        assert bytes(into[4096:9096]) == some_payload(1, 5000)
        data = sealed(some_key(2), ONE, some_payload(2, 5000))
        assert reason_of(tier.write(some_key(2), ONE, data, overwrite=False)) is Reason.NO_SPACE
    put(tier, some_key(2), some_payload(2, 5000))  # there is room again
    tier.close()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_one_that_only_looks_writes_no_chunk_and_takes_no_place(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path, writable=False)
    data = sealed(some_key(), ONE, some_payload(1, 5000))
    assert reason_of(tier.write(some_key(), ONE, data, overwrite=False)) is Reason.READ_ONLY
    tier.announce(NAMESPACE, {"a": 1})
    assert list((tmp_path / "tmp").iterdir()) == []
    assert json.loads((tmp_path / NAMESPACE / "namespace.json").read_text()) == {"a": 1}


def test_a_manifest_that_is_not_ours_is_passed_over(tier: DirectoryTier) -> None:
    for number, text in enumerate(("not json", "[1]", "null", "{}", '{"a": 1}', "\xff")):
        place = tier.root / f"{number:032x}"
        place.mkdir()
        (place / "namespace.json").write_bytes(text.encode("latin-1"))
    assert len(tier.announce(NAMESPACE, {"a": 2})) == 2  # {} and {"a": 1} are one step away


# --- leftovers of dead writers ---------------------------------------------------------


def dead_place(root: Path, name: str, *, lock: bool) -> None:
    place = root / "tmp" / name
    place.mkdir()
    (place / "0").write_bytes(b"half a chunk")
    (place / "1").write_bytes(b"")
    if lock:
        (root / "tmp" / f"{name}.lock").touch()


def test_leftovers_of_dead_writers_are_swept(tier: DirectoryTier) -> None:
    before = sorted((tier.root / "tmp").iterdir())
    dead_place(tier.root, "0" * 16, lock=True)
    dead_place(tier.root, "1" * 16, lock=False)
    (tier.root / "tmp" / f"{'2' * 16}.lock").touch()  # died between the lock and the place
    (tier.root / "tmp" / ("3" * 16)).mkdir()
    assert tier.sweep() == 4
    assert sorted((tier.root / "tmp").iterdir()) == before
    assert tier.sweep() == 0
    put(tier, some_key(), some_payload(1, 5000))


def test_a_sweep_never_takes_a_living_writers_place(tmp_path: Path) -> None:
    writers = [DirectoryTier(tmp_path) for _ in range(3)]
    places = sorted((tmp_path / "tmp").iterdir())
    for number, place in enumerate(p for p in places if p.is_dir()):
        (place / "77").write_bytes(b"being written" * number)
    looker = DirectoryTier(tmp_path, writable=False)
    for tier in (*writers, looker):
        assert tier.sweep() == 0
    assert sorted((tmp_path / "tmp").iterdir()) == places
    for tier in writers:
        tier.close()


def test_sweeps_and_starts_at_the_same_time(tmp_path: Path) -> None:
    """A sweep may meet a lock between its creation and its locking; the writer tries again."""
    sweeper = DirectoryTier(tmp_path, writable=False)
    stop = threading.Event()

    def sweep() -> None:
        while not stop.is_set():
            assert sweeper.sweep() == 0

    threads = [threading.Thread(target=sweep) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(60):
            tier = DirectoryTier(tmp_path)
            data = sealed(some_key(number), ONE, some_payload(number, 100))
            assert tier.write(some_key(number), ONE, data, overwrite=False) is None
            tier.close()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    sweeper.sweep()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_lock_that_a_sweep_takes_before_its_owner_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The narrow moment of the test above, hit on purpose."""
    sweeper = DirectoryTier(tmp_path, writable=False)
    flock = fcntl.flock
    lost: list[str] = []

    def late(fd: int, operation: int) -> None:
        if not lost and threading.current_thread() is threading.main_thread():
            lost.append("once")
            worker = threading.Thread(target=sweeper.sweep)
            worker.start()
            worker.join()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    tier = DirectoryTier(tmp_path)
    monkeypatch.undo()
    assert lost
    put(tier, some_key(), some_payload(1, 100))
    assert sweeper.sweep() == 0
    put(tier, some_key(), some_payload(1, 100))
    tier.close()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_medium_that_does_not_tell_its_space_has_none(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: object) -> object:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "statvfs", fail)
    assert tier.space() == (0, 0)
