"""Keys: what makes one block of KV equal to another, on any host and in any engine.

    namespace root ─┐
                    ▼
    SHA-256( frame | block 0 | block 1 | ... | block i )[:16]  =  prefix key i

One SHA-256 runs over the whole prompt, and its state is read after every full block. Key ``i`` is
therefore a hash of the namespace and of *every* token up to the end of block ``i``: two prompts
share key ``i`` only if they share all of it. A block that contains more than its tokens (an image
whose placeholder tokens are in it) restarts the hash from a frame with the full 32 bytes reached so
far and the extras. The frame is length-prefixed, so tokens can never imitate it.

The formats here are a contract with every block stored on disk or in a remote store.
``tests/unit/model/test_keys.py`` holds known answers: a change that breaks one needs a new
``_FORMAT`` and a note in the changelog.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from kvcore.errors import ConfigError

__all__ = [
    "KEY_BYTES",
    "ROOT_PARENT",
    "Extra",
    "KeyChain",
    "Namespace",
    "canonical_bytes",
    "pack_tokens",
]

KEY_BYTES = 16
"""Length in bytes of a prefix key and of a namespace digest."""

ROOT_PARENT = bytes(KEY_BYTES)
"""Parent key recorded for a block that starts a prompt."""

TOKEN_BYTES = 4
_FORMAT = b"kvcore-1"


# ---------------------------------------------------------------------------------------------
# canonical encoding


def canonical_bytes(value: object) -> bytes:
    """Encode plain data so that equal data, and only that, gives equal bytes in every process.

    Accepts None, bool, int, float, str, bytes, and lists, tuples and string-keyed mappings of them.
    Every item is ``tag, length, payload``; mappings are sorted by key. A float without a fraction
    is encoded as the integer it equals, because JSON writers disagree about ``10000.0``.
    """
    tag, payload = _canonical_parts(value)
    return tag + struct.pack("<Q", len(payload)) + payload


def _canonical_parts(value: object) -> tuple[bytes, bytes]:
    if value is None:
        return b"n", b""
    if isinstance(value, bool):
        return b"b", b"\1" if value else b"\0"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return b"y", bytes(value)
    if isinstance(value, str):
        # Salts are clients' text, in which JSON allows unpaired surrogates.
        return b"s", value.encode("utf-8", "surrogatepass")
    if isinstance(value, (int, float)):
        return _canonical_number(value)
    return _canonical_container(value)


def _canonical_number(value: int | float) -> tuple[bytes, bytes]:
    if isinstance(value, float) and not value.is_integer():
        return b"f", struct.pack("<d", value)
    return b"i", str(int(value)).encode()


def _canonical_container(value: object) -> tuple[bytes, bytes]:
    if isinstance(value, Mapping):
        keys = list(value)
        if not all(isinstance(key, str) for key in keys):
            raise ConfigError(f"keys of an identity mapping must be strings, got {keys!r}")
        return b"m", b"".join(
            canonical_bytes(key) + canonical_bytes(value[key]) for key in sorted(keys)
        )
    if isinstance(value, (list, tuple)):
        return b"l", b"".join(map(canonical_bytes, value))
    raise ConfigError(
        f"cannot make an identity from {type(value).__name__} {value!r}: "
        "give None, bool, int, float, str, bytes, or lists and string-keyed mappings of them"
    )


# ---------------------------------------------------------------------------------------------
# namespace


@dataclass(frozen=True)
class Namespace:
    """What must be equal before two blocks of KV may be compared at all.

    ``model`` is the adapter's fingerprint of everything about the model that shapes KV (see
    `kvcore.model.ingredients`), ``lora`` names the adapter weights, ``cache_salt`` separates
    tenants, and ``extra`` takes whatever else an engine needs. ``secret`` keys the hash for a
    deployment: without it, nobody can guess from the keys on disk or on the wire which prompts are
    cached.
    """

    model: str | bytes
    lora: str = ""
    cache_salt: str = ""
    extra: Mapping[str, object] = field(default_factory=dict)
    secret: bytes = field(default=b"", repr=False)

    @cached_property
    def root(self) -> bytes:
        """The 32 bytes that every chain starts from.

        They are derived from the secret: never store or log them.
        """
        fields = [self.model, self.lora, self.cache_salt, dict(self.extra)]
        return hmac.digest(self.secret, _FORMAT + b"/namespace" + canonical_bytes(fields), "sha256")

    @cached_property
    def digest(self) -> bytes:
        """The 16 bytes that name this namespace in stores and events; they do not reveal `root`."""
        return hashlib.sha256(_FORMAT + b"/namespace-id" + self.root).digest()[:KEY_BYTES]

    @property
    def plain(self) -> bool:
        """True for the model's own namespace: no adapter, no tenant, no extra."""
        return not (self.lora or self.cache_salt or self.extra)

    def __hash__(self) -> int:
        return hash(self.digest)


