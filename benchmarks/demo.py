"""The main job: kill a real vLLM server, restart it, and answer from stored KV.

A real model reads real texts through the OpenAI API, three times:

1. a server without the connector computes every prompt: the recompute baseline;
2. a server with the connector computes every prompt and saves its KV, then answers every prompt
   again from its own prefix cache: the reference answers;
3. that server is killed with SIGKILL, the store is dropped from the page cache, a new server starts
   and answers the same prompts from the store.

Answers are compared between 2 and 3, at equal depth: vLLM itself may answer differently depending
on how much of a prompt is cached, so the chunk is one block and both runs skip the same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import report
from benchmarks.load import foreign_ratio, read_cpu
from benchmarks.metrics_text import Metrics, increase
from benchmarks.model import DEFAULT_DIRECTORY, ModelUnavailable, prepare, read_shape
from benchmarks.progress import Progress
from benchmarks.prompts import Prompt, TextExhausted, build_prompts, full_chunk_tokens
from benchmarks.server import (
    Answer,
    SavesNotPublished,
    Server,
    ServerFailed,
    ServerOptions,
    end_cleanly_on_signals,
    running,
    shown_command,
)
from benchmarks.stats import median, percentile
from benchmarks.storage import directory_bytes, drop_page_cache, filesystem_type

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL_LENGTHS_TOKENS = (1000, 2000, 4000, 7000)
QUICK_LENGTHS_TOKENS = (1000, 2000)
SPEEDUP_LENGTH_TOKENS = 7000
SPEEDUP_GOAL = 10.0

# One chunk is one block of vLLM, so that a local prefix hit and a restore end at the same token.
CHUNK_TOKENS = 128
ANSWER_TOKENS = 32

LOADS = "fxkv:loads"
FAILED_LOADS = "fxkv:failed_loads"
LOADED_BYTES = "fxkv:loaded_bytes"
# Loads that the backend chose not to do because computing is faster: legal, and no miss.
DECLINED_LOADS = "fxkv:declined_loads"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
# Counters may reach /metrics a moment after the answer that they are about.
METRICS_LIMIT_S = 5.0


# Phase -> largest share (0..1) of the machine's CPU that other programs took during it.
Foreign = dict[str, float]
FOREIGN_RATIO_MAX = 0.1


class DemoFailed(Exception):
    """The run cannot give a valid result; the message says why."""


@dataclass(frozen=True, slots=True)
class Restored:
    """One prompt answered after a restart, and what the server says it loaded for it."""

    answer: Answer
    external_tokens: float
    loaded_chunks: float
    loaded_bytes: float
    failed_loads: float
    declined_loads: float

    @property
    def tokens(self) -> int:
        """Tokens that came out of the store, on every account of them.

        vLLM reports the tokens that it was promised, also when a load then failed and they were
        computed again; only chunks that were loaded and verified count.
        """
        loaded_tokens = self.loaded_chunks * CHUNK_TOKENS
        return min(self.answer.cached_tokens, round(self.external_tokens), round(loaded_tokens))


@dataclass(slots=True)
class Trial:
    """Everything that happened to one prompt."""

    prompt: Prompt
    recomputed: Answer | None = None
    saved: Answer | None = None
    local: Answer | None = None
    restored: list[Restored] = field(default_factory=list)


# -- the three runs ------------------------------------------------------------------------------


def plan_lengths(lengths_tokens: Sequence[int], sessions_count: int) -> list[int]:
    """Target lengths of all prompts: each session asks one prompt of every length, in turn."""
    return [length for _ in range(sessions_count) for length in lengths_tokens]


def kv_cache_gib(lengths_tokens: Sequence[int], kv_token_bytes: int) -> int:
    """Whole GiB of engine cache that hold every prompt and answer at once, at least 2.

    The reference answers are local hits: nothing may be evicted before it is asked again.
    """
    blocks = sum(-(-(length + ANSWER_TOKENS + 64) // CHUNK_TOKENS) for length in lengths_tokens)
    needed_bytes = 1.25 * blocks * CHUNK_TOKENS * kv_token_bytes
    return max(2, math.ceil(needed_bytes / (1 << 30)))


def run_baseline(
    options: ServerOptions, lengths_tokens: Sequence[int], progress: Progress, foreign: Foreign
) -> list[Trial]:
    """Computes every prompt on a server without the connector; also builds the prompts."""
    with running(options, "without connector", progress) as server:
        prompts = build_prompts(
            list(lengths_tokens), count_tokens=server.count_tokens, chunk_tokens=CHUNK_TOKENS
        )
        trials = [Trial(prompt) for prompt in prompts]
        with watched(server, "recompute", foreign):
            for number, trial in enumerate(trials, 1):
                trial.recomputed = ask(server, trial.prompt)
                progress.step("recompute", number, len(trials), describe(trial.recomputed))
                require_cold(trial.recomputed, trial.prompt)
    return trials


def run_saves(
    options: ServerOptions, trials: Sequence[Trial], store_path: Path, progress: Progress
) -> int:
    """Fills the store and takes the reference answers; ends with SIGKILL. Returns stored bytes."""
    with running(options, "with connector", progress) as server:
        for number, trial in enumerate(trials, 1):
            trial.saved = ask(server, trial.prompt)
            progress.step("compute and save", number, len(trials), describe(trial.saved))
            require_cold(trial.saved, trial.prompt)
        for number, trial in enumerate(trials, 1):
            trial.local = ask(server, trial.prompt)
            progress.step("local prefix hit", number, len(trials), describe(trial.local))
        progress.say("waiting until no save is pending")
        server.wait_saves_published()
        stored_bytes = directory_bytes(store_path)
        server.kill()
        progress.say(f"server killed with SIGKILL; {stored_bytes / 1e6:,.0f} MB stored")
    return stored_bytes


def run_restored(
    options: ServerOptions,
    trials: Sequence[Trial],
    round_number: int,
    progress: Progress,
    foreign: Foreign,
) -> None:
    """Asks every prompt once on a freshly started server over the filled store."""
    with running(options, f"after restart {round_number}", progress) as server:
        before = server.metrics()
        with watched(server, "restored", foreign):
            for number, trial in enumerate(trials, 1):
                answer = ask(server, trial.prompt)
                after = settled_metrics(server, before, answer)
                restored = restored_from(answer, before, after)
                trial.restored.append(restored)
                before = after
                text = f"{describe(answer)}, {restored.loaded_chunks:.0f} chunks loaded"
                progress.step("restored", number, len(trials), text)
        server.kill()


@contextlib.contextmanager
def watched(server: Server, phase: str, foreign: Foreign) -> Iterator[None]:
    """Notes in `foreign` which share of the CPU other programs took meanwhile, at worst."""
    began = read_cpu([server.session_id])
    yield
    ended = read_cpu([server.session_id])
    taken = foreign_ratio(began, ended, cores_count=os.cpu_count() or 1)
    foreign[phase] = max(taken, foreign.get(phase, 0.0))


def settled_metrics(server: Server, before: Metrics, answer: Answer) -> Metrics:
    """The metrics once they account for all tokens that the answer claims, or at the limit."""
    deadline_s = time.monotonic() + METRICS_LIMIT_S
    while True:
        after = server.metrics()
        if restored_from(answer, before, after).tokens >= answer.cached_tokens:
            return after
        if time.monotonic() > deadline_s:
            return after
        time.sleep(0.1)


def restored_from(answer: Answer, before: Metrics, after: Metrics) -> Restored:
    return Restored(
        answer=answer,
        external_tokens=increase(before, after, EXTERNAL_HITS),
        loaded_chunks=increase(before, after, LOADS),
        loaded_bytes=increase(before, after, LOADED_BYTES),
        failed_loads=increase(before, after, FAILED_LOADS),
        declined_loads=increase(before, after, DECLINED_LOADS),
    )


def ask(server: Server, prompt: Prompt) -> Answer:
    return server.ask(prompt.text, max_tokens=ANSWER_TOKENS)


def describe(answer: Answer) -> str:
    return (
        f"{answer.prompt_tokens:5d} tokens, {answer.cached_tokens:5d} cached, "
        f"TTFT {answer.ttft_s:7.3f} s"
    )


def require_cold(answer: Answer, prompt: Prompt) -> None:
    if answer.cached_tokens:
        raise DemoFailed(f"{prompt.name}: {answer.cached_tokens} tokens cached in a cold run")


# -- what it comes to ----------------------------------------------------------------------------


def same_answer(local: Answer, restored: Answer) -> bool:
    return local.token_ids == restored.token_ids and local.text == restored.text


def logprob_gap(local: Answer, restored: Answer) -> float:
    """Largest difference of a token's log probability: 0.0 when the KV bytes are the same."""
    pairs = zip(local.logprobs, restored.logprobs, strict=False)
    return max((abs(one - other) for one, other in pairs), default=math.inf)


