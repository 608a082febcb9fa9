"""How much of the machine other programs take while we measure.

A latency measured while somebody else computes on the same cores says nothing about us. This tells
disturbed measurements from good ones by a sign that does not depend on their outcome.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import session_processes

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal


@dataclass(frozen=True, slots=True)
class CpuReading:
    """CPU seconds since boot, of the whole machine and of our own processes, at one moment."""

    at_s: float
    machine_cpu_s: float
    ours_cpu_s: float


def read_cpu(session_ids: Sequence[int]) -> CpuReading:
    """The state now; "ours" are this process and all processes of the given sessions."""
    first_line = Path("/proc/stat").read_text().partition("\n")[0]
    return CpuReading(
        at_s=time.monotonic(),
        machine_cpu_s=busy_seconds(first_line),
        ours_cpu_s=time.process_time()
        + sum(process.cpu_s for each in session_ids for process in session_processes(each)),
    )


def busy_seconds(stat_line: str) -> float:
    """CPU seconds that were not idle, from the first line of /proc/stat. Stolen time counts."""
    ticks = [int(field) for field in stat_line.split()[1:]]
    return sum(ticks[index] for index in _BUSY_FIELDS if index < len(ticks)) / _TICKS_PER_S


def foreign_ratio(before: CpuReading, after: CpuReading, *, cores_count: int) -> float:
    """Share (0..1) of the machine's CPU time between two readings that others used.

    Work that the kernel does for us outside our processes counts as foreign; for direct I/O that
    is well below one percent.
    """
    elapsed_s = after.at_s - before.at_s
    if elapsed_s <= 0:
        return 0.0
    machine_s = after.machine_cpu_s - before.machine_cpu_s
    ours_s = after.ours_cpu_s - before.ours_cpu_s
    return min(1.0, max(0.0, machine_s - ours_s) / (elapsed_s * cores_count))
