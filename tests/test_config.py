"""One parser for every source: the same names, types and units, and nothing ignored."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fx_kvbackend import config as module
from fx_kvbackend.config import Config, Loaded, describe, env_name, flatten, load, parse_size
from fx_kvbackend.errors import ConfigError, FxError

DEFAULTS: dict[str, object] = {
    "config_file": "",
    "chunk_tokens": "auto",
    "layout": "auto",
    "save_generated": True,
    "load_failure_policy": "recompute",
    "load_deadline_s": 30.0,
    "staging": 1 << 30,
    "local.path": "~/.cache/fx_kvbackend",
    "local.capacity": "auto",
    "local.free_floor": "auto",
    "local.direct_io": "auto",
    "local.read_threads": 4,
    "local.write_threads": 2,
    "local.durability": "none",
}

# (setting, as written in JSON or TOML, what it means); every setting appears.
GOOD: list[tuple[str, object, object]] = [
    ("chunk_tokens", 256, 256),
    ("chunk_tokens", "auto", "auto"),
    ("layout", "direct", "direct"),
    ("layout", "canonical", "canonical"),
    ("save_generated", False, False),
    ("save_generated", True, True),
    ("load_failure_policy", "fail", "fail"),
    ("load_deadline_s", 5, 5.0),
    ("load_deadline_s", 0.25, 0.25),
    ("staging", "256MiB", 256 << 20),
    ("staging", 123456789, 123456789),
    ("local.path", "/nvme/kv cache", "/nvme/kv cache"),
    ("local.path", "123", "123"),
    ("local.path", "true", "true"),
    ("local.capacity", "1.5TB", 1_500_000_000_000),
    ("local.capacity", 0, 0),
    ("local.capacity", "auto", "auto"),
    ("local.free_floor", "10 GiB", 10 << 30),
    ("local.direct_io", "off", "off"),
    ("local.read_threads", 16, 16),
    ("local.write_threads", 1, 1),
    ("local.durability", "data", "data"),
]

# (setting, a wrong value, words that the refusal must contain)
WRONG: list[tuple[str, object, list[str]]] = [
    ("chunk_tokens", "256 tokens", ["whole number", "tokens", "auto"]),
    ("chunk_tokens", 0, ["greater than 0"]),
    ("chunk_tokens", -16, ["greater than 0"]),
    ("chunk_tokens", 2.5, ["whole number"]),
    ("layout", "canonic", ["canonical"]),
    ("layout", 1, ["auto", "direct", "canonical"]),
    ("save_generated", "yes", ["true or false"]),
    ("save_generated", 1, ["true or false"]),
    ("load_failure_policy", "recomputed", ["recompute", "fail"]),
    ("load_deadline_s", "30s", ["number of seconds without a unit"]),
    ("load_deadline_s", 0, ["greater than 0"]),
    ("load_deadline_s", -1.5, ["greater than 0"]),
    ("staging", "1 gigabyte", ["64GiB"]),
    ("staging", "1gb", ["64GiB"]),
    ("staging", 0, ["greater than 0"]),
    ("staging", 1.5, ["64GiB"]),
    ("staging", True, ["64GiB"]),
    ("local.path", "", ["not a directory"]),
    ("local.capacity", "64 Gib", ["64GiB", "auto"]),
    ("local.capacity", "lots", ["64GiB", "auto"]),
    ("local.capacity", -1, ["negative"]),
    ("local.free_floor", "5%", ["64GiB", "auto"]),
    ("local.direct_io", "on", ["auto", "off"]),
    ("local.direct_io", False, ["auto", "off"]),
    ("local.read_threads", 0, ["greater than 0"]),
    ("local.write_threads", -2, ["greater than 0"]),
    ("local.read_threads", True, ["whole number"]),
    ("local.read_threads", "many", ["whole number"]),
    ("local.durability", "sync", ["none", "data"]),
]


def nested(name: str, value: object) -> dict[str, Any]:
    *parents, leaf = name.split(".")
    out: dict[str, Any] = {leaf: value}
    for parent in reversed(parents):
        out = {parent: out}
    return out


def toml(name: str, value: object) -> str:
    # JSON scalars are TOML scalars, and a dotted name is a nested table.
    return f"{name} = {json.dumps(value)}\n"


def env_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def from_file(tmp_path: Path, text: str) -> Loaded:
    path = tmp_path / "fxkv.toml"
    path.write_text(text, encoding="utf-8")
    return load({"config_file": str(path)}, {})


def value_of(loaded: Loaded, name: str) -> object:
    return flatten(loaded.config)[name]


# --- the table of settings -------------------------------------------------------------


def test_every_setting_and_its_default() -> None:
    assert flatten(load({}, {}).config) == DEFAULTS
    assert load({}, {}).sources == {}


def test_every_setting_is_described_in_one_sentence() -> None:
    rows = describe()
    assert [name for name, _, _ in rows] == list(DEFAULTS)
    for name, default, doc in rows:
        assert json.loads(default) == DEFAULTS[name]
        assert doc.endswith(".")
        assert "\n" not in doc
        assert 15 < len(doc) < 160


def test_every_setting_is_tried_below() -> None:
    tried = {"config_file"}
    assert {name for name, _, _ in GOOD} | tried == set(DEFAULTS)
    assert {name for name, _, _ in WRONG} | tried == set(DEFAULTS)


def test_environment_names_are_unique_and_documented_by_rule() -> None:
    assert env_name("local.path") == "FXKV_LOCAL_PATH"
    assert env_name("load_deadline_s") == "FXKV_LOAD_DEADLINE_S"
    assert len({env_name(name) for name in DEFAULTS}) == len(DEFAULTS)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load({}, {}).config.staging = 1  # type: ignore[misc]


# --- the same result from every source -------------------------------------------------


@pytest.mark.parametrize(("name", "written", "meant"), GOOD)
def test_json_toml_and_environment_give_the_same(
    tmp_path: Path, name: str, written: object, meant: object
) -> None:
    as_json = load(json.loads(json.dumps(nested(name, written))), {})
    dotted = load({name: written}, {})
    as_toml = from_file(tmp_path, toml(name, written))
    as_env = load({}, {env_name(name): env_text(written)})
    for loaded in (as_json, dotted, as_toml, as_env):
        got = value_of(loaded, name)
        assert got == meant
        assert type(got) is type(meant)
        others = {n: v for n, v in flatten(loaded.config).items() if n not in (name, "config_file")}
        assert others == {n: v for n, v in DEFAULTS.items() if n in others}
    assert as_json.sources == {name: "kv_connector_extra_config"}
    assert as_toml.sources[name] == str(tmp_path / "fxkv.toml")
    assert as_env.sources == {name: env_name(name)}


@pytest.mark.parametrize(("name", "written", "words"), WRONG)
def test_every_source_refuses_the_same(
    tmp_path: Path, name: str, written: object, words: list[str]
) -> None:
    sources = {
        "kv_connector_extra_config": lambda: load(nested(name, written), {}),
        "fxkv.toml": lambda: from_file(tmp_path, toml(name, written)),
        env_name(name): lambda: load({}, {env_name(name): env_text(written)}),
    }
    for source, attempt in sources.items():
        with pytest.raises(ConfigError) as caught:
            attempt()
        text = str(caught.value)
        assert name in text
        assert source in text, "the refusal says where the value came from"
        for word in words:
            assert word in text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_a_deadline_that_never_comes_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"load_deadline_s: .* is not a number of seconds"):
        load({"load_deadline_s": value}, {})


def test_infinite_numbers_in_a_file_are_refused(tmp_path: Path) -> None:
    for text in ("inf", "nan", "-inf"):
        with pytest.raises(ConfigError, match="not a number"):
            from_file(tmp_path, f"load_deadline_s = {text}")
        with pytest.raises(ConfigError, match="not a number"):
            load({}, {"FXKV_LOAD_DEADLINE_S": text})


@pytest.mark.parametrize("text", ["true", "True", "TRUE", "false", "FALSE"])
def test_booleans_in_the_environment(text: str) -> None:
    loaded = load({}, {"FXKV_SAVE_GENERATED": text})
    assert loaded.config.save_generated is (text.lower() == "true")


@pytest.mark.parametrize("name", [n for n in DEFAULTS if n not in ("config_file",)])
def test_a_variable_set_to_nothing_is_refused_not_ignored(name: str) -> None:
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        load({}, {env_name(name): ""})


# --- precedence ------------------------------------------------------------------------


def test_the_stronger_source_wins_setting_by_setting(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('staging = "1GiB"\nlayout = "direct"\n[local]\npath = "/f"\nread_threads = 3\n')
    env = {
        "FXKV_CONFIG_FILE": str(path),
        "FXKV_STAGING": "2GiB",
        "FXKV_LOCAL_PATH": "/e",
        "HOME": "/root",
        "XFXKV_STAGING": "not ours",
    }
    loaded = load({"local": {"path": "/x"}}, env)
    config = loaded.config
    assert config.local.path == "/x"
    assert config.staging == 2 << 30
    assert config.layout == "direct"
    assert config.local.read_threads == 3
    assert config.local.write_threads == 2
    assert loaded.sources == {
        "config_file": "FXKV_CONFIG_FILE",
        "local.path": "kv_connector_extra_config",
        "staging": "FXKV_STAGING",
        "layout": str(path),
        "local.read_threads": str(path),
    }


def test_the_hosts_configuration_file_wins_over_the_environments(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f'[local]\npath = "/{name}"\n')
    env = {"FXKV_CONFIG_FILE": str(tmp_path / "a")}
    assert load({}, env).config.local.path == "/a"
    assert load({"config_file": str(tmp_path / "b")}, env).config.local.path == "/b"
    assert load({"config_file": ""}, env).config.local.path == DEFAULTS["local.path"]


def test_the_log_names_each_value_and_its_source(tmp_path: Path) -> None:
    lines = load({"local": {"capacity": "1GiB"}}, {"FXKV_LAYOUT": "direct"}).lines()
    assert len(lines) == len(DEFAULTS)
    assert "local.capacity = 1073741824  (kv_connector_extra_config)" in lines
    assert 'layout = "direct"  (FXKV_LAYOUT)' in lines
    assert "load_deadline_s = 30.0  (default)" in lines


# --- unknown names, wrong shapes, bad files --------------------------------------------


@pytest.mark.parametrize(
    ("tree", "near"),
    [
        ({"stagging": 1}, "staging"),
        ({"path": "/x"}, "local.path"),
        ({"capacity": "1GiB"}, "local.capacity"),
        ({"local": {"pth": "/x"}}, "local.path"),
        ({"local": {"staging": 1}}, "staging"),
        ({"local.capacityy": 1}, "local.capacity"),
        ({"Local": {"path": "/x"}}, "local.path"),
        ({"chunk_token": 1}, "chunk_tokens"),
        ({"load_deadline": 1}, "load_deadline_s"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(tree: Mapping[str, Any], near: str) -> None:
    with pytest.raises(ConfigError, match=f'unknown setting, did you mean "{near}"'):
        load(tree, {})


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("FXKV_STAGGING", "FXKV_STAGING"),
        ("FXKV_PATH", "FXKV_LOCAL_PATH"),
        ("FXKV_LOCAL_CAPACITYY", "FXKV_LOCAL_CAPACITY"),
        ("FXKV_staging", "FXKV_STAGING"),
        ("FXKV_", "FXKV_"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest(variable: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f'{variable}: .*, did you mean "{near}'):
        load({}, {variable: "1"})


def test_a_table_must_be_a_table_and_a_value_no_table() -> None:
    with pytest.raises(ConfigError, match="local is a table of settings, not '/nvme'"):
        load({"local": "/nvme"}, {})
    with pytest.raises(ConfigError, match="local is a table of settings, not None"):
        load({"local": None}, {})
    for name in DEFAULTS:
        for value in ({"a": 1}, [1], None):
            if name != "config_file" or value is not None:
                with pytest.raises(ConfigError):
                    load(nested(name, value), {})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read .*No such file"),
        ("directory", "cannot read .*Is a directory"),
        (b"staging = ", "is not TOML"),
        (b"staging = '1GiB'\nstaging = '1GiB'", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        (b"config_file = 'other'", "config_file cannot be set in a file"),
        (b"stagging = 1", 'did you mean "staging"'),
        (b"local = 1", "local is a table"),
        (b"layout = 1979-05-27", "layout"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(
    tmp_path: Path, content: bytes | str | None, words: str
) -> None:
    path = tmp_path / "bad.toml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        path.mkdir()
    for extra, env in (({"config_file": str(path)}, {}), ({}, {"FXKV_CONFIG_FILE": str(path)})):
        with pytest.raises(ConfigError, match=words) as caught:
            load(extra, env)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("value", [5, ["a"], "a\0b", "~no_such_user_here/x"])
def test_a_configuration_file_that_is_no_path_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="config_file"):
        load({"config_file": value}, {})


def test_a_configuration_file_under_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.toml").write_text('layout = "direct"')
    assert load({"config_file": "~/c.toml"}, {}).config.layout == "direct"


@pytest.mark.parametrize("path", ["~no_such_user_here/x", "a\0b"])
def test_a_store_that_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config: local\.path"):
        load({"local": {"path": path}}, {})


def test_no_home_directory_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is not in its passwd."""

    def homeless(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.raises(ConfigError, match=r"default: local\.path: .*name an absolute directory"):
        load({}, {})


def test_a_refusal_is_also_a_value_error() -> None:
    with pytest.raises(ValueError):
        load({"x": 1}, {})
    assert issubclass(ConfigError, FxError)


# Whatever is written, it is either understood or refused; nothing else happens.
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@given(name=st.sampled_from(sorted(DEFAULTS)), value=ANYTHING)
@example(name="config_file", value="\0")
def test_any_value_is_understood_or_refused(name: str, value: object) -> None:
    try:
        loaded = load(nested(name, value), {})
    except ConfigError:
        return
    if name != "config_file":
        assert type(value_of(loaded, name)) in (int, float, bool, str)


@given(st.dictionaries(st.sampled_from([env_name(n) for n in DEFAULTS]), st.text(max_size=12)))
def test_any_environment_is_understood_or_refused(env: dict[str, str]) -> None:
    try:
        load({}, env)
    except ConfigError:
        return


# --- sizes -----------------------------------------------------------------------------

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
}


