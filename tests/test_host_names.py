"""The signature test: every vLLM name that the adapter overrides, calls or reads exists.

Against the installed vLLM by importing it, and against a release that is not installed by reading
its wheel. The reader of wheels is tested on a small package made up for it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fx_kvbackend import config
from fx_kvbackend.errors import ConfigError, HostError
from fx_kvbackend.vllm_adapter import host
from fx_kvbackend.vllm_adapter.host import USED
from scripts import vllm_names
from scripts.vllm_names import READ, Package

ROOT = Path(__file__).resolve().parent.parent
WHEEL_VERSION = "0.33.0"
"""The newest release in the supported range. It exists as a CUDA build only."""
WHEELS = ROOT / ".cache" / "wheels"

TREES = vllm_names.adapter_trees()
IMPORTS = sorted(
    {
        (file, *origin)
        for file, t in TREES.items()
        for origin in vllm_names.imported_names(t).values()
    }
)


# --- the table is complete ------------------------------------------------------------------


@pytest.mark.parametrize(("file", "module", "name"), IMPORTS)
def test_every_import_is_in_the_table(file: str, module: str, name: str) -> None:
    dotted = USED.get(module, {})
    listed = any(entry == name or entry.startswith(f"{name}.") for entry in dotted)
    assert listed or name in READ.get(module, {}), f"{file} imports {module}.{name}"


def test_vllm_is_imported_by_name_or_not_at_all() -> None:
    """`import vllm.x` would hide what is used of it from the test above."""
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names if a.name.split(".")[0] == "vllm"]
                assert names in ([], ["vllm"]), file  # vllm.__version__ is all that is read of it


def test_the_adapter_has_subclasses_of_all_four_vllm_classes() -> None:
    bases = {(sub.node.name, sub.base) for sub in vllm_names.subclasses(TREES)}
    assert bases >= {
        ("FxKVConnector", "OffloadingConnector"),
        ("FxSpec", "OffloadingSpec"),
        ("FxManager", "OffloadingManager"),
        ("FxWorker", "OffloadingWorker"),
    }


def unlisted_overrides(package: Package) -> list[str]:
    """Overridden methods that `USED` does not name for their base class or one above it."""
    listed = {entry for names in USED.values() for entry in names}
    out = []
    for sub in vllm_names.subclasses(TREES):
        base = package.find(sub.base_module, sub.base)
        assert base is not None, sub.base
        classes = [cls.node.name for cls in package.mro(base) if isinstance(cls.node, ast.ClassDef)]
        out += [
            f"{sub.node.name}.{method}"
            for method in sub.overrides
            if not listed & {f"{cls}.{method}" for cls in classes}
        ]
    return out


# --- the installed vLLM ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed() -> Package:
    """The source of the installed vLLM."""
    import vllm

    return Package.open(Path(vllm.__file__).parent.parent)


@pytest.mark.vllm
def test_the_installed_vllm_has_every_name() -> None:
    assert host.missing_names() == []
    assert host.check_host()


@pytest.mark.vllm
def test_the_installed_vllm_has_every_name_by_its_source_too(installed: Package) -> None:
    assert vllm_names.problems(installed) == []


@pytest.mark.vllm
def test_every_override_is_in_the_table(installed: Package) -> None:
    assert unlisted_overrides(installed) == []


@pytest.mark.vllm
def test_reading_the_source_and_importing_agree(installed: Package) -> None:
    """What the reader says about a wheel is what an import would have said."""
    import importlib

    for module, names in USED.items():
        for dotted, parameters in names.items():
            if not parameters:
                continue
            found: Any = importlib.import_module(module)
            for part in dotted.split("."):
                found = getattr(found, part)
            read = installed.find(module, dotted)
            assert read is not None
            signature = installed.signature(read)
            assert signature is not None
            assert set(signature.parameters) == host._parameters(found) - {"self"}, dotted


@pytest.mark.vllm
@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.4.dev3+gabc.cu129"])
def test_a_supported_version_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    assert host.check_host() == version


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    assert ". " not in text
    return text


@pytest.mark.vllm
@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.34.0rc1", "1.0.0", "0.9.9", "dev"])
def test_another_version_is_refused_in_one_sentence(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    with pytest.raises(HostError) as raised:
        host.check_host()
    text = one_sentence(raised.value)
    assert f"vLLM {version} " in text
    assert "0.32 up to but not including 0.34" in text


@pytest.mark.vllm
def test_the_connector_refuses_before_it_does_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    from fx_kvbackend.vllm_adapter.connector import FxKVConnector

    monkeypatch.setattr("vllm.__version__", "0.34.0")
    nothing: Any = None
    with pytest.raises(HostError):
        FxKVConnector(nothing, nothing, nothing)


@pytest.mark.vllm
def test_a_missing_hook_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.base import OffloadingManager

    monkeypatch.delattr(OffloadingManager, "get_load_source")
    with pytest.raises(HostError) as raised:
        host.check_host()
    assert "vllm.v1.kv_offload.base.OffloadingManager.get_load_source" in one_sentence(raised.value)


@pytest.mark.vllm
def test_a_renamed_parameter_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.base import OffloadingWorker

    def wait(self: OffloadingWorker, jobs: set[int]) -> None: ...

    monkeypatch.setattr(OffloadingWorker, "wait", wait)
    with pytest.raises(HostError) as raised:
        host.check_host()
    assert "OffloadingWorker.wait(job_ids)" in one_sentence(raised.value)


# --- a vLLM that is not installed -----------------------------------------------------------


@pytest.fixture(scope="module")
def wheel() -> Package:
    """The CUDA wheel of WHEEL_VERSION, fetched once; it is read and never installed."""
    pattern = f"vllm-{WHEEL_VERSION}-*.whl"
    if not list(WHEELS.glob(pattern)):
        WHEELS.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", f"vllm=={WHEEL_VERSION}", "--no-deps"]
        kind = ["--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64"]
        how = ["--dest", str(WHEELS), "--disable-pip-version-check", "--no-input", "--quiet"]
        limits = ["--retries", "1", "--timeout", "20"]
        done = subprocess.run(
            [*pip, *kind, *how, *limits], capture_output=True, text=True, check=False
        )
        if "from versions: none" in done.stderr:
            pytest.skip(
                f"no package index with vllm {WHEEL_VERSION} can be reached; put its wheel into "
                f"{WHEELS.relative_to(ROOT)} to run this test"
            )
        assert done.returncode == 0, done.stderr
    [path] = WHEELS.glob(pattern)
    return Package.open(path)


@pytest.mark.slow
def test_the_next_vllm_has_every_name(wheel: Package) -> None:
    assert wheel.version() == WHEEL_VERSION
    assert vllm_names.problems(wheel) == []
    assert unlisted_overrides(wheel) == []


@pytest.mark.slow
def test_the_next_vllm_is_in_the_supported_range(wheel: Package) -> None:
    version = wheel.version()
    assert version is not None
    numbers = tuple(int(part) for part in version.split(".")[:2])
    assert host.MIN_VERSION <= numbers < host.BELOW_VERSION


@pytest.mark.slow
def test_an_expedited_load_is_taken(wheel: Package) -> None:
    """0.33 adds a parameter to submit_load; 0.32 does not pass it."""
    [worker] = [sub for sub in vllm_names.subclasses(TREES) if sub.node.name == "FxWorker"]
    ours = vllm_names._signature(worker.overrides["submit_load"])
    theirs = wheel.find("vllm.v1.kv_offload.base", "OffloadingWorker.submit_load")
    assert theirs is not None
    given = wheel.signature(theirs)
    assert given is not None
    assert list(given.parameters) == ["job_id", "src_spec", "dst_spec", "expedited"]
    caller = wheel.module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker")
    assert caller is not None
    calls = [
        node
        for node in ast.walk(caller.tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "submit_load"
    ]
    assert any(keyword.arg == "expedited" for call in calls for keyword in call.keywords)
    for call in calls:
        ours.bind(*call.args, **{str(k.arg): k.value for k in call.keywords})


@pytest.mark.slow
def test_every_abstract_method_is_implemented(wheel: Package) -> None:
    for sub in vllm_names.subclasses(TREES):
        base = wheel.find(sub.base_module, sub.base)
        assert base is not None
        abstract = wheel.abstract_methods(base)
        assert abstract <= set(sub.methods), sub.node.name
        if sub.base in ("OffloadingManager", "OffloadingWorker", "OffloadingSpec"):
            assert abstract, f"{sub.base} asks for nothing: is it still read right?"


@pytest.mark.slow
def test_loads_within_a_step_stay_off(wheel: Package) -> None:
    """0.33 can wait for a load inside a step; our `wait` ends loads instead of finishing them.

    vLLM does so only with a setting of its own that is 0 by default and that we refuse.
    """
    name = "sync_load_budget_bytes"
    scheduler = wheel.module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler")
    assert scheduler is not None
    defaults = [
        ast.literal_eval(node.args[1])
        for node in ast.walk(scheduler.tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "get"
        and len(node.args) == 2
        and getattr(node.args[0], "value", None) == name
    ]
    assert defaults == [0]
    with pytest.raises(ConfigError):
        config.load({name: 1 << 20}, {})


@pytest.mark.slow
def test_the_plugin_group_is_still_the_one(wheel: Package) -> None:
    found = wheel.find("vllm.plugins", "DEFAULT_PLUGINS_GROUP")
    assert found is not None
    assert isinstance(found.node, ast.Assign)
    assert ast.literal_eval(found.node.value) == "vllm.general_plugins"


# --- the reader of wheels -------------------------------------------------------------------

MADE_UP = {
    "vllm/__init__.py": "from .version import __version__\n",
    "vllm/version.py": "try:\n    from ._version import __version__\nexcept ImportError: ...\n",
    "vllm/_version.py": "__version__: str\n__version__ = version = '0.32.9'\n",
    "vllm/base.py": (
        "from abc import ABC, abstractmethod\n"
        "from dataclasses import dataclass\n"
        "from enum import Enum\n"
        "from typing import ClassVar, NamedTuple\n"
        "class Root(ABC):\n"
        "    def __init__(self, host): self.host, self._secret = host, 1\n"
        "    @abstractmethod\n"
        "    def must(self, a): ...\n"
        "    @abstractmethod\n"
        "    def given(self): ...\n"
        "    def may(self, a, b=1): ...\n"
        "class Middle(Root):\n"
        "    def given(self): ...\n"
        "    @classmethod\n"
        "    def named(cls, x): ...\n"
        "@dataclass(frozen=True)\n"
        "class Pair:\n"
        "    kind: ClassVar[str] = 'pair'\n"
        "    left: int\n"
        "    right: int = 0\n"
        "@dataclass\n"
        "class Triple(Pair):\n"
        "    last: int = 0\n"
        "class Point(NamedTuple):\n"
        "    x: int\n"
        "    y: int = 0\n"
        "class Answer(Enum):\n"
        "    YES = 1\n"
        "def make(first, second): ...\n"
    ),
    "vllm/api/__init__.py": "from ..base import Middle as Renamed, Pair\nfrom . import deep\n",
    "vllm/api/deep.py": "if True:\n    def inner(x): ...\n",
}
ADAPTER = """
from vllm.base import Middle, Pair, make
class Ours(Middle):
    def __init__(self, host):
        super().__init__(host)
        self._count = 0
    @override
    def must(self, a): ...
    @override
    def may(self, a, b=1): ...
    def own(self): return make(1, second=Pair(1))
