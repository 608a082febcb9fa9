"""PosixEngine on real file systems: O_DIRECT where it works, and every way in which it may not.

Mounts, loop devices and strace are used where this machine permits them; a test that cannot
have what it needs is skipped with the reason.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import mmap
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fx_kvbackend.core.format import Header
from fx_kvbackend.engines.buffers import aligned
from fx_kvbackend.engines.posix import PosixEngine, probe
from fx_kvbackend.records import ChunkKey, Reason, Refusal
from fx_kvbackend.testing.contracts import ONE, sealed, some_key, some_payload
from fx_kvbackend.tiers.directory import DirectoryTier

ROOT = Path(__file__).resolve().parent.parent
Mount = Callable[..., Path]


def filled(n_bytes: int, seed: int = 1, shift: int = 0) -> memoryview:
    """`n_bytes` of noise that start `shift` bytes behind a page border."""
    whole = aligned(n_bytes + shift)
    whole[shift:] = some_payload(seed, n_bytes)
    return whole[shift:]


def takes_direct(directory: Path, length: int = 4096) -> bool:
    """Whether O_DIRECT really works there; found out without the code under test."""
    path = directory / "direct"
    page = mmap.mmap(-1, 4096)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:
        return False
    try:
        return os.pwrite(fd, memoryview(page)[:length], 0) == length
    except OSError:
        return False
    finally:
        os.close(fd)
        path.unlink()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """(call, was O_DIRECT in force) of every read and write, asked of the kernel."""
    seen: list[tuple[str, bool]] = []

    def watch(name: str) -> None:
        real = getattr(os, name)

        def call(fd: int, data: Any, at: int) -> int:
            seen.append((name, bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
            return int(real(fd, data, at))

        monkeypatch.setattr(os, name, call)

    watch("preadv")
    watch("pwrite")
    return seen


def command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(words[:3])} ... is not possible here: {done.stderr.strip()}")
    return done.stdout.strip()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts things; `mount("tmpfs", size="8M")` gives the directory."""
    if os.geteuid():
        pytest.skip("only root may mount")
    places: list[Path] = []

    def do(kind: str, source: str = "none", **options: str) -> Path:
        place = tmp_path / f"mount{len(places)}"
        place.mkdir()
        words = ",".join(f"{name}={value}" for name, value in options.items())
        command("mount", "-t", kind, *(["-o", words] if words else []), source, str(place))
        places.append(place)
        return place

    yield do
    for place in reversed(places):
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def round_trip(engine: PosixEngine, directory: Path, data: memoryview, into: memoryview) -> None:
    path = str(directory / "file")
    engine.write(path, data, sync=False)
    assert Path(path).read_bytes() == bytes(data)
    assert engine.size(path) == len(data)
    into[:] = bytes(len(into))
    assert engine.read(path, into) == min(len(data), len(into))
    assert into[: len(data)] == data[: len(into)]
    os.unlink(path)


# --- O_DIRECT, proven by doing it ------------------------------------------------------


def test_the_probe_says_what_the_mount_really_does(tmp_path: Path) -> None:
    engine = probe(tmp_path, allow_direct=True)
    assert engine.direct is takes_direct(tmp_path)
    assert engine.why
    assert list(tmp_path.iterdir()) == []
    round_trip(engine, tmp_path, filled(3 * 4096), aligned(3 * 4096))


def test_direct_means_direct_in_every_call(tmp_path: Path, calls: list[tuple[str, bool]]) -> None:
    if not takes_direct(tmp_path):
        pytest.skip("this file system does not take O_DIRECT")
    engine = probe(tmp_path, allow_direct=True)
    calls.clear()
    round_trip(engine, tmp_path, filled((9 << 20) + 4096), aligned((9 << 20) + 4096))
    assert set(calls) == {("pwrite", True), ("preadv", True)}
    assert engine.fallback_count == 0


