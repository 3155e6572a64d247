"""Stored blocks that only a holder of the key can make: encrypted, or with a MAC.

    nonce             16 random bytes for each write
    block key         HMAC-SHA256(key, "kvcore-disk-1 block" or "kvcore-mac-1 block" | nonce)
    IV                the first 12 bytes of the nonce
    associated data   what the record or header says, and where the block belongs
    seal of a record  keyed BLAKE2b, 8 bytes

`BlockCipher` encrypts with AES-256-GCM. `BlockMac` runs the same algorithm on an empty text, with
the block appended to the associated data (GMAC): the block stays readable, and costs little more
than a checksum. Either way a block is accepted only as the block that was written, in the same
model, layout, namespace and shard.

A block key serves only one write, so the number of writes under one key is not limited. The keys of
blocks, of their parents and of namespaces stay readable. All of them are digests.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvcore.config import read_key
from kvcore.errors import ConfigError, UnsupportedError
from kvcore.memory.buffers import Buffers

if TYPE_CHECKING:
    from kvcore.tiers.spec import TierContext

__all__ = [
    "KEY_NBYTES", "NONCE_NBYTES", "TAG_NBYTES",
    "BlockCipher", "BlockGuard", "BlockMac", "Seal", "first_bytes", "guard_of", "key_of_secret",
]  # fmt: skip

KEY_NBYTES = 32
NONCE_NBYTES = 16
TAG_NBYTES = 16
_IV_NBYTES = 12


def key_of_secret(secret: str, purpose: str) -> bytes:
    """Return the key for ``purpose`` that belongs to ``namespace.secret``.

    It tells nothing about the secret, the keys of blocks, or the key for another purpose.
    """
    return hmac.digest(secret.encode(), b"kvcore-key-1 " + purpose.encode(), "sha256")


class Seal(NamedTuple):
    """What a record or header stores of a block's protection."""

    nonce: bytes
    tag: bytes


class BlockGuard(ABC):
    """Seals blocks on their way out and verifies them on their way in, with a key. Thread-safe.

    ``name`` identifies the algorithm and the key without revealing it. ``flag`` marks the blocks
    in their records and headers. ``encrypts`` is True if blocks are changed on their way.
    """

    flag: ClassVar[int]
    encrypts: ClassVar[bool]
    _algorithm: ClassVar[str]
    _label: ClassVar[bytes]

    def __init__(self, key: bytes) -> None:
        """Raise ConfigError if the key is not 32 bytes, UnsupportedError without `cryptography`."""
        if len(key) != KEY_NBYTES:
            raise ConfigError(f"a key of {len(key)} bytes; AES-256-GCM takes {KEY_NBYTES}")
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as error:
            raise UnsupportedError(
                f"{error}: encryption, and the MAC of stored blocks with namespace.secret, need "
                "`pip install cryptography`"
            ) from error
        self._key = key
        self._make: Callable[[bytes, bytes], Any] = lambda key, iv: Cipher(
            algorithms.AES(key), modes.GCM(iv)
        )
        self._invalid = InvalidTag
        self._record_key = hmac.digest(key, self._label + b"record", "sha256")
        name = hmac.digest(key, self._label + b"key", "sha256")[:16].hex()
        self.name = f"{self._algorithm}/{name}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    @abstractmethod
    def seal(
        self, source: Buffers, nbytes: int, associated_data: bytes, into: memoryview | None = None
    ) -> Seal:
        """Seal the first ``nbytes`` bytes of ``source``, which is not changed.

        A cipher encrypts ``into`` other memory, which must not overlap the source, and zeroes the
        rest of it.
        """

    @abstractmethod
    def unseal(self, seal: Seal, buffers: Buffers, nbytes: int, associated_data: bytes) -> bool:
        """Return True if the first ``nbytes`` bytes are what was sealed. Decrypt them in place.

        If the result is False, the content of the buffers must not be used.
        """

    def record_seal(self, body: bytes | memoryview) -> int:
        """Return 8 bytes of a MAC over a record: it is used before its block is read."""
        digest = hashlib.blake2b(body, digest_size=8, key=self._record_key).digest()
        return int.from_bytes(digest, "little")

    def _for(self, nonce: bytes) -> Any:
        """Return the cipher (of `cryptography`) for one write."""
        key = hmac.digest(self._key, self._label + b"block" + nonce, "sha256")
        return self._make(key, nonce[:_IV_NBYTES])

    def _ends(self, decryptor: Any, tag: bytes) -> bool:
        """Return True if the tag fits. The comparison takes the same time for every tag."""
        try:
            decryptor.finalize_with_tag(tag)
        except self._invalid:
            return False
        return True