def hit_ratio(trials: Sequence[Trial]) -> float:
    """Restored tokens over the tokens of all full chunks, all restarts together."""
    possible = restored = 0
    for trial in trials:
        for each in trial.restored:
            possible += full_chunk_tokens(each.answer.prompt_tokens, CHUNK_TOKENS)
            restored += each.tokens
    return restored / possible if possible else 0.0


def make_row(length_tokens: int, trials: Sequence[Trial]) -> dict[str, report.Cell]:
    """The row of one prompt length."""
    cold_s = [trial.recomputed.ttft_s for trial in trials if trial.recomputed]
    saving_s = [trial.saved.ttft_s for trial in trials if trial.saved]
    local_s = [trial.local.ttft_s for trial in trials if trial.local]
    restored = [each for trial in trials for each in trial.restored]
    restored_s = [each.answer.ttft_s for each in restored]
    pairs = [(t.local, each) for t in trials if t.local for each in t.restored]
    possible = sum(full_chunk_tokens(e.answer.prompt_tokens, CHUNK_TOKENS) for e in restored)
    return {
        "prompt_tokens": length_tokens,
        "prompts": len(trials),
        "restores": len(restored),
        "recompute_ttft_p50_s": median(cold_s),
        "recompute_ttft_p99_s": percentile(cold_s, 99),
        "saving_ttft_p50_s": median(saving_s),
        "local_ttft_p50_s": median(local_s),
        "restored_ttft_p50_s": median(restored_s),
        "restored_ttft_p99_s": percentile(restored_s, 99),
        "speedup_p50": median(cold_s) / median(restored_s),
        "hit_tokens": sum(each.tokens for each in restored),
        "full_chunk_tokens": possible,
        "loaded_bytes": round(sum(each.loaded_bytes for each in restored)),
        "failed_loads": round(sum(each.failed_loads for each in restored)),
        "declined_loads": round(sum(each.declined_loads for each in restored)),
        "same_depth": all(local.cached_tokens == each.tokens for local, each in pairs),
        "logprob_gap": max(logprob_gap(local, each.answer) for local, each in pairs),
        "identical": all(same_answer(local, each.answer) for local, each in pairs),
    }


