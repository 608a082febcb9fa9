"""A real vLLM OpenAI server as a benchmark needs it: started, asked, measured, killed."""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.metrics_text import Metrics, parse_metrics, total
from benchmarks.processes import (
    ProcessTimes,
    kill_session,
    session_processes,
)
from benchmarks.progress import Progress

HOST = "127.0.0.1"
MODEL_NAME = "smollm2"

# Too short for a whole chunk, so it leaves nothing in any cache.
WARM_UP_MESSAGE = "Good morning! Which day comes after Tuesday?"

PENDING_SAVES = "fxkv:pending_saves"
SAVES_TOTAL = "fxkv:saves_total"


class ServerFailed(Exception):
    """The server did not start, died, or answered with an error; its last words are with it."""


class SavesNotPublished(Exception):
    """Saves were still pending, or never reported, when the limit was reached."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed completion: what came back and when. Times count from sending the request.

    `logprobs` (natural logarithm, one per token) tell more than the tokens: two runs over
    different KV may agree on every token, but hardly on every probability.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    e2e_s: float


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a server is started; two servers that are compared differ in `kv_transfer_config` only.

    Eager mode by default: torch.compile doubles the start time on a small machine, and a benchmark
    that restarts the server pays it every time.
    """

    model_directory: Path
    log_path: Path
    kv_transfer_config: Mapping[str, Any] | None = None
    kv_cache_gib: int = 2
    block_tokens: int = 128
    max_model_tokens: int = 8192
    enforce_eager: bool = True
    start_limit_s: float = 600.0
    extra_arguments: Sequence[str] = ()
    extra_environment: Mapping[str, str] = field(default_factory=dict)


