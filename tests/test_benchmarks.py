"""The parts of the benchmarks that compute: a wrong benchmark proves a wrong thing.

No server is started here; `make demo` does that.
"""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo, load, report, save_overhead
from benchmarks.metrics_text import increase, parse_metrics, total
from benchmarks.model import ModelShape, is_prepared, read_shape
from benchmarks.processes import kill_session, session_processes
from benchmarks.prompts import (
    QUESTION,
    Prompt,
    TextExhausted,
    build_prompts,
    cut_to_tokens,
    full_chunk_tokens,
    load_texts,
    passages,
)
from benchmarks.server import (
    Answer,
    ServerFailed,
    ServerOptions,
    _collect,
    _events,
    is_settled,
    shown_command,
)
from benchmarks.stats import bootstrap_interval, geometric_mean, median, percentile
from benchmarks.storage import directory_bytes, drop_page_cache, files_under, filesystem_type


def words(message: str) -> int:
    return len(message.split())


class TestStatistics:
    def test_percentiles_interpolate_between_samples(self) -> None:
        assert percentile([4.0, 1.0, 3.0, 2.0], 0) == 1.0
        assert percentile([4.0, 1.0, 3.0, 2.0], 100) == 4.0
        assert median([4.0, 1.0, 3.0, 2.0]) == 2.5
        assert percentile([10.0, 20.0], 99) == pytest.approx(19.9)
        assert percentile([7.0], 99) == 7.0

    @pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 101), ([1.0], -1)])
    def test_nonsense_is_refused(self, values: list[float], percent: float) -> None:
        with pytest.raises(ValueError, match="percent"):
            percentile(values, percent)

    def test_ratios_average_geometrically(self) -> None:
        assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)

    def test_the_interval_holds_the_estimate_and_narrows_with_more_samples(self) -> None:
        few = bootstrap_interval([0.9, 1.0, 1.1] * 3, geometric_mean)
        many = bootstrap_interval([0.9, 1.0, 1.1] * 30, geometric_mean)
        assert few.low < few.estimate < few.high
        assert many.high - many.low < few.high - few.low

    def test_the_same_seed_gives_the_same_interval(self) -> None:
        samples = [1.0, 1.2, 0.8, 1.1]
        assert bootstrap_interval(samples, median) == bootstrap_interval(samples, median)


class TestHitTokens:
    @pytest.mark.parametrize(
        ("prompt_tokens", "expected"),
        [(0, 0), (1, 0), (127, 0), (129, 128), (1000, 896), (7002, 6912)],
    )
    def test_whole_chunks_count(self, prompt_tokens: int, expected: int) -> None:
        assert full_chunk_tokens(prompt_tokens, 128) == expected

    def test_the_last_token_is_always_computed(self) -> None:
        assert full_chunk_tokens(256, 128) == 255


class TestPrompts:
    def test_no_two_prompts_begin_alike(self) -> None:
        starts = [text[:400] for _, text in islice(passages(load_texts()), 60)]
        assert len(set(starts)) == len(starts) == 60

    def test_texts_are_long_enough_for_the_longest_prompts(self) -> None:
        texts = load_texts()
        assert len(texts) >= 4
        assert all(len(text) > 40_000 for text in texts.values())
        assert sum(len(text) for text in texts.values()) < 400_000

    @pytest.mark.parametrize("target", [50, 300, 1000])
    def test_a_cut_is_near_its_target_and_ends_in_the_question(self, target: int) -> None:
        text = cut_to_tokens("word " * 5000, target, count_tokens=words, chunk_tokens=128)
        assert text is not None
        assert abs(words(text) - target) <= 8
        assert text.endswith(QUESTION)

    @pytest.mark.parametrize("target", [128, 256, 1280])
    def test_a_cut_is_never_a_whole_number_of_chunks(self, target: int) -> None:
        text = cut_to_tokens(
            "word " * 5000, target, count_tokens=words, chunk_tokens=128, tolerance_tokens=0
        )
        assert text is not None
        assert words(text) % 128 != 0
        assert abs(words(text) - target) <= 2

    def test_a_passage_that_is_too_short_gives_nothing(self) -> None:
        assert cut_to_tokens("a few words", 500, count_tokens=words, chunk_tokens=128) is None

    def test_prompts_keep_the_order_of_their_targets(self) -> None:
        targets = [500, 1000, 3000, 500, 1000, 3000]
        prompts = build_prompts(targets, count_tokens=words, chunk_tokens=128)
        assert [prompt.target_tokens for prompt in prompts] == targets
        assert all(abs(words(p.text) - p.target_tokens) <= 8 for p in prompts)

    def test_texts_that_run_out_are_named(self) -> None:
        with pytest.raises(TextExhausted, match="200 prompts wanted"):
            build_prompts([9000] * 200, count_tokens=words, chunk_tokens=128)


