"""The canonical block: its sizes, and what is no block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvcore.errors import LayoutError
from kvcore.model.shape import ITEM_BYTES, BlockShape, item_bytes

SHAPE = BlockShape(layers=3, kv_heads=4, head_dim=8, block_tokens=16, dtype="bfloat16")


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_an_element_is_as_large_as_torchs(dtype: str) -> None:
    assert item_bytes(dtype) == getattr(torch, dtype).itemsize


def test_sizes_are_those_of_the_elements() -> None:
    assert SHAPE.dims() == (8, 8)
    assert SHAPE.head_nbytes == 2 * 8 * 16 * 2
    assert SHAPE.layer_nbytes == 4 * SHAPE.head_nbytes
    assert SHAPE.nbytes == 3 * SHAPE.layer_nbytes


def test_values_may_be_narrower_than_keys() -> None:
    narrow = replace(SHAPE, v_head_dim=4)
    assert narrow.dims() == (8, 4)
    assert narrow.head_nbytes == (8 + 4) * 16 * 2


def test_a_latent_has_no_values() -> None:
    latent = BlockShape(2, 1, 576, 16, "bfloat16", kv_factor=1)
    assert latent.dims() == (576,)
    assert latent.nbytes == 2 * 576 * 16 * 2


def test_a_share_differs_in_its_number_alone() -> None:
    assert SHAPE.with_heads(2) == replace(SHAPE, kv_heads=2)
    assert SHAPE.with_layers(1) == replace(SHAPE, layers=1)


@pytest.mark.parametrize(
    "shape", [SHAPE, replace(SHAPE, v_head_dim=4), replace(SHAPE, kv_factor=1)]
)
def test_it_comes_back_from_plain_data(shape: BlockShape) -> None:
    assert BlockShape.from_dict(shape.to_dict()) == shape


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: 0} for name in ("layers", "kv_heads", "head_dim", "block_tokens", "v_head_dim")),
        {"layers": -1}, {"layers": 1.5}, {"kv_heads": "4"}, {"kv_factor": 0}, {"kv_factor": 3},
        {"dtype": "complex64"},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_block_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        replace(SHAPE, **wrong)


def test_a_block_may_be_as_small_as_one_element() -> None:
    assert BlockShape(1, 1, 1, 1, "int8", kv_factor=1).nbytes == 1


def test_data_with_other_fields_is_refused() -> None:
    with pytest.raises(LayoutError, match="not the shape of a block"):
        BlockShape.from_dict(SHAPE.to_dict() | {"heads": 4})
