"""Whole files in and out of memory with plain system calls.

O_DIRECT where the mount takes it: buffered reads cost ten times the CPU and end at less
than half of the device limit (0.8-2.3 against 3.0-3.3 GB/s on the machine we measured).
Whether it works is found out by doing it (`probe`), and again per call: a file system that
refuses one call is served buffered, and the count of such calls is kept.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from fx_kvbackend.core.format import ALIGN_BYTES
from fx_kvbackend.engines.buffers import aligned

log = logging.getLogger(__name__)

_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
# One call moves at most this much: larger ones cost twice the CPU when buffered, and a
# request for more than 2 GiB is cut short by Linux anyway.
_CALL_BYTES = 4 << 20


class PosixEngine:
    """Reads and writes whole files. Thread-safe; holds no file open between calls.

    Every method raises OSError as the system gave it; the tier above translates.
    """

    def __init__(self, *, direct: bool, why: str) -> None:
        self.direct = direct
        self.why = why
        self.fallback_count = 0

    def read(self, path: str, into: memoryview) -> int:
        """Fill `into` from the start of the file; returns the bytes read (less at its end)."""
        with self._open(path, os.O_RDONLY) as (fd, direct):
            # The end of the file may be unaligned (a truncated one); O_DIRECT returns short.
            return self._fill(path, fd, into, direct)

    def size(self, path: str) -> int:
        """Length of the file in bytes."""
        return os.stat(path).st_size

    def write(self, path: str, data: memoryview, *, sync: bool) -> None:
        """Create the file (mode 0600), write all of `data`, and with `sync` flush the data."""
        with self._open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as (fd, direct):
            done = 0
            while done < len(data):
                try:
                    put = os.pwrite(fd, data[done : done + _CALL_BYTES], done)
                except OSError as exc:
                    if not direct or exc.errno not in _REFUSALS:
                        raise
                    direct = self._go_buffered(path, fd)
                    continue
                if put == 0:
                    raise OSError(errno.EIO, "nothing was written", path)
                done += put
            if sync:
                os.fdatasync(fd)

    def _fill(self, path: str, fd: int, into: memoryview, direct: bool) -> int:
        done = 0
        while done < len(into):
            try:
                got = os.preadv(fd, [into[done : done + _CALL_BYTES]], done)
            except OSError as exc:
                if not direct or exc.errno not in _REFUSALS:
                    raise
                direct = self._go_buffered(path, fd)
                continue
            if got == 0:
                break
            done += got
            if direct and done % ALIGN_BYTES:
                break  # only the end of a file is unaligned
        return done

    @contextlib.contextmanager
    def _open(self, path: str, flags: int) -> Iterator[tuple[int, bool]]:
        direct = self.direct
        try:
            fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
        except OSError as exc:
            if not direct or exc.errno not in _REFUSALS:
                raise
            self._count_fallback(path)
            direct = False
            # Linux may have created the file before it refused the flag.
            fd = os.open(path, flags & ~os.O_EXCL, 0o600)
        try:
            yield fd, direct
        finally:
            os.close(fd)

    def _go_buffered(self, path: str, fd: int) -> bool:
        self._count_fallback(path)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return False

    def _count_fallback(self, path: str) -> None:
        self.fallback_count += 1
        if self.fallback_count == 1 and self.why:  # a probe reports for itself
            log.warning("%s: O_DIRECT was refused, this call is buffered (said once)", path)


def probe(directory: Path, *, allow_direct: bool) -> PosixEngine:
    """An engine for this mount, after writing and reading back one file there.

    Raises OSError when even buffered I/O does not work.
    """
    if not allow_direct:
        engine = PosixEngine(direct=False, why="direct_io is off")
        _self_test(engine, directory)
        return engine
    engine = PosixEngine(direct=True, why="")
    try:
        _self_test(engine, directory)
        if engine.fallback_count == 0:
            engine.why = "probed by writing and reading a file"
            return engine
        why = "the file system refuses O_DIRECT"
    except OSError as exc:
        why = f"O_DIRECT fails here: {exc.strerror}"
    engine = PosixEngine(direct=False, why=why)
    _self_test(engine, directory)
    return engine


def _self_test(engine: PosixEngine, directory: Path) -> None:
    path = str(directory / f"probe-{os.getpid()}-{os.urandom(4).hex()}")
    data, back = aligned(2 * ALIGN_BYTES), aligned(2 * ALIGN_BYTES)
    data[:] = os.urandom(len(data))
    try:
        engine.write(path, data, sync=False)
        if engine.read(path, back) != len(back) or back != data:
            raise OSError(errno.EIO, "a file reads back other than it was written", path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
