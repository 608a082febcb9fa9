"""What the documents say is true: tables equal the code, examples parse, links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fx_kvbackend import config, metrics
from fx_kvbackend.config import Config
from fx_kvbackend.records import Reason
from scripts import doc_tables

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOML = ROOT / "examples" / "fxkv.toml"
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], key=lambda p: str(p.relative_to(ROOT))
)
# Everything that an operator may copy a name from.
TEXTS = [*DOCUMENTS, *sorted(ROOT.glob("examples/*")), ROOT / "Dockerfile"]
TOP_FOLDERS = {"fx_kvbackend", "docs", "examples", "scripts", "benchmarks", "tests"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Block(NamedTuple):
    """One fenced block of a document."""

    document: str
    line: int
    language: str
    text: str


def blocks() -> list[Block]:
    out = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for found in re.finditer(r"^```([\w-]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, found.start()) + 1
            out.append(Block(relative(document), line, found[1], found[2]))
    return out


BLOCKS = blocks()


def of_language(*languages: str) -> list[Any]:
    found = [b for b in BLOCKS if b.language in languages]
    return [pytest.param(b, id=f"{b.document}:{b.line}") for b in found]


def check_transfer_config(text: str) -> None:
    """A --kv-transfer-config as vLLM and the connector would take it."""
    tree = json.loads(text)
    assert tree["kv_connector"] == "FxKVConnector"
    assert tree["kv_role"] == "kv_both"
    known = {"kv_connector", "kv_role", "kv_connector_module_path", "kv_load_failure_policy"}
    assert set(tree) <= known | {"kv_connector_extra_config"}
    config.load(tree.get("kv_connector_extra_config", {}), {})


def transfer_configs(shell: str) -> list[str]:
    return re.findall(r"--kv-transfer-config\s+'([^']*)'", shell)


# --- fenced blocks --------------------------------------------------------------------------


def test_every_block_says_its_language() -> None:
    assert {b.language for b in BLOCKS} <= {"sh", "json", "toml", "python", "text", "mermaid"}
    assert {"sh", "json", "toml"} <= {b.language for b in BLOCKS if b.document == "README.md"}


@pytest.mark.parametrize("block", of_language("sh"))
def test_shell_blocks_parse(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    for text in transfer_configs(block.text):
        check_transfer_config(text)
    environment = dict(re.findall(r"\b(FXKV_\w+)=(\S+)", block.text))
    config.load({}, environment)


@pytest.mark.parametrize("block", of_language("json"))
def test_json_blocks_are_taken(block: Block) -> None:
    tree = json.loads(block.text)
    if "kv_connector" in tree:
        check_transfer_config(block.text)


@pytest.mark.parametrize("block", of_language("toml"))
def test_toml_blocks_are_taken(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "fxkv.toml"
    file.write_text(block.text, encoding="utf-8")
    loaded = config.load({"config_file": str(file)}, {})
    assert len(loaded.sources) > 1


def test_python_blocks_compile() -> None:
    for block in BLOCKS:
        if block.language == "python":
            compile(block.text, f"{block.document}:{block.line}", "exec")


def test_the_first_server_command_is_the_whole_configuration() -> None:
    [command, *_] = [line for line in README.splitlines() if line.startswith("vllm serve")]
    assert command == (
        "vllm serve MODEL --kv-transfer-config "
        """'{"kv_connector":"FxKVConnector","kv_role":"kv_both"}'"""
    )


# --- tables ---------------------------------------------------------------------------------


def table_rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the table under the row that starts with `heading`."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_the_generated_tables_are_up_to_date() -> None:
    assert doc_tables.filled(README) == README, "run python scripts/doc_tables.py"


def test_the_table_of_settings_is_the_parsers() -> None:
    rows = {code_spans(row[0])[0]: row[1:] for row in table_rows(README, "setting")}
    described = {name: (default, doc) for name, default, doc in config.describe()}
    assert list(rows) == list(described)
    for name, (default, doc) in described.items():
        shown = json.loads(code_spans(rows[name][0])[0])
        if isinstance(json.loads(default), int) and isinstance(shown, str):
            shown = config.parse_size(shown, name)
        assert shown == json.loads(default), name
        assert rows[name][1] == doc


def test_the_table_of_metrics_is_complete() -> None:
    named = [code_spans(row[0])[0] for row in table_rows(README, "metric")]
    assert named == [doc_tables.exported(metric) for metric in metrics.ALL]


def test_the_table_of_reasons_is_complete() -> None:
    named = [name for row in table_rows(README, "reason") for name in code_spans(row[0])]
    assert sorted(named) == sorted(reason.value for reason in Reason)


def test_the_table_of_the_namespace_is_complete() -> None:
    from fx_kvbackend.vllm_adapter import identity

    tree = ast.parse(Path(identity.__file__).read_text(encoding="utf-8"))
    [build] = [n for n in tree.body if getattr(n, "name", "") == "build_manifest"]
    [manifest] = [n.value for n in ast.walk(build) if isinstance(n, ast.AnnAssign)]
    assert isinstance(manifest, ast.Dict)
    fields = [str(key.value) for key in manifest.keys if isinstance(key, ast.Constant)]
    named = [name for row in table_rows(README, "field") for name in code_spans(row[0])]
    assert sorted(named) == sorted(fields)


def test_log_lines_that_the_readme_quotes_exist() -> None:
    rows = table_rows(README, "you see")
    quoted = {
        text
        for row in rows
        for cell in row
        for clause in re.findall(r"\blog\b[^`]*`([^`]+)`", cell)
        for text in [clause]
    }
    assert len(quoted) >= 4
    source = "\n".join(
        file.read_text(encoding="utf-8") for file in ROOT.glob("fx_kvbackend/**/*.py")
    )
    assert [text for text in quoted if text not in source] == []


# --- names ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_variables_exist(path: Path) -> None:
    known = {config.env_name(name) for name, _, _ in config.describe()}
    named = set(re.findall(r"\bFXKV_[A-Z][A-Z_]*[A-Z]", path.read_text(encoding="utf-8")))
    assert named <= known


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_metrics_exist(path: Path) -> None:
    known = {name for m in metrics.ALL for name in (m.name, doc_tables.exported(m))}
    named = set(re.findall(r"\bfxkv:[a-z_]+", path.read_text(encoding="utf-8")))
    assert named <= known


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        if file:
            assert (path.parent / file).exists(), target
        else:
            assert anchor in headings, target


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_files_that_are_named_exist(path: Path) -> None:
    for span in code_spans(path.read_text(encoding="utf-8")):
        if re.fullmatch(r"[\w./-]+", span) and span.split("/")[0] in TOP_FOLDERS and "/" in span:
            assert (ROOT / span).exists(), span


# --- examples -------------------------------------------------------------------------------


def test_the_example_file_is_up_to_date() -> None:
    assert TOML.read_text(encoding="utf-8") == doc_tables.example_toml(), (
        "run python scripts/doc_tables.py"
    )


def test_the_example_file_holds_every_setting_at_its_default() -> None:
    loaded = config.load({"config_file": str(TOML)}, {})
    assert set(loaded.sources) == {name for name, _, _ in config.describe()}
    assert dataclasses.replace(loaded.config, config_file="") == Config()


def test_the_example_file_explains_every_setting() -> None:
    text = " ".join(TOML.read_text(encoding="utf-8").replace("# ", "").split())
    for _, _, doc in config.describe()[1:]:
        assert doc in text
    assert tomllib.loads(TOML.read_text(encoding="utf-8"))


def fake_commands(folder: Path, *, vllm_works: bool) -> dict[str, str]:
    """A PATH whose `vllm` and `python` print their arguments, one a line."""
    folder.mkdir()
    for name in ("vllm", "python"):
        script = folder / name
        fails = name == "vllm" and not vllm_works
        script.write_text(
            f'#!/bin/sh\n[ {int(fails)} = 1 ] && exit 1\nprintf "%s\\n" {name} "$@"\n'
        )
        script.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:/usr/bin:/bin"}


@pytest.mark.parametrize("vllm_works", [True, False])
def test_the_serve_example_starts_the_server(vllm_works: bool, tmp_path: Path) -> None:
    script = ROOT / "examples" / "serve.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    done = subprocess.run(
        [script, "some/model", "--port", "8001"],
        env=fake_commands(tmp_path / "bin", vllm_works=vllm_works),
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    module = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"]
    assert words[: words.index("some/model")] == (["vllm", "serve"] if vllm_works else module)
    assert words[-2:] == ["--port", "8001"]
    check_transfer_config(words[words.index("--kv-transfer-config") + 1])


def test_the_serve_example_asks_for_a_model() -> None:
    done = subprocess.run([ROOT / "examples" / "serve.sh"], capture_output=True)
    assert done.returncode == 2
    assert b"usage:" in done.stderr


def test_the_offline_example_compiles() -> None:
    source = (ROOT / "examples" / "offline.py").read_text(encoding="utf-8")
    compile(source, "offline.py", "exec")


@pytest.mark.vllm
def test_the_offline_example_hits(tmp_path: Path) -> None:
    """The second question of a run comes from the store, and so does all of a second run."""
    from tests.engine import models

    model = models.llama(tmp_path / "model")
    _add_tokenizer(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(i % 500) for i in range(700)))
    script = str(ROOT / "examples" / "offline.py")
    command = [sys.executable, script, model, "--repeat", "1"]
    command += ["--text", str(text), "--store", str(tmp_path / "store")]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # starts in half the time
    }
    cached = []
    for _ in range(2):
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr[-3000:]
        cached += re.findall(r"question *: (\d+) of (\d+) tokens cached", done.stdout)
    counts = [int(count) for count, _ in cached]
    assert int(cached[0][1]) > 700
    assert counts[0] == 0
    assert counts[1] == counts[2] == counts[3] > 500
    shutil.rmtree(tmp_path / "store")


def _add_tokenizer(path: Path) -> None:
    """One token per word: the numbers below 500, and one for everything else."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "[EOS]": 1, **{str(i): i + 2 for i in range(500)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[EOS]")
    fast.save_pretrained(path)