def test_a_bare_number_in_quotes_does_not_say_its_unit() -> None:
    assert parse_size(500, "x") == 500
    with pytest.raises(ConfigError, match="x: '500' is not a size"):
        parse_size("500", "x")


@given(
    count=st.integers(0, 2**64),
    unit=st.sampled_from(sorted(UNITS)),
    space=st.sampled_from(["", " ", "  ", "\t"]),
)
@example(count=2**53 + 1, unit="B", space="")
def test_a_whole_number_of_units_is_exact(count: int, unit: str, space: str) -> None:
    assert parse_size(f"{count}{space}{unit}", "x") == count * UNITS[unit]
    assert parse_size(f"{space}{count}{unit}{space}", "x") == count * UNITS[unit]


@given(whole=st.integers(0, 2**40), part=st.integers(0, 999), unit=st.sampled_from(sorted(UNITS)))
def test_a_fraction_of_a_unit_is_cut_to_whole_bytes(whole: int, part: int, unit: str) -> None:
    assert (
        parse_size(f"{whole}.{part:03d}{unit}", "x") == (1000 * whole + part) * UNITS[unit] // 1000
    )


@given(st.text(max_size=8) | st.floats() | st.none() | st.booleans() | st.integers(max_value=-1))
def test_anything_else_is_no_size(value: object) -> None:
    text = value.strip() if isinstance(value, str) else ""
    if any(text.endswith(unit) for unit in UNITS):
        return
    with pytest.raises(ConfigError, match=r"^some\.name: "):
        parse_size(value, "some.name")


def test_the_module_reads_no_environment_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXKV_LAYOUT", "nonsense")
    assert load({}, {}).config == Config()
    assert "environ" not in Path(module.__file__).read_text()
