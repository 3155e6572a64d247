"""Sums of blocks, in the interpreter, against kvcore's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import LayoutError
from kvcore.memory.checksums import naive_sum
from kvcore_kernels.ops import TritonOps
from kvcore_kernels.sums import launch, naive

SLOT = 1 << 17


def region(seed: int) -> torch.Tensor:
    """Three slots, on a page."""
    whole = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, 4 * SLOT, np.uint8))
    skip = -whole.data_ptr() % 4096
    return whole[skip : skip + 3 * SLOT]


@given(
    seed=st.integers(0, 9),
    nbytes=st.sampled_from([1, 7, 8, 63, 500, 4096, 65528, 65536, 65537, SLOT]),
    places=st.lists(st.integers(0, 2), max_size=4),
)
@settings(max_examples=25, deadline=None)
def test_sums_are_the_host_s(seed: int, nbytes: int, places: list[int]) -> None:
    data, offsets = region(seed), [place * SLOT for place in places]
    memory = memoryview(data.numpy())
    want = [naive_sum([memory[offset : offset + nbytes]], nbytes) for offset in offsets]
    assert launch.sums(data, offsets, nbytes) == want
    assert naive.sums(data, offsets, nbytes) == want


@pytest.mark.parametrize("bit", [0, 63, 8 * 4096, 8 * SLOT - 1])
def test_a_flipped_bit_shows(bit: int) -> None:
    data = region(1)
    [before] = launch.sums(data, [0], SLOT)
    data[bit // 8] ^= 1 << bit % 8
    assert launch.sums(data, [0], SLOT) != [before]


@pytest.mark.parametrize("twin", [launch, naive])
def test_what_does_not_fit_is_refused(twin) -> None:  # type: ignore[no-untyped-def]
    data = region(2)
    for offsets, nbytes in (([8], 8), ([3 * SLOT], 8), ([-16], 8), ([0], 0), ([16], 3 * SLOT)):
        with pytest.raises(LayoutError, match=r"multiple of 16|blocks of"):
            twin.sums(data, offsets, nbytes)
    with pytest.raises(LayoutError, match="flat, contiguous bytes"):
        twin.sums(data.view(torch.int64), [0], 8)


def test_the_operations_sum_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("kvcore_kernels.ops.sums", lambda *given: asked.append(given) or [7])
    assert TritonOps().sums(region(3), [0], 8) == [7]
    assert len(asked) == 1
