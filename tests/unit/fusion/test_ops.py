"""Which operations a blend gets, and what torch's are."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from kvcore.errors import ConfigError
from kvcore.fusion.ops import FusionOps, Place, TorchFusion, select_fusion
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Pairing, Rope
from kvcore.memory.copy.base import DeviceOps
from kvcore.memory.copy.reference import ReferenceOps

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
    TorchFusion().place(staged, into, [Place(1, 2, 5, 3), Place(3, 1, 0, 0)], rope)
    assert torch.equal(into.values[[5, 6, 0]], staged.values[[1, 2, 3]])
    assert torch.equal(into.keys[0], staged.keys[3])
    moved = rope.shift(staged.keys[1:3].transpose(0, 1), 3).transpose(0, 1)
    assert torch.equal(into.keys[5:7], moved)
    assert not into.keys[[1, 2, 3, 4, 7, 8]].any()
    assert all(torch.equal(a, b) for a, b in zip(staged, before, strict=True))
