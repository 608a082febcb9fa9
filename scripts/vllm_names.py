#!/usr/bin/env python3
"""Checks what the adapter builds on against the source of a vLLM that is not imported.

    python scripts/vllm_names.py VLLM

VLLM is a wheel or a directory that holds the package `vllm`: a build for other hardware, or a
release that is not installed. Prints one line per problem; the status is 1 when there is any.

Three questions, all answered from syntax trees:
- does every name and parameter of `vllm_adapter.host.USED`, and every attribute of `READ`, exist?
- does every method that the adapter overrides take what vLLM passes, and is every method that vLLM
  demands there?
- does every call of a vLLM function or class in the adapter fit its parameters?
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, Signature
from pathlib import Path
from typing import Self

from fx_kvbackend.vllm_adapter import host
from fx_kvbackend.vllm_adapter.host import USED

ADAPTER = Path(host.__file__).parent

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"

READ: dict[str, dict[str, tuple[str, ...]]] = {
    # module -> class -> attributes that the adapter reads or sets. These cannot be checked at
    # start: an attribute that a constructor sets shows in the source only. The function named
    # last is imported on CPU alone.
    f"{_CONNECTOR}.offloading_connector": {
        "OffloadingConnector": ("scheduler", "connector_worker"),
    },
    f"{_CONNECTOR}.offloading.scheduler": {
        "OffloadingConnectorScheduler": ("config", "manager", "_req_status"),
        "SchedulerOffloadConfig": ("kv_group_configs",),
    },
    f"{_CONNECTOR}.offloading.worker": {"OffloadingConnectorWorker": ("worker",)},
    f"{_CONNECTOR}.base": {"KVConnectorTransferResults": ("failed_recving",)},
    "vllm.v1.kv_offload.base": {
        "OffloadingSpec": ("config", "blocks_per_chunk", "replicated_layout", "kv_events_config"),
        "OffloadingKVEventsConfig": ("enable_kv_cache_events",),
        "GPULoadStoreSpec": ("block_ids", "group_sizes", "block_indices"),
    },
    "vllm.v1.kv_offload.config": {
        "OffloadingGroupConfig": ("group_id", "tokens_per_block"),
        "OffloadingCacheConfig": ("blocks_per_chunk", "tokens_per_hash"),
        "OffloadingParallelConfig": ("pp_size", "pcp_size", "dcp_size"),
    },
    "vllm.v1.request": {"Request": ("request_id", "lora_request", "block_hashes")},
    "vllm.v1.outputs": {"KVConnectorOutput": ("kv_connector_worker_meta",)},
    "vllm.v1.kv_cache_interface": {
        "KVCacheConfig": ("kv_cache_groups",),
        "KVCacheGroupSpec": ("layer_names", "kv_cache_spec"),
        "AttentionSpec": ("num_kv_heads", "page_size_padded"),
    },
    "vllm.config": {
        "VllmConfig": ("kv_transfer_config", "model_config", "cache_config", "load_config"),
        "ModelConfig": (
            "model",
            "revision",
            "seed",
            "dtype",
            "quantization",
            "hf_config",
            "max_model_len",
            "get_total_num_kv_heads",
            "get_head_size",
        ),
        "CacheConfig": ("cache_dtype", "block_size", "prefix_caching_hash_algo"),
        "LoadConfig": ("load_format",),
    },
    "vllm.platforms.interface": {
        "Platform": ("is_cpu", "device_type", "get_cpu_architecture"),
    },
    "vllm.v1.attention.backends.cpu_attn": {"_get_attn_isa": ()},
}

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_FIELDS_MAKERS = frozenset({"dataclass", "config", "NamedTuple", "Struct"})


@dataclass(frozen=True)
class Found:
    """A definition: the module whose names it uses, and its node."""

    module: Module
    node: ast.AST


@dataclass(frozen=True)
class Module:
    """One module of the read package."""

    name: str
    is_package: bool
    tree: ast.Module

    @cached_property
    def names(self) -> Mapping[str, ast.AST]:
        """Top-level definitions, those inside `if` and `try` too; plain ones go first."""
        statements = [*self.tree.body, *_nested(self.tree.body)]
        # `x: int` says nothing about where x comes from, if anything else does.
        statements.sort(key=lambda s: isinstance(s, ast.AnnAssign) and s.value is None)
        out: dict[str, ast.AST] = {}
        for node in statements:
            for name in _bound(node):
                out.setdefault(name, node)
        return out

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that an import statement of this module names."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        base = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*base, *([node.module] if node.module else [])])


class Package:
    """A package whose files `read` returns by path, None for those that do not exist."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        self._read = read
        self._modules: dict[str, Module | None] = {}

    @classmethod
    def open(cls, path: Path) -> Self:
        """The contents of a wheel, or of a directory that holds the package."""
        if path.is_dir():

            def from_directory(name: str) -> str | None:
                file = path / name
                return file.read_text(encoding="utf-8") if file.is_file() else None

            return cls(from_directory)
        wheel = zipfile.ZipFile(path)
        names = frozenset(wheel.namelist())

        def from_wheel(name: str) -> str | None:
            return wheel.read(name).decode("utf-8") if name in names else None

        return cls(from_wheel)

    def module(self, name: str) -> Module | None:
        """A module by its dotted name."""
        if name not in self._modules:
            at = name.replace(".", "/")
            source, is_package = self._read(f"{at}/__init__.py"), True
            if source is None:
                source, is_package = self._read(f"{at}.py"), False
            self._modules[name] = (
                Module(name, is_package, ast.parse(source)) if source is not None else None
            )
        return self._modules[name]

    def version(self) -> str | None:
        """`vllm.__version__`, where it is written down as a literal."""
        found = self.find("vllm", "__version__")
        value = getattr(found.node, "value", None) if found else None
        return str(value.value) if isinstance(value, ast.Constant) else None

    def find(self, module_name: str, dotted: str) -> Found | None:
        """What `dotted` means in a module: through imports, class bodies and base classes."""
        first, *rest = dotted.split(".")
        found = self._resolve(module_name, first)
        for part in rest:
            found = self._member(found, part) if found is not None else None
        return found

    def mro(self, found: Found) -> list[Found]:
        """A class and those of its bases that the package defines, nearest first."""
        out = [found]
        for base in getattr(found.node, "bases", ()):
            parent = self._expression(found.module, base)
            if parent is not None and isinstance(parent.node, ast.ClassDef):
                out += [one for one in self.mro(parent) if one not in out]
        return out

    def has_attribute(self, found: Found, name: str) -> bool:
        """Whether instances have it: defined in a class, or set on `self` by a method of it."""
        if self._member(found, name) is not None:
            return True
        return any(name in _set_on_self(cls.node) for cls in self.mro(found))

    def abstract_methods(self, found: Found) -> set[str]:
        """Methods that a subclass must define."""
        state: dict[str, bool] = {}
        for cls in self.mro(found):
            for name, node in _class_body(cls.node).items():
                state.setdefault(name, "abstractmethod" in _decorators(node))
        return {name for name, abstract in state.items() if abstract}

    def signature(self, found: Found) -> Signature | None:
        """Parameters without `self`; those of the constructor, or the fields, of a class."""
        node = found.node
        if isinstance(node, _Function):
            return _signature(node)
        if not isinstance(node, ast.ClassDef):
            return None
        classes = self.mro(found)
        for cls in classes:
            init = _class_body(cls.node).get("__init__")
            if isinstance(init, _Function):
                return _signature(init)
        fields: dict[str, Parameter] = {}
        for cls in reversed(classes):
            if isinstance(cls.node, ast.ClassDef) and _makes_fields(cls.node):
                fields |= _fields(cls.node)
        # A default in a base class before a field without one is legal for keyword-only fields.
        return Signature(sorted(fields.values(), key=lambda p: p.default is not Parameter.empty))

    def _resolve(self, module_name: str, name: str, depth: int = 0) -> Found | None:
        module = self.module(module_name)
        node = module.names.get(name) if module is not None else None
        if module is None or depth > 20:
            return None
        if isinstance(node, ast.ImportFrom):
            source = next(a.name for a in node.names if (a.asname or a.name) == name)
            target = module.absolute(node)
            found = self._resolve(target, source, depth + 1)
            whole = self.module(f"{target}.{source}") if found is None else None
            return Found(whole, whole.tree) if whole is not None else found
        return Found(module, node) if node is not None else None

    def _expression(self, module: Module, node: ast.expr) -> Found | None:
        if isinstance(node, ast.Subscript):  # Generic[T] and the like
            return self._expression(module, node.value)
        if isinstance(node, ast.Name):
            return self._resolve(module.name, node.id)
        if isinstance(node, ast.Attribute):
            owner = self._expression(module, node.value)
            return self._member(owner, node.attr) if owner is not None else None
        return None

    def _member(self, owner: Found, name: str) -> Found | None:
        if isinstance(owner.node, ast.Module):
            return self._resolve(owner.module.name, name)
        for cls in self.mro(owner):
            node = _class_body(cls.node).get(name)
            if node is not None:
                return Found(cls.module, node)
        return None


