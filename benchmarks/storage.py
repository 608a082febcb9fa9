"""What a benchmark needs to know and do about the directory that holds stored KV."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


def files_under(directory: Path) -> Iterator[Path]:
    """Regular files below `directory`; files that vanish meanwhile are left out, links too."""
    for root, _, names in os.walk(directory):
        for name in names:
            path = Path(root, name)
            if path.is_file() and not path.is_symlink():
                yield path


def directory_bytes(directory: Path) -> int:
    """Sum of the sizes of all files below `directory`."""
    total_bytes = 0
    for path in files_under(directory):
        try:
            total_bytes += path.stat().st_size
        except FileNotFoundError:  # a temporary that was just published under its final name
            continue
    return total_bytes


def filesystem_type(directory: Path) -> str:
    """The type of the mounted file system that holds `directory`, "unknown" when not found."""
    best_path, best_type = Path("/"), "unknown"
    target = directory.resolve()
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        mount_path = Path(mount.replace("\\040", " "))
        deeper = len(mount_path.parts) >= len(best_path.parts)
        if deeper and target.is_relative_to(mount_path):
            best_path, best_type = mount_path, kind
    return best_type


@dataclass(frozen=True, slots=True)
class CacheDrop:
    """How cold the files are after an attempt to drop them from the page cache."""

    total_bytes: int
    resident_bytes: int
    how: str

    def __str__(self) -> str:
        resident = f"{self.resident_bytes / 1e6:.1f} of {self.total_bytes / 1e6:.1f} MB resident"
        return f"page cache dropped by {self.how}, {resident} after it"


def drop_page_cache(directory: Path) -> CacheDrop:
    """Makes the next reads of the files below `directory` come from the medium.

    Uses posix_fadvise per file, which every owner of the files may do; only when pages stay and
    the caller is root the kernel's drop_caches, which cools the whole machine. Dirty pages cannot
    be dropped, hence the fdatasync first.
    """
    files = list(files_under(directory))
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    how = "posix_fadvise"
    resident_bytes = sum(map(resident_file_bytes, files))
    if resident_bytes and os.geteuid() == 0:
        try:
            Path("/proc/sys/vm/drop_caches").write_text("1\n")
        except OSError:
            how += " (drop_caches not allowed)"
        else:
            how += " and drop_caches"
        resident_bytes = sum(map(resident_file_bytes, files))
    return CacheDrop(sum(path.stat().st_size for path in files), resident_bytes, how)


def resident_file_bytes(path: Path) -> int:
    """Bytes of the file that are in the page cache now, in whole pages (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes == 0:
            return 0
        # ACCESS_COPY: a private mapping that ctypes may take the address of; nothing is written.
        with mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_COPY) as mapping:
            pages = -(-size_bytes // mmap.PAGESIZE)
            flags = (ctypes.c_ubyte * pages)()
            view = ctypes.c_char.from_buffer(mapping)
            try:
                address = ctypes.c_void_p(ctypes.addressof(view))
                if libc.mincore(address, ctypes.c_size_t(size_bytes), flags) != 0:
                    raise OSError(ctypes.get_errno(), "mincore")
            finally:
                del view
            return sum(flag & 1 for flag in flags) * mmap.PAGESIZE
