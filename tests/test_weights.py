"""The fingerprint of weights: equal for equal weights wherever they lie, else different."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from fx_kvbackend.engines.weights import fingerprint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TENSORS = {f"layers.{i}.weight": (64, 32) for i in range(6)} | {"norm": (32,)}


def safetensors(tensors: Mapping[str, tuple[int, ...]], *, seed: int = 0) -> bytes:
    """A file in the safetensors format, written here by hand; 2 bytes an element."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, shape in tensors.items():
        size = 2
        for n in shape:
            size *= n
        header[name] = {
            "dtype": "F16",
            "shape": list(shape),
            "data_offsets": [len(body), len(body) + size],
        }
        body += random.Random(f"{seed} {name}").randbytes(size)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def model(root: Path, files: Mapping[str, bytes]) -> Path:
    root.mkdir(parents=True)
    for name, content in files.items():
        (root / name).write_bytes(content)
    return root


SHARDED = {
    "model-00001-of-00002.safetensors": safetensors(TENSORS, seed=1),
    "model-00002-of-00002.safetensors": safetensors(TENSORS, seed=2),
}


def changed(content: bytes, at: int, n_bytes: int) -> bytes:
    flipped = bytes(b ^ 0xFF for b in content[at : at + n_bytes])
    return content[:at] + flipped + content[at + n_bytes :]


def test_the_handmade_file_is_safetensors(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.numpy").load_file
    path = tmp_path / "x.safetensors"
    tensors = {"a": (4, 2), "b": (3,)}
    path.write_bytes(safetensors(tensors))
    assert {name: array.shape for name, array in load_file(path).items()} == tensors


def test_copies_at_other_paths_are_equal(tmp_path: Path) -> None:
    one = fingerprint(model(tmp_path / "a" / "model", SHARDED))
    shutil.copytree(tmp_path / "a" / "model", tmp_path / "elsewhere" / "deep")
    (tmp_path / "link").symlink_to(tmp_path / "a" / "model")
    assert one is not None
    assert one.startswith("sample:")
    assert fingerprint(tmp_path / "elsewhere" / "deep") == one
    assert fingerprint(tmp_path / "link") == one
    assert fingerprint(tmp_path / "a" / ".." / "a" / "model") == one


def test_times_modes_and_other_files_do_not_matter(tmp_path: Path) -> None:
    root = model(tmp_path / "m", SHARDED)
    one = fingerprint(root)
    (root / "README.md").write_text("new")
    (root / "config.json").write_text("{}")
    for path in root.iterdir():
        os.utime(path, ns=(1, 1))
        path.chmod(0o444)
    assert fingerprint(root) == one


@pytest.mark.parametrize("name", sorted(SHARDED))
@pytest.mark.parametrize("tensor", sorted(TENSORS))
def test_any_one_changed_tensor_shows(tmp_path: Path, name: str, tensor: str) -> None:
    one = fingerprint(model(tmp_path / "a", SHARDED))
    content = SHARDED[name]
    (length,) = struct.unpack_from("<Q", content)
    start, end = json.loads(content[8 : 8 + length])[tensor]["data_offsets"]
    other = changed(content, 8 + length + start, end - start)
    assert fingerprint(model(tmp_path / "b", {**SHARDED, name: other})) != one


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"[64, 32]", b"[32, 64]"),
        (b"F16", b"I16"),
        (b"layers.3.weight", b"layers.3.WEIGHT"),
        (b'"format": "pt"', b'"format": "tf"'),
    ],
)
def test_a_changed_shape_type_or_name_shows(tmp_path: Path, old: bytes, new: bytes) -> None:
    one = fingerprint(model(tmp_path / "a", SHARDED))
    name = sorted(SHARDED)[0]
    other = SHARDED[name].replace(old, new, 1)
    assert len(other) == len(SHARDED[name])
    assert other != SHARDED[name]
    assert fingerprint(model(tmp_path / "b", {**SHARDED, name: other})) != one