def make_rows(trials: Sequence[Trial]) -> list[dict[str, report.Cell]]:
    lengths = sorted({trial.prompt.target_tokens for trial in trials})
    return [
        make_row(length, [t for t in trials if t.prompt.target_tokens == length])
        for length in lengths
    ]


def make_checks(
    trials: Sequence[Trial], rows: Sequence[dict[str, report.Cell]]
) -> list[report.Check]:
    """Every check that this run can answer; the speed-up needs the longest prompts."""
    identical = all(row["identical"] is True and row["same_depth"] is True for row in rows)
    checks = [
        report.equals("answers_identical", identical, True, "bool"),
        report.equals("hit_ratio", hit_ratio(trials), 1.0, "ratio"),
    ]
    for row in rows:
        if row["prompt_tokens"] == SPEEDUP_LENGTH_TOKENS:
            speedup = float(row["speedup_p50"] or 0)
            checks.append(report.at_least("ttft_speedup_7k", speedup, SPEEDUP_GOAL, "x"))
    return checks


def make_notes(
    rows: Sequence[dict[str, report.Cell]],
    settings: dict[str, report.Cell],
    foreign: Foreign,
) -> list[str]:
    """What a reader must know beside the figures."""
    notes = [
        f"all servers run with the same flags ({settings['mode']}) and on the same cores; "
        "one request at a time",
        "identical: restored answers against local prefix hits of equal depth, token by token",
    ]
    notes += [
        f"the machine was busy: other programs took {taken:.0%} of the CPU during {phase}, "
        "which makes its times longer; repeat on a quiet machine"
        for phase, taken in foreign.items()
        if taken > FOREIGN_RATIO_MAX
    ]
    failed = sum(int(row["failed_loads"] or 0) for row in rows)
    if failed:
        notes.append(f"chunks that failed to load and were computed again: {failed}")
    if not all(row["same_depth"] for row in rows):
        notes.append("restored and local answers differ in depth: their comparison proves nothing")
    declined = sum(int(row["declined_loads"] or 0) for row in rows)
    if declined:
        notes.append(f"loads declined as slower than recompute, which are no misses: {declined}")
    if all(row["prompt_tokens"] != SPEEDUP_LENGTH_TOKENS for row in rows):
        notes.append("ttft_speedup_7k needs the 7k prompts: run without --quick")
    if settings["store_filesystem"] in ("tmpfs", "ramfs"):
        notes.append("the store lies in memory: restores did not read a disk (see --store)")
    return notes


