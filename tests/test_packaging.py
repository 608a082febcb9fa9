"""The package as it is built, installed and shipped: metadata, image, commands.

The Dockerfile is read, not run: its steps are tried outside a container as far as that goes.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import fx_kvbackend

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
ENTRY_POINT_GROUP = "vllm.general_plugins"


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction of a Dockerfile, with its continuation lines joined."""

    verb: str
    argument: str


def dockerfile_steps() -> list[Step]:
    lines = [
        line
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if not line.lstrip().startswith("#")
    ]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        Step(verb.upper(), argument.strip())
        for verb, _, argument in (line.partition(" ") for line in joined.splitlines() if line)
    ]


STEPS = dockerfile_steps()


def arguments_of(verb: str) -> list[str]:
    return [step.argument for step in STEPS if step.verb == verb]


def image_environment() -> dict[str, str]:
    return dict(argument.split("=", 1) for argument in arguments_of("ENV"))


def copied_sources() -> list[str]:
    return [source for argument in arguments_of("COPY") for source in argument.split()[:-1]]


def install_command() -> list[str]:
    [command] = [shlex.split(run) for run in arguments_of("RUN") if " pip install " in run]
    return command


def sent_to_builder(path: str) -> bool:
    """Whether .dockerignore lets a top-level path through; the last line that matches decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if pattern and not pattern.startswith("#"):
            again = pattern.startswith("!")
            if fnmatch.fnmatch(path, pattern.removeprefix("!")):
                sent = again
    return sent


# --- metadata -------------------------------------------------------------------------------


def test_one_version_everywhere() -> None:
    assert PROJECT["version"] == fx_kvbackend.__version__
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_extra_that_the_documents_name_exists() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {"vllm", "cpu", "gds", "gds13", "lmcache", "bench", "dev"} <= set(extras)
    named = set()
    for document in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        for group in re.findall(r"fx[-_]kvbackend\[([\w,-]+)\]", document.read_text()):
            named |= set(group.split(","))
    assert named <= set(extras)


def test_the_core_needs_numpy_and_a_hash() -> None:
    names = {re.split(r"[<>=!~ \[]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert names == {"numpy", "xxhash"}


def test_the_plugin_is_declared_for_vllm() -> None:
    declared = PROJECT["entry-points"][ENTRY_POINT_GROUP]
    assert declared == {"fxkv": "fx_kvbackend.vllm_adapter.plugin:register"}
    installed = {
        point.name: point.value for point in metadata.entry_points(group=ENTRY_POINT_GROUP)
    }
    assert installed.get("fxkv") == declared["fxkv"], "the installed package is out of date"


@pytest.mark.vllm
def test_the_plugin_loads() -> None:
    [point] = metadata.entry_points(group=ENTRY_POINT_GROUP, name="fxkv")
    assert callable(point.load())


def test_importing_the_package_imports_neither_vllm_nor_torch() -> None:
    program = "import sys, fx_kvbackend; print([m for m in ('vllm', 'torch') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_import_contracts_name_every_room() -> None:
    [rooms] = [c for c in PYPROJECT["tool"]["importlinter"]["contracts"] if c["id"] == "rooms"]
    named = {room.strip(" ()") for layer in rooms["layers"] for room in re.split(r"[|:]", layer)}
    there = {
        path.stem
        for path in (ROOT / "fx_kvbackend").iterdir()
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").exists()
    }
    assert named == there


# --- image ----------------------------------------------------------------------------------


def test_the_base_is_the_official_image_and_a_build_argument() -> None:
    [default] = arguments_of("ARG")
    assert re.fullmatch(r"VLLM_IMAGE=vllm/vllm-openai:v0\.\d+\.\d+", default)
    assert arguments_of("FROM") == ["${VLLM_IMAGE}"]


def test_the_base_has_a_vllm_that_the_package_accepts() -> None:
    [default] = arguments_of("ARG")
    minor = int(default.rpartition(":v0.")[2].split(".")[0])
    [requirement] = PROJECT["optional-dependencies"]["vllm"]
    lowest, below = (int(number) for number in re.findall(r"0\.(\d+)", requirement))
    assert lowest <= minor < below


def test_copied_files_exist_and_reach_the_builder() -> None:
    assert copied_sources()
    for source in copied_sources():
        assert (ROOT / source).exists(), source
        assert sent_to_builder(source), source


def test_the_builder_gets_nothing_else() -> None:
    sent = {path.name for path in ROOT.iterdir() if sent_to_builder(path.name)}
    assert sent == set(copied_sources())


def test_every_shell_step_parses() -> None:
    for run in arguments_of("RUN"):
        subprocess.run(["sh", "-n", "-c", run], check=True)


def test_the_image_runs_vllm_serve_as_an_ordinary_user() -> None:
    *_, last = [step for step in STEPS if step.verb == "USER"]
    assert last.argument.split(":")[0] not in {"", "0", "root"}
    assert STEPS.index(last) > max(i for i, step in enumerate(STEPS) if step.verb == "RUN")
    [entrypoint] = arguments_of("ENTRYPOINT")
    assert json.loads(entrypoint) == ["vllm", "serve"]
    assert not arguments_of("CMD")


def test_the_cache_directory_is_a_private_volume() -> None:
    [volume] = [path for argument in arguments_of("VOLUME") for path in json.loads(argument)]
    assert image_environment()["FXKV_LOCAL_PATH"] == volume
    [install] = [shlex.split(run) for run in arguments_of("RUN") if volume in run]
    assert install[:2] == ["install", "-d"]
    assert install[install.index("-m") + 1] == "0700"
    *_, last_user = arguments_of("USER")
    owner, group = install[install.index("-o") + 1], install[install.index("-g") + 1]
    assert f"{owner}:{group}" == last_user
    # A volume keeps what was done to its directory before it was declared, not after.
    verbs = [step.verb for step in STEPS]
    assert verbs.index("VOLUME") > next(
        i for i, step in enumerate(STEPS) if step.verb == "RUN" and volume in step.argument
    )


def test_the_cache_directory_step_makes_a_private_directory(tmp_path: Path) -> None:
    [volume] = json.loads(arguments_of("VOLUME")[0])
    [install] = [shlex.split(run) for run in arguments_of("RUN") if volume in run]
    own = {"-o": str(os.getuid()), "-g": str(os.getgid())}
    for flag, value in own.items():
        install[install.index(flag) + 1] = value
    install[install.index(volume)] = str(tmp_path / "cache")
    subprocess.run(install, check=True)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_the_install_step_works(tmp_path: Path) -> None:
    """What the image installs imports, and brings the plugin and no dependency along."""
    destination = next(argument.split()[-1] for argument in arguments_of("COPY"))
    context = tmp_path / "context"
    context.mkdir()
    for argument in arguments_of("COPY"):
        *sources, target = argument.split()
        to = context / target.rstrip("/").removeprefix(destination.rstrip("/")).lstrip("/")
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, to)

    command = install_command()
    assert command[:3] == ["uv", "pip", "install"]
    assert "--no-deps" in command
    requirements = [word for word in command[3:] if not word.startswith("-")]
    assert destination.rstrip("/") in requirements
    # xxhash is here already; what can fail is the package itself.
    assert [r for r in requirements if r.startswith("xxhash")] == [
        r for r in PROJECT["dependencies"] if r.startswith("xxhash")
    ]
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    how = ["--no-deps", "--no-build-isolation", "--target", str(installed)]
    subprocess.run([*pip, *how, str(context)], check=True)
    assert {path.name for path in installed.iterdir()} == {
        "fx_kvbackend",
        f"fx_kvbackend-{PROJECT['version']}.dist-info",
    }
    program = (
        "import fx_kvbackend, importlib.metadata as m; print(fx_kvbackend.__file__);"
        f"print([p.value for p in m.entry_points(group={ENTRY_POINT_GROUP!r}, name='fxkv')][0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    file, plugin = done.stdout.split()
    assert Path(file).is_relative_to(installed)
    assert plugin == PROJECT["entry-points"][ENTRY_POINT_GROUP]["fxkv"]


# --- commands -------------------------------------------------------------------------------


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_make_command_of_the_documents_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    blocks = re.findall(
        r"```[^\n]*\n(.*?)```|^ {4}(.+)$|`([^`\n]+)`", text, re.DOTALL | re.MULTILINE
    )
    code = "\n".join("\n".join(block) for block in blocks)
    commands = set(re.findall(r"^\s*(?:\$ )?make ([a-z][\w-]*)", code, re.MULTILINE))
    assert commands, f"{document} names no make command: is this test still reading it?"
    assert commands <= make_targets()


def test_make_targets_name_files_that_exist() -> None:
    recipes = (ROOT / "Makefile").read_text()
    for script in re.findall(r"(?:scripts|benchmarks)/[\w.]+", recipes):
        assert (ROOT / script).is_file(), script


@pytest.mark.parametrize("script", ["scripts/setup_env.sh", "scripts/check", ".ci/run"])
def test_scripts_are_executable_and_parse(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


def test_ci_runs_make_test() -> None:
    *_, last = (ROOT / ".ci" / "run").read_text().split("\n")[:-1]
    assert last == "exec make test"


def test_setup_refuses_an_unknown_goal() -> None:
    done = subprocess.run([ROOT / "scripts" / "setup_env.sh", "everything"], capture_output=True)
    assert done.returncode == 1
    assert b"usage: scripts/setup_env.sh demo|test" in done.stderr
