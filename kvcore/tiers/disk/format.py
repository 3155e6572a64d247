"""The disk tier's files, version 1. Specified in docs/format.md.

<path>/lock                           held (flock) while stores are chosen, made or removed
<path>/<base>/<store>/store.json      what the blocks are, and what of them each shard holds
                      shard-0.data    slot i at i * slot_nbytes
                      shard-0.index   record i (128 bytes) tells what slot i holds
                      lock            held by the engine that writes here; the bytes it may fill
"""

from __future__ import annotations

import json
import logging
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from kvcore.errors import FormatError, LayoutError
from kvcore.memory.arena import slot_bytes
from kvcore.memory.layout import BlockShape
from kvcore.tiers.base import BlockRecord, Buffers
from kvcore.tiers.sharding import Part

_log = logging.getLogger("kvcore.tiers.disk")

VERSION = 1
STAGED_VERSION = 2
"""Of a ``store.json`` whose shards hold ranges of layers: a kvcore that knows none leaves it be."""
MAGIC = b"KVC1"
RECORD_NBYTES = 128
_BODY = struct.Struct("<4sHHQ16s16s16s16sQ")  # magic version flags stamp key parent ns sum nbytes
_SEAL = _SUM = struct.Struct("<Q")
_BODY_NB = _BODY.size
_PAD = bytes(RECORD_NBYTES - _BODY_NB - _SEAL.size)
ENCRYPTED = 1  # flag: the block is encrypted, and nonce and tag stand in place of zeros
_FLAGS = (0, ENCRYPTED)
_MAGIC = int.from_bytes(MAGIC, "little")
_ROW = np.dtype(
    [
        ("magic", "<u4"), ("version", "<u2"), ("flags", "<u2"), ("stamp", "<u8"),
        ("key", "V16"), ("parent", "V16"), ("namespace", "V16"), ("checksum", "V16"),
        ("nbytes", "<u8"), ("pad", f"V{len(_PAD)}"), ("seal", "<u8"),
    ]
)  # fmt: skip
assert _ROW.itemsize == RECORD_NBYTES
EMPTY_RECORD = bytes(RECORD_NBYTES)
KEY_NBYTES = 16


