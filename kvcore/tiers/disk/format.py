"""The disk tier's files, version 1. Specified in docs/format.md.

<path>/<base>/<store>/store.json      what the blocks are, and which heads each shard holds
                      shard-0.data    slot i at i * slot_nbytes
                      shard-0.index   record i (128 bytes) tells what slot i holds
                      lock            held (flock) by the engine that writes here
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from kvcore.errors import FormatError, LayoutError
from kvcore.layout import BlockShape
from kvcore.tiers.base import BlockRecord, Buffers

VERSION = 1
MAGIC = b"KVC1"
RECORD_NBYTES = 128
_BODY = struct.Struct("<4sHHQ16s16s16s16sQ")  # magic version flags stamp key parent ns sum nbytes
_SEAL = struct.Struct("<Q")
_PAD = bytes(RECORD_NBYTES - _BODY.size - _SEAL.size)
EMPTY_RECORD = bytes(RECORD_NBYTES)
KEY_NBYTES = 16


class Record(NamedTuple):
    """What a slot holds: the block, the checksum of its bytes, and how many there are."""

    key: bytes
    parent: bytes
    namespace: bytes
    checksum: bytes
    nbytes: int
    stamp: int

    def pack(self) -> bytes:
        """128 bytes that vouch for themselves."""
        body = _BODY.pack(
            MAGIC, VERSION, 0, self.stamp, self.key, self.parent, self.namespace,
            self.checksum, self.nbytes,
        )  # fmt: skip
        return body + _PAD + _SEAL.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Record | None:
        """The record in 128 bytes; None when they are empty, torn or of another version."""
        if len(data) != RECORD_NBYTES:
            return None
        magic, version, _, stamp, key, parent, namespace, checksum, nbytes = _BODY.unpack_from(data)
        if magic != MAGIC or version != VERSION:
            return None
        (seal,) = _SEAL.unpack_from(data, RECORD_NBYTES - _SEAL.size)
        if xxhash.xxh3_64_intdigest(data[: _BODY.size]) != seal:
            return None
        return cls(key, parent, namespace, checksum, nbytes, stamp)


def checksum(key: bytes, buffers: Buffers) -> bytes:
    """XXH3-128 of a block's bytes, seeded with its key: another block's bytes do not pass."""
    state = xxhash.xxh3_128(seed=int.from_bytes(key[:8], "little"))
    for part in buffers:
        state.update(part)
    return state.digest()


def read_records(path: Path) -> Iterable[tuple[int, Record]]:
    """Every valid (slot, record) of an index file. A torn last record is left out."""
    data = memoryview(path.read_bytes())
    for slot in range(len(data) // RECORD_NBYTES):
        start = slot * RECORD_NBYTES
        if data[start : start + 4] == MAGIC:
            record = Record.unpack(data[start : start + RECORD_NBYTES])
            if record is not None:
                yield slot, record


@dataclass(frozen=True)
class Geometry:
    """What makes the blocks of two stores comparable, and how one store cuts them into shards.

    ``shape`` is the whole model's block, ``model`` its fingerprint, ``heads`` the KV heads
    [start, stop) of each shard.
    """

    shape: BlockShape
    model: bytes
    heads: tuple[tuple[int, int], ...]

    @property
    def base(self) -> str:
        """Name of the folder that stores of comparable blocks share, at any number of shards."""
        data = json.dumps({"version": VERSION, "shape": self.shape.to_dict()}, sort_keys=True)
        return xxhash.xxh3_128_hexdigest(data.encode() + self.model)

    def shard_shape(self, shard: int) -> BlockShape:
        start, stop = self.heads[shard]
        return self.shape.with_heads(stop - start)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "kvcore disk tier",
            "version": VERSION,
            "model": self.model.hex(),
            "shape": self.shape.to_dict(),
            "heads": [list(span) for span in self.heads],
        }

    @classmethod
    def from_json(cls, data: Any) -> Geometry:
        """Raises FormatError when ``data`` is not a store.json of this version."""
        if not isinstance(data, dict) or data.get("format") != "kvcore disk tier":
            raise FormatError("not a store.json of kvcore's disk tier")
        if data.get("version") != VERSION:
            raise FormatError(
                f"a store of format version {data.get('version')!r}; this kvcore reads {VERSION}"
            )
        try:
            heads = tuple((int(a), int(b)) for a, b in data["heads"])
            return cls(BlockShape.from_dict(data["shape"]), bytes.fromhex(data["model"]), heads)
        except (KeyError, TypeError, ValueError, LayoutError) as error:
            raise FormatError(f"a damaged store.json: {error!r}") from error

    def save(self, folder: Path) -> None:
        """Write store.json whole or not at all."""
        draft = folder / "store.json.new"
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(self.to_json(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / "store.json")

    @classmethod
    def load(cls, folder: Path) -> Geometry:
        """Raises FormatError saying what is wrong with the folder's store.json."""
        try:
            data = json.loads((folder / "store.json").read_text())
        except (OSError, ValueError) as error:
            raise FormatError(f"no readable store.json in {folder.name}: {error}") from error
        return cls.from_json(data)


def shard_files(folder: Path, shard: int) -> tuple[Path, Path]:
    """(data file, index file) of a shard."""
    return folder / f"shard-{shard}.data", folder / f"shard-{shard}.index"


def to_block_record(slot: int, record: Record) -> BlockRecord:
    return BlockRecord(slot, record.key, record.parent, record.namespace, record.stamp)
