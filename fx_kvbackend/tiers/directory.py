"""One file per chunk shard in a directory: local NVMe, or any shared file system.

    <root>/<namespace>/namespace.json
    <root>/<namespace>/of<count>/<xx>/<name>.<index>.kv     xx: first two digits of the name
    <root>/tmp/<writer>/<number>                            being written
    <root>/tmp/<writer>.lock                                locked while that writer lives

Every file is written under tmp and published by rename: it is complete or not there.
The medium is the truth: nothing here depends on memory of an earlier process. The access
time of shard 0 is the time of last use; it is set explicitly, so `noatime` does not matter.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fx_kvbackend.core import format as chunkfile
from fx_kvbackend.core.format import Header
from fx_kvbackend.engines import posix
from fx_kvbackend.errors import TierUnavailable
from fx_kvbackend.records import ChunkKey, Found, Reason, Refusal, Shard
from fx_kvbackend.tiers.base import Copies, Space

# Whole names, written in the one way that `_file` writes them: all else is foreign.
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_COUNT = re.compile(r"of[1-9][0-9]{0,4}")
_FAN = re.compile(r"[0-9a-f]{2}")
_CHUNK = re.compile(
    rf"(?:[0-9a-f]{{2}}){{1,{chunkfile.MAX_NAME_BYTES}}}\.(?:0|[1-9][0-9]{{0,4}})\.kv"
)
_PLACE = re.compile(r"[0-9a-f]{16}")
_LOCK = re.compile(r"[0-9a-f]{16}\.lock")
_TMP = "tmp"
_MANIFEST = "namespace.json"

_REASONS = {
    errno.ENOENT: Reason.ABSENT,
    errno.ENOTDIR: Reason.ABSENT,
    errno.EMFILE: Reason.NO_FDS,
    errno.ENFILE: Reason.NO_FDS,
    errno.ENOSPC: Reason.NO_SPACE,
    errno.EDQUOT: Reason.NO_SPACE,
    errno.EROFS: Reason.READ_ONLY,
    errno.EACCES: Reason.READ_ONLY,
    errno.EPERM: Reason.READ_ONLY,
    errno.ESTALE: Reason.ABSENT,  # another client of a network file system deleted it
    errno.ESHUTDOWN: Reason.CANCELLED,  # `close` was called
}
# A directory that says so holds nothing that we could count or read.
_PASSED_OVER = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ESTALE})


class DirectoryTier:
    """Chunks as files under `root`. Implements `tiers.base.Tier`; thread-safe.

    With `writable=False` (the planner's instance) no chunk is written and no O_DIRECT probed.
    `_claiming` guards the place under tmp, which is claimed anew when somebody removed it.
    """

    name = "local"

    def __init__(
        self, root: Path, *, allow_direct: bool = True, sync: bool = False, writable: bool = True
    ) -> None:
        self.root = root
        self._sync = sync
        self._writable = writable
        self._numbers = itertools.count()
        self._claiming = threading.Lock()
        self._place: _Place | None = None
        self._closed = False
        try:
            self._make_root()
            self._engine = self._probe(allow_direct)
        except OSError as exc:
            self.close()
            raise TierUnavailable(
                f"cannot use {root} as a store: {exc.strerror}; set local.path to a directory "
                "that this user can write"
            ) from exc
        how = "O_DIRECT" if self._engine.direct else "buffered"
        self.path_taken = f"{how} ({self._engine.why})"

    def _make_root(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.root / _TMP).mkdir(mode=0o700, exist_ok=True)

    def _probe(self, allow_direct: bool) -> posix.PosixEngine:
        if not self._writable:
            return posix.PosixEngine(direct=False, why="this process only looks")
        try:
            return posix.probe(self._claim().path, allow_direct=allow_direct)
        except OSError as exc:
            if _REASONS.get(exc.errno or 0) not in (Reason.NO_SPACE, Reason.READ_ONLY):
                raise
            # No reason not to serve what is there; the engine falls back call by call.
            return posix.PosixEngine(direct=allow_direct, why=f"not probed: {exc.strerror}")

    # --- chunks -----------------------------------------------------------------------

    def read(self, key: ChunkKey, shard: Shard, into: memoryview) -> Header | Refusal:
        """See Tier."""
        try:
            length = self._engine.read(self._file(key, shard), into)
        except OSError as exc:
            reason = _REASONS.get(exc.errno or 0, Reason.IO_ERROR)
            if reason not in (Reason.ABSENT, Reason.NO_FDS):
                reason = Reason.IO_ERROR
            return Refusal(reason, str(exc))
        header = chunkfile.open_header(into[:length], key, shard)
        if isinstance(header, Refusal):
            return header
        return chunkfile.verify_payload(into[:length], header) or header

    def stored_bytes(self, key: ChunkKey, shard: Shard) -> int | Refusal:
        """See Tier."""
        try:
            return self._engine.size(self._file(key, shard))
        except OSError as exc:
            return Refusal(_REASONS.get(exc.errno or 0, Reason.IO_ERROR), str(exc))

    def write(
        self, key: ChunkKey, shard: Shard, data: memoryview, *, overwrite: bool
    ) -> Refusal | None:
        """See Tier."""
        if not self._writable:
            return Refusal(Reason.READ_ONLY, "this process only looks")
        final = self._file(key, shard)
        if not overwrite and self.stored_bytes(key, shard) == len(data):
            return None
        try:
            place = self._claim()
            try:
                self._put(place, final, data)
            except FileNotFoundError:  # somebody removed our place under tmp
                self._put(self._claim(instead_of=place), final, data)
        except OSError as exc:
            reason = _REASONS.get(exc.errno or 0, Reason.IO_ERROR)
            return Refusal(Reason.IO_ERROR if reason is Reason.ABSENT else reason, str(exc))
        return None

    def _put(self, place: _Place, final: str, data: memoryview) -> None:
        temporary = f"{place.path}/{next(self._numbers)}"
        try:
            self._engine.write(temporary, data, sync=self._sync)
            self._publish(temporary, final)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _publish(self, temporary: str, final: str) -> None:
        try:
            os.rename(temporary, final)
        except FileNotFoundError:
            # Not makedirs: it gives its mode to the last level only.
            fan = Path(final).parent
            for directory in (fan.parent.parent, fan.parent, fan):
                directory.mkdir(mode=0o700, exist_ok=True)
            os.rename(temporary, final)

    def find(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, Copies]:
        """See Tier."""
        counts: dict[str, list[int]] = {}
        out: dict[ChunkKey, Copies] = {}
        for key in keys:
            if key.namespace not in counts:
                counts[key.namespace] = self._shard_counts(key.namespace)
            complete, total = [], 0
            for count in counts[key.namespace]:
                sizes = [self.stored_bytes(key, Shard(i, count)) for i in range(count)]
                known = [size for size in sizes if isinstance(size, int)]
                total += sum(known)
                if len(known) == count:
                    complete.append(count)
            if complete:
                out[key] = Copies(tuple(complete), total)
        return out

    def delete(self, key: ChunkKey) -> None:
        """See Tier."""
        for count in self._shard_counts(key.namespace):
            for index in range(count):
                with contextlib.suppress(OSError):
                    os.unlink(self._file(key, Shard(index, count)))

    def touch(self, key: ChunkKey, shard_count: int) -> None:
        """See Tier."""
        path = self._file(key, Shard(0, shard_count))
        with contextlib.suppress(OSError):
            os.utime(path, ns=(time.time_ns(), os.stat(path).st_mtime_ns))

    # --- the whole directory ----------------------------------------------------------

    def scan(self) -> Iterator[Found]:
        """See Tier."""
        try:
            yield from self._scan()
        except OSError as exc:
            raise TierUnavailable(f"cannot list all of {self.root}: {exc}") from exc

    def _scan(self) -> Iterator[Found]:
        for namespace in _children(self.root, _NAMESPACE):
            for of in _children(Path(namespace.path), _COUNT):
                count = int(of.name[2:])
                for fan in _children(Path(of.path), _FAN):
                    for item in _children(Path(fan.path), _CHUNK):
                        name, index, _ = item.name.split(".")
                        if int(index) >= count or not name.startswith(fan.name):
                            continue
                        try:
                            if not item.is_file(follow_symlinks=False):
                                continue
                            info = item.stat(follow_symlinks=False)
                        except OSError:
                            continue  # deleted meanwhile
                        yield Found(
                            ChunkKey(namespace.name, bytes.fromhex(name)),
                            Shard(int(index), count),
                            info.st_size,
                            info.st_atime,
                        )

    def sweep(self) -> int:
        """See Tier."""
        swept = 0
        tmp = self.root / _TMP
        with contextlib.suppress(OSError):
            for place in _children(tmp, _PLACE):
                with contextlib.suppress(OSError), _dead_writers_lock(f"{place.path}.lock"):
                    swept += len(os.listdir(place.path))
                    shutil.rmtree(place.path, ignore_errors=True)
            # The lock of a living writer cannot be had; without its place it is a leftover.
            for lock in _children(tmp, _LOCK):
                with contextlib.suppress(OSError), _dead_writers_lock(lock.path):
                    if not os.path.exists(lock.path.removesuffix(".lock")):
                        os.unlink(lock.path)
        return swept

    def space(self) -> Space:
        """See Tier."""
        for place in (self.root, *self.root.parents):
            try:
                info = os.statvfs(place)
            except FileNotFoundError:
                continue  # removed by somebody; the next write makes it again
            except OSError:
                break
            return Space(info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize)
        return Space(0, 0)

    def announce(self, namespace: str, manifest: Mapping[str, object]) -> list[str]:
        """See Tier."""
        notes: list[str] = []
        with contextlib.suppress(OSError):
            others = [o for o in _children(self.root, _NAMESPACE) if o.name != namespace]
            notes += filter(None, (_one_difference(other, manifest) for other in others))
        with contextlib.suppress(OSError), contextlib.closing(_Place(self.root / _TMP)) as place:
            temporary = place.path / _MANIFEST
            temporary.touch(mode=0o600)
            temporary.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
            directory = self.root / namespace
            directory.mkdir(mode=0o700, exist_ok=True)
            temporary.rename(directory / _MANIFEST)
        return notes

    def close(self) -> None:
        """See Tier."""
        with self._claiming:
            self._closed = True
            place, self._place = self._place, None
        if place is not None:
            place.close()

    # --- helpers ----------------------------------------------------------------------

    def _file(self, key: ChunkKey, shard: Shard) -> str:
        name = key.name.hex()
        return f"{self.root}/{key.namespace}/of{shard.count}/{name[:2]}/{name}.{shard.index}.kv"

    def _shard_counts(self, namespace: str) -> list[int]:
        try:
            return sorted(int(d.name[2:]) for d in _children(self.root / namespace, _COUNT))
        except OSError:
            return []

    def _claim(self, instead_of: _Place | None = None) -> _Place:
        """Our place under tmp, made when there is none yet or `instead_of` was removed."""
        with self._claiming:
            if self._closed:
                raise OSError(errno.ESHUTDOWN, "the tier is closed")
            if self._place is not None and self._place is not instead_of:
                return self._place
            if self._place is not None:
                self._place.close()
                self._place = None
                self._make_root()
            self._place = _Place(self.root / _TMP)
            return self._place


class _Place:
    """One living writer's directory under tmp, which no `sweep` in any process touches.

    Its lock goes when the process does, however it ends.
    """

    def __init__(self, tmp: Path) -> None:
        self._fd = -1
        while self._fd < 0:
            self.path = tmp / os.urandom(8).hex()
            self._fd = _new_lock(f"{self.path}.lock")
        try:
            # The lock comes before the directory: a sweep never meets one without it.
            self.path.mkdir(mode=0o700)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Remove the directory and let go of the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(f"{self.path}.lock")
        os.close(self._fd)


def _new_lock(path: str) -> int:
    """Descriptor of a new locked file; -1 when a sweep took it for a leftover meanwhile."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(fd).st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    os.close(fd)
    return -1


@contextlib.contextmanager
def _dead_writers_lock(path: str) -> Iterator[None]:
    """Hold the lock of a writer that is gone. Raises OSError while it lives."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _one_difference(other: os.DirEntry[str], manifest: Mapping[str, object]) -> str | None:
    """A sentence when the namespace there differs from `manifest` in one field only."""
    try:
        theirs = json.loads(Path(other.path, _MANIFEST).read_text(encoding="utf-8"))
        fields = manifest.keys() | theirs.keys()
        differ = sorted(f for f in fields if manifest.get(f) != theirs.get(f))
    except (OSError, ValueError, AttributeError):
        return None  # missing, or not a manifest
    if len(differ) != 1:
        return None
    field = differ[0]
    return (
        f"chunks stored with {field} = {theirs.get(field)!r} cannot be used, it is "
        f"{manifest.get(field)!r} now"
    )


def _children(directory: Path, pattern: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    """Entries whose whole name matches; none when the directory is gone or not for us.

    Raises OSError for anything else: what a broken medium does not list is still there.
    """
    try:
        with os.scandir(directory) as entries:
            yield from (e for e in entries if pattern.fullmatch(e.name))
    except OSError as exc:
        if exc.errno not in _PASSED_OVER:
            raise