class Record(NamedTuple):
    """What a slot holds: the block, the checksum of its bytes, and how many there are.

    An encrypted block's ``nonce`` and ``tag`` are 16 bytes each; its checksum is of the bytes on
    disk. Neither is under the record's seal: decryption fails where one is damaged. Nor is ``sum``
    (`kvcore.memory.checksums.bound_to`; 0: none), by which a block is verified that was read
    straight into device memory: where it is damaged, the block is taken for damaged.
    """

    key: bytes
    parent: bytes
    namespace: bytes
    checksum: bytes
    nbytes: int
    stamp: int
    nonce: bytes = b""
    tag: bytes = b""
    sum: int = 0

    def pack(self) -> bytes:
        """128 bytes that vouch for themselves."""
        body = self._body(self.checksum)
        pad = self.nonce + self.tag or _SUM.pack(self.sum) + _PAD[_SUM.size :]
        assert len(pad) == len(_PAD)
        return body + pad + _SEAL.pack(xxhash.xxh3_64_intdigest(body))

    def bound(self, place: bytes) -> bytes:
        """What an encrypted block is bound to: all that is known of it before it is encrypted."""
        return self._replace(nonce=_PAD[:16])._body(bytes(16)) + place

    def _body(self, checksum: bytes) -> bytes:
        flags = ENCRYPTED if self.nonce else 0
        return _BODY.pack(
            MAGIC, VERSION, flags, self.stamp, self.key, self.parent, self.namespace,
            checksum, self.nbytes,
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Record | None:
        """The record in 128 bytes; None when they are empty, torn or of another version."""
        if len(data) != RECORD_NBYTES:
            return None
        magic, version, flags, stamp, key, parent, namespace, digest, nbytes = _BODY.unpack_from(
            data
        )
        if magic != MAGIC or version != VERSION or flags not in _FLAGS:
            return None
        (seal,) = _SEAL.unpack_from(data, RECORD_NBYTES - _SEAL.size)
        if xxhash.xxh3_64_intdigest(data[:_BODY_NB]) != seal:
            return None
        known = key, parent, namespace, digest, nbytes, stamp
        if flags != ENCRYPTED:
            return cls(*known, sum=_SUM.unpack_from(data, _BODY_NB)[0])
        pad = bytes(data[_BODY_NB : _BODY_NB + len(_PAD)])
        return cls(*known, pad[:16], pad[16:])


def checksum(key: bytes, buffers: Buffers, nbytes: int) -> bytes:
    """XXH3-128 of the first ``nbytes`` bytes, seeded with the block's key: another block's bytes
    do not pass for it."""
    state = xxhash.xxh3_128(seed=int.from_bytes(key[:8], "little"))
    for part in buffers:
        state.update(part if part.nbytes <= nbytes else part.cast("B")[:nbytes])
        nbytes -= min(nbytes, part.nbytes)
    return state.digest()


def read_table(path: Path) -> tuple[Table, int]:
    """(The valid rows of an index file, how many there are that are neither valid nor empty).

    Row ``slot`` is the slot's number. A torn last record counts as not valid.
    """
    rows = np.fromfile(path, dtype=_ROW)
    torn = int(path.stat().st_size % RECORD_NBYTES != 0)
    slots = np.flatnonzero(rows["magic"])
    current = (rows["magic"][slots] == _MAGIC) & (rows["version"][slots] == VERSION)
    current &= np.isin(rows["flags"][slots], _FLAGS)
    candidates = rows[slots]
    body = np.ascontiguousarray(candidates.view(np.uint8).reshape(-1, RECORD_NBYTES)[:, :_BODY_NB])
    data, digest = memoryview(body.reshape(-1).data), xxhash.xxh3_64_intdigest
    seals = np.fromiter(
        (digest(data[i : i + _BODY_NB]) for i in range(0, len(data), _BODY_NB)),
        dtype=np.uint64,
        count=len(slots),
    )
    valid = current & (seals == candidates["seal"])
    return Table(slots[valid], candidates[valid]), torn + int(len(slots) - valid.sum())


def suspect_slots(path: Path) -> list[int]:
    """Slots of an index file whose records are neither valid nor empty."""
    written = np.flatnonzero(np.fromfile(path, dtype=_ROW)["magic"])
    table, _ = read_table(path)
    slots: list[int] = np.setdiff1d(written, table.slots).tolist()
    return slots


class Table(NamedTuple):
    """Records by column. ``slots[i]`` holds what ``rows[i]`` says."""

    slots: np.ndarray[Any, np.dtype[np.int64]]
    rows: np.ndarray[Any, np.dtype[np.void]]

    @classmethod
    def empty(cls) -> Table:
        return cls(np.empty(0, np.int64), np.empty(0, _ROW))

    def where(self, keep: np.ndarray[Any, np.dtype[np.bool_]]) -> Table:
        return Table(self.slots[keep], self.rows[keep])

    def also_in(self, other: Table) -> Table:
        """The rows whose slot holds the same block there."""
        _, mine, theirs = np.intersect1d(
            self.slots, other.slots, assume_unique=True, return_indices=True
        )
        same = self.rows["key"][mine] == other.rows["key"][theirs]
        return Table(self.slots[mine[same]], self.rows[mine[same]])

    def block_records(self, first_slot: int = 0) -> list[BlockRecord]:
        """Records of slots counted from ``first_slot``."""
        columns = (self.rows[name].tolist() for name in ("key", "parent", "namespace", "stamp"))
        return list(map(BlockRecord, (self.slots + first_slot).tolist(), *columns))


@dataclass(frozen=True)
class Geometry:
    """What makes the blocks of two stores comparable, and how one store cuts them into shards.

    ``shape`` is the whole model's block, ``model`` its fingerprint, ``heads`` the KV heads
    [start, stop) of each shard. ``cipher`` is the name of what its blocks are encrypted with.
    ``layers`` are the layers [start, stop) of each shard, given only where not all have all.
    """

    shape: BlockShape
    model: bytes
    heads: tuple[tuple[int, int], ...]
    cipher: str = ""
    layers: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            object.__setattr__(self, "layers", ((0, self.shape.layers),) * len(self.heads))
        fits = len(self.layers) == len(self.heads)
        if not self.heads or not fits or not all(part.within(self.shape) for part in self.parts):
            raise FormatError(
                f"shards of KV heads {self.heads} and layers {self.layers}: each is [start, stop) "
                f"within 0..{self.shape.kv_heads} and 0..{self.shape.layers}"
            )

    @property
    def parts(self) -> tuple[Part, ...]:
        """What each shard holds of a block."""
        return tuple(map(Part, self.heads, self.layers))

    @property
    def base(self) -> str:
        """Name of the folder that stores of comparable blocks share, however they are cut."""
        cut = {"version": VERSION, "shape": self.shape.to_dict()}
        data = json.dumps(cut | self._cipher, sort_keys=True)
        return xxhash.xxh3_128_hexdigest(data.encode() + self.model)

    @property
    def _cipher(self) -> dict[str, str]:
        return {"cipher": self.cipher} if self.cipher else {}

    @property
    def _staged(self) -> bool:
        """Whether a shard lacks layers."""
        return any(span != (0, self.shape.layers) for span in self.layers)

    def place(self, shard: int) -> bytes:
        """Which shard of which blocks this is: what encrypted ones are bound to."""
        layers = f" {self.layers[shard]}" if self._staged else ""
        return f"{self.base} {self.heads[shard]}{layers}".encode()

    @property
    def per_slot(self) -> int:
        """Bytes on disk of one slot in all shards, records included."""
        shards = range(len(self.heads))
        return sum(slot_bytes(self.shard_shape(i)) + RECORD_NBYTES for i in shards)

    def shard_shape(self, shard: int) -> BlockShape:
        return self.parts[shard].shape(self.shape)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "kvcore disk tier",
            "version": STAGED_VERSION if self._staged else VERSION,
            "model": self.model.hex(),
            "shape": self.shape.to_dict(),
            "heads": [list(span) for span in self.heads],
            **({"layers": [list(span) for span in self.layers]} if self._staged else {}),
            **self._cipher,
        }

    @classmethod
    def from_json(cls, data: Any) -> Geometry:
        """Raises FormatError when ``data`` is not a store.json of a version that is known."""
        if not isinstance(data, dict) or data.get("format") != "kvcore disk tier":
            raise FormatError("not a store.json of kvcore's disk tier")
        version = data.get("version")
        if version not in (VERSION, STAGED_VERSION):
            raise FormatError(
                f"a store of format version {version!r}; this kvcore reads {VERSION} and "
                f"{STAGED_VERSION}"
            )
        try:
            heads = tuple((int(a), int(b)) for a, b in data["heads"])
            staged = data["layers"] if version == STAGED_VERSION else ()
            layers = tuple((int(a), int(b)) for a, b in staged)
            shape, model = BlockShape.from_dict(data["shape"]), bytes.fromhex(data["model"])
            return cls(shape, model, heads, str(data.get("cipher", "")), layers)
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


def scan_shard(folder: Path, geometry: Geometry, shard: int) -> Table:
    """What a shard's index says it holds, as far as the data file reaches. Drops are logged."""
    data, index = shard_files(folder, shard)
    if not index.exists() or not data.exists():
        return Table.empty()
    table, torn = read_table(index)
    shape = geometry.shard_shape(shard)
    inside = (table.slots + 1) * slot_bytes(shape) <= data.stat().st_size
    whole = table.where(inside & (table.rows["nbytes"] == shape.nbytes))
    dropped = len(table.slots) - len(whole.slots)
    if torn or dropped:
        _log.warning(
            "%s: dropped records torn=%d beyond_data_or_of_other_size=%d", index, torn, dropped
        )
    return whole


def shard_files(folder: Path, shard: int) -> tuple[Path, Path]:
    """(data file, index file) of a shard."""
    return folder / f"shard-{shard}.data", folder / f"shard-{shard}.index"
