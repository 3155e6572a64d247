"""Digests of weights: any changed tensor shows, copies are equal, what is broken is named."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvcore.errors import UnsupportedError
from kvcore.model import weights
from kvcore.model.weights import fingerprint_code, fingerprint_files

MIB = 1 << 20
SIZES = {"embedding": 5 * MIB, "norm": 512, "bias": 9000, "down": 3 * MIB + 17, "scale": 4}


def safetensors(path: Path, sizes: dict[str, int] = SIZES) -> dict[str, int]:
    """Write a file of tensors full of ones; return where each begins."""
    told, starts, at = {}, {}, 0
    for name, nbytes in sizes.items():
        told[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [at, at + nbytes]}
        starts[name] = at
        at += nbytes
    header = json.dumps(told).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\1" * at)
    return {name: 8 + len(header) + start for name, start in starts.items()}


def gguf(path: Path, sizes: dict[str, int] = SIZES) -> dict[str, int]:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    entries = [
        text("general.name") + struct.pack("<I", 8) + text("tiny"),
        text("general.alignment") + struct.pack("<II", 4, 64),
        text("words") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
        text("scores") + struct.pack("<IIQ", 9, 6, 2) + bytes(8),
    ]
    told, at, starts = b"", 0, {}
    for name, nbytes in sizes.items():
        told += text(name) + struct.pack("<IQIQ", 1, nbytes, 24, at)
        starts[name] = at
        at += -(-nbytes // 64) * 64
    head = b"GGUF" + struct.pack("<IQQ", 3, len(sizes), len(entries)) + b"".join(entries) + told
    head += bytes(-len(head) % 64)
    path.write_bytes(head + b"\1" * at)
    return {name: len(head) + start for name, start in starts.items()}


def change(path: Path, offset: int, nbytes: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\2" * nbytes)


@pytest.mark.parametrize(("suffix", "write"), [("safetensors", safetensors), ("gguf", gguf)])
@pytest.mark.parametrize("name", SIZES)
def test_a_change_of_any_tensor_shows(
    tmp_path: Path, suffix: str, write: Callable[[Path], dict[str, int]], name: str
) -> None:
    path = tmp_path / f"model.{suffix}"
    starts = write(path)
    before = fingerprint_files(tmp_path)
    change(path, starts[name], SIZES[name])
    assert fingerprint_files(tmp_path) != before


@pytest.mark.parametrize("start", [0, 1, MIB // 2, 2 * MIB + 1, 4 * MIB])
def test_a_change_of_a_mib_shows_wherever_it_is(tmp_path: Path, start: int) -> None:
    path = tmp_path / "model.safetensors"
    starts = safetensors(path)
    before = fingerprint_files(tmp_path)
    change(path, starts["embedding"] + start, MIB)
    assert fingerprint_files(tmp_path) != before


def test_not_everything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    real = os.pread

    def counted(file: int, nbytes: int, offset: int) -> bytes:
        read.append(nbytes)
        return real(file, nbytes, offset)

    monkeypatch.setattr(os, "pread", counted)
    safetensors(tmp_path / "model.safetensors")
    fingerprint_files(tmp_path)
    assert sum(read) < 20 * 4096 < sum(SIZES.values()) / 50


def test_an_archive_is_known_by_its_entries(tmp_path: Path) -> None:
    """As torch.save writes it: the sums in its directory cover every byte."""
    found = set()
    for name, value in (("one", 0), ("copy", 0), ("other", 1)):
        array = np.zeros(5 * MIB, np.uint8)
        array[3 * MIB + 100_000] = value
        (tmp_path / name).mkdir()
        with (tmp_path / name / "model.pt").open("wb") as file:
            np.savez(file, tensor=array)
        found.add(fingerprint_files(tmp_path / name))
    assert len(found) == 2


def test_a_file_without_known_tensors_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_WHOLE_READ", 1000)
    path = tmp_path / "model.bin"
    path.write_bytes(bytes(300_000))
    before = fingerprint_files(tmp_path)
    change(path, 150_001, 1)
    assert fingerprint_files(tmp_path) != before


def test_copies_are_equal_and_names_count(tmp_path: Path) -> None:
    safetensors(tmp_path / "one" / "model.safetensors")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (tmp_path / "two" / "tokenizer.json").write_text("not weights")
    assert fingerprint_files(tmp_path / "one") == fingerprint_files(tmp_path / "two")
    (tmp_path / "two" / "model.safetensors").rename(tmp_path / "two" / "other.safetensors")
    assert fingerprint_files(tmp_path / "one") != fingerprint_files(tmp_path / "two")


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "hf_quant_config.json"])
def test_what_tells_a_loader_which_tensors_to_use_counts(tmp_path: Path, name: str) -> None:
    safetensors(tmp_path / "model.safetensors")
    before = fingerprint_files(tmp_path)
    (tmp_path / name).write_text("{}")
    assert fingerprint_files(tmp_path) != before


def test_symlinks_are_followed(tmp_path: Path) -> None:
    """Of files, as in a hub's cache, of folders inside the model's, and in a circle."""
    safetensors(tmp_path / "blobs" / "tower" / "model.safetensors")
    model = tmp_path / "model"
    model.mkdir()
    (model / "tower").symlink_to(tmp_path / "blobs" / "tower")
    before = fingerprint_files(model)
    assert before == fingerprint_files(tmp_path / "blobs")
    (model / "tower" / "circle").symlink_to(model)
    assert fingerprint_files(model) == before
    change(tmp_path / "blobs" / "tower" / "model.safetensors", 5 * MIB, 2 * MIB)
    assert fingerprint_files(model) != before


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=f"no model weights in {tmp_path}"):
        fingerprint_files(tmp_path)


@pytest.mark.parametrize("nbytes", [4, 100, 6 * MIB])
@pytest.mark.parametrize(("suffix", "write"), [("safetensors", safetensors), ("gguf", gguf)])
def test_a_file_that_is_cut_off_is_named(
    tmp_path: Path, suffix: str, write: Callable[[Path], dict[str, int]], nbytes: int
) -> None:
    path = tmp_path / f"model.{suffix}"
    write(path)
    os.truncate(path, nbytes)
    with pytest.raises(UnsupportedError, match="cannot read the weights"):
        fingerprint_files(tmp_path)


@pytest.mark.parametrize("header", [b"{", b'{"w": 1}', b"[]", b'{"w": {"data_offsets": [1]}}'])
def test_a_damaged_header_is_named(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(UnsupportedError, match="cannot read the weights"):
        fingerprint_files(tmp_path)


def test_code_is_known_by_its_files(tmp_path: Path) -> None:
    empty = fingerprint_code(tmp_path)
    (tmp_path / "modeling.py").write_text("a = 1")
    one = fingerprint_code(tmp_path)
    (tmp_path / "modeling.py").write_text("a = 2")
    assert len({empty, one, fingerprint_code(tmp_path)}) == 3


# -- files that somebody made to do harm --------------------------------------------------------


def hostile_gguf(path: Path, kind: str) -> None:
    """Write a header that promises more than the file has."""
    huge = 1 << 60
    text = struct.pack("<Q", 1) + b"a"
    head = {
        "text": (0, 1, struct.pack("<Q", huge)),
        "tensors": (huge, 0, b""),
        "values": (0, huge, b""),
        "list": (0, 1, text + struct.pack("<IIQ", 9, 8, huge)),
        "lists in lists": (0, 1, text + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000),
        "unknown kind": (0, 1, text + struct.pack("<I", 77)),
        "cut off": (1, 0, b""),
    }
    tensors, values, rest = head[kind]
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, values) + rest)


@pytest.mark.parametrize(
    "kind", ["text", "tensors", "values", "list", "lists in lists", "unknown kind", "cut off"]
)
def test_a_gguf_that_promises_more_than_it_has_is_refused(tmp_path: Path, kind: str) -> None:
    hostile_gguf(tmp_path / "model.gguf", kind)
    with pytest.raises(UnsupportedError, match="cannot read the weights"):
        fingerprint_files(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"a": {"data_offsets": [0.5, 1.5]}}',
        b'{"a": {"data_offsets": [1e400, 2]}}',
        b'{"a": {"data_offsets": [-9, 2]}}',
        b'{"a": {"data_offsets": 7}}',
        b'{"a": {"data_offsets": ["x", "y"]}}',
        b"\xff\xfe",
        b"7",
    ],
    ids=range(9),
)
def test_a_header_that_is_not_safetensors_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(UnsupportedError, match="cannot read the weights"):
        fingerprint_files(tmp_path)


def test_a_file_of_tensors_may_hold_none(tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors", {})
    empty = fingerprint_files(tmp_path)
    safetensors(tmp_path / "model.safetensors")
    assert fingerprint_files(tmp_path) != empty


def test_an_archive_of_an_unknown_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", b"1" * 100)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\1\2") + 6] = 99  # the version that is needed to read it
    path.write_bytes(content)
    with pytest.raises(UnsupportedError, match="cannot read the weights"):
        fingerprint_files(tmp_path)


def test_a_file_that_became_a_pipe_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a regular file when the folder was looked at."""
    os.mkfifo(tmp_path / "model.safetensors")
    monkeypatch.setattr(Path, "is_file", lambda path: path.suffix == ".safetensors")
    with pytest.raises(UnsupportedError, match="regular file"):
        fingerprint_files(tmp_path)
