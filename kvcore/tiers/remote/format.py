"""The format of a stored value, version 1: a header with a checksum of its own, then the block.

    0      4        6      8        16    32       48          64      80        96     120    128
    magic  version  flags  nbytes   key   parent   namespace   shard   checksum  zeros  seal   block
                                                                                               ...

``nbytes`` is the size of the block. ``shard`` is the digest that identifies the model and the part
of the block. ``checksum`` is the XXH3-128 of the block, seeded with its key. ``seal`` is the
XXH3-64 of bytes 0..96. Numbers are little-endian.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvcore.errors import CorruptBlock
from kvcore.memory.buffers import Buffers
from kvcore.tiers.checksum import checksum

MAGIC = b"KVR1"
VERSION = 1
HEADER_NBYTES = 128
_BODY = struct.Struct("<4sHHQ16s16s16s16s16s")
_SEAL = struct.Struct("<Q")
_PAD = bytes(HEADER_NBYTES - _BODY.size - _SEAL.size)


class Header(NamedTuple):
    """The fields of a value's header."""

    nbytes: int
    key: bytes
    parent: bytes
    namespace: bytes
    shard: bytes
    checksum: bytes

    def pack(self) -> bytes:
        body = _BODY.pack(MAGIC, VERSION, 0, *self)
        return body + _PAD + _SEAL.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Header | None:
        """Return the header; None if the bytes are not an intact header of this version."""
        if len(data) != HEADER_NBYTES:
            return None
        magic, version, _, *fields = _BODY.unpack_from(data)
        (seal,) = _SEAL.unpack_from(data, HEADER_NBYTES - _SEAL.size)
        if magic != MAGIC or version != VERSION:
            return None
        if xxhash.xxh3_64_intdigest(data[: _BODY.size]) != seal:
            return None
        return cls(*fields)


def _not_ours(header: bytes | memoryview) -> str:
    """Describe why bytes are not a header."""
    data = bytes(header[:6])
    if data.startswith(MAGIC) and (version := int.from_bytes(data[4:], "little")) != VERSION:
        return f"has a header of format version {version}; this kvcore reads {VERSION}"
    return "has no intact header"


def verify(
    header: bytes | memoryview, key: bytes, shard: bytes, buffers: Buffers
) -> CorruptBlock | None:
    """Return what is wrong with a value that should be block ``key`` of ``shard``; None if nothing.

    ``buffers`` hold exactly the block. Reads all of its bytes.
    """
    found = Header.unpack(header)
    size = sum(part.nbytes for part in buffers)
    if found is None:
        wrong = _not_ours(header)
    elif found.key != key or found.shard != shard or found.nbytes != size:
        wrong = (
            f"is block {found.key.hex()} of shard {found.shard.hex()} with {found.nbytes} bytes; "
            f"expected was shard {shard.hex()} with {size} bytes"
        )
    elif found.checksum != checksum(key, buffers, size):
        wrong = "differs from the bytes that were written"
    else:
        return None
    return CorruptBlock(f"the value stored as block {key.hex()} {wrong}")
