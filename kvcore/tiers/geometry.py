"""What a stored block is: its model, its shape, and the part that each rank holds."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import xxhash

from kvcore._util.outside import decode_json, printable, read_bounded
from kvcore._util.private import open_file, open_folder, write_whole
from kvcore.errors import FormatError
from kvcore.memory.arena import slot_bytes
from kvcore.model.parts import Part
from kvcore.model.shape import BlockShape

__all__ = ["PARTIAL_VERSION", "RECORD_NBYTES", "STAGED_VERSION", "VERSION", "Geometry"]

VERSION = 1
STAGED_VERSION = 2
"""The version of a ``store.json`` whose shards hold ranges of layers. An older kvcore skips it."""
PARTIAL_VERSION = 3
"""The version of a ``store.json`` some of whose shards are on other machines. An older kvcore skips
it."""
MAX_SHARDS = 4096
"""The most shards of a store: one for each rank of an engine."""
_MAX_NBYTES = 1 << 20
"""The most bytes of a store.json. One of `MAX_SHARDS` shards with ranges of layers has 150 KB."""
RECORD_NBYTES = 128
"""Bytes of a record in a shard's index file."""


class _Named(Protocol):
    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class Geometry:
    """What blocks a store holds, and how it splits them into shards.

    Two stores with the same `base` hold comparable blocks, however they split them.

    Args:
        shape: the block of the whole model.
        model: the model's fingerprint.
        heads: the KV heads [start, stop) of each shard.
        cipher: names the cipher or MAC, and the key, that protect the blocks; empty for checksums
            alone.
        layers: the layers [start, stop) of each shard. Empty: every shard holds all layers.
        held: the shards [start, stop) whose files are on this machine. Empty: all of them.
    """

    shape: BlockShape
    model: bytes
    heads: tuple[tuple[int, int], ...]
    cipher: str = ""
    layers: tuple[tuple[int, int], ...] = ()
    held: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            object.__setattr__(self, "layers", ((0, self.shape.layers),) * len(self.heads))
        if not self.held:
            object.__setattr__(self, "held", (0, len(self.heads)))
        fits = len(self.layers) == len(self.heads)
        if not self.heads or not fits or not all(part.within(self.shape) for part in self.parts):
            raise FormatError(
                f"shards of KV heads {self.heads} and layers {self.layers}: each is [start, stop) "
                f"within 0..{self.shape.kv_heads} and 0..{self.shape.layers}"
            )
        start, stop = self.held
        if not 0 <= start < stop <= len(self.heads):
            raise FormatError(f"shards {self.held} of {len(self.heads)} in a folder")

    @property
    def parts(self) -> tuple[Part, ...]:
        """The part of a block that each shard holds."""
        return tuple(map(Part, self.heads, self.layers))

    @property
    def shards(self) -> range:
        """The shards whose files are on this machine."""
        return range(*self.held)

    @property
    def is_whole(self) -> bool:
        """True if no shard is on another machine."""
        return self.held == (0, len(self.heads))

    @property
    def base(self) -> str:
        """Name of the folder that stores with comparable blocks share, however they split them."""
        cut = {"version": VERSION, "shape": self.shape.to_dict()}
        data = json.dumps(cut | self._cipher, sort_keys=True)
        return xxhash.xxh3_128_hexdigest(data.encode() + self.model)

    @property
    def _cipher(self) -> dict[str, str]:
        return {"cipher": self.cipher} if self.cipher else {}

    @property
    def _staged(self) -> bool:
        """True if some shard does not hold all layers."""
        return any(span != (0, self.shape.layers) for span in self.layers)

    @property
    def _version(self) -> int:
        if not self.is_whole:
            return PARTIAL_VERSION
        return STAGED_VERSION if self._staged else VERSION

    def guarded(self, guard: _Named | None) -> Geometry:
        """Return the geometry of blocks that ``guard`` seals, which have a folder of their own.

        ``guard`` is a `kvcore.tiers.guard.BlockGuard`.
        """
        return self if guard is None else replace(self, cipher=guard.name)

    def shard_name(self, shard: int) -> bytes:
        """Return a name for a shard's part of the blocks. Sealed blocks are bound to it."""
        layers = f" {self.layers[shard]}" if self._staged else ""
        return f"{self.base} {self.heads[shard]}{layers}".encode()

    @property
    def per_slot(self) -> int:
        """Bytes on disk of one slot in all shards of this machine, including its records."""
        return sum(slot_bytes(self.shard_shape(i)) + RECORD_NBYTES for i in self.shards)

    def share_of(self, nbytes: int) -> int:
        """Return this machine's share of ``nbytes`` that the shards of all machines may fill."""
        return nbytes * self.per_slot // replace(self, held=()).per_slot

    def shard_shape(self, shard: int) -> BlockShape:
        return self.parts[shard].shape(self.shape)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "kvcore disk tier",
            "version": self._version,
            "model": self.model.hex(),
            "shape": self.shape.to_dict(),
            "heads": [list(span) for span in self.heads],
            **({"layers": [list(span) for span in self.layers]} if self._version > 1 else {}),
            **({} if self.is_whole else {"held": list(self.held)}),
            **self._cipher,
        }

    @classmethod
    def from_json(cls, data: Any) -> Geometry:
        """Return the geometry in the decoded store.json ``data``.

        Raises FormatError if the file is damaged, or its version is not known.
        """
        if not isinstance(data, dict) or data.get("format") != "kvcore disk tier":
            raise FormatError("not a store.json of kvcore's disk tier")
        version = data.get("version")
        if version not in (VERSION, STAGED_VERSION, PARTIAL_VERSION):
            raise FormatError(
                f"a store of format version {version!r}; this kvcore reads {VERSION} to "
                f"{PARTIAL_VERSION}"
            )
        try:
            if len(data["heads"]) > MAX_SHARDS:
                raise ValueError(f"{len(data['heads'])} shards; supported are {MAX_SHARDS}")
            heads = tuple((int(a), int(b)) for a, b in data["heads"])
            staged = data["layers"] if version != VERSION else ()
            layers = tuple((int(a), int(b)) for a, b in staged)
            start, stop = data["held"] if version == PARTIAL_VERSION else (0, len(heads))
            shape, model = BlockShape.from_dict(data["shape"]), bytes.fromhex(data["model"])
            held = (int(start), int(stop))
            return cls(shape, model, heads, str(data.get("cipher", "")), layers, held)
        except FormatError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {printable(error)}"
            raise FormatError(f"a damaged store.json: {why}") from error

    def save(self, folder: Path) -> None:
        """Write store.json, whole or not at all."""
        within = open_folder(folder, adopt=True)
        try:
            write_whole(within, "store.json", json.dumps(self.to_json(), indent=1).encode())
        finally:
            os.close(within)

    @classmethod
    def load(cls, folder: Path) -> Geometry:
        """Read the folder's store.json. Raise FormatError if it cannot be used."""
        try:
            os.close(open_folder(folder, adopt=True))
            with open(open_file(folder / "store.json", os.O_RDONLY, adopt=True)) as file:
                data = decode_json(read_bounded(file.fileno(), _MAX_NBYTES, "store.json"))
        except (OSError, FormatError) as error:
            raise FormatError(f"no readable store.json in {folder.name}: {error}") from error
        return cls.from_json(data)
