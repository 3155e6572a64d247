"""The format of a stored value, version 1: a header with a checksum of its own, then the block.

    0      4        6      8        16    32       48          64      80        96     120    128
    magic  version  flags  nbytes   key   parent   namespace   shard   checksum  zeros  seal   block
                                                                       tag       nonce, zeros

``nbytes`` is the size of the block. ``shard`` is the digest that identifies the model and the part
of the block. Without flags, ``checksum`` is the XXH3-128 of the block, seeded with its key. With
the flag of a `BlockGuard`, its tag is in that place, and a nonce follows. ``seal`` is the XXH3-64
of bytes 0..96. Numbers are little-endian.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvcore.errors import CorruptBlock, Mismatch
from kvcore.memory.buffers import Buffers
from kvcore.tiers.base import BlockRead, is_asked_for
from kvcore.tiers.checksum import checksum
from kvcore.tiers.guard import NONCE_NBYTES, BlockCipher, BlockGuard, BlockMac, Seal

MAGIC = b"KVR1"
VERSION = 1
HEADER_NBYTES = 128
_BODY = struct.Struct("<4sHHQ16s16s16s16s16s")
_SEAL = struct.Struct("<Q")
_PAD = bytes(HEADER_NBYTES - _BODY.size - _SEAL.size)
_FLAGS = (0, BlockCipher.flag, BlockMac.flag)


class Header(NamedTuple):
    """The fields of a value's header.

    ``checksum`` is the guard's tag if ``flags`` is not 0; ``nonce`` is then its nonce.
    """

    nbytes: int
    key: bytes
    parent: bytes
    namespace: bytes
    shard: bytes
    checksum: bytes
    flags: int = 0
    nonce: bytes = b""

    def pack(self) -> bytes:
        body = self._body()
        pad = self.nonce + _PAD[len(self.nonce) :]
        return body + pad + _SEAL.pack(xxhash.xxh3_64_intdigest(body))

    @property
    def associated_data(self) -> bytes:
        """What a sealed block is bound to: the header, as known before the block is sealed."""
        return self._replace(checksum=bytes(16))._body()

    def _body(self) -> bytes:
        return _BODY.pack(MAGIC, VERSION, self.flags, *self[:6])

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Header | None:
        """Return the header; None if the bytes are not an intact header of this version."""
        if len(data) != HEADER_NBYTES:
            return None
        magic, version, flags, *fields = _BODY.unpack_from(data)
        (seal,) = _SEAL.unpack_from(data, HEADER_NBYTES - _SEAL.size)
        if magic != MAGIC or version != VERSION or flags not in _FLAGS:
            return None
        if xxhash.xxh3_64_intdigest(data[: _BODY.size]) != seal:
            return None
        nonce = bytes(data[_BODY.size :][:NONCE_NBYTES]) if flags else b""
        return cls._make((*fields, flags, nonce))


def seal(header: Header, guard: BlockGuard | None, block: Buffers) -> tuple[Header, Buffers]:
    """Return the header and the bytes of a value to store, protected as ``guard`` does it.

    ``block`` is not changed: an encrypted value has memory of its own.
    """
    nbytes = header.nbytes
    if guard is None:
        return header._replace(checksum=checksum(header.key, block, nbytes)), block
    header = header._replace(flags=guard.flag)
    into = memoryview(bytearray(nbytes)) if guard.encrypts else None
    nonce, tag = guard.seal(block, nbytes, header.associated_data, into)
    return header._replace(checksum=tag, nonce=nonce), block if into is None else [into]


def verify(
    data: bytes | memoryview,
    asked: BlockRead,
    shard: bytes,
    buffers: Buffers,
    guard: BlockGuard | None = None,
) -> CorruptBlock | None:
    """Return what is wrong with a value that should be the block that was ``asked`` for.

    None if nothing is. ``data`` is the value's header, ``shard`` the digest of the shard it should
    be of. ``buffers`` hold exactly the block, which is decrypted in place if it is encrypted. Reads
    all of its bytes.
    """
    header = Header.unpack(data)
    size = sum(part.nbytes for part in buffers)
    if header is None:
        wrong, why = Mismatch.CORRUPT, _not_ours(data)
    elif header.shard != shard or header.nbytes != size or not is_asked_for(header, asked):
        wrong, why = Mismatch.OTHER, _other(header, shard, size)
    elif header.flags != (0 if guard is None else guard.flag):
        wrong, why = Mismatch.FORGED, f"{_KINDS[header.flags]}; {_expected(guard)}"
    elif guard is None and header.checksum != checksum(asked.key, buffers, size):
        wrong, why = Mismatch.CORRUPT, "differs from the bytes that were written"
    elif guard is not None and not guard.unseal(
        Seal(header.nonce, header.checksum), buffers, size, header.associated_data
    ):
        wrong = Mismatch.FORGED
        why = "was not written with this namespace.secret or key, or was changed since"
    else:
        return None
    return CorruptBlock(f"the value stored as block {asked.key.hex()} {why}", wrong)


_KINDS = {
    0: "has no MAC and is not encrypted",
    BlockCipher.flag: "is encrypted",
    BlockMac.flag: "has a MAC",
}


def _expected(guard: BlockGuard | None) -> str:
    if guard is None:
        return "this engine has neither a namespace.secret nor a key to verify it with"
    return f"this engine accepts only values that {guard.name.partition('/')[0]} protects"


def _other(header: Header, shard: bytes, size: int) -> str:
    return (
        f"is block {header.key.hex()} of namespace {header.namespace.hex()} after "
        f"{header.parent.hex()} of shard {header.shard.hex()} with {header.nbytes} bytes; expected "
        f"was shard {shard.hex()} with {size} bytes"
    )


def _not_ours(header: bytes | memoryview) -> str:
    """Describe why bytes are not a header."""
    data = bytes(header[:6])
    if data.startswith(MAGIC) and (version := int.from_bytes(data[4:], "little")) != VERSION:
        return f"has a header of format version {version}; this kvcore reads {VERSION}"
    return "has no intact header"