METRICS_TEXT = """\
# HELP fxkv:saves_total Chunks published on the medium.
# TYPE fxkv:saves_total counter
fxkv:saves_total{engine="0",model_name="smollm2"} 12.0
fxkv:saves_total{engine="1",model_name="smollm2"} 3.0
fxkv:pending_saves{engine="0",path="a \\"b\\\\c, }"} 0.0
process_start_time_seconds 1.76e+09
vllm:nothing{le="+Inf"} NaN
not a sample
"""


class TestMetrics:
    def test_samples_are_found_by_name_and_labels(self) -> None:
        metrics = parse_metrics(METRICS_TEXT)
        assert metrics["process_start_time_seconds"] == {frozenset(): 1.76e9}
        labels = frozenset({("engine", "0"), ("model_name", "smollm2")})
        assert metrics["fxkv:saves_total"][labels] == 12.0
        assert math.isnan(metrics["vllm:nothing"][frozenset({("le", "+Inf")})])
        assert "not" not in metrics

    def test_labels_may_hold_any_character(self) -> None:
        (labels,) = parse_metrics(METRICS_TEXT)["fxkv:pending_saves"]
        assert dict(labels)["path"] == 'a "b\\c, }'

    def test_totals_add_label_sets_and_know_the_counter_suffix(self) -> None:
        metrics = parse_metrics(METRICS_TEXT)
        assert total(metrics, "fxkv:saves_total") == total(metrics, "fxkv:saves") == 15.0
        assert total(metrics, "fxkv:absent") is None

    def test_a_counter_that_appears_later_has_grown_from_zero(self) -> None:
        assert increase({}, parse_metrics(METRICS_TEXT), "fxkv:saves") == 15.0
        assert increase({}, {}, "fxkv:saves") == 0.0

    @pytest.mark.parametrize(
        ("pending", "saves", "previous", "settled"),
        [
            (None, None, None, False),  # nothing reported yet
            (0.0, None, None, False),  # no save has begun
            (0.0, 0.0, 0.0, False),
            (0.0, 5.0, 4.0, False),  # one was published since the last look: more may follow
            (2.0, 5.0, 5.0, False),
            (0.0, 5.0, 5.0, True),
        ],
    )
    def test_saves_are_settled_only_when_seen_and_at_rest(
        self, pending: float | None, saves: float | None, previous: float | None, settled: bool
    ) -> None:
        assert is_settled(pending, saves, previous_saves=previous) is settled


def event(token_ids: list[int], text: str, **more: Any) -> dict[str, Any]:
    scores = {"content": [{"logprob": -0.5} for _ in token_ids]}
    choice = {"delta": {"content": text}, "token_ids": token_ids, "logprobs": scores}
    return {"choices": [choice], **more}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 300,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 256},
    },
}