def missing_names(
    package: Package, used: Mapping[str, Mapping[str, tuple[str, ...]]] = USED
) -> list[str]:
    """What `used` asks for and the package lacks; parameters must come in the listed order."""
    out = []
    for module, names in used.items():
        for dotted, parameters in names.items():
            found = package.find(module, dotted)
            if found is None:
                out.append(f"{module}.{dotted}")
                continue
            signature = package.signature(found)
            known = list(signature.parameters) if signature is not None else []
            absent = [f"{module}.{dotted}({p})" for p in parameters if p not in known]
            if not absent and sorted(parameters, key=known.index) != list(parameters):
                absent = [f"{module}.{dotted}: the parameters come in the order {known}"]
            out += absent
    return out


def missing_attributes(
    package: Package, read: Mapping[str, Mapping[str, tuple[str, ...]]] = READ
) -> list[str]:
    """Classes and attributes of `read` that the package lacks."""
    out = []
    for module, classes in read.items():
        for name, attributes in classes.items():
            found = package.find(module, name)
            if found is None:
                out.append(f"{module}.{name}")
                continue
            out += [
                f"{module}.{name}.{attribute}"
                for attribute in attributes
                if not package.has_attribute(found, attribute)
            ]
    return out


# --- our side -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subclass:
    """A class of the adapter and the vLLM class it extends."""

    node: ast.ClassDef
    base_module: str
    base: str

    @property
    def methods(self) -> dict[str, ast.FunctionDef]:
        """Every method, property and class method that it defines."""
        body = _class_body(self.node)
        return {name: n for name, n in body.items() if isinstance(n, ast.FunctionDef)}

    @property
    def overrides(self) -> dict[str, ast.FunctionDef]:
        """The methods that it declares to override."""
        return {n: m for n, m in self.methods.items() if "override" in _decorators(m)}