"""


def made_up(change: Callable[[str], str] = str) -> Package:
    """The made-up package, with `change` applied to vllm/base.py."""
    files = {**MADE_UP, "vllm/base.py": change(MADE_UP["vllm/base.py"])}
    return Package(files.get)


def of_adapter(package: Package, adapter: str = ADAPTER) -> list[str]:
    trees = {"ours.py": ast.parse(adapter)}
    return [
        *vllm_names.broken_overrides(package, vllm_names.subclasses(trees)),
        *vllm_names.broken_calls(package, trees),
    ]


def test_the_reader_finds_what_is_there() -> None:
    used = {
        "vllm.base": {
            "Root.__init__": ("host",),
            "Middle.must": ("a",),  # from the base class
            "Middle.named": ("x",),
            "Pair": ("left", "right"),
            "Triple": ("left", "right", "last"),
            "Point": ("x", "y"),
            "Answer.YES": (),
            "make": ("first", "second"),
        },
        "vllm.api": {"Renamed.may": ("a", "b"), "Pair": ("left",), "deep.inner": ("x",)},
    }
    assert vllm_names.missing_names(made_up(), used) == []
    read = {"vllm.base": {"Middle": ("host", "_secret", "may"), "Answer": ("YES",)}}
    assert vllm_names.missing_attributes(made_up(), read) == []
    assert made_up().version() == "0.32.9"
    assert of_adapter(made_up()) == []


def test_the_reader_misses_what_is_not() -> None:
    used: dict[str, dict[str, tuple[str, ...]]] = {
        "vllm.base": {
            "Middle.gone": (),
            "make": ("first", "third"),
            "Pair": ("right", "left"),
            "Pair.kind": ("anything",),
        },
        "vllm.gone": {"anything": ()},
        "vllm.api": {"deep.gone": ()},
    }
    assert vllm_names.missing_names(made_up(), used) == [
        "vllm.base.Middle.gone",
        "vllm.base.make(third)",
        "vllm.base.Pair: the parameters come in the order ['left', 'right']",
        "vllm.base.Pair.kind(anything)",
        "vllm.gone.anything",
        "vllm.api.deep.gone",
    ]
    read = {"vllm.base": {"Middle": ("hosts",), "Gone": ("x",)}}
    assert vllm_names.missing_attributes(made_up(), read) == [
        "vllm.base.Middle.hosts",
        "vllm.base.Gone",
    ]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("def must(self, a)", "def must(self, a, c=0)", "Ours.must does not take c"),
        ("def must(self, a)", "def must(self, z)", "Ours.must does not take z"),
        ("def may(self, a, b=1)", "def may(self, b, a=1)", "Ours.may does not take b"),
        ("    def may(self, a, b=1): ...\n", "", "Ours.may overrides nothing in Middle"),
        (
            "class Middle(Root):\n    def given(self): ...\n",
            "class Middle(Root):\n",
            "Ours does not define Middle.given",
        ),
        ("    @classmethod\n", "    def own(self): ...\n    @classmethod\n", "Ours.own hides"),
        ("self._secret", "self._count", "Ours._count hides an attribute of Middle"),
        ("def make(first, second)", "def make(first, other)", "make(...)"),
        ("    left: int\n", "    left: int\n    middle: int\n", "Pair(...)"),
    ],
)
def test_the_reader_sees_an_upgrade_that_breaks_us(old: str, new: str, problem: str) -> None:
    assert old in MADE_UP["vllm/base.py"]
    found = of_adapter(made_up(lambda source: source.replace(old, new)))
    assert problem in found[0]


def test_the_command_reads_a_directory_and_a_wheel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import zipfile

    wheel = tmp_path / "vllm-0.32.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in MADE_UP.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
            archive.writestr(name, text)
    assert vllm_names.main([str(tmp_path)]) == 1  # it lacks everything that the adapter uses
    from_directory = capsys.readouterr().out
    assert vllm_names.main([str(wheel)]) == 1
    assert capsys.readouterr().out == from_directory
    assert "vLLM 0.32.9:" in from_directory
    (tmp_path / "empty").mkdir()
    assert vllm_names.main([str(tmp_path / "empty")]) == 2
    assert vllm_names.main([]) == 2