@cache
def launcher() -> tuple[str, ...]:
    """How to start the server here: `vllm serve` where that command works, else its module.

    The command looks up a distribution named `vllm`; a CPU build has another name and the command
    fails before it reads its arguments.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        command = Path(sys.executable).with_name("vllm")
        probe = subprocess.run(
            [str(command), "--version"], capture_output=True, timeout=300, check=False
        )
        if probe.returncode == 0:
            return (str(command), "serve")
    return (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model")


def shown_command(options: ServerOptions) -> str:
    """The command line as a reader would type it: no path, no port of this machine."""
    head = "vllm serve" if launcher()[-1] == "serve" else f"python {' '.join(launcher()[1:])}"
    arguments = _arguments(options)
    return " ".join([head, options.model_directory.name, *map(_quoted, arguments)])


def _quoted(argument: str) -> str:
    return argument if re.fullmatch(r"[\w./:=-]+", argument) else f"'{argument}'"


def _arguments(options: ServerOptions) -> list[str]:
    arguments = [
        *("--served-model-name", MODEL_NAME),
        *("--dtype", "bfloat16"),
        *("--max-model-len", str(options.max_model_tokens)),
        *("--block-size", str(options.block_tokens)),
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
    ]
    if options.enforce_eager:
        arguments.append("--enforce-eager")
    if options.kv_transfer_config is not None:
        arguments += ["--kv-transfer-config", json.dumps(options.kv_transfer_config)]
    return [*arguments, *options.extra_arguments]


def _environment(options: ServerOptions) -> dict[str, str]:
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gib),
        # On CPU vLLM keeps one core free, and one more when there is a connector: on two cores the
        # server without it would compute on one and the server with it on both. One for both
        # makes them comparable; it is what vLLM does without a connector.
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
        # The model lies on disk: nothing is to be looked up or reported over a network.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **options.extra_environment,
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """One running server. Use as a context manager: whatever happens, no process of it is left.

    `started_s` says how long the start took.
    """

    def __init__(self, options: ServerOptions, *, port: int | None = None) -> None:
        self.options = options
        self.port = port or _free_port()
        self.started_s = 0.0
        options.log_path.parent.mkdir(parents=True, exist_ok=True)
        # Sockets and other temporaries of the server: it cannot remove them when it is killed.
        self._scratch = tempfile.TemporaryDirectory(prefix="fxkv-server-")
        with options.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *launcher(),
                    str(options.model_directory),
                    *("--host", HOST, "--port", str(self.port)),
                    *_arguments(options),
                ],
                env={**_environment(options), "TMPDIR": self._scratch.name},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __repr__(self) -> str:
        state = "running" if self._process.poll() is None else "ended"
        return f"<Server {state} port={self.port} log={self.options.log_path.name}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    # -- life ------------------------------------------------------------------------------------

    def wait_ready(self, progress: Callable[[float], None] = lambda elapsed_s: None) -> Self:
        """Returns when the server answers /health; calls `progress` with the seconds so far.

        Raises ServerFailed when it ends or when `start_limit_s` is over.
        """
        began_s = time.monotonic()
        while True:
            elapsed_s = time.monotonic() - began_s
            if self._process.poll() is not None:
                raise ServerFailed(f"ended with {self._process.returncode}\n{self.last_words()}")
            if self._healthy():
                self.started_s = elapsed_s
                return self
            if elapsed_s > self.options.start_limit_s:
                raise ServerFailed(f"not ready in {elapsed_s:.0f} s\n{self.last_words()}")
            progress(elapsed_s)
            time.sleep(0.25)

    def _healthy(self) -> bool:
        try:
            return self._get("/health", limit_s=5.0)[0] == http.client.OK
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL to every process of the server; returns when all of them are gone.

        What a power cut looks like to the store: no handler runs, nothing is flushed. Idempotent.
        """
        kill_session(self._process.pid)
        self._process.wait()
        self._scratch.cleanup()

    def last_words(self, lines_count: int = 30) -> str:
        """The end of the server's log."""
        text = self.options.log_path.read_text("utf-8", "replace")
        return "\n".join(text.splitlines()[-lines_count:])

    @property
    def session_id(self) -> int:
        """The session that all processes of this server belong to."""
        return self._process.pid

    def engine_processes(self) -> list[ProcessTimes]:
        """Processes behind the HTTP front end: engine core and workers, with their CPU seconds."""
        return [each for each in session_processes(self._process.pid) if not self._is_front(each)]

    def _is_front(self, process: ProcessTimes) -> bool:
        return process.pid == self._process.pid

    def engine_cpu_s(self) -> float:
        """CPU seconds that the engine's processes have used since they started."""
        return sum(process.cpu_s for process in self.engine_processes())

    # -- asking ----------------------------------------------------------------------------------

    def count_tokens(self, message: str) -> int:
        """Prompt tokens of a chat with this one user message, template included."""
        reply = self._post("/tokenize", {"model": MODEL_NAME, "messages": _messages(message)})
        count: int = json.loads(reply)["count"]
        return count

    def ask(self, message: str, *, max_tokens: int, limit_s: float = 600.0) -> Answer:
        """Streams the greedy answer of exactly `max_tokens` tokens to one user message.

        Raises ServerFailed when the server answers with an error or the stream breaks off.
        """
        body = {
            "model": MODEL_NAME,
            "messages": _messages(message),
            "temperature": 0,
            "max_tokens": max_tokens,
            # A fixed number of tokens: an early end would make the comparison weaker and the
            # time per token of two runs incomparable.
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "logprobs": True,
        }
        connection = http.client.HTTPConnection(HOST, self.port, timeout=limit_s)
        try:
            sent_s = time.perf_counter()
            connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps(body),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise ServerFailed(f"HTTP {response.status}: {response.read()[:500]!r}")
            return _collect(_events(response), sent_s)
        except (OSError, http.client.HTTPException) as exc:
            raise ServerFailed(f"{exc!r}\n{self.last_words()}") from exc
        finally:
            connection.close()

    # -- metrics ---------------------------------------------------------------------------------

    def metrics(self) -> Metrics:
        """All samples of /metrics now."""
        status, body = self._get("/metrics", limit_s=30.0)
        if status != http.client.OK:
            raise ServerFailed(f"HTTP {status} from /metrics")
        return parse_metrics(body.decode())

    def wait_saves_published(self, *, limit_s: float = 120.0) -> Metrics:
        """Returns, with the metrics of that moment, once no save is pending any more.

        A server that has reported no save yet is not finished but has not begun: it is waited for.
        The counter of saves must rest between two looks, so that a save which is queued just after
        the gauge was read is not missed. Raises SavesNotPublished at the limit.
        """
        deadline_s = time.monotonic() + limit_s
        previous: float | None = None
        while True:
            metrics = self.metrics()
            pending, saves = total(metrics, PENDING_SAVES), total(metrics, SAVES_TOTAL)
            if is_settled(pending, saves, previous_saves=previous):
                return metrics
            if time.monotonic() > deadline_s:
                raise SavesNotPublished(
                    f"after {limit_s:.0f} s: {PENDING_SAVES}={pending} {SAVES_TOTAL}={saves}"
                )
            previous = saves
            time.sleep(0.2)

    # -- HTTP ------------------------------------------------------------------------------------

    def _get(self, path: str, *, limit_s: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=limit_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _post(self, path: str, body: Mapping[str, Any]) -> bytes:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=60.0)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            reply = response.read()
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise ServerFailed(f"HTTP {response.status} from {path}: {reply[:500]!r}")
        return reply


