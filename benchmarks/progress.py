"""Progress for people who watch: lines with the time since the start, on standard output."""

from __future__ import annotations

import sys
import time

_WAIT_LINE_EVERY_S = 15.0


class Progress:
    """Prints one line per event; a wait shows one line that counts on a terminal."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._counting = False
        self._last_wait_s = 0.0

    def say(self, text: str) -> None:
        """One line, with the seconds since the start."""
        if self._counting:
            print("\r\x1b[K", end="")
            self._counting = False
        self._last_wait_s = 0.0
        print(f"[{time.monotonic() - self._began_s:5.0f} s] {text}", flush=True)

    def step(self, what: str, number: int, total: int, text: str) -> None:
        """One of `total` equal steps is done."""
        self.say(f"{what} {number}/{total}: {text}")

    def wait(self, what: str, elapsed_s: float) -> None:
        """Called again and again while something takes long; cheap to call often."""
        if sys.stdout.isatty():
            self._counting = True
            print(f"\r\x1b[K[        ] {what} ... {elapsed_s:.0f} s", end="", flush=True)
        elif elapsed_s - self._last_wait_s >= _WAIT_LINE_EVERY_S:
            self.say(f"{what} ... {elapsed_s:.0f} s")
            self._last_wait_s = elapsed_s
