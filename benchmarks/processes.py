"""Process groups of servers that a benchmark started: find, time and end all of their members.

A server is started as the leader of its own session, so every process that it starts in turn
(engine core, workers) carries the leader's process id as its session id. Nothing outside that
session is ever touched.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """One live process of a session and the CPU time that it has used so far."""

    pid: int
    cpu_s: float


def session_processes(session_id: int) -> list[ProcessTimes]:
    """Live processes of a session. The dead that nobody has waited for yet do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:  # ended between the listing and the read
            continue
        # The command name, in parentheses, may hold blanks: split after it.
        fields = stat[stat.rindex(")") + 2 :].split()
        state, session = fields[0], int(fields[3])
        if session == session_id and state not in "ZX":
            ticks = int(fields[11]) + int(fields[12])
            found.append(ProcessTimes(int(entry.name), ticks / _TICKS_PER_S))
    return found


def shared_memory_files(session_id: int) -> set[Path]:
    """Named shared memory that processes of the session have mapped now."""
    found = set()
    for process in session_processes(session_id):
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue
        for line in maps.splitlines():
            _, separator, name = line.partition("/dev/shm/")
            if separator and not name.endswith(" (deleted)"):
                found.add(Path("/dev/shm", name))
    return found


def kill_session(session_id: int, *, limit_s: float = 30.0) -> None:
    """SIGKILL to all processes of the session; returns when none of them is left.

    Raises TimeoutError when one is still there after `limit_s` (stuck in the kernel).
    """
    deadline_s = time.monotonic() + limit_s
    while processes := session_processes(session_id):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{len(processes)} processes survive SIGKILL for {limit_s:.0f} s")
        for process in processes:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
