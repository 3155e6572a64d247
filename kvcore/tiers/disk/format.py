"""The disk tier's files, version 1, as specified in docs/format.md.

<path>/lock                           held (flock) while stores are chosen, made or removed
<path>/<base>/<store>/store.json      what the blocks are, and which part of them each shard holds
                      shard-0.data    slot i at i * slot_nbytes
                      shard-0.index   record i (128 bytes) says what slot i holds
                      lock            held by the engine that writes here; the bytes it may fill

The engine that writes holds store.json too: without its ``lock``, the store is still its own.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from kvcore._util.private import open_file
from kvcore.errors import Mismatch
from kvcore.memory.arena import slot_bytes
from kvcore.memory.buffers import Buffers
from kvcore.tiers.base import BlockRecord
from kvcore.tiers.checksum import checksum
from kvcore.tiers.geometry import RECORD_NBYTES, VERSION, Geometry
from kvcore.tiers.guard import BlockCipher, BlockGuard, BlockMac, Seal

_log = logging.getLogger("kvcore.tiers.disk")

MAGIC = b"KVC1"
_BODY = struct.Struct("<4sHHQ16s16s16s16sQ")  # magic version flags stamp key parent ns sum nbytes
_SEAL = _SUM = struct.Struct("<Q")
_BODY_NB = _BODY.size
_PAD = bytes(RECORD_NBYTES - _BODY_NB - _SEAL.size)
_FLAGS = (0, BlockCipher.flag, BlockMac.flag)
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
    """What a slot holds: the block, the checksum of its bytes on disk, and their number.

    ``flags`` is that of the `BlockGuard` that sealed the block, or 0. The ``nonce`` and ``tag`` of
    a sealed block have 16 bytes each. ``sum`` (`kvcore.memory.checksums.bound_to`; 0: none)
    verifies a plain block that was read straight into device memory. The record's own seal does not
    cover these three. If one of them is damaged, verification fails, and the block counts as
    damaged. With a ``guard`` that seal is a MAC, so that no tier believes a record that somebody
    without the key has made.
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
    flags: int = 0

    def pack(self, guard: BlockGuard | None = None) -> bytes:
        """Return the record's 128 bytes, with a seal over them."""
        body = self._body(self.checksum)
        pad = self.nonce + self.tag or _SUM.pack(self.sum) + _PAD[_SUM.size :]
        assert len(pad) == len(_PAD)
        return body + pad + _SEAL.pack(_seal_by(guard)(body))

    def associated_data(self, shard_name: bytes) -> bytes:
        """Return what a sealed block is bound to: all that is known before it is sealed."""
        return self._body(bytes(16)) + shard_name

    def mismatch(
        self, guard: BlockGuard | None, buffers: Buffers, shard_name: bytes
    ) -> Mismatch | None:
        """Return how a block that was read differs from the one written; None if it does not.

        Decrypts the block in place if the guard is a cipher. The block must be sealed by this kind
        of guard, and must not be sealed if there is none. Unless the result is None, the content of
        the buffers is undefined. The checksum of a block with a MAC only tells rot from forgery.
        """
        if self.flags != (0 if guard is None else guard.flag):
            return Mismatch.FORGED
        if guard is None:
            return None if self.fits(buffers) else Mismatch.CORRUPT
        seal = Seal(self.nonce, self.tag)
        if guard.unseal(seal, buffers, self.nbytes, self.associated_data(shard_name)):
            return None
        return Mismatch.FORGED if guard.encrypts or self.fits(buffers) else Mismatch.CORRUPT

    def fits(self, buffers: Buffers) -> bool:
        """Return True if the checksum is that of the block."""
        return checksum(self.key, buffers, self.nbytes) == self.checksum

    def _body(self, checksum: bytes) -> bytes:
        return _BODY.pack(
            MAGIC, VERSION, self.flags, self.stamp, self.key, self.parent, self.namespace,
            checksum, self.nbytes,
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes | memoryview, guard: BlockGuard | None = None) -> Record | None:
        """Return the record in 128 bytes; None if they are empty, torn or of another version."""
        if len(data) != RECORD_NBYTES:
            return None
        magic, version, flags, *_ = _BODY.unpack_from(data)
        if magic != MAGIC or version != VERSION or flags not in _FLAGS:
            return None
        (seal,) = _SEAL.unpack_from(data, RECORD_NBYTES - _SEAL.size)
        if _seal_by(guard)(data[:_BODY_NB]) != seal:
            return None
        return cls._of(data)

    @classmethod
    def _of(cls, data: bytes | memoryview) -> Record:
        """Return what 128 bytes say, which were found to be a record."""
        _, _, flags, stamp, key, parent, namespace, digest, nbytes = _BODY.unpack_from(data)
        known = key, parent, namespace, digest, nbytes, stamp
        if not flags:
            return cls(*known, sum=_SUM.unpack_from(data, _BODY_NB)[0])
        pad = bytes(data[_BODY_NB : _BODY_NB + len(_PAD)])
        return cls(*known, pad[:16], pad[16:], flags=flags)


