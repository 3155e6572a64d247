"""What a blend needs of its device, in the interpreter: each operation against torch's, and blends
of a small model through all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcore.fusion.attend import Attention
from kvcore.fusion.ops import Place, TorchFusion
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Pairing, Rope
from kvcore.fusion.rows import Rows
from kvcore.memory.copy.reference import ReferenceOps
from kvcore.memory.layout import KVView, sglang_layout
from kvcore_kernels.fusion import TritonFusion
from support.moved_kernels import assert_rotated

TRITON, TORCH = TritonFusion(), TorchFusion()
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def kv_of(seed: int, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> LayerKV:
    """K and V as a staging has them: two parts of one tensor."""
    return LayerKV(*drawn(seed, 2, tokens, heads, dim, dtype=dtype))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def poisoned(kv: LayerKV) -> LayerKV:
    return LayerKV(*(torch.full_like(part, float("nan")) for part in kv))


def assert_equal(ours: LayerKV, right: LayerKV) -> None:
    for a, b in zip(ours, right, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@given(
    cuts=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 20), st.integers(0, 3), st.integers(-70, 70)),
        max_size=3,
    ),
    heads=st.integers(1, 2),
    rope=st.sampled_from([None, Rope(64, 64, Pairing.NEOX, 1e4), Rope(64, 32, Pairing.GPTJ, 5e5)]),
    dtype=DTYPES,
)
@settings(max_examples=25)
def test_chunks_are_placed_at_any_token(
    cuts: list[tuple[int, int, int, int]], heads: int, rope: Rope | None, dtype: torch.dtype
) -> None:
    places, here, there = [], 0, 0
    for skipped, length, gap, distance in cuts:
        here, there = here + skipped, there + gap
        places.append(Place(here, length, there, distance))
        here, there = here + length, there + length
    staged, into = kv_of(1, max(here, 1), heads, 64, dtype), kv_of(2, there + 2, heads, 64, dtype)
    ours, right = poisoned(into), poisoned(into)
    before = LayerKV(*(part.clone() for part in staged))
    source = KVView(sglang_layout([staged.keys], [staged.values], 1, name_of(dtype)), [*staged])
    for ops, target in ((TRITON, ours), (TORCH, right)):
        ops.placing(source, target, places, [rope], ReferenceOps()).place(0)
    assert_rotated(ours, right)
    assert_equal(staged, before)


@given(data=st.data(), dtype=DTYPES, heads=st.integers(1, 3), dim=st.sampled_from([8, 64, 80]))
@settings(max_examples=20)
def test_rows_are_merged_measured_and_chosen(
    data: st.DataObject, dtype: torch.dtype, heads: int, dim: int
) -> None:
    tokens = data.draw(st.sampled_from([1, 63, 70]))
    chosen = sorted(data.draw(st.sets(st.integers(0, tokens - 1), max_size=20)))
    rows = torch.tensor(chosen, dtype=torch.int64)
    cached, fresh = kv_of(1, tokens, heads, dim, dtype), kv_of(2, len(rows), heads, dim, dtype)
    some = torch.tensor([n for n in range(len(rows)) if data.draw(st.booleans())]).long()
    both = TRITON.deviation(fresh, some, cached, rows[some])
    expected = TORCH.deviation(fresh, some, cached, rows[some])
    torch.testing.assert_close(both, expected, rtol=1e-5, atol=1e-6)
    for part in range(2):
        alone = TRITON.deviation([fresh[part]], some, [cached[part]], rows[some])
        assert torch.equal(alone, both[part : part + 1])
    far, balance = both[0], TRITON.balance(*both)
    torch.testing.assert_close(balance, TORCH.balance(*both), rtol=1e-5, atol=1e-6, equal_nan=True)
    reach = data.draw(st.integers(0, 5))
    smooth = TRITON.smooth(rows[some], far, reach, tokens)
    assert torch.equal(smooth, TORCH.smooth(rows[some], far, reach, tokens))
    offset_of = torch.full((tokens,), -1)
    offset_of[rows[some]] = 0
    count = data.draw(st.integers(0, len(some)))
    args = Rows(rows, some, rows[some]), offset_of, far, count
    kept, wanted = TRITON.keep(*args), TORCH.keep(*args)
    assert torch.equal(kept.going, wanted.going)
    for one, other in zip(kept.rows, wanted.rows, strict=True):
        assert torch.equal(one, other)
    ours, right = (LayerKV(*(part.clone() for part in cached)) for _ in range(2))
    TRITON.merge(ours, rows, fresh)
    TORCH.merge(right, rows, fresh)
    assert_equal(ours, right)


@given(
    dtype=DTYPES,
    dim=st.sampled_from([8, 16, 64, 80]),
    window=st.sampled_from([None, 1, 30]),
    soft_cap=st.sampled_from([0.0, 5.0]),
    rows=st.sets(st.integers(0, 62), max_size=12),
)
@settings(max_examples=25)
def test_rows_attend_as_in_torch(
    dtype: torch.dtype, dim: int, window: int | None, soft_cap: float, rows: set[int]
) -> None:
    """Of heads below 16 torch is asked."""
    positions = torch.tensor(sorted(rows), dtype=torch.int64)
    queries, kv = drawn(3, len(rows), 4, dim, dtype=dtype), kv_of(4, 63, 2, dim, dtype)
    attention = Attention(dim**-0.5, window, soft_cap)
    ours = TRITON.attend(queries, positions, kv, attention)
    right = TORCH.attend(queries.float(), positions, LayerKV(*(p.float() for p in kv)), attention)
    bar = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(ours.float(), right, rtol=bar, atol=bar)
    assert ours.dtype == dtype


def test_what_kernels_do_not_serve_torch_does() -> None:
    """float64 has no kernel that rotates, measures or attends."""
    staged, into = kv_of(1, 5, 1, 16, torch.float64), kv_of(2, 5, 1, 16, torch.float64)
    every = torch.arange(5)
    far = TRITON.deviation(staged, every, into, every)
    assert torch.equal(far, TORCH.deviation(staged, every, into, every))
    queries, positions = drawn(3, 2, 1, 16, dtype=torch.float64), torch.tensor([0, 4])
    out = TRITON.attend(queries, positions, into, Attention(0.25))
    assert torch.equal(out, TORCH.attend(queries, positions, into, Attention(0.25)))


def test_a_blend_is_what_it_is_in_torch() -> None:
    """The same rows at every layer and the same KV, through look, walk and gate."""
    pytest.importorskip("transformers")
    from kvcore.fusion.fusor import Fusor
    from kvcore.fusion.gate import Gate
    from kvcore.fusion.reference import Decoder
    from kvcore.fusion.select import BUILTIN_SELECTORS, Ratio
    from kvcore_devtools import fusion

    world = fusion.World(Decoder(fusion.make_model("llama")))
    plan = world.plan()

    def blended(ops: TorchFusion) -> tuple[Any, Any]:
        placed = fusion.ReferencePlaced(world.make(plan))
        fusor = Fusor(fusion.ReferenceLayers(world.decoder), ops=ops)
        gate = Gate(1e-3, larger=(0.3,), depth=0.5)
        args = BUILTIN_SELECTORS["runs"](), Ratio(0.15, spread=0.5), gate
        return fusor.blend(fusion.job_of(plan), placed, *args), placed.written

    (ours, kv), (right, expected) = blended(TRITON), blended(TORCH)
    assert ours.chosen.tolist() == right.chosen.tolist()
    assert [layer.rows for layer in ours.layers] == [layer.rows for layer in right.layers]
    assert len(ours.verdicts) == len(right.verdicts) > 0
    job = fusion.job_of(plan)
    for layer, right_kv in expected.items():
        for got, wanted in zip(kv[layer], right_kv, strict=True):
            fusion.close(got[job.exact : job.stop], wanted[job.exact : job.stop], 2e-4)