class BlockCipher(BlockGuard):
    """Encrypts and decrypts blocks with the user's key."""

    flag = 1
    encrypts = True
    _algorithm = "aes-256-gcm"
    _label = b"kvcore-disk-1 "

    def seal(
        self, source: Buffers, nbytes: int, associated_data: bytes, into: memoryview | None = None
    ) -> Seal:
        assert into is not None, "the source must not be changed"
        nonce = os.urandom(NONCE_NBYTES)
        encryptor = self._for(nonce).encryptor()
        encryptor.authenticate_additional_data(associated_data)
        at = 0
        for part in first_bytes(source, nbytes):
            at += encryptor.update_into(part, into[at : at + part.nbytes])
        encryptor.finalize()
        into[at:] = bytes(into.nbytes - at)
        return Seal(nonce, encryptor.tag)

    def unseal(self, seal: Seal, buffers: Buffers, nbytes: int, associated_data: bytes) -> bool:
        decryptor = self._for(seal.nonce).decryptor()
        decryptor.authenticate_additional_data(associated_data)
        for part in first_bytes(buffers, nbytes):
            decryptor.update_into(part, part)
        return self._ends(decryptor, seal.tag)


class BlockMac(BlockGuard):
    """Authenticates blocks, which stay readable, with a key that `key_of_secret` derives."""

    flag = 2
    encrypts = False
    _algorithm = "aes-256-gmac"
    _label = b"kvcore-mac-1 "

    def seal(
        self, source: Buffers, nbytes: int, associated_data: bytes, into: memoryview | None = None
    ) -> Seal:
        nonce = os.urandom(NONCE_NBYTES)
        encryptor = self._for(nonce).encryptor()
        self._feed(encryptor, source, nbytes, associated_data)
        encryptor.finalize()
        return Seal(nonce, encryptor.tag)

    def unseal(self, seal: Seal, buffers: Buffers, nbytes: int, associated_data: bytes) -> bool:
        decryptor = self._for(seal.nonce).decryptor()
        self._feed(decryptor, buffers, nbytes, associated_data)
        return self._ends(decryptor, seal.tag)

    @staticmethod
    def _feed(context: Any, buffers: Buffers, nbytes: int, associated_data: bytes) -> None:
        """Authenticate the associated data, which says how long the block is, and the block."""
        context.authenticate_additional_data(associated_data)
        for part in first_bytes(buffers, nbytes):
            context.authenticate_additional_data(part)


def guard_of(context: TierContext, key_env: str | None, key_file: str | None) -> BlockGuard | None:
    """Return what protects the blocks of a tier: its own key, else the deployment's, else nothing.

    Raises ConfigError for a key that cannot be read, UnsupportedError without `cryptography`.
    """
    if key_env is not None or key_file is not None:
        return BlockCipher(read_key(key_env, key_file))
    return BlockMac(context.mac_key) if context.mac_key else None


def first_bytes(buffers: Buffers, nbytes: int) -> Iterator[memoryview]:
    """Yield the first ``nbytes`` bytes, part by part."""
    for part in buffers:
        if nbytes <= 0:
            return
        flat = part.cast("B")
        yield flat[: min(nbytes, flat.nbytes)]
        nbytes -= flat.nbytes