# What people see of a row; the JSON has all of it.
HEADINGS = {
    "prompt_tokens": "prompt tokens",
    "restores": "n",
    "recompute_ttft_p50_s": "recompute p50 s",
    "recompute_ttft_p99_s": "p99 s",
    "restored_ttft_p50_s": "restored p50 s",
    "restored_ttft_p99_s": "p99 s",
    "speedup_p50": "speed-up",
    "hit_tokens": "hit tokens",
    "full_chunk_tokens": "of",
    "loaded_bytes": "bytes loaded",
    "identical": "identical",
}


def chart(rows: Sequence[dict[str, report.Cell]]) -> report.Draw:
    """Bars per prompt length: computed again, restored after the kill, local hit."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        series = [
            ("recompute_ttft_p50_s", "recompute (no connector)", "#9aa5b5"),
            ("restored_ttft_p50_s", "restored after SIGKILL", "#1f6feb"),
            ("local_ttft_p50_s", "local prefix hit (floor)", "#cfe0fb"),
        ]
        width = 0.27
        for place, (key, label, colour) in enumerate(series):
            heights = [float(row[key] or 0) for row in rows]
            positions = [index + (place - 1) * width for index in range(len(rows))]
            bars = axes.bar(positions, heights, width * 0.94, label=label, color=colour)
            axes.bar_label(bars, [f"{height:.2f}" for height in heights], padding=2, fontsize=8)
        labels = [
            f"{row['prompt_tokens']:,} tokens\n{row['speedup_p50']:.1f}x faster" for row in rows
        ]
        axes.set_xticks(range(len(rows)), labels)
        axes.set_yscale("log")
        axes.set_ylabel("time to first token, p50, seconds (log)")
        axes.set_title("Cold restart of a vLLM server: recompute or restore")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.15)
        axes.legend(frameon=False, loc="upper left")

    return draw


def answers_section(trials: Sequence[Trial]) -> tuple[str, str]:
    """The page's table of every prompt with both answers, for readers who trust their eyes."""
    rows: list[report.Row] = [
        {
            "prompt": trial.prompt.name,
            "tokens": trial.local.prompt_tokens,
            "restored tokens": each.tokens,
            "local answer": trial.local.text,
            "restored answer": each.answer.text,
        }
        for trial in trials
        for each in trial.restored
        if trial.local
    ]
    return "Answers", report.html_table(rows)