def _seal_by(guard: BlockGuard | None) -> Callable[[bytes | memoryview], int]:
    return xxhash.xxh3_64_intdigest if guard is None else guard.record_seal


def read_table(
    path: Path, guard: BlockGuard | None = None, *, sealed: bool = True
) -> tuple[Table, int]:
    """Return (the valid records of an index file, the number of those neither valid nor empty).

    A torn last record counts as not valid. With ``sealed`` False seals are not verified, because
    the key is not known.
    """
    rows, nbytes = _rows(path)
    torn = int(nbytes % RECORD_NBYTES != 0)
    slots = np.flatnonzero(rows["magic"])
    current = (rows["magic"][slots] == _MAGIC) & (rows["version"][slots] == VERSION)
    current &= np.isin(rows["flags"][slots], _FLAGS)
    candidates = rows[slots]
    body = np.ascontiguousarray(candidates.view(np.uint8).reshape(-1, RECORD_NBYTES)[:, :_BODY_NB])
    if not sealed:
        return Table(slots[current], candidates[current]), torn + int(len(slots) - current.sum())
    data, digest = memoryview(body.reshape(-1).data), _seal_by(guard)
    seals = np.fromiter(
        (digest(data[i : i + _BODY_NB]) for i in range(0, len(data), _BODY_NB)),
        dtype=np.uint64,
        count=len(slots),
    )
    valid = current & (seals == candidates["seal"])
    return Table(slots[valid], candidates[valid]), torn + int(len(slots) - valid.sum())


def _rows(path: Path) -> tuple[np.ndarray[Any, np.dtype[np.void]], int]:
    """Return (the whole records of an index file, valid or not; the size of the file)."""
    with open(open_file(path, os.O_RDONLY, adopt=True), "rb") as file:
        return np.fromfile(file, dtype=_ROW), os.fstat(file.fileno()).st_size


def suspect_slots(path: Path, table: Table) -> list[int]:
    """Return the slots of an index file that are not empty and not in ``table``."""
    written = np.flatnonzero(_rows(path)[0]["magic"])
    slots: list[int] = np.setdiff1d(written, table.slots).tolist()
    return slots


class Table(NamedTuple):
    """Records by column. Slot ``slots[i]`` holds what ``rows[i]`` says.

    ``torn`` counts the records that a scan dropped because they were not valid.
    """

    slots: np.ndarray[Any, np.dtype[np.int64]]
    rows: np.ndarray[Any, np.dtype[np.void]]
    torn: int = 0

    @classmethod
    def empty(cls) -> Table:
        return cls(np.empty(0, np.int64), np.empty(0, _ROW))

    def record(self, place: int) -> Record:
        """Return row ``place`` as a record."""
        return Record._of(self.rows[place].tobytes())

    def where(self, keep: np.ndarray[Any, np.dtype[np.bool_]]) -> Table:
        return Table(self.slots[keep], self.rows[keep])

    def also_in(self, other: Table) -> Table:
        """Return the rows whose slot holds the same block in ``other``."""
        _, mine, theirs = np.intersect1d(
            self.slots, other.slots, assume_unique=True, return_indices=True
        )
        same = self.rows["key"][mine] == other.rows["key"][theirs]
        return Table(self.slots[mine[same]], self.rows[mine[same]])

    def block_records(self, first_slot: int = 0) -> list[BlockRecord]:
        """Return the rows as records, with slots counted from ``first_slot``."""
        columns = (self.rows[name].tolist() for name in ("key", "parent", "namespace", "stamp"))
        return list(map(BlockRecord, (self.slots + first_slot).tolist(), *columns))


def scan_shard(
    folder: Path, geometry: Geometry, shard: int, guard: BlockGuard | None = None
) -> Table:
    """Return the valid records of a shard whose blocks lie within its data file.

    The others are dropped, and their number is logged.
    """
    data, index = shard_files(folder, shard)
    if not index.exists() or not data.exists():
        return Table.empty()
    table, torn = read_table(index, guard)
    shape = geometry.shard_shape(shard)
    inside = (table.slots + 1) * slot_bytes(shape) <= data.stat().st_size
    whole = table.where(inside & (table.rows["nbytes"] == shape.nbytes))
    dropped = len(table.slots) - len(whole.slots)
    if torn or dropped:
        _log.warning(
            "%s: dropped records torn=%d beyond_data_or_of_other_size=%d", index, torn, dropped
        )
    return whole._replace(torn=torn)


def shard_files(folder: Path, shard: int) -> tuple[Path, Path]:
    """Return a shard's (data file, index file)."""
    return folder / f"shard-{shard}.data", folder / f"shard-{shard}.index"
