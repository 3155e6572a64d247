"""Identity: chains against a one-shot oracle, and known answers that must never change."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ConfigError
from kvcore.model.keys import (
    Extra,
    KeyChain,
    Namespace,
    canonical_bytes,
    pack_tokens,
)

BASE = Namespace("model")
tokens_ = st.lists(st.integers(0, 2**32 - 1), max_size=40)
extras_ = st.lists(
    st.builds(Extra, st.integers(0, 40), st.integers(1, 12), st.binary(max_size=3)), max_size=3
)


def oracle(
    namespace: Namespace, block_tokens: int, tokens: list[int], extras: list[Extra]
) -> list[bytes]:
    """Every key from scratch, straight from the definition in `kvcore.model.keys`."""
    keys = []
    for block in range(len(tokens) // block_tokens):
        frame = [b"kvcore-1", "prefix", namespace.root, block_tokens]
        stream = canonical_bytes(frame)
        for i in range(block + 1):
            start, stop = i * block_tokens, (i + 1) * block_tokens
            inside = [
                [e.offset - start, e.length, e.digest]
                for e in sorted(extras)
                if set(range(e.offset, e.offset + e.length)) & set(range(start, stop))
            ]
            if inside:
                reached = hashlib.sha256(stream).digest()
                stream = canonical_bytes([b"kvcore-1", "extras", reached, inside])
            stream += b"".join(token.to_bytes(4, "little") for token in tokens[start:stop])
        keys.append(hashlib.sha256(stream).digest()[:16])
    return keys


@given(tokens_, extras_, st.integers(1, 9))
def test_chain_is_its_definition(tokens: list[int], extras: list[Extra], size: int) -> None:
    chain = KeyChain(BASE, size)
    assert chain.extend(tokens, extras) == oracle(BASE, size, tokens, extras)
    assert chain.num_tokens == len(tokens)


@given(tokens_, extras_, st.integers(1, 9), st.lists(st.integers(0, 40), max_size=4))
def test_any_split_gives_the_same_keys(
    tokens: list[int], extras: list[Extra], size: int, cuts: list[int]
) -> None:
    cuts = sorted(min(cut, len(tokens)) for cut in cuts)
    chain = KeyChain(BASE, size)
    chain.extend([], extras)
    for start, stop in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        chain.extend(tokens[start:stop])
        chain.copy().extend([1] * size)  # a fork leaves its origin alone
    assert chain.keys == KeyChain(BASE, size).extend(tokens, extras)


@given(st.lists(st.integers(0, 9), min_size=8, max_size=24), st.data())
def test_any_other_token_or_order_gives_other_keys_from_there_on(
    tokens: list[int], data: st.DataObject
) -> None:
    other = list(tokens)
    i = data.draw(st.integers(0, len(tokens) - 1))
    other[i] = data.draw(st.integers(0, 9))
    if data.draw(st.booleans()):
        j = data.draw(st.integers(0, len(tokens) - 1))
        other[i], other[j] = other[j], other[i]
    one, two = KeyChain(BASE, 4).extend(tokens), KeyChain(BASE, 4).extend(other)
    for block, (a, b) in enumerate(zip(one, two, strict=True)):
        same = tokens[: 4 * block + 4] == other[: 4 * block + 4]
        assert (a == b) == same


@pytest.mark.parametrize(
    "other",
    [
        Namespace("model2"),
        Namespace(b"model"),
        Namespace("model", lora="x"),
        Namespace("model", cache_salt="x"),
        Namespace("model", extra={"x": 1}),
        Namespace("model", extra={"x": "1"}),
        Namespace("model", secret=b"x"),
        Namespace("mode", lora="l"),
    ],
)
def test_any_namespace_field_gives_other_keys(other: Namespace) -> None:
    spaces = [BASE, other]
    assert len({space.digest for space in spaces}) == 2
    assert len({KeyChain(space, 4).extend([1, 2, 3, 4])[0] for space in spaces}) == 2


def test_block_sizes_never_meet() -> None:
    tokens = list(range(8))
    assert KeyChain(BASE, 4).extend(tokens)[1] != KeyChain(BASE, 8).extend(tokens)[0]


@pytest.mark.parametrize(
    "extras",
    [
        [],
        [Extra(4, 4, b"a")],
        [Extra(4, 4, b"b")],
        [Extra(5, 3, b"a")],
        [Extra(4, 3, b"a")],
        [Extra(4, 4, b"a"), Extra(4, 4, b"b")],
        [Extra(3, 5, b"a")],
    ],
)
def test_extras_change_the_blocks_they_overlap_and_all_after(extras: list[Extra]) -> None:
    tokens = [7] * 16
    plain = KeyChain(BASE, 4).extend(tokens)
    keys = KeyChain(BASE, 4).extend(tokens, extras)
    first = min((extra.offset // 4 for extra in extras), default=4)
    assert keys[:first] == plain[:first]
    assert not set(keys[first:]) & set(plain)


def test_extras_tell_their_own_contents_apart() -> None:
    variants = [
        [Extra(4, 4, b"a")],
        [Extra(4, 4, b"b")],
        [Extra(5, 3, b"a")],
        [Extra(4, 3, b"a")],
        [Extra(4, 4, b"a"), Extra(4, 4, b"b")],
        [Extra(4, 4, b"ab")],
        [Extra(3, 5, b"a")],
    ]
    keys = [KeyChain(BASE, 4).extend([7] * 12, extras)[-1] for extras in variants]
    assert len(set(keys)) == len(variants)


def test_the_order_extras_are_given_in_does_not_matter() -> None:
    extras = [Extra(9, 2, b"z"), Extra(8, 3, b"a"), Extra(1, 2, b"a")]
    forward = KeyChain(BASE, 4).extend(range(16), extras)
    assert forward == KeyChain(BASE, 4).extend(range(16), extras[::-1])


def test_late_extras_are_refused_and_change_nothing() -> None:
    chain = KeyChain(BASE, 4)
    chain.extend(range(6))
    with pytest.raises(ConfigError, match="at or after token 4"):
        chain.extend([1, 2], [Extra(3, 4, b"a")])
    with pytest.raises(ConfigError, match="at least one token"):
        chain.extend([1, 2], [Extra(9, 0, b"a")])
    assert chain.extend([6, 7]) == KeyChain(BASE, 4).extend(range(8))


@given(tokens_)
def test_packing_is_the_same_for_every_container(tokens: list[int]) -> None:
    expected = b"".join(token.to_bytes(4, "little") for token in tokens)
    for given_as in (
        tokens,
        tuple(tokens),
        iter(tokens),
        array("L", tokens),
        np.array(tokens, dtype=np.uint64),
        np.array(tokens, dtype=np.uint32),
    ):
        assert pack_tokens(given_as) == expected


def test_packing_of_long_lists() -> None:
    tokens = list(range(20_000))
    assert pack_tokens(tokens) == struct.pack("<20000I", *tokens)


@pytest.mark.parametrize(
    "tokens",
    [[-1], [2**32], [1.5], ["1"], [None], np.array([-1]), np.array([1.0]), np.zeros((2, 2), int)],
)
def test_what_is_no_token_is_refused(tokens: object) -> None:
    with pytest.raises(ConfigError, match="token ids must be integers"):
        pack_tokens(tokens)  # type: ignore[arg-type]


plain_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=5,
)


def _typed(value: object) -> object:
    """Distinguishes what Python's == does not: True and 1."""
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    return type(value).__name__, value