class TestStream:
    def test_an_answer_is_put_together_from_its_events(self) -> None:
        opening = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        answer = _collect(
            iter([opening, event([5], "One"), event([6, 7], " two"), USAGE]), time.perf_counter()
        )
        assert answer.text == "One two"
        assert answer.token_ids == (5, 6, 7)
        assert answer.logprobs == (-0.5, -0.5, -0.5)
        assert (answer.prompt_tokens, answer.cached_tokens) == (300, 256)
        assert 0 <= answer.ttft_s <= answer.e2e_s

    def test_the_time_per_token_counts_tokens_not_events(self) -> None:
        def slow() -> Any:
            yield event([5], "a")
            time.sleep(0.02)
            yield event([6, 7, 8, 9], "b")
            yield USAGE

        answer = _collect(slow(), time.perf_counter())
        assert answer.tpot_s == pytest.approx((answer.e2e_s - answer.ttft_s) / 4)

    @pytest.mark.parametrize(
        "events", [[], [USAGE], [event([5], "a")], [{"error": {"message": "no"}}]]
    )
    def test_a_broken_answer_is_an_error(self, events: list[dict[str, Any]]) -> None:
        with pytest.raises(ServerFailed):
            _collect(iter(events), time.perf_counter())

    def test_the_stream_ends_with_its_marker_only(self) -> None:
        lines = b'data: {"a": 1}\n\n: comment\n\ndata: [DONE]\n\ndata: {"a": 2}\n\n'
        assert list(_events(io.BytesIO(lines))) == [{"a": 1}]
        with pytest.raises(ServerFailed, match="broke off"):
            list(_events(io.BytesIO(b'data: {"a": 1}\n\n')))


class TestServerOptions:
    def test_the_shown_command_has_no_path_of_this_machine(self, tmp_path: Path) -> None:
        options = ServerOptions(tmp_path / "smollm2-135m", tmp_path / "log")
        shown = shown_command(options)
        assert str(tmp_path) not in shown
        assert str(Path.home()) not in shown
        assert " smollm2-135m --served-model-name" in shown

    def test_servers_differ_in_the_connector_only(self, tmp_path: Path) -> None:
        plain = ServerOptions(tmp_path, tmp_path / "log")
        connected = replace(plain, kv_transfer_config={"kv_connector": "FxKVConnector"})
        added = shown_command(connected).removeprefix(shown_command(plain)).split()
        assert added[0] == "--kv-transfer-config"


