"""Encryption at rest: AES-256-GCM of each block, under a key of its own, derived from the user's.

    nonce             16 random bytes for each write
    block key         HMAC-SHA256(user's key, "kvcore-disk-1 block" | nonce), 32 bytes
    IV                the first 12 bytes of the nonce
    associated data   what the record says, the store's base folder and the shard's KV heads: a
                      block does not decrypt as another block, or in another model, layout,
                      namespace or shard

A block key serves only one write, so the number of writes under the user's key is not limited. The
keys of blocks, of their parents and of namespaces stay readable in the records. All of them are
digests.
"""

from __future__ import annotations

import hmac
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvcore.errors import ConfigError, UnsupportedError
from kvcore.memory.buffers import Buffers
from kvcore.memory.hugepages import Pages

__all__ = ["KEY_NBYTES", "NONCE_NBYTES", "TAG_NBYTES", "BlockCipher", "Scratch", "Seal"]

KEY_NBYTES = 32
NONCE_NBYTES = 16
TAG_NBYTES = 16
_IV_NBYTES = 12
_LABEL = b"kvcore-disk-1 "
AT_ONCE = 8
"""Blocks of a write that are encrypted ahead and under way together."""


class Seal(NamedTuple):
    """What a record stores of a block's encryption."""

    nonce: bytes
    tag: bytes


class BlockCipher:
    """Encrypts and decrypts blocks with the user's key. Thread-safe.

    ``name`` identifies the key without revealing it.
    """

    def __init__(self, key: bytes) -> None:
        """Raise ConfigError if the key is not 32 bytes, UnsupportedError without `cryptography`."""
        if len(key) != KEY_NBYTES:
            raise ConfigError(f"a key of {len(key)} bytes; AES-256-GCM takes {KEY_NBYTES}")
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as error:
            raise UnsupportedError(
                f"{error}: encryption needs `pip install cryptography`"
            ) from error
        self._key = key
        self._make: Callable[[bytes, bytes], Any] = lambda key, iv: Cipher(
            algorithms.AES(key), modes.GCM(iv)
        )
        self._invalid = InvalidTag
        self.name = f"aes-256-gcm/{hmac.digest(key, _LABEL + b'key', 'sha256')[:16].hex()}"

    def __repr__(self) -> str:
        return f"BlockCipher({self.name})"

    def seal(
        self,
        source: Buffers,
        nbytes: int,
        associated_data: bytes,
        into: memoryview,
        nonce: bytes = b"",
    ) -> Seal:
        """Encrypt the first ``nbytes`` bytes of ``source`` into ``into``, and zero the rest of it.

        ``source`` and ``into`` must not overlap. ``nonce`` is for tests; by default it is random.
        """
        nonce = nonce or os.urandom(NONCE_NBYTES)
        encryptor = self._for(nonce).encryptor()
        encryptor.authenticate_additional_data(associated_data)
        at = 0
        for part in _first(source, nbytes):
            at += encryptor.update_into(part, into[at : at + part.nbytes])
        encryptor.finalize()
        into[at:] = bytes(into.nbytes - at)
        return Seal(nonce, encryptor.tag)

    def unseal(self, seal: Seal, buffers: Buffers, nbytes: int, associated_data: bytes) -> bool:
        """Decrypt the first ``nbytes`` bytes in place. Return True if they are what was sealed.

        If not, the content of the buffers is undefined and must not be used.
        """
        decryptor = self._for(seal.nonce).decryptor()
        decryptor.authenticate_additional_data(associated_data)
        for part in _first(buffers, nbytes):
            decryptor.update_into(part, part)
        try:
            decryptor.finalize_with_tag(seal.tag)
        except self._invalid:
            return False
        return True

    def _for(self, nonce: bytes) -> Any:
        """Return the cipher (of `cryptography`) for one write."""
        key = hmac.digest(self._key, _LABEL + b"block" + nonce, "sha256")
        return self._make(key, nonce[:_IV_NBYTES])


def _first(buffers: Buffers, nbytes: int) -> Iterator[memoryview]:
    """Yield the first ``nbytes`` bytes, part by part."""
    for part in buffers:
        if nbytes <= 0:
            return
        flat = part.cast("B")
        yield flat[: min(nbytes, flat.nbytes)]
        nbytes -= flat.nbytes


class Scratch:
    """Memory that blocks are encrypted into on their way to disk. Thread-safe.

    Encryption must not change the host arena. Each writer leases memory of ``AT_ONCE`` slots.
    """

    def __init__(self, slot_nbytes: int) -> None:
        self._slot_nbytes = slot_nbytes
        self._lock = threading.Lock()
        self._idle: list[Pages] = []

    @contextmanager
    def lease(self) -> Iterator[Sequence[memoryview]]:
        """Lend ``AT_ONCE`` slots. No write from them may be under way when the context ends."""
        with self._lock:
            pages = self._idle.pop() if self._idle else None
        if pages is None:
            pages = Pages(AT_ONCE * self._slot_nbytes)
        size = self._slot_nbytes
        try:
            yield [pages.view[i * size : (i + 1) * size] for i in range(AT_ONCE)]
        finally:
            with self._lock:
                self._idle.append(pages)

    def close(self) -> None:
        with self._lock:
            for pages in self._idle:
                pages.close()
            self._idle.clear()
