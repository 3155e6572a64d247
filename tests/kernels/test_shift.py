"""The copy that rotates, in the interpreter, against a copy, `Rope.shift` and a copy: every byte.

The interpreter fuses no multiply-add, so that both twins round alike. A GPU may round otherwise.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import KVCoreError, LayoutError, UnsupportedError
from kvcore.fusion.rope import Linear, Llama3, Pairing, Rope, Yarn
from kvcore.memory.copy import HeadRange
from kvcore.memory.copy.base import Copy
from kvcore.memory.layout import KVView, unit_tokens
from kvcore.model.shape import BlockShape
from kvcore_kernels.shift import launch, naive
from kvcore_kernels.testing import ENGINES, arena_view, assert_same, normal, raw, slot_view, twin
from support.moved_kernels import assert_rotated

SCALINGS = [
    Linear(4.0),
    Llama3(8.0, 1.0, 4.0, 8192.0),
    Yarn(4.0, 4096.0, magnitude=1.1),
]


def check(src: KVView, units: np.ndarray, dst: KVView, *args: object) -> KVView:
    """Both twins from the same start: the same bytes after. Returns what was written to."""
    ours, right = twin(dst), twin(dst)
    before = twin(src)
    *parts, ropes, distances = args
    for twin_, copy_shifted in ((ours, launch.copy_shifted), (right, naive.copy_shifted)):
        copy_shifted(Copy(src, units, twin_, *parts), ropes, distances)  # type: ignore[arg-type]
    wholes = ([raw(t).view(t.dtype) for t in view.tensors] for view in (ours, right))
    assert_rotated(*wholes)
    assert_same(src, before)
    return ours


@given(data=st.data())
@settings(max_examples=30)
def test_between_any_engine_and_canonical_blocks(data: st.DataObject) -> None:
    page, block = data.draw(st.sampled_from([1, 16, 32])), data.draw(st.sampled_from([1, 16, 63]))
    head_dim = data.draw(st.sampled_from([64, 80, 128, 256]))
    shape = BlockShape(
        layers=data.draw(st.integers(1, 3)),
        kv_heads=data.draw(st.integers(1, 3)),
        head_dim=head_dim,
        block_tokens=block,
        dtype=data.draw(st.sampled_from(["bfloat16", "float16", "float32"])),
    )
    view = normal(ENGINES[data.draw(st.sampled_from(sorted(ENGINES)))](shape, 3, page))
    arena = normal(arena_view(shape, 3))
    unit = unit_tokens(page, block)
    ours = data.draw(st.permutations(range(3 * page // unit)))
    theirs = data.draw(st.permutations(range(3 * block // unit)))
    count = data.draw(st.integers(0, min(len(ours), len(theirs), 6)))
    a, b = np.array(ours[:count], np.int64), np.array(theirs[:count], np.int64)
    a[data.draw(st.lists(st.booleans(), min_size=count, max_size=count))] = -1
    moves = st.sampled_from([0, 1, -1, 17, 4096, -131072, 1_000_000])
    distances = np.array(data.draw(st.lists(moves, min_size=count, max_size=count)), np.int64)
    layers = sorted(data.draw(st.sets(st.integers(0, shape.layers - 1))))
    ropes = ropes_for(data, layers, head_dim)
    first = data.draw(st.integers(0, shape.kv_heads - 1))
    heads = HeadRange(first, 0, data.draw(st.integers(0, shape.kv_heads - first)))
    check(arena, b, view, a, layers, unit, heads, ropes, distances)


def ropes_for(data: st.DataObject, layers: list[int], head_dim: int) -> list[Rope | None]:
    """One a layer, none for some, of two scalings and one way of pairing."""
    rotary = data.draw(st.sampled_from([head_dim, head_dim // 2, 20]))
    pairing = data.draw(st.sampled_from(Pairing))
    known = [Rope(head_dim, rotary, pairing, 1e4), None] + [
        Rope(head_dim, rotary, pairing, 5e5, scaling) for scaling in SCALINGS
    ]
    return [data.draw(st.sampled_from(known)) for _ in layers]


@pytest.mark.parametrize("tokens", [1, 63, 500])
def test_every_token_by_its_own_distance(tokens: int) -> None:
    """Units of a token, as a chunk that is not placed at a page's start needs them."""
    shape = BlockShape(1, 2, 64, 4, "bfloat16")
    view, arena = normal(slot_view(shape, 500, 1)), normal(arena_view(shape, 125))
    slots = np.random.default_rng(tokens).permutation(500)[:tokens]
    rope = Rope(64, 64, Pairing.NEOX, 1e4)
    moved = np.arange(tokens) % 7 - 3
    every = HeadRange(0, 0, 2)
    check(arena, np.arange(tokens), view, slots, [0], 1, every, [rope], moved)


