#!/usr/bin/env python3
"""Writes what the code knows about itself into the documentation.

    python scripts/doc_tables.py

fills the tables of README.md between their `begin` and `end` comments and rewrites
examples/fxkv.toml. A test fails while either says something else than the code.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

from fx_kvbackend import config, metrics

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
TOML = ROOT / "examples" / "fxkv.toml"

# The one setting that cannot stand in the file that it names.
NOT_IN_TOML = frozenset({"config_file"})


def settings_table() -> str:
    """Every setting: name, default, meaning."""
    rows = [f"| `{name}` | `{readable(default)}` | {doc} |" for name, default, doc in _settings()]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])


def metrics_table() -> str:
    """Every metric under the name that it is exported by."""
    rows = [
        f"| `{exported(metric)}` | {metric.kind} | {', '.join(metric.labels)} | {metric.doc} |"
        for metric in metrics.ALL
    ]
    return "\n".join(["| metric | kind | labels | meaning |", "|---|---|---|---|", *rows])


def example_toml() -> str:
    """A configuration file with every setting at its default."""
    lines = [
        "# Every setting of fx_kvbackend with its default. Name this file with",
        '#   "kv_connector_extra_config": {"config_file": "fxkv.toml"}',
        "# in --kv-transfer-config, or with FXKV_CONFIG_FILE. Leave out what you do not change.",
    ]
    table = ""
    for name, default, doc in _settings():
        if name in NOT_IN_TOML:
            continue
        *parents, leaf = name.split(".")
        if ".".join(parents) != table:
            table = ".".join(parents)
            lines += ["", f"[{table}]"]
        lines += ["", *textwrap.wrap(doc, 96, initial_indent="# ", subsequent_indent="# ")]
        lines.append(f"{leaf} = {readable(default)}")
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """The text of README.md with its tables brought up to date."""
    for name, table in (("settings", settings_table()), ("metrics", metrics_table())):
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"README.md has no single place for its table of {name}")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{table}\n{end}{rest.partition(end)[2]}"
    return text


def exported(metric: metrics.Metric) -> str:
    """Name on /metrics: the Prometheus client adds the suffix of a counter."""
    return metric.name + ("_total" if metric.kind == "counter" else "")


def readable(default: str) -> str:
    """A default as an operator would write it: `1073741824` becomes `"1GiB"`."""
    value = json.loads(default)
    if type(value) is int:
        for power, unit in ((3, "GiB"), (2, "MiB")):
            if value and value % 1024**power == 0:
                return f'"{value // 1024**power}{unit}"'
    return default


def _settings() -> list[tuple[str, str, str]]:
    return config.describe()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit((__doc__ or "").split("\n\n")[1].strip())
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
    TOML.write_text(example_toml(), encoding="utf-8")
