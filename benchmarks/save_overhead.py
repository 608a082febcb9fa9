"""What saving costs the engine: CPU time, and time per output token.

Two servers run side by side, one without the connector and one with it; they differ in nothing
else. The same prompts go to both, one request at a time in the order A B B A, so that whatever
else the machine does falls on both alike. Every prompt is new to its server: all of it is computed
and, with the connector, saved while the answer is generated.

The time per output token is compared pair by pair; the interval says what the pairs allow to claim.
Pairs during which other programs took more than a small share of the CPU are asked again with
other prompts: what they tell is about those programs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import report
from benchmarks.load import foreign_ratio, read_cpu
from benchmarks.metrics_text import increase
from benchmarks.model import DEFAULT_DIRECTORY, ModelUnavailable, prepare, read_shape
from benchmarks.progress import Progress
from benchmarks.prompts import Prompt, TextExhausted, build_prompts
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
from benchmarks.stats import Interval, bootstrap_interval, geometric_mean, median
from benchmarks.storage import filesystem_type

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROMPT_TOKENS = 1500
ANSWER_TOKENS = 96
BLOCK_TOKENS = 128
# Whole chunks only are saved; at this prompt length the rest is well below a quarter.
SAVED_RATIO_MIN = 0.75
# Two cores of which others use a tenth of one: the noise of a pair is then about as large as
# that of an idle machine.
FOREIGN_RATIO_MAX = 0.05
QUIET_WAIT_LIMIT_S = 30.0
ATTEMPTS_PER_PAIR = 3
TIME_LIMIT_S = 900.0
CPU_SHARE_GOAL = 0.02
TPOT_RATIO_GOAL = 1.05

THREAD_CPU_SECONDS = "fxkv:thread_cpu_seconds"
SAVED_BYTES = "fxkv:saved_bytes"


class OverheadFailed(Exception):
    """The run cannot give a valid result; the message says why."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompt on both servers, asked one after the other."""

    prompt: Prompt
    without: Answer
    with_connector: Answer
    foreign_ratio: float = 0.0  # share of the CPU that other programs took meanwhile

    @property
    def quiet(self) -> bool:
        return self.foreign_ratio <= FOREIGN_RATIO_MAX

    @property
    def tpot_ratio(self) -> float:
        return self.with_connector.tpot_s / self.without.tpot_s

    @property
    def ttft_ratio(self) -> float:
        return self.with_connector.ttft_s / self.without.ttft_s


@dataclass(frozen=True, slots=True)
class SavingCost:
    """CPU seconds of both engines over all pairs, and what was saved meanwhile."""

    threads_cpu_s: float
    engine_cpu_s: float
    engine_without_cpu_s: float
    saved_bytes: float

    @property
    def cpu_share(self) -> float:
        """The connector's own threads over the engine's processes (which they are part of)."""
        return self.threads_cpu_s / self.engine_cpu_s


def order(pair_index: int) -> tuple[bool, bool]:
    """Which server is asked first and second; True is the one with the connector. A B B A."""
    return (False, True) if pair_index % 2 == 0 else (True, False)


