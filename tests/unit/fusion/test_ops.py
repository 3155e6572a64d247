"""Which operations a blend gets, and what torch's are."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ConfigError
from kvcore.fusion.ops import FusionOps, Place, TorchFusion, select_fusion
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Pairing, Rope
from kvcore.fusion.rows import Rows
from kvcore.fusion.select import keep_top
from kvcore.memory.copy.base import DeviceOps
from kvcore.memory.copy.reference import ReferenceOps
from kvcore.memory.layout import KVView, sglang_layout

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class GpuFusion(TorchFusion):
    def supports(self, device: torch.device) -> bool:
        return device.type == "cuda"


class GpuOps(ReferenceOps):
    name: ClassVar[str] = "gpu"
    priority: ClassVar[int] = 20


class Slower(GpuOps):
    name: ClassVar[str] = "slower"
    priority: ClassVar[int] = 15


CANDIDATES: list[DeviceOps] = [ReferenceOps(), GpuOps(), Slower()]
BROUGHT: dict[str, FusionOps] = {"gpu": GpuFusion(), "slower": TorchFusion()}


@pytest.mark.parametrize(
    ("device", "backend", "kind"),
    [
        (GPU, "auto", GpuFusion),
        (CPU, "auto", TorchFusion),
        (GPU, "gpu", GpuFusion),
        (GPU, "slower", TorchFusion),
        (GPU, "reference", TorchFusion),
    ],
)
def test_the_fastest_that_serves_the_device(
    device: torch.device, backend: str, kind: type[FusionOps]
) -> None:
    assert type(select_fusion(device, CANDIDATES, BROUGHT, backend)) is kind


def test_with_copies_alone_torch_blends() -> None:
    assert type(select_fusion(GPU, [ReferenceOps()], {})) is TorchFusion


def test_a_backend_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="'fast'; available here are auto, gpu, reference"):
        select_fusion(CPU, CANDIDATES, BROUGHT, "fast")
    with pytest.raises(ConfigError, match="cannot blend on cpu"):
        select_fusion(CPU, CANDIDATES, BROUGHT, "gpu")


def test_places_are_written_and_nothing_else() -> None:
    staged = LayerKV(torch.randn(6, 1, 8), torch.randn(6, 1, 8))
    before = [part.clone() for part in staged]
    into = LayerKV(torch.zeros(9, 1, 8), torch.zeros(9, 1, 8))
    rope = Rope(8, 8, Pairing.NEOX, 1e4)
    source = KVView(sglang_layout([staged.keys], [staged.values], 1, "float32"), list(staged))
    places = [Place(1, 2, 5, 3), Place(3, 1, 0, 0)]
    TorchFusion().placing(source, into, places, [rope], ReferenceOps()).place(0)
    assert torch.equal(into.values[[5, 6, 0]], staged.values[[1, 2, 3]])
    assert torch.equal(into.keys[0], staged.keys[3])
    moved = rope.shift(staged.keys[1:3].transpose(0, 1), 3).transpose(0, 1)
    assert torch.equal(into.keys[5:7], moved)
    assert not into.keys[[1, 2, 3, 4, 7, 8]].any()
    assert all(torch.equal(a, b) for a, b in zip(staged, before, strict=True))


@given(data=st.data(), tokens=st.integers(1, 30))
def test_the_best_chunk_rows_are_kept_and_all_fresh_rows(data: st.DataObject, tokens: int) -> None:
    """The rows are those of `keep_top` among the chunk rows, sorted with the others."""
    rows = sorted(data.draw(st.sets(st.integers(0, tokens - 1), min_size=1)))
    cached = sorted(data.draw(st.sets(st.sampled_from(rows))))
    offset_of = torch.full((tokens,), -1)
    offset_of[cached] = 0
    given_rows = Rows(
        torch.tensor(rows), torch.tensor([rows.index(row) for row in cached], dtype=torch.int64),
        torch.tensor(cached, dtype=torch.int64),
    )  # fmt: skip
    values = st.sampled_from([0.0, 1.0, 2.0, float("nan"), float("inf")])
    scores = torch.tensor(data.draw(st.lists(values, min_size=len(cached), max_size=len(cached))))
    count = data.draw(st.integers(0, len(cached)))
    kept, going = TorchFusion().keep(given_rows, offset_of, scores, count)
    best = keep_top(given_rows.places, scores, count).tolist()
    assert kept.places.tolist() == best
    assert kept.positions.tolist() == sorted({*best, *rows} - ({*cached} - {*best}))
    assert [rows[index] for index in going.tolist()] == kept.positions.tolist()
    assert kept.positions[kept.chunk].tolist() == best
