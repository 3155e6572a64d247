"""KV in 8 bits, in the interpreter, against torch's own conversions: every code and every scale."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import KVCoreError, LayoutError, UnsupportedError
from kvcore.memory.copy import HeadRange
from kvcore.memory.layout import KVView, unit_tokens
from kvcore.model.shape import BlockShape
from kvcore_kernels.pack import launch, naive
from kvcore_kernels.pack.checks import LARGEST
from kvcore_kernels.testing import ENGINES, arena_view, assert_same, normal, slot_view, twin
from support.budget import examples

FORMATS = sorted(LARGEST)


def scales_for(view: KVView) -> torch.Tensor:
    """Room for the scales of packed blocks, poisoned."""
    layout = view.layout
    return torch.full(
        (layout.num_pages, layout.layers, layout.kv_factor, layout.kv_heads), float("nan")
    )


def packed_like(view: KVView, block: int, slots: int, dtype: str) -> KVView:
    """Room for blocks of ``view`` in 8 bits, filled with noise."""
    planes = view.layout.planes[0]
    dims = [plane.head_dim for plane in planes]
    shape = BlockShape(
        view.layout.layers, view.layout.kv_heads, dims[0], block, dtype, len(dims), dims[-1]
    )
    return arena_view(shape, slots)


def check_pack(src: KVView, units: np.ndarray, dst: KVView, *args: object) -> torch.Tensor:
    """Both twins: the same codes, the same scales. Fills ``dst`` and returns the scales."""
    ours, right = twin(dst), twin(dst)
    scales, right_scales = scales_for(dst), scales_for(dst)
    blocks, *rest = args
    launch.pack_blocks(src, units, ours, blocks, scales, *rest)  # type: ignore[arg-type]
    naive.pack_blocks(src, units, right, blocks, right_scales, *rest)  # type: ignore[arg-type]
    assert_same(ours, right)
    torch.testing.assert_close(scales, right_scales, rtol=0, atol=0, equal_nan=True)
    for mine, new in zip(dst.tensors, ours.tensors, strict=True):
        mine.copy_(new)
    return scales


def check_unpack(
    src: KVView, blocks: np.ndarray, scales: torch.Tensor, dst: KVView, *rest: object
) -> KVView:
    ours, right = twin(dst), twin(dst)
    launch.unpack_blocks(src, blocks, scales, ours, *rest)  # type: ignore[arg-type]
    naive.unpack_blocks(src, blocks, scales, right, *rest)  # type: ignore[arg-type]
    assert_same(ours, right, any_nan=True)
    return ours


@pytest.fixture(scope="class", params=[False, True], ids=["integers", "native"])
def native(request: pytest.FixtureRequest) -> Iterator[None]:
    """e4m3 by integer arithmetic, and by the instruction of GPUs that have it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "has_fp8", lambda device: request.param)
        yield