def test_off_means_off(tmp_path: Path, calls: list[tuple[str, bool]]) -> None:
    engine = probe(tmp_path, allow_direct=False)
    assert not engine.direct
    assert engine.why == "direct_io is off"
    round_trip(engine, tmp_path, filled(2 << 20), aligned(2 << 20))
    tier = DirectoryTier(tmp_path / "store", allow_direct=False)
    data = sealed(some_key(), ONE, some_payload(1, 100_000))
    assert tier.write(some_key(), ONE, data, overwrite=False) is None
    assert isinstance(tier.read(some_key(), ONE, data), Header)
    assert tier.path_taken == "buffered (direct_io is off)"
    tier.close()
    assert calls
    assert not any(direct for _, direct in calls)


@pytest.mark.parametrize("shift", [1, 64])
def test_an_unaligned_buffer_is_served_by_falling_back_for_that_call(
    tmp_path: Path, calls: list[tuple[str, bool]], caplog: pytest.LogCaptureFixture, shift: int
) -> None:
    if not takes_direct(tmp_path):
        pytest.skip("this file system does not take O_DIRECT")
    engine = probe(tmp_path, allow_direct=True)
    caplog.set_level(logging.WARNING)
    round_trip(engine, tmp_path, filled(8192, shift=shift), filled(8192, shift=shift))
    round_trip(engine, tmp_path, filled(8192, shift=shift), aligned(8192))
    if not engine.fallback_count:
        pytest.skip("this file system takes O_DIRECT from any address")
    assert engine.fallback_count == 3
    assert len(caplog.records) == 1, "one warning, not one per call"
    calls.clear()
    round_trip(engine, tmp_path, filled(8192), aligned(8192))
    assert all(direct for _, direct in calls), "the next call is direct again"


