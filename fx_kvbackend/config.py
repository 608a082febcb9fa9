"""The one parser of settings.

Sources, strongest first: the host's `kv_connector_extra_config`, `FXKV_*` variables, a
TOML file (`config_file`), defaults. All of them meet the same table of settings, so a
name, a type and a unit mean the same everywhere. Unknown names are refused with the
nearest known one; nothing is ignored.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fx_kvbackend.errors import ConfigError

ENV_PREFIX = "FXKV_"
AUTO = "auto"
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGTP]i?B|B)\s*$")
_UNIT_BYTES = {
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGTP", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGTP", 1)},
}

Bytes = int
"""A size; written as an integer number of bytes or as text such as "64GiB"."""


def _setting(default: Any, doc: str, *, unit: str = "") -> Any:
    return field(default=default, metadata={"doc": doc, "unit": unit})


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """The local tier: one directory on a local or shared file system."""

    path: str = _setting("~/.cache/fx_kvbackend", "Directory that holds the chunks.")
    capacity: Bytes | Literal["auto"] = _setting(
        AUTO,
        "Cap on the bytes stored under the path, per node; auto is half of the free space.",
        unit="bytes",
    )
    free_floor: Bytes | Literal["auto"] = _setting(
        AUTO,
        "Free space of the file system that saves never go below; auto is 5 % of its size.",
        unit="bytes",
    )
    direct_io: Literal["auto", "off"] = _setting(
        AUTO, "O_DIRECT where the mount takes it (auto), or buffered I/O only (off)."
    )
    read_threads: int = _setting(4, "Threads that read chunks, per rank.")
    write_threads: int = _setting(2, "Threads that write chunks, per rank.")
    durability: Literal["none", "data"] = _setting(
        "none", "Before a chunk is published: none, or data (fdatasync)."
    )


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting of this package, with its default."""

    config_file: str = _setting("", "TOML file with any of these settings.")
    chunk_tokens: int | Literal["auto"] = _setting(
        AUTO,
        "Tokens per chunk, a multiple of the engine's block; auto aims at 4 MiB per rank, "
        "at most 256 tokens.",
        unit="tokens",
    )
    layout: Literal["auto", "direct", "canonical"] = _setting(
        AUTO,
        "canonical: any tensor-parallel size reads what another wrote; direct: only the same "
        "one does; auto: canonical where the engine certifies it.",
    )
    save_generated: bool = _setting(True, "Save generated tokens too, for multi-turn hits.")
    load_failure_policy: Literal["recompute", "fail"] = _setting(
        "recompute", "What the engine does with a request whose load failed."
    )
    load_deadline_s: float = _setting(
        30.0, "A load not finished by then counts as failed.", unit="seconds"
    )
    staging: Bytes = _setting(
        1 << 30, "DRAM for chunks in flight to and from the media, per rank.", unit="bytes"
    )
    local: LocalConfig = field(default_factory=LocalConfig, metadata={"doc": "The local tier."})


@dataclass(frozen=True, slots=True)
class Loaded:
    """An effective configuration and where each value that is not a default came from."""

    config: Config
    sources: Mapping[str, str]

    def lines(self) -> list[str]:
        """One `name = value  (source)` line per setting, for the log at start."""
        return [
            f"{name} = {json.dumps(value)}  ({self.sources.get(name, 'default')})"
            for name, value in flatten(self.config).items()
        ]


def parse_size(text: object, name: str) -> int:
    """Bytes from an int or from text such as "64GiB".

    Raises ConfigError for anything else; a bare number in quotes is refused, because it
    does not say its unit.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ConfigError(f"{name}: {text} is negative; give a size such as 64GiB")
        return text
    match = _SIZE.match(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(
            f'{name}: {text!r} is not a size; write it as "64GiB", "500MB" or an integer of bytes'
        )
    return int(Fraction(match[1]) * _UNIT_BYTES[match[2]])


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted setting name -> value, in declaration order."""
    out: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        name = prefix + item.name
        out.update(flatten(value, name + ".") if is_dataclass(value) else {name: value})
    return out


def describe() -> list[tuple[str, str, str]]:
    """(dotted name, default as JSON, one line of documentation) of every setting."""
    rows = []
    for name, value in flatten(Config()).items():
        cls: type[Any] = Config
        *parents, leaf = name.split(".")
        for parent in parents:
            cls = get_type_hints(cls)[parent]
        meta = next(f for f in fields(cls) if f.name == leaf).metadata
        rows.append((name, json.dumps(value), meta["doc"]))
    return rows


def env_name(name: str) -> str:
    """Environment variable of a setting: `local.path` -> `FXKV_LOCAL_PATH`."""
    return ENV_PREFIX + name.replace(".", "_").upper()


def load(extra: Mapping[str, Any], env: Mapping[str, str]) -> Loaded:
    """The effective configuration from all sources.

    `extra` is nested as in JSON (`{"local": {"path": "/nvme"}}`). Raises ConfigError that
    names the setting, its source and what to write instead.
    """
    flat_extra = _flatten_input(extra, "kv_connector_extra_config")
    flat_env = _flatten_env(env)
    values: dict[str, tuple[Any, str]] = {}
    config_file = flat_extra.get("config_file", flat_env.get("config_file", ("", "")))[0]
    if config_file:
        values.update(_flatten_input(_read_toml(config_file), str(config_file)))
        if "config_file" in values:
            raise ConfigError(f"{config_file}: config_file cannot be set in a file")
    values.update(flat_env)
    values.update(flat_extra)
    config = _build(Config, "", values)
    sources = {name: source for name, (_, source) in values.items()}
    _check(config, sources)
    return Loaded(config, sources)


