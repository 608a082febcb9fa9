"""One file per chunk shard in a directory: local NVMe, or any shared file system.

    <root>/<namespace>/namespace.json
    <root>/<namespace>/of<count>/<xx>/<name>.<index>.kv     xx: first two digits of the name
    <root>/tmp/<writer>/<number>                            being written
    <root>/tmp/<writer>.lock                                locked while that writer lives

A chunk file is written under tmp and published by rename: it is complete or not there.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fx_kvbackend.core import format as chunkfile
from fx_kvbackend.core.format import Header
from fx_kvbackend.engines import posix
from fx_kvbackend.errors import TierUnavailable
from fx_kvbackend.records import ChunkKey, Found, Reason, Refusal, Shard
from fx_kvbackend.tiers.base import Copies, Space

_NAMESPACE = re.compile(r"^[0-9a-f]{32}$")
_COUNT = re.compile(r"^of([1-9][0-9]{0,5})$")
_CHUNK = re.compile(r"^((?:[0-9a-f]{2})+)\.([0-9]+)\.kv$")
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
}


class DirectoryTier:
    """Chunks as files under `root`. Implements `tiers.base.Tier`; thread-safe.

    With `writable=False` (the planner's instance) no writer's place under tmp is taken.
    """

    name = "local"

    def __init__(
        self, root: Path, *, allow_direct: bool = True, sync: bool = False, writable: bool = True
    ) -> None:
        self.root = root
        self._sync = sync
        self._numbers = itertools.count()
        self._writer: Path | None = None
        self._lock_fd = -1
        try:
            for directory in (root, root / _TMP):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.read_only = not os.access(root / _TMP, os.W_OK)
            if writable and not self.read_only:
                self._claim_writer()
            self._engine = self._probe(allow_direct)
        except OSError as exc:
            raise TierUnavailable(
                f"cannot use {root} as a store: {exc.strerror}; set local.path to a directory "
                "that this user can write"
            ) from exc
        how = "O_DIRECT" if self._engine.direct else "buffered"
        self.path_taken = f"{how} ({self._engine.why})"

    def _probe(self, allow_direct: bool) -> posix.PosixEngine:
        if self._writer is None:
            why = "the store is read-only" if self.read_only else "this process only looks"
            return posix.PosixEngine(direct=False, why=why)
        try:
            return posix.probe(self._writer, allow_direct=allow_direct)
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # A full disk is no reason not to serve what is on it.
            return posix.PosixEngine(direct=False, why="the disk was full when it was probed")

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
        if self._writer is None:
            return Refusal(Reason.READ_ONLY, f"{self.root} is not writable")
        final = self._file(key, shard)
        if not overwrite and self.stored_bytes(key, shard) == len(data):
            return None
        temporary = str(self._writer / str(next(self._numbers)))
        try:
            try:
                self._engine.write(temporary, data, sync=self._sync)
            except FileNotFoundError:  # somebody removed our place under tmp
                self._writer.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._engine.write(temporary, data, sync=self._sync)
            self._publish(temporary, final)
        except OSError as exc:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            reason = _REASONS.get(exc.errno or 0, Reason.IO_ERROR)
            return Refusal(Reason.IO_ERROR if reason is Reason.ABSENT else reason, str(exc))
        return None

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
        for namespace in _children(self.root, _NAMESPACE):
            for of in _children(Path(namespace.path), _COUNT):
                count = int(of.name[2:])
                for fan in _children(Path(of.path), re.compile(r"^[0-9a-f]{2}$")):
                    for item in _children(Path(fan.path), _CHUNK):
                        name, index, _ = item.name.split(".")
                        if int(index) >= count or not name.startswith(fan.name):
                            continue
                        try:
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
        for place in _children(self.root / _TMP, re.compile(r"^[0-9a-f]{16}$")):
            lock = f"{place.path}.lock"
            with contextlib.suppress(OSError), _dead_writers_lock(lock):
                swept += len(os.listdir(place.path))
                shutil.rmtree(place.path, ignore_errors=True)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(lock)
        return swept

    def space(self) -> Space:
        """See Tier."""
        info = os.statvfs(self.root)
        return Space(info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize)

    def announce(self, namespace: str, manifest: Mapping[str, object]) -> list[str]:
        """See Tier."""
        notes = []
        for other in _children(self.root, _NAMESPACE):
            if other.name == namespace:
                continue
            try:
                theirs = json.loads(Path(other.path, _MANIFEST).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            fields = manifest.keys() | theirs.keys()
            differ = sorted(f for f in fields if manifest.get(f) != theirs.get(f))
            if len(differ) == 1:
                field = differ[0]
                notes.append(
                    f"chunks stored with {field} = {theirs.get(field)!r} cannot be used, it is "
                    f"{manifest.get(field)!r} now"
                )
        if not self.read_only:
            with contextlib.suppress(OSError):
                directory = self.root / namespace
                directory.mkdir(mode=0o700, exist_ok=True)
                temporary = directory / f"{_MANIFEST}.{os.urandom(4).hex()}"
                temporary.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
                temporary.chmod(0o600)
                temporary.rename(directory / _MANIFEST)
        return notes

    def close(self) -> None:
        """See Tier."""
        if self._writer is not None:
            shutil.rmtree(self._writer, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._writer}.lock")
            os.close(self._lock_fd)
            self._writer = None

    # --- helpers ----------------------------------------------------------------------

    def _file(self, key: ChunkKey, shard: Shard) -> str:
        name = key.name.hex()
        return f"{self.root}/{key.namespace}/of{shard.count}/{name[:2]}/{name}.{shard.index}.kv"

    def _shard_counts(self, namespace: str) -> list[int]:
        return sorted(int(d.name[2:]) for d in _children(self.root / namespace, _COUNT))

    def _claim_writer(self) -> None:
        """Take a place under tmp that `sweep` in any process sees as alive."""
        while self._writer is None:
            place = self.root / _TMP / os.urandom(8).hex()
            fd = os.open(f"{place}.lock", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The lock comes before the place: a sweep never meets a place without it.
            place.mkdir(mode=0o700)
            self._writer, self._lock_fd = place, fd


@contextlib.contextmanager
def _dead_writers_lock(path: str) -> Iterator[None]:
    """Hold the lock of a writer that is gone. Raises OSError while it lives."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _children(directory: Path, pattern: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    """Entries whose name matches; none when the directory is missing or unreadable."""
    try:
        with os.scandir(directory) as entries:
            yield from (e for e in entries if pattern.match(e.name))
    except OSError:
        return