def adapter_trees(directory: Path = ADAPTER) -> dict[str, ast.Module]:
    """File name -> syntax tree of every module of the adapter."""
    files = sorted(directory.glob("*.py"))
    return {file.name: ast.parse(file.read_text(encoding="utf-8")) for file in files}


def imported_names(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Local name -> (module, name) of everything a module takes out of vLLM, wherever it does."""
    out = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                out[alias.asname or alias.name] = (str(node.module), alias.name)
    return out


def subclasses(trees: Mapping[str, ast.Module]) -> list[Subclass]:
    """The adapter's classes that extend one of vLLM's."""
    out = []
    for tree in trees.values():
        imported = imported_names(tree)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                names = [base.id for base in node.bases if isinstance(base, ast.Name)]
                out += [Subclass(node, *imported[name]) for name in names if name in imported]
    return out


def broken_overrides(package: Package, ours: list[Subclass]) -> list[str]:
    """Where a class of ours would not do as the vLLM class it extends."""
    out = []
    for sub in ours:
        base = package.find(sub.base_module, sub.base)
        if base is None:
            out.append(f"{sub.base_module}.{sub.base}")
            continue
        for name, mine in sub.methods.items():
            if name == "__init__":
                continue
            theirs = package.find(sub.base_module, f"{sub.base}.{name}")
            declared = name in sub.overrides
            if declared != (theirs is not None):
                what = "overrides nothing in" if declared else "hides a name of"
                out.append(f"{sub.node.name}.{name} {what} {sub.base}")
            elif theirs is not None and isinstance(theirs.node, _Function):
                out += _narrower(f"{sub.node.name}.{name}", mine, theirs.node)
        demanded = package.abstract_methods(base) - set(sub.methods)
        out += [f"{sub.node.name} does not define {sub.base}.{name}" for name in sorted(demanded)]
        fields = {n for n in _set_on_self(sub.node) if n.startswith("_")}
        out += [
            f"{sub.node.name}.{name} hides an attribute of {sub.base}"
            for name in sorted(fields)
            if package.has_attribute(base, name)
        ]
    return out


def _narrower(name: str, mine: ast.AST, theirs: ast.AST) -> list[str]:
    """Parameters of their method that ours does not take, by name and place."""
    takes, given = _signature(mine), _signature(theirs)
    if any(p.kind is Parameter.VAR_KEYWORD for p in takes.parameters.values()):
        return []
    mine_in_order = list(takes.parameters)
    return [
        f"{name} does not take {parameter} as its parameter {at + 1}"
        for at, parameter in enumerate(given.parameters)
        if mine_in_order[at : at + 1] != [parameter]
    ]


def broken_calls(package: Package, trees: Mapping[str, ast.Module]) -> list[str]:
    """Calls in the adapter of vLLM functions and classes that do not fit their parameters."""
    out = []
    for file, tree in trees.items():
        imported = imported_names(tree)
        for call in ast.walk(tree):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                continue
            target = imported.get(call.func.id)
            found = package.find(*target) if target is not None else None
            signature = package.signature(found) if found is not None else None
            if signature is None or any(isinstance(a, ast.Starred) for a in call.args):
                continue
            try:
                signature.bind(*call.args, **{k.arg: k for k in call.keywords if k.arg})
            except TypeError as exc:
                out.append(f"{file}:{call.lineno} {call.func.id}(...): {exc}")
    return out


def problems(package: Package) -> list[str]:
    """Everything that this vLLM lacks or does otherwise."""
    trees = adapter_trees()
    return [
        *missing_names(package),
        *missing_attributes(package),
        *broken_overrides(package, subclasses(trees)),
        *broken_calls(package, trees),
    ]


# --- syntax ---------------------------------------------------------------------------------


def _nested(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements inside the `if`, `try` and `with` statements of a body."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            inner = [
                *node.body,
                *getattr(node, "orelse", ()),
                *getattr(node, "finalbody", ()),
                *(s for handler in getattr(node, "handlers", ()) for s in handler.body),
            ]
            yield from inner
            yield from _nested(inner)


def _bound(node: ast.AST) -> list[str]:
    """Names that a statement defines where it stands."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _class_body(node: ast.AST) -> dict[str, ast.AST]:
    if not isinstance(node, ast.ClassDef):
        return {}
    out: dict[str, ast.AST] = {}
    for statement in (*node.body, *_nested(node.body)):
        for name in _bound(statement):
            out.setdefault(name, statement)
    return out


def _set_on_self(node: ast.AST) -> set[str]:
    """Attributes that methods of a class assign to `self`."""
    out = set()
    for inner in ast.walk(node):
        targets: list[ast.expr] = []
        if isinstance(inner, ast.Assign):
            targets = [
                one
                for target in inner.targets
                for one in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
        elif isinstance(inner, ast.AnnAssign):
            targets = [inner.target]
        for target in targets:
            if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                out.add(target.attr)
    return out


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _decorators(node: ast.AST) -> set[str]:
    return {_last_name(decorator) for decorator in getattr(node, "decorator_list", ())}


def _makes_fields(node: ast.ClassDef) -> bool:
    bases = {_last_name(base) for base in node.bases}
    return bool((_decorators(node) | bases) & _FIELDS_MAKERS)


def _fields(node: ast.ClassDef) -> dict[str, Parameter]:
    out = {}
    for statement in node.body:
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and "ClassVar" not in ast.dump(statement.annotation)
        ):
            default = Parameter.empty if statement.value is None else statement.value
            name = statement.target.id
            out[name] = Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default)
    return out