def end_cleanly_on_signals() -> None:
    """Makes SIGTERM and SIGHUP leave through the context managers, which end the servers.

    For the main thread of a script: without it a stopped benchmark leaves its servers running.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


@contextlib.contextmanager
def running(options: ServerOptions, what: str, progress: Progress) -> Iterator[Server]:
    """A server that is up and warm: its first request pays for things that no later one pays."""
    with Server(options) as server:
        server.wait_ready(partial(progress.wait, f"server {what}: starting"))
        server.ask(WARM_UP_MESSAGE, max_tokens=8)
        progress.say(f"server {what}: ready after {server.started_s:.0f} s")
        yield server


def is_settled(pending: float | None, saves: float | None, *, previous_saves: float | None) -> bool:
    """Whether every save is published, from two successive looks at the server's metrics."""
    return pending == 0 and saves is not None and saves > 0 and saves == previous_saves


def _messages(message: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": message}]


def _events(response: io.BufferedIOBase) -> Iterator[dict[str, Any]]:
    """The JSON events of a server-sent stream, each as soon as its line is there."""
    while line := response.readline():
        if line.startswith(b"data: "):
            data = line[len(b"data: ") :].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    raise ServerFailed("the stream broke off")


def _collect(events: Iterator[dict[str, Any]], sent_s: float) -> Answer:
    texts: list[str] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    usage: dict[str, Any] = {}
    first_s = last_s = 0.0
    first_tokens = 0
    for event in events:
        now_s = time.perf_counter()
        if "error" in event:
            raise ServerFailed(f"error in the stream: {event['error']}")
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            new_ids = choice.get("token_ids") or ()
            texts.append(choice.get("delta", {}).get("content") or "")
            if not new_ids:  # the opening event carries the role and no token
                continue
            token_ids.extend(new_ids)
            scores = (choice.get("logprobs") or {}).get("content") or ()
            logprobs.extend(score["logprob"] for score in scores)
            last_s = now_s
            if not first_tokens:
                first_s, first_tokens = now_s, len(new_ids)
    if not token_ids or not usage:
        raise ServerFailed("an answer without tokens or without its usage record")
    later_tokens = len(token_ids) - first_tokens
    return Answer(
        text="".join(texts),
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        output_tokens=usage["completion_tokens"],
        ttft_s=first_s - sent_s,
        tpot_s=(last_s - first_s) / later_tokens if later_tokens else 0.0,
        e2e_s=last_s - sent_s,
    )