def measure(
    without: Server,
    with_connector: Server,
    prompts: Sequence[Prompt],
    pairs_count: int,
    progress: Progress,
) -> tuple[list[Pair], SavingCost]:
    """Asks prompts of both servers until `pairs_count` pairs were quiet.

    Gives up waiting for quiet after TIME_LIMIT_S, once that many pairs were asked at all. Returns
    all pairs, disturbed ones too, and what saving cost over all of them.
    """
    deadline_s = time.monotonic() + TIME_LIMIT_S
    sessions = (without.session_id, with_connector.session_id)
    before = with_connector.metrics()
    before_cpu_s = with_connector.engine_cpu_s()
    before_without_cpu_s = without.engine_cpu_s()
    pairs: list[Pair] = []
    for index, prompt in enumerate(prompts):
        if time.monotonic() < deadline_s:
            wait_quiet(sessions)
        pair = measure_pair(without, with_connector, prompt, order(index))
        pairs.append(pair)
        quiet_count = sum(each.quiet for each in pairs)
        progress.step("pair", quiet_count, pairs_count, describe(pair))
        late = time.monotonic() > deadline_s
        if quiet_count == pairs_count or (late and len(pairs) >= pairs_count):
            break
    after = with_connector.wait_saves_published()
    return pairs, SavingCost(
        threads_cpu_s=increase(before, after, THREAD_CPU_SECONDS),
        engine_cpu_s=with_connector.engine_cpu_s() - before_cpu_s,
        engine_without_cpu_s=without.engine_cpu_s() - before_without_cpu_s,
        saved_bytes=increase(before, after, SAVED_BYTES),
    )


def measure_pair(
    without: Server, with_connector: Server, prompt: Prompt, turns: tuple[bool, bool]
) -> Pair:
    """One prompt on both servers, in the given order (True: the one with the connector).

    The saves of a request are waited for before the other server is asked: writing that goes on
    would slow that one down and make the connector look cheaper than it is.
    """
    sessions = (without.session_id, with_connector.session_id)
    began = read_cpu(sessions)
    answers: dict[bool, Answer] = {}
    for connected in turns:
        server = with_connector if connected else without
        answers[connected] = server.ask(prompt.text, max_tokens=ANSWER_TOKENS)
        require_cold(answers[connected], prompt)
        if connected:
            with_connector.wait_saves_published()
    taken = foreign_ratio(began, read_cpu(sessions), cores_count=os.cpu_count() or 1)
    return Pair(prompt, answers[False], answers[True], taken)


def describe(pair: Pair) -> str:
    text = (
        f"TPOT {pair.without.tpot_s * 1e3:6.2f} ms without, "
        f"{pair.with_connector.tpot_s * 1e3:6.2f} ms with: {pair.tpot_ratio:.3f}"
    )
    return text if pair.quiet else f"{text}; others took {pair.foreign_ratio:.0%} of the CPU"


def wait_quiet(session_ids: Sequence[int]) -> None:
    """Returns when other programs leave the CPU alone for a second, at the latest at the limit."""
    deadline_s = time.monotonic() + QUIET_WAIT_LIMIT_S
    while time.monotonic() < deadline_s:
        began = read_cpu(session_ids)
        time.sleep(1.0)
        now = read_cpu(session_ids)
        if foreign_ratio(began, now, cores_count=os.cpu_count() or 1) <= FOREIGN_RATIO_MAX:
            return


def quietest(pairs: Sequence[Pair], count: int) -> list[Pair]:
    """The `count` pairs that others disturbed least, in the order in which they were asked."""
    by_disturbance = sorted(range(len(pairs)), key=lambda index: pairs[index].foreign_ratio)
    return [pairs[index] for index in sorted(by_disturbance[:count])]


def require_cold(answer: Answer, prompt: Prompt) -> None:
    if answer.cached_tokens:
        raise OverheadFailed(f"{prompt.name}: {answer.cached_tokens} tokens cached in a cold run")


def require_saves(cost: SavingCost, pairs: Sequence[Pair], kv_token_bytes: int) -> None:
    """The prompts must really have been saved, or the cost is that of less work."""
    prompt_bytes = sum(pair.without.prompt_tokens for pair in pairs) * kv_token_bytes
    if cost.saved_bytes < SAVED_RATIO_MIN * prompt_bytes:
        raise OverheadFailed(
            f"{cost.saved_bytes:.0f} bytes saved of {prompt_bytes} bytes of prompt KV"
        )
    if cost.threads_cpu_s <= 0:
        raise OverheadFailed(f"{THREAD_CPU_SECONDS} did not grow although KV was saved")


# -- what it comes to ----------------------------------------------------------------------------