def _signature(node: ast.AST) -> Signature:
    """Parameters of a function without `self` or `cls`."""
    if not isinstance(node, _Function):
        return Signature()
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    defaults = [Parameter.empty] * (len(plain) - len(args.defaults)) + list(args.defaults)
    bound = "cls" if "classmethod" in _decorators(node) else "self"
    if plain and plain[0].arg == bound:
        plain, defaults = plain[1:], defaults[1:]
    out = [
        Parameter(
            arg.arg,
            Parameter.POSITIONAL_ONLY
            if arg in args.posonlyargs
            else Parameter.POSITIONAL_OR_KEYWORD,
            default=default,
        )
        for arg, default in zip(plain, defaults, strict=True)
    ]
    if args.vararg:
        out.append(Parameter(args.vararg.arg, Parameter.VAR_POSITIONAL))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        kind = Parameter.KEYWORD_ONLY
        out.append(
            Parameter(arg.arg, kind, default=Parameter.empty if default is None else default)
        )
    if args.kwarg:
        out.append(Parameter(args.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(out)


def main(arguments: list[str]) -> int:
    """Check one vLLM; see the module's first lines."""
    if len(arguments) != 1:
        print((__doc__ or "").split("\n\n")[1].strip(), file=sys.stderr)
        return 2
    package = Package.open(Path(arguments[0]))
    if package.module("vllm") is None:
        print(f"{arguments[0]} does not hold the package vllm", file=sys.stderr)
        return 2
    found = problems(package)
    print(*found, sep="\n", end="\n" if found else "")
    version = package.version() or "of an unknown version"
    print(f"vLLM {version}: {len(found)} problems, {sum(map(len, USED.values()))} names checked")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
