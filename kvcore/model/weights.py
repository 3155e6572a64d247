"""Digests of weights on disk: equal on every host with a copy, at a bounded cost.

    *.safetensors, *.gguf    header, and of every tensor its start, its end and 4 KiB of each MiB
    *.bin, *.pt, *.pth       the same of each entry of the zip archive, with its CRC-32
    anything else, *.json    the whole file

A tensor of up to 8 KiB is read as a whole. A change of a tensor is noticed unless it leaves all
samples as they were: a fine-tune, a merge or another quantisation does not; an edit of fewer than
2**20 consecutive bytes may.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

from kvcore._util.outside import decode_json, open_regular, printable
from kvcore.errors import FormatError, UnsupportedError
from kvcore.model.keys import KEY_BYTES, canonical_bytes

__all__ = ["fingerprint_code", "fingerprint_files"]

_FORMAT = b"kvcore-2"
_SAMPLED = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_WHOLE = (".tensors", ".npz", ".npy")
_SAMPLE = 4 << 10
_STRIDE = 1 << 20
_WHOLE_READ = 8 << 20
_MAX_HEADER = 256 << 20
_READERS = 16
"""Threads that read samples. A cold NVMe drive or a network folder answers many at once."""


class _Span(NamedTuple):
    offset: int
    nbytes: int


def fingerprint_files(place: str | Path) -> bytes:
    """Return 16 bytes over a folder of weights, or over one file; names within a folder count.

    Follows symlinks. Blocks on disk reads. Raises UnsupportedError if there are no weights, or if a
    file is cut off, damaged or cannot be read.
    """
    root = Path(place)
    try:
        files = [(root.suffix, root)] if root.is_file() else _weight_files(root)
        total = hashlib.sha256(_FORMAT + b"/weights")
        with ThreadPoolExecutor(_READERS, "kvcore-weights") as readers:
            for name, path in files:
                total.update(canonical_bytes([name, _digest_of(path, readers)]))
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(f"cannot read the weights in {root}: {printable(error)}") from error
    return total.digest()[:KEY_BYTES]


def fingerprint_code(folder: str | Path) -> bytes:
    """Return 16 bytes over the Python files of a folder. Raises UnsupportedError as above."""
    root = Path(folder)
    total = hashlib.sha256(_FORMAT + b"/code")
    try:
        for name, path in _walk(root):
            if path.suffix == ".py":
                total.update(canonical_bytes([name, path.read_bytes()]))
    except OSError as error:
        raise UnsupportedError(f"cannot read the model's code in {root}: {error}") from error
    return total.digest()[:KEY_BYTES]


def _walk(root: Path) -> list[tuple[str, Path]]:
    """Return every file below ``root`` with its name there, through symlinked folders too."""
    found, seen = [], set()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=_raise):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()  # a symlink to a folder above
            continue
        seen.add(real)
        folders.sort()
        here = Path(folder)
        found += [((here / name).relative_to(root).as_posix(), here / name) for name in names]
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error


def _weight_files(root: Path) -> list[tuple[str, Path]]:
    """Return the files that decide what a loader finds: weights, their indexes and scales."""
    files = [(name, path) for name, path in _walk(root) if path.is_file()]
    weights = [item for item in files if item[1].suffix in _SAMPLED + _WHOLE]
    if not weights:
        raise UnsupportedError(
            f"no model weights in {root}: looked for *{', *'.join(_SAMPLED + _WHOLE)}; give the "
            "folder that holds them"
        )
    told = ("index.json", "quant", "scale")
    return weights + [
        item
        for item in files
        if item[1].suffix == ".json" and any(word in item[1].name for word in told)
    ]


def _digest_of(path: Path, readers: ThreadPoolExecutor) -> bytes:
    size = path.stat().st_size
    with open(open_regular(path), "rb", buffering=0) as file:
        header, spans = _layout(path, file, size)
        windows = list(_windows(spans))
        if hasattr(os, "posix_fadvise"):  # a sample must not read its neighbourhood ahead
            advice = os.POSIX_FADV_RANDOM if len(windows) > 1 else os.POSIX_FADV_SEQUENTIAL
            os.posix_fadvise(file.fileno(), 0, 0, advice)
        digest = hashlib.sha256(canonical_bytes([size, header]))
        shares = [windows[i : i + 256] for i in range(0, len(windows), 256)]
        for found in readers.map(lambda share: _read(file.fileno(), share), shares):
            digest.update(found)
    return digest.digest()


def _read(file: int, windows: Sequence[_Span]) -> bytes:
    digest = hashlib.sha256()
    for offset, nbytes in windows:
        left = nbytes
        while left:
            data = os.pread(file, min(left, _WHOLE_READ), offset + nbytes - left)
            if not data:
                raise ValueError(f"the file ends before byte {offset + nbytes}")
            digest.update(data)
            left -= len(data)
    return digest.digest()


def _windows(spans: Sequence[_Span]) -> Iterator[_Span]:
    """Yield the samples of each span: its start, its end, and one in each MiB."""
    for offset, nbytes in spans:
        if nbytes <= 2 * _SAMPLE:
            yield _Span(offset, nbytes)
            continue
        for start in range(0, nbytes - _SAMPLE, _STRIDE):
            yield _Span(offset + start, _SAMPLE)
        yield _Span(offset + nbytes - _SAMPLE, _SAMPLE)


# -- where tensors lie --------------------------------------------------------------------------


def _layout(path: Path, file: BinaryIO, size: int) -> tuple[bytes, list[_Span]]:
    """Return what a file says about its tensors, and where their bytes are."""
    if path.suffix == ".safetensors":
        return _safetensors(file, size)
    if path.suffix == ".gguf":
        return _gguf(path, size)
    if path.suffix in _SAMPLED and zipfile.is_zipfile(path):
        return _archive(path)
    return b"", [_Span(at, min(_WHOLE_READ, size - at)) for at in range(0, size, _WHOLE_READ)]


def _safetensors(file: BinaryIO, size: int) -> tuple[bytes, list[_Span]]:
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, _MAX_HEADER):
        raise ValueError(f"{file.name} is cut off or not safetensors: a header of {length} bytes")
    header = b""
    while len(header) < length and (more := file.read(length - len(header))):
        header += more
    try:
        told = decode_json(header)
        offsets = [item["data_offsets"] for name, item in told.items() if name != "__metadata__"]
        spans = [_Span(8 + length + start, stop - start) for start, stop in offsets]
    except (AttributeError, KeyError, TypeError, FormatError) as error:
        raise ValueError(f"{file.name} has a header that is not safetensors'") from error
    first = 8 + length
    if any(s.nbytes < 0 or s.offset < first or s.offset + s.nbytes > size for s in spans):
        raise ValueError(f"{file.name} is cut off: its tensors end beyond its {size} bytes")
    return header, sorted(spans)


def _archive(path: Path) -> tuple[bytes, list[_Span]]:
    """Read the directory of a file that `torch.save` wrote. Its local headers are small."""
    with zipfile.ZipFile(path) as archive:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    told = [[entry.filename, entry.CRC, entry.file_size] for entry in entries]
    spans = [_Span(entry.header_offset, 30 + entry.compress_size) for entry in entries]
    return canonical_bytes(told), spans


_GGUF_NUMBERS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_TEXT, _GGUF_ARRAY = 8, 9


class _Gguf:
    """A reader of a GGUF header, as https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = min(size, _MAX_HEADER)

    def number(self, form: str) -> int:
        data = self._file.read(struct.calcsize(form))
        (value,) = struct.unpack("<" + form, data)
        return int(value)

    def text(self) -> bytes:
        return self._file.read(self._left(self.number("Q"), "bytes of text"))

    def _left(self, count: int, what: str) -> int:
        """Return a count that the header gives. Raises ValueError if it cannot have so many."""
        if count > self._size - self._file.tell():
            raise ValueError(f"a GGUF header of {self._size} bytes has {count} {what}")
        return count

    def value(self, kind: int) -> int | None:
        """Skip a value; return it if it is a number of 4 bytes, as the alignment is."""
        if kind == _GGUF_TEXT:
            self.text()
        elif kind == _GGUF_ARRAY:
            inner, count = self.number("I"), self._left(self.number("Q"), "values in a list")
            if inner in _GGUF_NUMBERS:
                self._file.seek(_GGUF_NUMBERS[inner] * count, os.SEEK_CUR)
            else:
                for _ in range(count):
                    self.value(inner)
        elif kind == 4:
            return self.number("I")
        else:
            self._file.seek(_GGUF_NUMBERS[kind], os.SEEK_CUR)
        return None

    def offsets(self) -> list[int]:
        """Return where each tensor begins in the file."""
        magic, _version = self._file.read(4), self.number("I")
        if magic != b"GGUF":
            raise ValueError(f"{self._file.name} is not GGUF: it begins with {magic!r}")
        tensors = self._left(self.number("Q"), "tensors")
        entries, alignment = self._left(self.number("Q"), "values"), 32
        for _ in range(entries):
            name = self.text()
            found = self.value(self.number("I"))
            if name == b"general.alignment" and found:
                alignment = found
        starts = []
        for _ in range(tensors):
            self.text()
            self._file.seek(8 * self.number("I") + 4, os.SEEK_CUR)
            starts.append(self.number("Q"))
        data = -(-self._file.tell() // alignment) * alignment
        return [data + start for start in starts]


def _gguf(path: Path, size: int) -> tuple[bytes, list[_Span]]:
    with open(open_regular(path), "rb") as file:
        try:
            starts = sorted(_Gguf(file, size).offsets())
        except KeyError as error:
            raise ValueError(f"{path} has a value of an unknown type {error}") from error
        end = starts[0] if starts else size
        file.seek(0)
        header = file.read(min(end, _MAX_HEADER))
    if starts and starts[-1] > size:
        raise ValueError(f"{path} is cut off: its tensors begin beyond its {size} bytes")
    stops = [*starts[1:], size]
    spans = [_Span(start, stop - start) for start, stop in zip(starts, stops, strict=True)]
    return header, spans
