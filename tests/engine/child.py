"""An engine in a process of its own, driven over its standard input, that can be killed.

    with Child(model, store) as child:
        child.ask([prompt])

Run as a module it is the other side: JSON lines in, JSON lines marked with MARK out.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import kill_session
from tests.engine.harness import Answer, Engine

MARK = "@@ "
_ROOT = Path(__file__).parents[2]


class Child:
    """Starts an engine; `kill` ends every process of it with SIGKILL, at once."""

    def __init__(
        self, model: str, store: Path, *, env: dict[str, str] | None = None, **options: Any
    ) -> None:
        self.log = store.parent / f"child-{os.urandom(3).hex()}.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=_ROOT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self._send({"model": model, "store": str(store), "options": options})

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def ready(self) -> Child:
        """Return when the engine is up."""
        self._receive()
        return self

    def ask(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **fields: Any
    ) -> list[Answer]:
        """Like Engine.ask."""
        self._send({"ask": [list(p) for p in prompts], "max_tokens": max_tokens, "fields": fields})
        return [Answer(tuple(tokens), cached) for tokens, cached in self._receive()]

    def start_asking(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8) -> None:
        """Begin to answer; returns when the engine has begun, for a test that kills it."""
        self._send({"start": [list(p) for p in prompts], "max_tokens": max_tokens})
        self._receive()

    def reset_local(self) -> None:
        """Like Engine.reset_local."""
        self._send({"reset": True})
        self._receive()

    def stop(self, number: int) -> int:
        """Send a signal to the main process and wait for its end; its exit status."""
        self._process.send_signal(number)
        return self._process.wait(60)

    def kill(self) -> None:
        """SIGKILL every process that was started here, and wait. Idempotent."""
        kill_session(self._process.pid)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise AssertionError(f"the engine ended:\n{self.log.read_text()[-4000:]}")


def _serve() -> None:
    def say(value: Any) -> None:
        print(MARK + json.dumps(value), flush=True)

    start = json.loads(sys.stdin.readline())
    running = Engine(start["model"], Path(start["store"]), **start["options"])
    say("ready")
    for line in sys.stdin:
        message = json.loads(line)
        if "ask" in message:
            answers = running.ask(message["ask"], message["max_tokens"], **message["fields"])
            say([[list(a.tokens), a.cached] for a in answers])
        elif "start" in message:
            for one in message["start"]:
                running.add(one, message["max_tokens"])
            say("started")
            running.finish()
        else:
            running.reset_local()
            say("reset")


if __name__ == "__main__":
    _serve()