def test_ramfs_refuses_the_open_and_is_served_buffered(
    mount: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    directory = mount("ramfs")
    assert not takes_direct(directory)
    engine = probe(directory, allow_direct=True)
    assert not engine.direct
    assert engine.why == "the file system refuses O_DIRECT"
    round_trip(engine, directory, filled(5 << 20), aligned(5 << 20))
    assert caplog.records == [], "the probe reports for itself"
    # Without a probe, as on a disk that was full at start: call by call.
    unproven = PosixEngine(direct=True, why="not probed")
    round_trip(unproven, directory, filled(5 << 20), aligned(5 << 20))
    assert unproven.fallback_count == 2
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    tier = DirectoryTier(directory / "store")
    assert tier.path_taken == "buffered (the file system refuses O_DIRECT)"
    data = sealed(some_key(), ONE, some_payload(1, 100_000))
    assert tier.write(some_key(), ONE, data, overwrite=False) is None
    assert isinstance(tier.read(some_key(), ONE, data), Header)
    tier.close()


def test_a_drive_with_4096_byte_sectors(
    tmp_path: Path, mount: Mount, calls: list[tuple[str, bool]]
) -> None:
    if shutil.which("mkfs.ext4") is None or shutil.which("losetup") is None:
        pytest.skip("no mkfs.ext4 or losetup here")
    image = tmp_path / "image"
    image.touch()
    os.truncate(image, 16 << 20)
    command("mkfs.ext4", "-q", "-b", "4096", str(image))
    device = command("losetup", "--sector-size", "4096", "--show", "--find", str(image))
    try:
        directory = mount("ext4", device)
        assert takes_direct(directory)
        assert not takes_direct(directory, 512), "the sectors are not what this test needs"
        engine = probe(directory, allow_direct=True)
        assert engine.direct
        tier = DirectoryTier(directory / "store")
        calls.clear()
        for size in (1, 511, 4096, 4097, 1 << 20, (1 << 20) + 513):
            data = sealed(some_key(size), ONE, some_payload(size, size))
            assert tier.write(some_key(size), ONE, data, overwrite=False) is None
            into = aligned(len(data))
            assert isinstance(tier.read(some_key(size), ONE, into), Header)
            assert into == data
        assert all(direct for _, direct in calls)
        tier.close()
        round_trip(engine, directory, filled(8192, shift=1), filled(8192, shift=1))
        assert engine.fallback_count == 2
    finally:
        # Detached when the mount that is still there goes.
        subprocess.run(["losetup", "--detach", device], check=True)


def test_a_mount_that_lies_about_o_direct_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the flag and gives other bytes: buffered then, if that is right."""
    preadv = os.preadv

    def lying(fd: int, buffers: list[memoryview], at: int) -> int:
        got = preadv(fd, buffers, at)
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            buffers[0][0] ^= 1
        return got

    if not takes_direct(tmp_path):
        pytest.skip("this file system does not take O_DIRECT")
    monkeypatch.setattr(os, "preadv", lying)
    engine = probe(tmp_path, allow_direct=True)
    assert not engine.direct
    assert "a file reads back other than it was written" in engine.why
    assert list(tmp_path.iterdir()) == []


# --- lengths ---------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("length", [0, 1, 511, 4095, 4096, 4097, 12288 + 77, (4 << 20) + 5])
def test_the_end_of_a_file_is_where_it_is(tmp_path: Path, direct: bool, length: int) -> None:
    engine = PosixEngine(direct=direct, why="a test")
    path = tmp_path / "file"
    path.write_bytes(some_payload(1, length))
    into = aligned((4 << 20) + 8192)
    assert engine.read(str(path), into) == length
    assert into[:length] == some_payload(1, length)
    assert engine.size(str(path)) == length


@pytest.mark.parametrize("direct", [True, False])
def test_a_buffer_shorter_than_the_file_is_filled(tmp_path: Path, direct: bool) -> None:
    engine = PosixEngine(direct=direct, why="a test")
    (tmp_path / "file").write_bytes(some_payload(1, 20_000))
    into = aligned(8192)
    assert engine.read(str(tmp_path / "file"), into) == 8192
    assert into == some_payload(1, 20_000)[:8192]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("step", [512, 1000, 4096])
def test_calls_that_move_less_than_asked_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, step: int
) -> None:
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:step], at))
    if not direct or step == 4096:  # O_DIRECT ends short at the end of a file only
        monkeypatch.setattr(os, "preadv", lambda fd, b, at: preadv(fd, [b[0][:step]], at))
    engine = PosixEngine(direct=direct, why="a test")
    round_trip(engine, tmp_path, filled(5 * 4096), aligned(5 * 4096))


def test_a_call_that_writes_nothing_is_an_error_not_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    with pytest.raises(OSError, match="nothing was written"):
        PosixEngine(direct=False, why="a test").write(str(tmp_path / "f"), filled(10), sync=False)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        PosixEngine(direct=False, why="").write(str(tmp_path / "file"), filled(10), sync=False)
    assert (tmp_path / "file").read_bytes() == b"old"


# --- media that are full, read-only, or out of descriptors -----------------------------


def write_until_refused(tier: DirectoryTier, size: int) -> tuple[list[ChunkKey], Refusal]:
    written: list[ChunkKey] = []
    for number in range(1000):
        key = some_key(number)
        data = sealed(key, ONE, some_payload(number, size))
        refusal = tier.write(key, ONE, data, overwrite=False)
        if refusal is not None:
            return written, refusal
        written.append(key)
    raise AssertionError("it never got full")


def assert_whole(tier: DirectoryTier, keys: list[ChunkKey], size: int) -> None:
    for number, key in enumerate(keys):
        into = aligned(size + 8192)
        assert isinstance(tier.read(key, ONE, into), Header)
        assert into[4096 : 4096 + size] == some_payload(number, size)


def files_under(root: Path) -> list[str]:
    return sorted(p.name for p in root.rglob("*") if p.is_file())


def test_a_full_disk_drops_saves_and_leaves_nothing(mount: Mount) -> None:
    root = mount("tmpfs", size="8M") / "store"
    tier = DirectoryTier(root)
    size = 900_000
    written, refusal = write_until_refused(tier, size)
    assert refusal.reason is Reason.NO_SPACE
    assert "No space left" in refusal.detail
    assert 5 <= len(written) <= 9
    names = [name for name in files_under(root) if not name.endswith(".lock")]
    assert len(names) == len(written), "no entry and no temporary of the failed save"
    assert [f.key for f in tier.scan()].sort() == written.copy().sort()
    assert_whole(tier, written, size)
    tier.delete(written[0])
    data = sealed(written[0], ONE, some_payload(0, size))
    assert tier.write(written[0], ONE, data, overwrite=False) is None
    assert_whole(tier, written, size)
    # And a restart on the full disk serves all of it.
    (root.parent / "filler").write_bytes(bytes(100))
    with (root.parent / "filler").open("ab", buffering=0) as filler, pytest.raises(OSError):
        while True:
            filler.write(bytes(4096))
    tier.close()
    again = DirectoryTier(root)
    assert "not probed" in again.path_taken
    assert_whole(again, written, size)
    again.close()


def test_read_only_media_are_served(mount: Mount) -> None:
    place = mount("tmpfs", size="8M")
    first = DirectoryTier(place / "store")
    data = sealed(some_key(0), ONE, some_payload(0, 50_000))
    assert first.write(some_key(0), ONE, data, overwrite=False) is None
    first.close()
    command("mount", "-o", "remount,ro", str(place))
    tier = DirectoryTier(place / "store")
    assert "not probed: Read-only file system" in tier.path_taken
    other = sealed(some_key(1), ONE, some_payload(1, 50_000))
    for _ in range(2):
        refusal = tier.write(some_key(1), ONE, other, overwrite=False)
        assert refusal is not None
        assert refusal.reason is Reason.READ_ONLY
    tier.delete(some_key(0))
    tier.touch(some_key(0), 1)
    assert tier.sweep() == 0
    assert tier.announce("ab" * 16, {"a": 1}) == []
    assert [f.key for f in tier.scan()] == [some_key(0)]
    assert_whole(tier, [some_key(0)], 50_000)
    command("mount", "-o", "remount,rw", str(place))
    assert tier.write(some_key(1), ONE, other, overwrite=False) is None, "writable again"
    assert_whole(tier, [some_key(0), some_key(1)], 50_000)
    tier.close()


def test_out_of_descriptors_is_a_refusal_and_passes(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path)
    data = sealed(some_key(0), ONE, some_payload(0, 5000))
    assert tier.write(some_key(0), ONE, data, overwrite=False) is None
    other = sealed(some_key(1), ONE, some_payload(1, 5000))
    into = aligned(16384)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        read = tier.read(some_key(0), ONE, into)
        write = tier.write(some_key(1), ONE, other, overwrite=False)
        found = tier.find([some_key(0)])
        swept = tier.sweep()
        tier.touch(some_key(0), 1)
        tier.delete(some_key(0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert isinstance(read, Refusal)
    assert read.reason is Reason.NO_FDS
    assert write is not None
    assert write.reason is Reason.NO_FDS
    assert (found, swept) == ({}, 0)
    assert isinstance(tier.read(some_key(0), ONE, into), Header)
    assert tier.write(some_key(1), ONE, other, overwrite=False) is None
    assert len(list(tier.scan())) == 2
    tier.close()


def test_no_descriptor_leaks(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    tier = DirectoryTier(tmp_path)
    data = sealed(some_key(0), ONE, some_payload(0, 5000))
    for number in range(50):
        tier.write(some_key(0), ONE, data, overwrite=True)
        tier.read(some_key(0), ONE, data)
        tier.read(some_key(1), ONE, data)
        tier.find([some_key(0), some_key(1)])
        next(tier.scan())
        tier.sweep()
        tier.announce("ab" * 16, {"n": number})
    tier.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


# --- faults of system calls ------------------------------------------------------------

READ = "preadv,preadv2"  # Python takes the second where the C library has it

# Runs under strace and says how its save, or its load of a chunk saved before, went.
CHILD = """
import json, sys
from pathlib import Path
from fx_kvbackend.core.format import Header
from fx_kvbackend.testing.contracts import ONE, sealed, some_key, some_payload
from fx_kvbackend.tiers.directory import DirectoryTier
root, verb, sync = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "sync"
tier = DirectoryTier(root, sync=sync)
data = sealed(some_key(), ONE, some_payload(1, 3_000_000))
if verb == "save":
    got = tier.write(some_key(), ONE, data, overwrite=False)
else:
    data = sealed(some_key(7), ONE, some_payload(7, 3_000_000))  # what a slot held before
    got = tier.read(some_key(), ONE, data)
good = data[4096:3_004_096] == some_payload(1, 3_000_000)
if isinstance(got, Header):
    got = None
print(json.dumps({
    "reason": got and got.reason, "good": good, "fallbacks": tier._engine.fallback_count,
    "direct": tier._engine.direct,
}))
"""


@pytest.fixture(scope="session")
def strace() -> str:
    path = shutil.which("strace")
    if path is None:
        pytest.skip("strace is not installed")
    done = subprocess.run([path, "-o", "/dev/null", "true"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("strace may not trace here")
    return path


def under_faults(
    strace: str, root: Path, verb: str, *faults: str, only: Path | None = None, sync: bool = False
) -> dict[str, Any]:
    """What the child says when these faults are injected, into calls on one path only."""
    words = [strace, "-f", "-qq", "-o", str(root.parent / "strace.log")]
    names = ",".join(sorted({fault.split(":")[0] for fault in faults}))
    words += ["-e", f"trace={names}"] + [w for f in faults for w in ("-e", f"inject={f}")]
    words += ["-P", str(only)] if only else []
    words += [sys.executable, "-c", CHILD, str(root), verb, "sync" if sync else "none"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert "INJECTED" in (root.parent / "strace.log").read_text(), "no fault came"
    out: dict[str, Any] = json.loads(done.stdout)
    return out


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, Path]:
    """(root, file) of a store with one chunk of 3 MB."""
    root = tmp_path / "store"
    tier = DirectoryTier(root)
    data = sealed(some_key(), ONE, some_payload(1, 3_000_000))
    assert tier.write(some_key(), ONE, data, overwrite=False) is None
    tier.close()
    return root, next(root.rglob("*.kv"))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (f"{READ}:error=EIO", "io_error"),
        (f"{READ}:error=ESTALE", "absent"),
        ("openat:error=EMFILE", "no_fds"),
    ],
)
def test_a_load_that_meets_an_error_is_refused(
    strace: str, stored: tuple[Path, Path], fault: str, reason: str
) -> None:
    root, path = stored
    said = under_faults(strace, root, "load", fault, only=path)
    assert said["reason"] == reason
    assert path.stat().st_size > 3_000_000, "an error of the medium deletes nothing"


def test_a_load_that_is_told_a_lie_is_refused(strace: str, stored: tuple[Path, Path]) -> None:
    """The first call claims a page and touched nothing: the buffer holds what it held before."""
    root, path = stored
    said = under_faults(strace, root, "load", f"{READ}:retval=4096:when=1", only=path)
    assert said["reason"] == "mismatch"


def test_a_load_whose_file_ends_early_is_refused(strace: str, stored: tuple[Path, Path]) -> None:
    root, path = stored
    said = under_faults(strace, root, "load", f"{READ}:retval=0", only=path)
    assert said["reason"] == "truncated"


@pytest.mark.parametrize("error", ["EINVAL", "EOPNOTSUPP"])
def test_a_load_whose_o_direct_is_refused_is_served(
    strace: str, stored: tuple[Path, Path], error: str
) -> None:
    root, path = stored
    said = under_faults(strace, root, "load", f"{READ}:error={error}:when=1", only=path)
    if not said["direct"]:
        pytest.skip("this file system does not take O_DIRECT")
    assert said == {"reason": None, "good": True, "fallbacks": 1, "direct": True}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        # The first write is the probe's.
        ("pwrite64:error=EIO:when=2+", "io_error"),
        ("pwrite64:error=ENOSPC:when=2+", "no_space"),
        ("pwrite64:error=EROFS:when=2+", "read_only"),
        ("pwrite64:retval=0:when=2+", "io_error"),
        ("fdatasync:error=EIO", "io_error"),
        ("rename:error=EIO", "io_error"),
    ],
)
def test_a_save_that_meets_an_error_is_dropped_and_leaves_nothing(
    strace: str, tmp_path: Path, fault: str, reason: str
) -> None:
    root = tmp_path / "store"
    said = under_faults(strace, root, "save", fault, sync=True)
    assert said["reason"] == reason
    left = DirectoryTier(root, writable=False)
    assert list(left.scan()) == []
    assert left.sweep() == 0, "the temporary was removed at once"


@pytest.mark.parametrize("error", ["EINVAL", "EOPNOTSUPP"])
def test_a_save_whose_o_direct_is_refused_is_written(
    strace: str, tmp_path: Path, error: str
) -> None:
    root = tmp_path / "store"
    said = under_faults(strace, root, "save", f"pwrite64:error={error}:when=2")
    if not said["direct"]:
        pytest.skip("this file system does not take O_DIRECT")
    assert (said["reason"], said["fallbacks"]) == (None, 1)
    tier = DirectoryTier(root)
    into = sealed(some_key(), ONE, bytes(3_000_000))
    assert isinstance(tier.read(some_key(), ONE, into), Header)
    assert into[4096:3_004_096] == some_payload(1, 3_000_000)
    tier.close()


@pytest.mark.parametrize("claimed", [4096, 1000])
def test_a_save_that_is_told_a_lie_is_never_read_back(
    strace: str, tmp_path: Path, claimed: int
) -> None:
    """The call claims bytes that it did not write: published with a hole, refused at load."""
    root = tmp_path / "store"
    under_faults(strace, root, "save", f"pwrite64:retval={claimed}:when=2")
    tier = DirectoryTier(root)
    into = aligned(4 << 20)
    got = tier.read(some_key(), ONE, into)
    assert isinstance(got, Refusal)
    assert got.reason is Reason.CORRUPT
    tier.close()


def test_only_plain_calls_touch_a_chunk(strace: str, stored: tuple[Path, Path]) -> None:
    """No mapping, no preallocation: calls that some file systems lack."""
    root, path = stored
    log = root.parent / "trace.log"
    words = [strace, "-f", "-qq", "-o", str(log), "-e", "trace=all", "-P", str(path)]
    words += [sys.executable, "-c", CHILD, str(root), "load", "none"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=env)
    assert json.loads(done.stdout)["good"]
    made = {line.split("(")[0].split()[-1] for line in log.read_text().splitlines()}
    assert made - {"preadv", "preadv2", "fcntl"} == {"openat", "close"}
    assert made & {"preadv", "preadv2"}


def test_errors_come_as_the_system_gave_them(tmp_path: Path) -> None:
    engine = PosixEngine(direct=False, why="a test")
    for attempt in (
        lambda: engine.read(str(tmp_path / "missing"), aligned(4096)),
        lambda: engine.size(str(tmp_path / "missing")),
        lambda: engine.write(str(tmp_path / "no" / "dir"), filled(10), sync=False),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            attempt()
        assert caught.value.errno == errno.ENOENT