def test_what_does_not_move_keeps_its_bits() -> None:
    """NaN, -0 and all, as `Rope.shift` has it at distance 0; V at any distance."""
    shape = BlockShape(1, 1, 64, 16, "bfloat16")
    src, dst = arena_view(shape, 2), arena_view(shape, 2)
    units, rope = np.arange(2), Rope(64, 64, Pairing.GPTJ, 1e4)
    copy = Copy(src, units, dst, units, [0], 16, HeadRange(0, 0, 1))
    launch.copy_shifted(copy, [rope], np.array([0, 0]))
    assert_same(src, dst)
    launch.copy_shifted(copy, [rope], np.array([0, 5]))
    half = shape.nbytes // 4
    old, new = (view.tensors[0].view(torch.int16).view(2, 2, half) for view in (src, dst))
    assert torch.equal(old[0], new[0])
    assert torch.equal(old[:, 1], new[:, 1])
    assert not torch.equal(old[1, 0], new[1, 0])


def test_k_and_v_of_unlike_dims() -> None:
    shape = BlockShape(2, 2, 192, 8, "float16", v_head_dim=128)
    src, dst = normal(arena_view(shape, 3)), normal(slot_view(shape, 3, 8))
    rope = Rope(192, 64, Pairing.GPTJ, 1e4)
    args = [0, 1], 8, HeadRange(0, 0, 2), [rope, None], np.array([-9, 30])
    check(src, np.array([2, 0]), dst, np.array([0, 1]), *args)


def test_a_latent_is_copied() -> None:
    shape = BlockShape(1, 1, 576, 8, "bfloat16", kv_factor=1)
    src, dst = arena_view(shape, 3), slot_view(shape, 3, 8)
    args = [0], 8, HeadRange(0, 0, 1), [None], np.array([3])
    check(src, np.array([2]), dst, np.array([0]), *args)


SHAPE = BlockShape(2, 2, 64, 8, "bfloat16")
ROPE = Rope(64, 64, Pairing.NEOX, 1e4)


@pytest.mark.parametrize(
    ("shape", "change", "error", "message"),
    [
        (SHAPE, {"ropes": [ROPE]}, LayoutError, "1 ropes for 2 layers"),
        (SHAPE, {"distances": np.zeros(2, np.int64)}, LayoutError, "one distance per unit"),
        (SHAPE, {"ropes": [Rope(128, 64, Pairing.NEOX, 1e4), None]}, LayoutError, "head dim 128"),
        (
            SHAPE,
            {"ropes": [ROPE, Rope(64, 32, Pairing.NEOX, 1e4)]},
            UnsupportedError,
            "differ in pairing",
        ),
        (SHAPE, {"src_units": np.array([7])}, LayoutError, "unit 7"),
        (BlockShape(2, 2, 64, 8, "float8_e4m3fn"), {}, UnsupportedError, "unpack it first"),
        (BlockShape(2, 1, 64, 8, "bfloat16", kv_factor=1), {}, UnsupportedError, "latent"),
    ],
)
@pytest.mark.parametrize("twin", [launch.copy_shifted, naive.copy_shifted])
def test_what_does_not_fit_is_refused(  # type: ignore[no-untyped-def]
    twin, shape: BlockShape, change, error: type[KVCoreError], message: str
) -> None:
    args = {
        "src": arena_view(shape, 2), "src_units": np.array([0]),
        "dst": arena_view(shape, 2), "dst_units": np.array([1]),
        "layers": [0, 1], "unit_tokens": 8, "heads": HeadRange(0, 0, shape.kv_heads),
        "ropes": [ROPE, ROPE], "distances": np.array([3]),
    }  # fmt: skip
    args |= change
    ropes, distances = args.pop("ropes"), args.pop("distances")
    with pytest.raises(error, match=message):
        twin(Copy(**args), ropes, distances)