@given(plain_data, plain_data)
def test_canonical_bytes_are_equal_only_for_equal_data(one: object, two: object) -> None:
    assert (canonical_bytes(one) == canonical_bytes(two)) == (_typed(one) == _typed(two))


def test_canonical_bytes_ignore_order_and_float_spelling() -> None:
    assert canonical_bytes({"a": 1, "b": 2}) == canonical_bytes({"b": 2, "a": 1})
    assert canonical_bytes(10000.0) == canonical_bytes(10000)
    assert canonical_bytes(0.5) != canonical_bytes(0)
    for bad in ({1: 2}, object(), {"a": {3}}):
        with pytest.raises(ConfigError):
            canonical_bytes(bad)


# Published with format "kvcore-1". If one of these fails, every block stored so far is lost to
# users: do not edit them, raise the format.
KNOWN = {
    "namespace": "1bfa24a6776aa09663f36bbdef08db44",
    "plain": "7d8f92f5009acb390195c4b9c54b57c7",
    "extras": "faccff4dc2043aad808859dbfa0b582c",
}


def test_known_answers() -> None:
    space = Namespace("llama", lora="l", cache_salt="tenant", extra={"mm": 1}, secret=b"key")
    chain = KeyChain(space, 16).extend(range(48), [Extra(20, 4, b"image")])
    assert {
        "namespace": space.digest.hex(),
        "plain": KeyChain(Namespace("llama"), 16).extend(range(32))[1].hex(),
        "extras": chain[2].hex(),
    } == KNOWN


def test_keys_are_equal_in_another_process_with_another_hash_seed() -> None:
    program = (
        "from kvcore.model.keys import KeyChain, Namespace as N;"
        "print(KeyChain(N('m', extra={'b': 1, 'a': 2}), 4).extend(range(8))[1].hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    space = Namespace("m", extra={"a": 2, "b": 1})
    assert seen == {KeyChain(space, 4).extend(range(8))[1].hex() + "\n"}


def test_the_secret_is_not_shown() -> None:
    assert "hush" not in repr(Namespace("m", secret=b"hush"))
    assert len({Namespace("m"), Namespace("m"), Namespace("n")}) == 2


def test_block_tokens_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        KeyChain(BASE, 0)