# ---------------------------------------------------------------------------------------------
# tokens


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Return token ids as little-endian uint32, four bytes per token.

    Accepts lists, tuples, arrays, numpy arrays, torch CPU tensors and any other iterable of
    integers in 0 .. 2**32 - 1. Raises `ConfigError` for anything else.
    """
    try:
        return _pack_array(tokens) if hasattr(tokens, "dtype") else _pack_ints(tokens)
    except (struct.error, TypeError, OverflowError) as error:
        raise ConfigError(f"token ids must be integers in 0 .. 2**32 - 1: {error}") from error


def _pack_ints(tokens: Iterable[int]) -> bytes:
    ids = tokens if isinstance(tokens, (list, tuple)) else list(tokens)
    packed = array("I", ids)  # takes a quarter less time than struct.pack
    if packed.itemsize != TOKEN_BYTES:
        return struct.pack(f"<{len(ids)}I", *ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _pack_array(tokens: Any) -> bytes:
    import numpy as np  # only callers that already use arrays pay for the import

    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise TypeError(f"got an array of {ids.dtype} with {ids.ndim} dimensions")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 1 << 32):
        raise OverflowError(f"ids range from {ids.min()} to {ids.max()}")
    return ids.astype("<u4", copy=False).tobytes()


class Extra(NamedTuple):
    """Content that the tokens do not determine: ``digest`` covers ``length`` tokens at ``offset``.

    Offsets count from the start of the prompt. An image is one extra over its placeholder tokens.
    """

    offset: int
    length: int
    digest: bytes


def _extras_in(extras: Sequence[Extra], start: int, stop: int) -> list[list[object]]:
    """Return the extras that overlap tokens [start, stop), with offsets from ``start``."""
    return [
        [extra.offset - start, extra.length, extra.digest]
        for extra in extras
        if extra.offset < stop and extra.offset + extra.length > start
    ]


# ---------------------------------------------------------------------------------------------
# keys


class KeyChain:
    """Prefix keys of one growing token sequence.

    ``keys`` holds one 16-byte key for each *full* block and only grows. Hashing costs O(new
    tokens), about 0.3 us per block of 16 plus 10 ns per token. Not thread-safe: one owner per
    chain.
    """

    __slots__ = (
        "_extras", "_hash", "_step", "_tail", "block_tokens", "keys", "namespace", "plain",
    )  # fmt: skip

    def __init__(self, namespace: Namespace, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ConfigError(f"block_tokens must be at least 1, got {block_tokens}")
        self.namespace = namespace
        self.block_tokens = block_tokens
        self.keys: list[bytes] = []
        self.plain = namespace.plain
        """True if the tokens alone, with the model, determine the content of the blocks."""
        self._step = block_tokens * TOKEN_BYTES
        self._tail = b""
        self._extras: list[Extra] = []
        frame = [_FORMAT, "prefix", namespace.root, block_tokens]
        self._hash = hashlib.sha256(canonical_bytes(frame))

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, including those of the last partial block."""
        return len(self.keys) * self.block_tokens + len(self._tail) // TOKEN_BYTES

    def extend(self, tokens: Iterable[int], extras: Iterable[Extra] = ()) -> list[bytes]:
        """Append tokens and hash the blocks they fill; returns ``keys`` (the list itself).

        ``extras`` may start at or after the first token that is not hashed yet, also beyond the
        tokens given so far. They enter the key of each block they overlap, and so every later key.
        Raises `ConfigError` and changes nothing if an extra overlaps a block that is already
        hashed.
        """
        data = self._tail + pack_tokens(tokens)
        if extras:
            self._add_extras(extras)
        stop = len(data) - len(data) % self._step
        if self._extras:
            self._hash_with_extras(data[:stop])
        else:
            self._hash_plain(data[:stop])
        self._tail = data[stop:]
        return self.keys

    def copy(self) -> KeyChain:
        """Return an independent chain that continues from here, for a forked request."""
        twin = KeyChain.__new__(KeyChain)
        twin.namespace, twin.block_tokens = self.namespace, self.block_tokens
        twin.plain = self.plain
        twin.keys, twin._extras = list(self.keys), list(self._extras)
        twin._step, twin._tail, twin._hash = self._step, self._tail, self._hash.copy()
        return twin

    def _add_extras(self, extras: Iterable[Extra]) -> None:
        new = [Extra(*extra) for extra in extras]
        hashed = len(self.keys) * self.block_tokens
        for extra in new:
            if extra.length < 1 or extra.offset < hashed:
                raise ConfigError(
                    f"{extra} must cover at least one token and start at or after token {hashed}: "
                    "the blocks before it are hashed already, so give extras with their tokens"
                )
        self._extras = sorted([*self._extras, *new])
        self.plain = self.plain and not self._extras

    def _hash_plain(self, data: bytes) -> None:
        update, digest = self._hash.update, self._hash.digest
        blocks = struct.iter_unpack(f"{self._step}s", data)
        self.keys += [digest()[:KEY_BYTES] for (block,) in blocks if not update(block)]

    def _hash_with_extras(self, data: bytes) -> None:
        for offset in range(0, len(data), self._step):
            start = len(self.keys) * self.block_tokens
            extras = _extras_in(self._extras, start, start + self.block_tokens)
            if extras:
                frame = [_FORMAT, "extras", self._hash.digest(), extras]
                self._hash = hashlib.sha256(canonical_bytes(frame))
            self._hash_plain(data[offset : offset + self._step])
        hashed = len(self.keys) * self.block_tokens
        self._extras = [extra for extra in self._extras if extra.offset + extra.length > hashed]