class TestModel:
    def test_an_incomplete_directory_is_not_prepared(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        assert not is_prepared(tmp_path)

    def test_kv_bytes_per_token_follow_the_shape(self, tmp_path: Path) -> None:
        config = {
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "hidden_size": 576,
            "max_position_embeddings": 8192,
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        shape = read_shape(tmp_path)
        assert shape == ModelShape(30, 3, 64, 2, 8192)
        assert shape.kv_token_bytes == 23040


class TestStorage:
    def test_sizes_and_coldness_of_a_directory(self, tmp_path: Path) -> None:
        (tmp_path / "below").mkdir()
        (tmp_path / "below" / "chunk").write_bytes(b"x" * 100_000)
        (tmp_path / "empty").touch()
        (tmp_path / "link").symlink_to(tmp_path / "below" / "chunk")
        assert directory_bytes(tmp_path) == 100_000
        assert {path.name for path in files_under(tmp_path)} == {"chunk", "empty"}
        drop = drop_page_cache(tmp_path / "below")
        assert drop.total_bytes == 100_000
        if filesystem_type(tmp_path) in ("ext4", "xfs"):
            assert drop.resident_bytes == 0

    def test_the_file_system_is_that_of_the_nearest_mount(self) -> None:
        assert filesystem_type(Path("/proc/self")) == "proc"


class TestProcesses:
    def test_a_session_is_killed_with_all_its_members(self) -> None:
        # The child starts a grandchild and is killed before it could ever wait for it.
        script = (
            "import subprocess, sys, time\n"
            "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
            "print('up', flush=True); time.sleep(60)"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
        )
        assert child.stdout is not None
        with child.stdout as stdout:
            stdout.readline()
        assert len(session_processes(child.pid)) == 2
        kill_session(child.pid)
        child.wait()
        assert session_processes(child.pid) == []


class TestLoad:
    def test_stolen_and_interrupt_time_is_busy_but_waiting_is_not(self) -> None:
        ticks = load._TICKS_PER_S
        line = "cpu " + " ".join(str(ticks * value) for value in (1, 2, 3, 400, 500, 6, 7, 8, 0, 0))
        assert load.busy_seconds(line) == 1 + 2 + 3 + 6 + 7 + 8

    def test_what_others_took_is_the_rest(self) -> None:
        before = load.CpuReading(at_s=0.0, machine_cpu_s=100.0, ours_cpu_s=10.0)
        after = load.CpuReading(at_s=10.0, machine_cpu_s=115.0, ours_cpu_s=20.0)
        assert load.foreign_ratio(before, after, cores_count=2) == pytest.approx(0.25)
        assert load.foreign_ratio(before, before, cores_count=2) == 0.0

    def test_our_own_work_is_not_foreign(self) -> None:
        began = load.read_cpu([])
        while time.process_time() < began.ours_cpu_s + 0.2:
            pass
        ended = load.read_cpu([])
        assert ended.ours_cpu_s - began.ours_cpu_s >= 0.2
        assert ended.machine_cpu_s - began.machine_cpu_s >= 0.1


# -- the demo's arithmetic -----------------------------------------------------------------------


def answer(*, cached: int = 0, ttft_s: float = 1.0, tokens: int = 1000) -> Answer:
    return Answer(
        text="Emma",
        token_ids=(1, 2, 3),
        logprobs=(-0.1, -0.2, -0.3),
        prompt_tokens=tokens,
        cached_tokens=cached,
        output_tokens=3,
        ttft_s=ttft_s,
        tpot_s=0.02,
        e2e_s=ttft_s + 0.04,
    )


def trial(length: int = 1000, *, hit: int | None = None, restored_s: float = 0.1) -> demo.Trial:
    depth = full_chunk_tokens(length, demo.CHUNK_TOKENS)
    hit = depth if hit is None else hit
    restored = answer(cached=hit, ttft_s=restored_s, tokens=length)
    return demo.Trial(
        prompt=Prompt("emma@0", "...", length),
        recomputed=answer(ttft_s=2.0, tokens=length),
        saved=answer(ttft_s=2.1, tokens=length),
        local=answer(cached=depth, ttft_s=0.05, tokens=length),
        restored=[demo.Restored(restored, hit, hit / demo.CHUNK_TOKENS, hit * 23040, 0, 0)],
    )


def checks(trials: list[demo.Trial]) -> dict[str, report.Check]:
    return {check.id: check for check in demo.make_checks(trials, demo.make_rows(trials))}


class TestDemo:
    def test_a_perfect_run_passes_every_check(self) -> None:
        found = checks([trial(1000), trial(7000)])
        assert set(found) == {"answers_identical", "hit_ratio", "ttft_speedup_7k"}
        assert all(check.passed for check in found.values())
        assert found["hit_ratio"].value == 1.0
        assert found["ttft_speedup_7k"].value == pytest.approx(20.0)

    def test_one_different_token_fails(self) -> None:
        bad = trial()
        bad.restored[0] = replace(
            bad.restored[0], answer=replace(bad.restored[0].answer, token_ids=(1, 2, 4))
        )
        assert not checks([trial(), bad])["answers_identical"].passed

    def test_equal_answers_at_unequal_depth_prove_nothing(self) -> None:
        assert not checks([trial(hit=768)])["answers_identical"].passed

    def test_one_missed_chunk_fails(self) -> None:
        found = checks([trial(), trial(hit=768)])["hit_ratio"]
        assert not found.passed
        assert found.value == pytest.approx((896 + 768) / (2 * 896))

    def test_tokens_that_were_not_loaded_are_no_restore(self) -> None:
        local_hit = trial()
        local_hit.restored[0] = replace(local_hit.restored[0], external_tokens=0.0)
        assert checks([local_hit])["hit_ratio"].value == 0.0

    def test_tokens_whose_load_failed_are_no_restore(self) -> None:
        # vLLM still reports all of them as cached, and computes them again.
        failed = trial()
        failed.restored[0] = replace(failed.restored[0], loaded_chunks=6, failed_loads=1)
        found = checks([failed])
        assert not found["hit_ratio"].passed
        assert found["hit_ratio"].value == pytest.approx(6 / 7)
        assert not found["answers_identical"].passed

    def test_no_restore_at_all_is_a_ratio_of_zero(self) -> None:
        assert demo.hit_ratio([]) == 0.0

    def test_too_slow_a_restore_misses_the_speedup(self) -> None:
        assert not checks([trial(7000, restored_s=0.3)])["ttft_speedup_7k"].passed

    def test_rows_have_all_that_people_are_shown(self) -> None:
        (row,) = demo.make_rows([trial(), trial()])
        assert set(demo.HEADINGS) <= set(row)
        assert row["prompts"] == 2
        assert row["loaded_bytes"] == 2 * 896 * 23040
        assert row["logprob_gap"] == 0.0

    def test_a_busy_machine_is_named_with_its_phase(self) -> None:
        settings: dict[str, report.Cell] = {"mode": "eager", "store_filesystem": "ext4"}
        rows = demo.make_rows([trial(7000)])
        quiet = demo.make_notes(rows, settings, {"recompute": 0.02, "restored": 0.1})
        busy = demo.make_notes(rows, settings, {"recompute": 0.4, "restored": 0.02})
        assert not any("busy" in note for note in quiet)
        assert ["40% of the CPU during recompute" in note for note in busy].count(True) == 1

    def test_a_cold_run_that_was_cached_is_no_baseline(self) -> None:
        with pytest.raises(demo.DemoFailed, match="128 tokens cached"):
            demo.require_cold(answer(cached=128), Prompt("emma@0", "...", 1000))

    def test_the_engine_cache_holds_every_prompt_at_once(self) -> None:
        plan = demo.plan_lengths(demo.FULL_LENGTHS_TOKENS, 2)
        assert plan == [1000, 2000, 4000, 7000] * 2
        assert demo.kv_cache_gib(plan, 23040) == 2
        assert demo.kv_cache_gib(plan * 8, 23040) * (1 << 30) > sum(plan * 8) * 23040

    def test_a_named_store_must_be_empty_and_stays(self, tmp_path: Path) -> None:
        with demo.store_directory(tmp_path / "new") as path:
            (path / "chunk").touch()
        assert (tmp_path / "new" / "chunk").exists()
        with pytest.raises(demo.DemoFailed, match="not empty"), demo.store_directory(path):
            pass


class TestSaveOverhead:
    def test_both_servers_are_first_equally_often(self) -> None:
        firsts = [save_overhead.order(index)[0] for index in range(24)]
        assert firsts.count(True) == firsts.count(False) == 12

    def pairs(self, ratio: float) -> list[save_overhead.Pair]:
        without = answer()
        slower = replace(without, tpot_s=without.tpot_s * ratio)
        return [save_overhead.Pair(Prompt("emma@0", "...", 1000), without, slower)] * 12

    def cost(self, threads_cpu_s: float = 0.1) -> save_overhead.SavingCost:
        return save_overhead.SavingCost(threads_cpu_s, 10.0, 9.0, 12 * 1000 * 23040.0)

    def test_the_checks_judge_the_upper_end_of_the_interval(self) -> None:
        share, tpot = save_overhead.make_checks(self.pairs(1.03), self.cost())
        assert (share.id, share.value, share.passed) == ("cpu_share", 0.01, True)
        assert (tpot.id, tpot.passed) == ("tpot_ratio", True)
        assert tpot.value == pytest.approx(1.03)

    def test_a_dear_save_misses_both_goals(self) -> None:
        found = save_overhead.make_checks(self.pairs(1.08), self.cost(threads_cpu_s=0.5))
        assert [check.passed for check in found] == [False, False]

    def test_rows_are_alike_and_carry_the_interval(self) -> None:
        rows = save_overhead.make_rows(self.pairs(1.03), self.cost())
        assert len({tuple(row) for row in rows}) == 1
        assert rows[0]["ratio_low_95"] == pytest.approx(1.03)

    def test_the_least_disturbed_pairs_are_used_in_their_order(self) -> None:
        pairs = [
            replace(pair, prompt=Prompt(f"p{index}", "...", 1000), foreign_ratio=ratio)
            for index, (pair, ratio) in enumerate(
                zip(self.pairs(1.0), [0.0, 0.9, 0.01, 0.5], strict=False)
            )
        ]
        used = save_overhead.quietest(pairs, 3)
        assert [pair.prompt.name for pair in used] == ["p0", "p2", "p3"]
        assert "in 1 of 3 pairs" in save_overhead.disturbance_notes(used)[0]
        assert not save_overhead.disturbance_notes(used[:2])

    def test_a_run_that_saved_too_little_is_refused(self) -> None:
        lazy = replace(self.cost(), saved_bytes=1e6)
        with pytest.raises(save_overhead.OverheadFailed, match="bytes saved"):
            save_overhead.require_saves(lazy, self.pairs(1.0), 23040)
        save_overhead.require_saves(self.cost(), self.pairs(1.0), 23040)


# -- the report ----------------------------------------------------------------------------------


def result(*, passed: bool = True) -> report.Result:
    return report.Result(
        name="sample",
        title="A <sample>",
        command=report.command_line("benchmarks.sample", ["--quick"]),
        rows=[{"what": "a", "time_s": 0.5, "ok": True}, {"what": "b", "time_s": None, "ok": False}],
        checks=[report.at_least("speed", 12.0 if passed else 9.0, 10.0, "x")],
        settings={"size": 3},
        notes=["one & two"],
    )


class TestReport:
    @pytest.mark.parametrize(
        ("check", "passed", "goal"),
        [
            (report.at_least("a", 10.0, 10.0, "x"), True, ">= 10"),
            (report.at_least("a", 9.99, 10.0, "x"), False, ">= 10"),
            (report.at_most("a", 0.02, 0.02, "ratio"), True, "<= 0.02"),
            (report.equals("a", True, True, "bool"), True, "== true"),
            (report.equals("a", 0.999, 1.0, "ratio"), False, "== 1.0"),
        ],
    )
    def test_checks_compare_with_their_goal(
        self, check: report.Check, passed: bool, goal: str
    ) -> None:
        assert (check.passed, check.goal) == (passed, goal)
        assert set(check.as_json()) == {"id", "value", "unit", "goal", "pass"}

    def test_a_result_without_checks_does_not_pass(self) -> None:
        assert not replace(result(), checks=[]).passed

    def test_a_table_is_aligned_and_follows_the_headings(self) -> None:
        table = report.text_table(result().rows, {"time_s": "seconds", "what": "name"})
        assert table.splitlines() == [
            "seconds  name",
            "-------  ----",
            "    0.5  a",
            "      -  b",
        ]

    @pytest.mark.parametrize(("passed", "status"), [(True, 0), (False, 1)])
    def test_publish_writes_all_files_and_returns_the_status(
        self, tmp_path: Path, passed: bool, status: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("matplotlib")

        def draw(figure: Any) -> None:
            figure.add_subplot().plot([1, 2, 3])

        assert report.publish(result(passed=passed), draw=draw, directory=tmp_path) == status
        assert ("MISS" in capsys.readouterr().out) is not passed
        data = json.loads((tmp_path / "sample.json").read_text())
        expected = {"name", "command", "versions", "machine", "date", "rows", "checks"}
        assert expected <= set(data)
        assert data["command"] == "python -m benchmarks.sample --quick"
        assert data["checks"][0]["pass"] is passed
        assert data["versions"]["python"]
        assert {"cpu", "cores", "memory_gib"} <= set(data["machine"])
        page = (tmp_path / "sample.html").read_text()
        assert "A &lt;sample&gt;" in page
        assert "data:image/png;base64," in page
        assert "http" not in page.replace(data["machine"]["cpu"], "")
        assert (tmp_path / "sample.png").read_bytes().startswith(b"\x89PNG")

    def test_the_demo_charts_draw(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        rows = demo.make_rows([trial(1000), trial(7000)])
        report._draw_png(tmp_path / "demo.png", demo.chart(rows))
        pairs = TestSaveOverhead().pairs(1.02)
        report._draw_png(tmp_path / "overhead.png", save_overhead.chart(pairs))
        assert (tmp_path / "overhead.png").stat().st_size > 1000