def _read_toml(path: object) -> dict[str, Any]:
    if not isinstance(path, str):
        raise ConfigError(f"config_file: {path!r} is not a path")
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        return tomllib.loads(text)
    except OSError as exc:
        raise ConfigError(f"config_file: cannot read {path}: {exc.strerror}") from exc
    except RuntimeError as exc:  # from expanduser
        raise ConfigError(f"config_file: {path}: {exc}; give an absolute path") from exc
    except ValueError as exc:  # not TOML, not UTF-8, or not a path at all
        raise ConfigError(f"config_file: {path} is not TOML: {exc}") from exc


def _flatten_input(
    tree: Mapping[str, Any], source: str, prefix: str = ""
) -> dict[str, tuple[Any, str]]:
    known = _types()
    out: dict[str, tuple[Any, str]] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if any(k.startswith(name + ".") for k in known):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{source}: {name} is a table of settings, not {value!r}")
            out.update(_flatten_input(value, source, name + "."))
        elif name in known:
            out[name] = (value, source)
        else:
            raise ConfigError(f"{source}: {_unknown(name, list(known))}")
    return out


def _flatten_env(env: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    by_env = {env_name(name): name for name in _types()}
    out: dict[str, tuple[Any, str]] = {}
    for variable, text in env.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        name = by_env.get(variable)
        if name is None:
            raise ConfigError(_unknown(variable, list(by_env)))
        out[name] = (_from_text(text, _types()[name]), variable)
    return out


def _unknown(name: str, known: list[str]) -> str:
    # A name may be right and only its table missing ("path" for "local.path").
    by_lower = {k.lower(): k for k in known}
    leaf = [k for k in by_lower if k.rpartition(".")[2] == name.lower().rpartition(".")[2]]
    near = leaf or difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.0)
    return f'{name}: unknown setting, did you mean "{by_lower[near[0]]}"?'


def _from_text(text: str, kind: Any) -> Any:
    """The value that JSON or TOML would have given for this text."""
    options = _options(kind)
    if bool in options and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if int in options and re.fullmatch(r"-?\d+", text):
        return int(text)
    if float in options and re.fullmatch(r"-?\d+(\.\d+)?([eE]-?\d+)?", text):
        return float(text)
    return text


def _options(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    args = get_args(kind)
    return sum((_options(a) for a in args), ()) if args else (kind,)


def _types() -> dict[str, Any]:
    out: dict[str, Any] = {}
    hints = get_type_hints(Config)
    for item in fields(Config):
        if is_dataclass(hints[item.name]):
            sub = get_type_hints(hints[item.name])
            out.update({f"{item.name}.{name}": kind for name, kind in sub.items()})
        else:
            out[item.name] = hints[item.name]
    return out


def _build(cls: type[Any], prefix: str, values: Mapping[str, tuple[Any, str]]) -> Any:
    hints = get_type_hints(cls)
    kwargs: dict[str, Any] = {}
    for item in fields(cls):
        name = prefix + item.name
        if is_dataclass(hints[item.name]):
            kwargs[item.name] = _build(hints[item.name], name + ".", values)
        elif name in values:
            value, source = values[name]
            kwargs[item.name] = _convert(
                value, hints[item.name], f"{source}: {name}", item.metadata["unit"]
            )
    return cls(**kwargs)


def _convert(value: Any, kind: Any, name: str, unit: str) -> Any:
    options = _options(kind)
    words = [o for o in options if isinstance(o, str)]
    if value in words and isinstance(value, str):
        return value
    if unit == "bytes":
        try:
            return parse_size(value, name)
        except ConfigError as exc:
            raise ConfigError(f"{exc}{_or(words)}") from None
    if bool in options and isinstance(value, bool):
        return value
    if isinstance(value, bool):
        pass  # a bool is an int to Python, and never what a number was meant to be
    elif int in options and isinstance(value, int):
        return value
    elif float in options and isinstance(value, int | float):
        if abs(value) <= sys.float_info.max:  # neither infinite nor NaN
            return float(value)
    elif str in options and isinstance(value, str):
        return value
    plain = [o.__name__ for o in options if isinstance(o, type)]
    if not plain:
        near = difflib.get_close_matches(str(value), words, n=1, cutoff=0.0)[0]
        raise ConfigError(f'{name}: {value!r} is not one of {words}, did you mean "{near}"?')
    wanted = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
    of_unit = f" of {unit} without a unit" if unit else ""
    expected = " or ".join(wanted[p] + of_unit for p in plain)
    raise ConfigError(f"{name}: {value!r} is not {expected}{_or(words)}")


def _or(words: list[str]) -> str:
    return f', or "{words[0]}"' if words else ""


def _check(config: Config, sources: Mapping[str, str]) -> None:
    """What a type cannot express. Defaults are right, so a wrong value has a source."""
    positive: dict[str, int | float] = {
        "local.read_threads": config.local.read_threads,
        "local.write_threads": config.local.write_threads,
        "load_deadline_s": config.load_deadline_s,
        "staging": config.staging,
    }
    if isinstance(config.chunk_tokens, int):
        positive["chunk_tokens"] = config.chunk_tokens
    for name, value in positive.items():
        if value <= 0:
            raise ConfigError(f"{sources[name]}: {name}: {value} must be greater than 0")
    path = config.local.path
    if not path or "\0" in path:
        raise ConfigError(f"{sources['local.path']}: local.path: {path!r} is not a directory")
    try:
        Path(path).expanduser()
    except RuntimeError as exc:  # no home directory, for instance in a container
        source = sources.get("local.path", "default")
        raise ConfigError(
            f"{source}: local.path: {path!r}: {exc}; name an absolute directory"
        ) from exc
