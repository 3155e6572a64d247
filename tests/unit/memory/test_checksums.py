"""Sums of blocks for device memory: numpy, C and torch agree, and damage shows."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import UnsupportedError
from kvcore.memory import checksums as sums
from kvcore.memory.checksums import bound_to, host_sum, naive_sum, tensor_sums
from kvcore.memory.copy import builtin_ops
from kvcore.memory.copy.build_native import build
from kvcore.memory.native_lib import prepare_library

SIZES = st.sampled_from([1, 7, 8, 9, 63, 64, 500, 4096, 5000])


def block(seed: int, nbytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def plain(data: bytes) -> int:
    """As the page says it, a word at a time."""
    total = 0
    for i in range(0, len(data), 8):
        x = int.from_bytes(data[i : i + 8], "little") ^ (i // 8 + 1) * sums.KEY % 2**64
        x = x * sums.FIRST % 2**64
        x ^= x >> 32
        x = x * sums.SECOND % 2**64
        total += x ^ x >> 29
    return total % 2**64


@given(seed=st.integers(0, 99), nbytes=SIZES, cuts=st.lists(st.integers(0, 5000), max_size=4))
def test_every_way_gives_the_same_sum(seed: int, nbytes: int, cuts: list[int]) -> None:
    data = block(seed, nbytes + 16)
    edges = sorted({0, nbytes + 16, *(cut for cut in cuts if cut < nbytes)})
    parts = [memoryview(data)[a:b] for a, b in itertools.pairwise(edges)]
    want = plain(data[:nbytes])
    assert naive_sum(parts, nbytes) == host_sum(parts, nbytes) == want
    flat = torch.frombuffer(bytearray(bytes(64) + data), dtype=torch.uint8)
    assert tensor_sums(flat, [64], nbytes) == [want]
    for ops in builtin_ops():
        assert ops.sums(flat, [64, 64], nbytes) == [want, want], ops.name


@pytest.mark.slow
@pytest.mark.parametrize("width", range(4))
def test_every_width_of_vectors_gives_the_same_sum(tmp_path: Path, width: int) -> None:
    """Those that this CPU has not fall back to what it has."""
    library = prepare_library(build(tmp_path / "copy.so", f"-DKVCORE_SIMD={width}"))
    for nbytes in range(1, 300):
        data = np.frombuffer(block(nbytes, nbytes), dtype=np.uint8)
        for first in (0, 5):
            want = plain(bytes(8 * first) + data.tobytes()) - plain(bytes(8 * first))
            assert library.kvcore_sum(data.ctypes.data, nbytes, first) == want % 2**64


def test_a_large_block_is_summed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    data = block(1, 1003)
    flat = torch.frombuffer(bytearray(data + bytes(5)), dtype=torch.uint8)
    monkeypatch.setattr(sums, "_PIECE_WORDS", 7)
    assert tensor_sums(flat, [0], 1003) == [plain(data)]


def test_without_the_library_numpy_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise UnsupportedError("not built")

    monkeypatch.setattr(sums, "load_library", none)
    data = block(2, 100)
    assert host_sum([memoryview(data)], 100) == plain(data)


@given(seed=st.integers(0, 99), nbytes=SIZES, bit=st.integers(0, 2**20))
def test_a_flipped_bit_shows(seed: int, nbytes: int, bit: int) -> None:
    data = bytearray(block(seed, nbytes))
    before = host_sum([memoryview(data)], nbytes)
    data[bit // 8 % nbytes] ^= 1 << bit % 8
    assert host_sum([memoryview(data)], nbytes) != before


@given(seed=st.integers(0, 99), places=st.lists(st.integers(0, 62), min_size=2, max_size=2))
def test_words_and_pages_that_changed_places_show(seed: int, places: list[int]) -> None:
    words = np.frombuffer(block(seed, 63 * 8), dtype=np.uint64).copy()
    before = host_sum([memoryview(words)], words.nbytes)
    a, b = places
    words[[a, b]] = words[[b, a]]
    same = host_sum([memoryview(words)], words.nbytes) == before
    assert same == (a == b)


@given(seed=st.integers(0, 99), keep=st.integers(0, 62))
def test_what_came_in_part_shows(seed: int, keep: int) -> None:
    words = np.frombuffer(block(seed, 63 * 8), dtype=np.uint64).copy()
    before = host_sum([memoryview(words)], words.nbytes)
    words[keep:] = 0
    assert host_sum([memoryview(words)], words.nbytes) != before
    words[:] = 0
    assert host_sum([memoryview(words)], words.nbytes) not in (0, before)


def test_a_sum_is_its_own_blocks() -> None:
    one, other = bytes(16), bytes(15) + b"\1"
    assert bound_to(one, 5) != bound_to(other, 5)
    assert bound_to(one, bound_to(one, 0) ^ 0) == 1, "0 is kept for: there is none"