def ratio_interval(ratios: Sequence[float]) -> Interval:
    return bootstrap_interval(ratios, geometric_mean)


def make_rows(pairs: Sequence[Pair], cost: SavingCost) -> list[dict[str, report.Cell]]:
    """One measure per row. Latencies are medians over the pairs, ratios geometric means."""
    return [
        latency_row("time per output token", pairs, "tpot"),
        latency_row("time to first token, computed", pairs, "ttft"),
        row(
            "CPU time of the engine",
            "s",
            without=cost.engine_without_cpu_s,
            with_connector=cost.engine_cpu_s,
            ratio=cost.engine_cpu_s / cost.engine_without_cpu_s,
        ),
        row(
            "CPU time of the connector's threads",
            "s",
            with_connector=cost.threads_cpu_s,
            ratio=cost.cpu_share,
        ),
        row("KV saved", "GB", with_connector=cost.saved_bytes / 1e9),
        row(
            "CPU time of the threads per GB saved",
            "s/GB",
            with_connector=cost.threads_cpu_s / (cost.saved_bytes / 1e9),
        ),
    ]


def latency_row(measure: str, pairs: Sequence[Pair], attribute: str) -> dict[str, report.Cell]:
    ratios = [getattr(pair, f"{attribute}_ratio") for pair in pairs]
    interval = ratio_interval(ratios)
    return row(
        measure,
        "s",
        pairs=len(pairs),
        without=median([getattr(pair.without, f"{attribute}_s") for pair in pairs]),
        with_connector=median([getattr(pair.with_connector, f"{attribute}_s") for pair in pairs]),
        ratio=interval.estimate,
        ratio_low_95=interval.low,
        ratio_high_95=interval.high,
    )


def row(measure: str, unit: str, **cells: report.Cell) -> dict[str, report.Cell]:
    empty = dict.fromkeys(
        ("pairs", "without", "with_connector", "ratio", "ratio_low_95", "ratio_high_95")
    )
    return {"measure": measure, "unit": unit, **empty, **cells}


def disturbance_notes(pairs: Sequence[Pair]) -> list[str]:
    disturbed = sum(not pair.quiet for pair in pairs)
    if not disturbed:
        return []
    worst = max(pair.foreign_ratio for pair in pairs)
    return [
        f"the machine was busy: in {disturbed} of {len(pairs)} pairs other programs took more than "
        f"{FOREIGN_RATIO_MAX:.0%} of the CPU (up to {worst:.0%}); repeat on a quiet machine"
    ]


def make_checks(pairs: Sequence[Pair], cost: SavingCost) -> list[report.Check]:
    """The CPU share, and the upper end of the interval of the TPOT ratio: a claim that holds."""
    interval = ratio_interval([pair.tpot_ratio for pair in pairs])
    return [
        report.at_most("cpu_share", cost.cpu_share, CPU_SHARE_GOAL, "ratio"),
        report.at_most("tpot_ratio", interval.high, TPOT_RATIO_GOAL, "ratio (95 % upper bound)"),
    ]


def chart(pairs: Sequence[Pair]) -> report.Draw:
    """Every pair as a dot, the mean ratio with its interval, and the goal."""

    def draw(figure: Figure) -> None:
        ratios = [pair.tpot_ratio for pair in pairs]
        interval = ratio_interval(ratios)
        axes = figure.add_subplot()
        axes.axhspan(
            interval.low, interval.high, color="#cfe0fb", label="95 % interval of the mean"
        )
        axes.axhline(interval.estimate, color="#1f6feb", label=f"mean {interval.estimate:.3f}")
        axes.axhline(TPOT_RATIO_GOAL, color="#b42318", linestyle="--", label="goal for the bound")
        axes.plot(range(1, len(ratios) + 1), ratios, "o", color="#5b6675", label="one pair")
        axes.set_xlabel("pair")
        axes.set_ylabel("time per output token, with / without connector")
        axes.set_title("What saving costs a running answer")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)

    return draw