def test_missing_added_renamed_and_swapped_files_show(tmp_path: Path) -> None:
    first, second = sorted(SHARDED)
    variants: list[dict[str, bytes]] = [
        SHARDED,
        {first: SHARDED[first]},
        {**SHARDED, "extra.safetensors": SHARDED[first]},
        {first: SHARDED[first], "other.safetensors": SHARDED[second]},
        {first: SHARDED[second], second: SHARDED[first]},
        {first: SHARDED[first] + b"\0", second: SHARDED[second]},
        {first: b"", second: SHARDED[second]},
    ]
    seen = [fingerprint(model(tmp_path / str(n), files)) for n, files in enumerate(variants)]
    assert None not in seen
    assert len(set(seen)) == len(variants)


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "gguf"])
def test_other_kinds_of_files(tmp_path: Path, suffix: str) -> None:
    content = random.Random(suffix).randbytes(700_000)
    name = f"weights.{suffix}"
    one = fingerprint(model(tmp_path / "a", {name: content}))
    assert one == fingerprint(model(tmp_path / "b", {name: content}))
    for number, at in enumerate((0, 350_000, 690_000)):
        other = changed(content, at, 10_000)
        assert fingerprint(model(tmp_path / f"c{number}", {name: other})) != one


@pytest.mark.parametrize(
    "start",
    [b"PK\x03\x04", b"GGUF\x03\0\0\0", b"\xff" * 16, b"\x10\0\0\0\0\0\0\0[1, 2, 3, 4, 5]", b"\x02"],
    ids=["zip", "gguf", "noise", "json that is no header", "too short"],
)
def test_what_is_not_safetensors_is_sampled_without_reading_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(start)
    if len(start) > 1:
        os.truncate(path, 200 << 20)  # sparse: takes no room
    read_bytes = 0
    real = Path.open

    class Counting:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            self.stream.close()

        def seek(self, at):
            self.stream.seek(at)

        def read(self, n):
            nonlocal read_bytes
            data = self.stream.read(n)
            read_bytes += len(data)
            return data

    monkeypatch.setattr(Path, "open", lambda self, mode: Counting(real(self, mode)))
    assert fingerprint(path)
    assert read_bytes < 2 << 20


def test_a_model_of_many_tensors_is_sampled_evenly(tmp_path: Path) -> None:
    tensors = {f"t{i:05d}": (16,) for i in range(5000)}
    content = safetensors(tensors)
    one = fingerprint(model(tmp_path / "a", {"m.safetensors": content}))
    for number, part in enumerate((0.1, 0.5, 0.97)):
        other = changed(content, int(len(content) * part) // 32 * 32, 4096)
        assert fingerprint(model(tmp_path / f"b{number}", {"m.safetensors": other})) != one


def test_one_file_by_its_own_path(tmp_path: Path) -> None:
    root = model(tmp_path / "a", {"one.gguf": b"GGUF" * 500, "two.gguf": b"GGUF" * 400})
    one, two = fingerprint(root / "one.gguf"), fingerprint(root / "two.gguf")
    assert None not in (one, two, fingerprint(root))
    assert len({one, two, fingerprint(root)}) == 3


def test_no_weights_no_fingerprint(tmp_path: Path) -> None:
    assert fingerprint(tmp_path) is None
    assert fingerprint(tmp_path / "missing") is None
    (tmp_path / "config.json").write_text("{}")
    assert fingerprint(tmp_path) is None


def test_weights_that_cannot_be_read_are_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError):
        fingerprint(tmp_path)


# --- files of a hub --------------------------------------------------------------------


def test_the_commit_of_a_hub_cache_needs_no_reading(tmp_path: Path) -> None:
    hub = tmp_path / "models--org--name" / "snapshots" / COMMIT
    assert fingerprint(hub) == f"commit:{COMMIT}"
    model(hub, SHARDED)
    assert fingerprint(hub) == f"commit:{COMMIT}"
    assert fingerprint(tmp_path / "models--org--name" / "snapshots" / COMMIT) == f"commit:{COMMIT}"


def test_the_cache_may_lie_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = model(tmp_path / "h" / "snapshots" / COMMIT, SHARDED)
    monkeypatch.chdir(hub.parent.parent)
    assert fingerprint(Path("snapshots") / COMMIT) == f"commit:{COMMIT}"
    assert fingerprint(Path("/other/place/snapshots") / COMMIT) == f"commit:{COMMIT}"


def test_two_models_in_folders_of_one_commit_are_told_apart(tmp_path: Path) -> None:
    hub = tmp_path / "snapshots" / COMMIT
    one, two = fingerprint(hub / "adapters" / "a"), fingerprint(hub / "adapters" / "b")
    assert one == f"commit:{COMMIT}/adapters/a"
    assert two == f"commit:{COMMIT}/adapters/b"


@pytest.mark.parametrize("name", ["main", COMMIT[:-1], COMMIT + "0", COMMIT.upper()])
def test_what_is_no_commit_is_sampled(tmp_path: Path, name: str) -> None:
    one = fingerprint(model(tmp_path / "snapshots" / name, SHARDED))
    assert one == fingerprint(model(tmp_path / "plain", SHARDED))