@pytest.mark.usefixtures("native")
class TestBothWays:
    @given(data=st.data())
    @settings(max_examples=examples(20))
    def test_from_any_engine_and_back(self, data: st.DataObject) -> None:
        page, block = (
            data.draw(st.sampled_from([1, 16, 32])),
            data.draw(st.sampled_from([1, 16, 63, 64])),
        )
        shape = BlockShape(
            layers=data.draw(st.integers(1, 2)),
            kv_heads=data.draw(st.integers(1, 3)),
            head_dim=data.draw(st.sampled_from([64, 80, 128, 256])),
            block_tokens=block,
            dtype=data.draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        )
        unit = unit_tokens(page, block)
        per_block = block // unit
        pages = -(-3 * per_block * unit // page)
        view = normal(ENGINES[data.draw(st.sampled_from(sorted(ENGINES)))](shape, pages, page))
        dst = packed_like(view, block, 3, data.draw(st.sampled_from(FORMATS)))
        order = data.draw(st.permutations(range(pages * page // unit)))[: 2 * per_block]
        units = np.array(order, np.int64).reshape(2, per_block)
        for block_gone in data.draw(st.lists(st.integers(0, 1), max_size=1)):
            units[block_gone, 0] = -1
        blocks = np.array(data.draw(st.sampled_from([[2, 0], [1, -1]])))
        layers = sorted(data.draw(st.sets(st.integers(0, shape.layers - 1), min_size=1)))
        first = data.draw(st.integers(0, shape.kv_heads - 1))
        heads = HeadRange(first, 0, data.draw(st.integers(1, shape.kv_heads - first)))
        scales = check_pack(view, units, dst, blocks, layers, heads)
        back = HeadRange(0, first, heads.size)
        check_unpack(dst, blocks, scales, view, units, layers, back)

    @pytest.mark.parametrize("format", FORMATS)
    def test_every_code(self, format: str) -> None:
        """Every bfloat16 that is a number, whatever its size, rounds as torch rounds it."""
        every = torch.arange(-32768, 32768, dtype=torch.int16).view(torch.bfloat16)
        finite = torch.where(every.isfinite(), every, 0.0)
        shape = BlockShape(1, 1, 128, 64, "bfloat16", kv_factor=1)
        view = slot_view(shape, 9, 64)
        for top in (1.0, 448.0, 127.0):
            view.tensors[0][:512] = finite.clamp(-top, top).view(512, 1, 128)
            dst = packed_like(view, 64, 8, format)
            units = np.arange(8)[:, None]
            scales = check_pack(view, units, dst, np.arange(8), [0], HeadRange(0, 0, 1))
            check_unpack(
                dst, np.arange(8), scales, view, units[::-1].copy(), [0], HeadRange(0, 0, 1)
            )


def round_trip(values: torch.Tensor, format: str) -> tuple[torch.Tensor, float]:
    """One block ``[tokens, dims]`` there and back, in float32, and its scale."""
    tokens, dims = values.shape
    view = slot_view(BlockShape(1, 1, dims, tokens, "float32", kv_factor=1), 1, tokens)
    view.tensors[0][:, 0] = values
    dst = packed_like(view, tokens, 1, format)
    one = np.zeros((1, 1), np.int64)
    scales = check_pack(view, one, dst, one[0], [0], HeadRange(0, 0, 1))
    there = check_unpack(dst, one[0], scales, view, one, [0], HeadRange(0, 0, 1))
    return there.tensors[0][:, 0], float(scales.flatten()[0])


@given(
    data=st.data(),
    format=st.sampled_from(FORMATS),
    exponent=st.integers(-90, 100),
)
@settings(max_examples=examples(20))
def test_the_error_is_bounded(data: st.DataObject, format: str, exponent: int) -> None:
    """Half a step: of the scale for int8, of a sixteenth of the value or of 2^-10 for e4m3."""
    seed = data.draw(st.integers(0, 99))
    values = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    back, scale = round_trip(values, format)
    step = (
        scale / 2
        if format == "int8"
        else torch.maximum(values.abs() / 16, torch.tensor(scale * 2.0**-10))
    )
    assert ((back - values).abs() <= step * 1.00001).all()
    assert back.abs().max() == pytest.approx(float(values.abs().max()), rel=1e-6)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_does_not_come_back_as_a_number(format: str, bad: float) -> None:
    values = torch.ones(16, 64)
    values[3, 5] = bad
    back, scale = round_trip(values, format)
    assert np.isnan(scale)
    assert back.isnan().all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38])
def test_nothing_and_next_to_nothing(format: str, value: float) -> None:
    back, scale = round_trip(torch.full((16, 64), value), format)
    assert scale > 2.0**-126
    assert (back == 0).all()


def test_a_latent() -> None:
    view = normal(slot_view(BlockShape(1, 1, 576, 16, "bfloat16", kv_factor=1), 4, 16))
    dst = packed_like(view, 64, 2, "float8_e4m3fn")
    units = np.array([[2, 0, 1, 3]])
    scales = check_pack(view, units, dst, np.array([1]), [0], HeadRange(0, 0, 1))
    check_unpack(dst, np.array([1]), scales, view, units, [0], HeadRange(0, 0, 1))


VIEW = normal(slot_view(BlockShape(1, 2, 64, 16, "bfloat16"), 4, 16))
PACKED = packed_like(VIEW, 16, 2, "int8")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dst": VIEW}, UnsupportedError, "packed as bfloat16"),
        ({"src": PACKED}, UnsupportedError, "int8 packed as int8"),
        ({"src_units": np.array([0])}, LayoutError, "a row of units per block"),
        ({"src_units": np.array([[0, 1, 2]])}, LayoutError, "3 units for a block of 16"),
        ({"src_units": np.array([[4]])}, LayoutError, "unit 4 is out of range: there are 4"),
        ({"dst_blocks": np.array([2])}, LayoutError, "block 2 is out of range: there are 2"),
        ({"layers": [1]}, LayoutError, r"layers \[1\]"),
        ({"heads": HeadRange(1, 0, 2)}, LayoutError, "HeadRange"),
        ({"scales": torch.zeros(2, 1, 2, 1)}, LayoutError, "scales of"),
        ({"scales": torch.zeros(2, 1, 2, 4)[..., ::2]}, LayoutError, "not contiguous"),
    ],
)
@pytest.mark.parametrize("twin", [launch.pack_blocks, naive.pack_blocks])
def test_what_does_not_fit_is_refused(  # type: ignore[no-untyped-def]
    twin, change, error: type[KVCoreError], message: str
) -> None:
    args = {
        "src": VIEW, "src_units": np.array([[0]]), "dst": PACKED, "dst_blocks": np.array([0]),
        "scales": scales_for(PACKED), "layers": [0], "heads": HeadRange(0, 0, 2),
    }  # fmt: skip
    with pytest.raises(error, match=message):
        twin(**(args | change))