# -- the script ----------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="two short lengths, one session")
    parser.add_argument("--sessions", type=int, help="sessions per length (2; 1 with --quick)")
    parser.add_argument("--restarts", type=int, default=1, help="kills and restarts (1)")
    parser.add_argument(
        "--store", type=Path, help="empty directory for the KV; default: a fresh one, removed after"
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_DIRECTORY, help="model directory")
    parser.add_argument("--results", type=Path, default=report.DEFAULT_RESULTS)
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile instead of eager mode"
    )
    options = parser.parse_args(arguments)
    if options.sessions is None:
        options.sessions = 1 if options.quick else 2
    if options.sessions < 1 or options.restarts < 1:
        parser.error("--sessions and --restarts are at least 1")
    return options


@contextlib.contextmanager
def store_directory(wanted: Path | None) -> Iterator[Path]:
    """An empty directory on a disk; removed afterwards unless the user named it."""
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        if any(wanted.iterdir()):
            raise DemoFailed("--store: the directory is not empty, the first run would not be cold")
        yield wanted
        return
    # Beside the model, not in the system's temporary directory: that is often memory.
    parent = report.REPOSITORY / ".cache"
    parent.mkdir(exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="demo-store-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def run(arguments: argparse.Namespace) -> int:
    progress = Progress()
    model = prepare(arguments.model)
    lengths = QUICK_LENGTHS_TOKENS if arguments.quick else FULL_LENGTHS_TOKENS
    plan = plan_lengths(lengths, arguments.sessions)
    log_directory = arguments.results / "logs"
    with store_directory(arguments.store) as store_path:
        connector = {
            "kv_connector": "FxKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "chunk_tokens": CHUNK_TOKENS,
                "local": {"path": str(store_path)},
            },
        }

        def options(name: str, *, with_connector: bool) -> ServerOptions:
            return ServerOptions(
                model,
                log_directory / f"demo-{name}.log",
                kv_transfer_config=connector if with_connector else None,
                kv_cache_gib=kv_cache_gib(plan, read_shape(model).kv_token_bytes),
                block_tokens=CHUNK_TOKENS,
                enforce_eager=not arguments.compile,
            )

        mode = "torch.compile" if arguments.compile else "eager mode, for a short start"
        progress.say(f"{len(plan)} prompts, {sum(plan):,} tokens; every server: {mode}")
        foreign: Foreign = {}
        trials = run_baseline(options("baseline", with_connector=False), plan, progress, foreign)
        stored_bytes = run_saves(
            options("saving", with_connector=True), trials, store_path, progress
        )
        drops = []
        for number in range(1, arguments.restarts + 1):
            drops.append(str(drop_page_cache(store_path)))
            progress.say(drops[-1])
            run_restored(
                options(f"restart{number}", with_connector=True), trials, number, progress, foreign
            )
        settings: dict[str, report.Cell] = {
            "server": shown_command(options("", with_connector=False)),
            "connector": json.dumps(connector).replace(str(store_path), "DIRECTORY"),
            "mode": mode,
            "kv_cache_gib": options("", with_connector=False).kv_cache_gib,
            "sessions": arguments.sessions,
            "restarts": arguments.restarts,
            "answer_tokens": ANSWER_TOKENS,
            "store_bytes": stored_bytes,
            "store_filesystem": filesystem_type(store_path),
            "page_cache": "; ".join(drops),
            **{f"foreign_cpu_{phase}": f"{taken:.0%}" for phase, taken in foreign.items()},
        }
    rows = make_rows(trials)
    result = report.Result(
        name="demo",
        title="Cold restart: recompute or restore",
        command=report.command_line("benchmarks.demo"),
        rows=rows,
        checks=make_checks(trials, rows),
        settings=settings,
        notes=make_notes(rows, settings, foreign),
    )
    return report.publish(
        result,
        draw=chart(rows),
        directory=arguments.results,
        headings=HEADINGS,
        sections=[answers_section(trials)],
    )


def main() -> int:
    """0 when every check passes, 1 when one misses, 2 when there is no valid result."""
    arguments = parse_arguments()
    end_cleanly_on_signals()
    try:
        return run(arguments)
    except (DemoFailed, ModelUnavailable, SavesNotPublished, ServerFailed, TextExhausted) as exc:
        print(f"demo: {type(exc).__name__}: {exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