# -- the script ----------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.save_overhead", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--pairs", type=int, default=24, help="paired requests, at least 12 (24)")
    parser.add_argument("--model", type=Path, default=DEFAULT_DIRECTORY, help="model directory")
    parser.add_argument("--results", type=Path, default=report.DEFAULT_RESULTS)
    options = parser.parse_args(arguments)
    if options.pairs < 12:
        parser.error("--pairs: fewer than 12 pairs say too little")
    return options


@contextlib.contextmanager
def both_servers(
    model: Path, logs: Path, connector: dict[str, object], progress: Progress
) -> Iterator[tuple[Server, Server]]:
    """The two servers, started one after the other and both warm."""
    with contextlib.ExitStack() as stack:
        servers = []
        for name, config in (("without", None), ("with", connector)):
            options = ServerOptions(
                model, logs / f"save-overhead-{name}.log", kv_transfer_config=config
            )
            servers.append(stack.enter_context(running(options, f"{name} connector", progress)))
        yield servers[0], servers[1]


def warm_up(without: Server, with_connector: Server, prompts: Sequence[Prompt]) -> None:
    """One full-length request to each server, outside the measurement."""
    for server in (without, with_connector):
        for prompt in prompts:
            server.ask(prompt.text, max_tokens=ANSWER_TOKENS)
    with_connector.wait_saves_published()


def run(arguments: argparse.Namespace) -> int:
    progress = Progress()
    model = prepare(arguments.model)
    cache = report.REPOSITORY / ".cache"
    cache.mkdir(exist_ok=True)
    store_path = Path(tempfile.mkdtemp(prefix="save-overhead-store-", dir=cache))
    connector: dict[str, object] = {
        "kv_connector": "FxKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"local": {"path": str(store_path)}},
    }
    try:
        with both_servers(model, arguments.results / "logs", connector, progress) as servers:
            prompts = build_prompts(
                [PROMPT_TOKENS] * (1 + arguments.pairs * ATTEMPTS_PER_PAIR),
                count_tokens=servers[0].count_tokens,
                chunk_tokens=BLOCK_TOKENS,
            )
            warm_up(*servers, prompts[:1])
            asked, cost = measure(*servers, prompts[1:], arguments.pairs, progress)
        filesystem = filesystem_type(store_path)
    finally:
        shutil.rmtree(store_path, ignore_errors=True)
    require_saves(cost, asked, read_shape(model).kv_token_bytes)
    pairs = quietest(asked, arguments.pairs)
    result = report.Result(
        name="save_overhead",
        title="What saving KV costs the engine",
        command=report.command_line("benchmarks.save_overhead"),
        rows=make_rows(pairs, cost),
        checks=make_checks(pairs, cost),
        settings={
            "server": shown_command(ServerOptions(model, Path())),
            "connector": json.dumps(connector).replace(str(store_path), "DIRECTORY"),
            "prompt_tokens": PROMPT_TOKENS,
            "answer_tokens": ANSWER_TOKENS,
            "store_filesystem": filesystem,
            "pairs_asked": len(asked),
            "foreign_cpu_ratio_max": max(pair.foreign_ratio for pair in pairs),
        },
        notes=[
            *disturbance_notes(pairs),
            "both servers run side by side in eager mode; one request at a time, order A B B A",
            "ratios are geometric means over the pairs; intervals by bootstrap, 95 %",
        ],
    )
    return report.publish(result, draw=chart(pairs), directory=arguments.results)


def main() -> int:
    """0 when every check passes, 1 when one misses, 2 when there is no valid result."""
    arguments = parse_arguments()
    end_cleanly_on_signals()
    try:
        return run(arguments)
    except (
        ModelUnavailable,
        OverheadFailed,
        SavesNotPublished,
        ServerFailed,
        TextExhausted,
    ) as exc:
        print(f"save_overhead: {type(exc).__name__}: {exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
