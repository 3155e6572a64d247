"""How kvcore finds the Triton operations, and when it chooses them."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from kvcore.errors import UnsupportedError
from kvcore.fusion.ops import TorchFusion, select_fusion
from kvcore.memory.copy import select_ops
from kvcore.memory.copy.reference import ReferenceOps
from kvcore.memory.layout import KVView, arena_layout
from kvcore.model.shape import BlockShape
from kvcore.plugins.manager import GROUP, PluginManager
from kvcore_kernels.fusion import TritonFusion
from kvcore_kernels.ops import TritonOps

ENTRY = importlib.metadata.EntryPoint("triton", "kvcore_kernels.plugin", GROUP)


@dataclass(frozen=True)
class Memory:
    """As much of a tensor as the choice looks at."""

    device: torch.device
    pinned: bool = False

    def is_pinned(self) -> bool:
        return self.pinned


GPU, OTHER_GPU = Memory(torch.device("cuda", 0)), Memory(torch.device("cuda", 1))
PINNED, PAGEABLE = Memory(torch.device("cpu"), True), Memory(torch.device("cpu"))


def view(*memory: Memory) -> KVView:
    return KVView(arena_layout(BlockShape(1, 1, 64, 8, "bfloat16"), 1), memory)  # type: ignore[arg-type]


def test_the_plugin_offers_the_operations() -> None:
    manager = PluginManager(entry_points=[ENTRY], strict=True)
    assert [f.name for f in manager.found("ops")] == ["link", "native", "reference", "triton"]


def test_the_plugin_is_light() -> None:
    code = "import kvcore_kernels.plugin, sys; print({'torch', 'triton'} & set(sys.modules))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_others_serve() -> None:
    manager = PluginManager(entry_points=[ENTRY])
    (offer,) = (f for f in manager.found("ops") if f.name == "triton")
    with pytest.raises(UnsupportedError, match="no CUDA or ROCm device"):
        offer.item.factory()
    assert "triton" not in [ops.name for ops in manager.ops()]


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore_kernels.plugin.find_spec", lambda name: None)
    (offer,) = (f for f in PluginManager(entry_points=[ENTRY]).found("ops") if f.name == "triton")
    with pytest.raises(UnsupportedError, match="pip install"):
        offer.item.factory()


@pytest.mark.parametrize(
    ("src", "dst", "fits"),
    [
        ([GPU], [GPU], True),
        ([GPU], [PINNED], True),
        ([PINNED], [GPU, GPU], True),
        ([GPU], [PAGEABLE], True),
        ([GPU], [GPU, PAGEABLE], False),
        ([PINNED], [PINNED], False),
        ([GPU], [OTHER_GPU], False),
    ],
)
def test_it_serves_one_gpu_and_all_host_memory(
    src: list[Memory], dst: list[Memory], fits: bool
) -> None:
    views = view(*src), view(*dst)
    assert TritonOps().supports(*views) is fits
    chosen = select_ops(*views, [ReferenceOps(), TritonOps()])
    assert chosen.name == ("triton" if fits else "reference")


def test_blends_on_a_gpu_are_done_by_triton() -> None:
    candidates = [ReferenceOps(), TritonOps()]
    brought = {"triton": TritonFusion()}
    gpu = torch.device("cuda", 0)
    assert type(select_fusion(gpu, candidates, brought)) is TritonFusion
    assert type(select_fusion(torch.device("cpu"), candidates, brought)) is TorchFusion
    assert type(select_fusion(gpu, candidates, brought, "reference")) is TorchFusion
