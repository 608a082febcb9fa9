"""Process groups of servers that a benchmark started: find, time and end all of their members.

A server is started as the leader of its own session, so every process that it starts in turn
(engine core, workers) carries the leader's process id as its session id. Nothing outside that
session is ever touched.
"""

from __future__ import annotations

import contextlib
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


def kill_session(session_id: int, *, limit_s: float = 30.0, grace_s: float = 3.0) -> None:
    """SIGKILL to all processes of the session; returns when none of them is left.

    Python's resource tracker alone gets `grace_s` to end by itself once the others are gone: all
    it does then is to remove their shared memory, which would fill the machine's memory otherwise.
    Raises TimeoutError when a process is still there after `limit_s` (stuck in the kernel).
    """
    began_s = time.monotonic()
    while processes := session_processes(session_id):
        elapsed_s = time.monotonic() - began_s
        if elapsed_s > limit_s:
            raise TimeoutError(f"{len(processes)} processes survive SIGKILL for {limit_s:.0f} s")
        for process in processes:
            if elapsed_s < grace_s and _is_resource_tracker(process.pid):
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.02)


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
