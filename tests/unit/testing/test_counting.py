"""What would be asked of a GPU is counted: a wait, a launch or an upload in a layer is found."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcore.memory.device import CpuDevice, device_of
from kvcore_devtools.gpu.counting import Counts, DeviceCalls

CPU = torch.device("cpu")


def counted(work: Callable[[Tensor], object]) -> Counts:
    with torch.inference_mode(), DeviceCalls() as calls:
        data = torch.arange(6, device=CPU)
        calls.section = "layer 3"
        work(data)
    return calls.sections.get("layer 3", Counts())


@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: int(x[0]),
        lambda x: float(x[0]),
        lambda x: bool((x > 2).any()),
        lambda x: range(x[3]),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: x[x > 2],
        lambda x: x.__setitem__(x > 2, 0),
        lambda x: x.nonzero(),
        lambda x: torch.masked_select(x, x > 2),
        lambda x: torch.equal(x, x.clone()),
        lambda x: torch.zeros(6, dtype=torch.int64).copy_(x),
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: x.new_tensor([1, 2]),
        lambda x: torch.from_numpy(np.arange(3)).to(x.device),
        lambda x: x.copy_(torch.arange(6)),
        lambda x: device_of(x.device).synchronize(),
    ],
)  # fmt: skip
def test_a_wait_of_the_host_is_found(work: Callable[[Tensor], object]) -> None:
    assert counted(work).waits.total() == 1


@pytest.mark.parametrize(
    ("work", "launches"),
    [
        (lambda x: x + 1, 1),
        (lambda x: x[torch.arange(2, device=CPU)], 2),
        (lambda x: x.index_select(0, x), 1),
        (lambda x: x.fill_(3), 1),
        (lambda x: x.float().mul_(2), 2),
        (lambda x: x.view(2, 3).transpose(0, 1)[1:], 0),
        (lambda x: x.new_empty(9), 0),
        (lambda x: x.to(torch.int64), 0),
        (lambda x: x.contiguous(), 0),
        (lambda x: torch.arange(6) + torch.ones(6), 0),
        (lambda x: torch.tensor([1]).new_tensor([2]).item(), 0),
    ],
)
def test_launches_are_counted_and_views_and_host_work_are_not(
    work: Callable[[Tensor], object], launches: int
) -> None:
    found = counted(work)
    assert found.launches.total() == launches
    assert not found.waits
    assert not found.uploads


def test_uploads_through_the_device_do_not_wait() -> None:
    found = counted(lambda x: device_of(x.device).upload(np.arange(100)))
    assert (found.uploads, found.upload_bytes, found.waits.total()) == (1, 800, 0)
    assert type(device_of(CPU)) is CpuDevice  # as before


def test_what_comes_from_the_host_is_of_the_device_afterwards() -> None:
    assert counted(lambda x: device_of(CPU).upload(np.arange(3)).tolist()).waits.total() == 1
    moved = counted(lambda x: torch.arange(3).to(CPU).tolist())
    assert (moved.uploads, moved.upload_bytes, moved.waits.total()) == (1, 24, 2)


def test_the_engines_own_work_is_not_counted() -> None:
    with DeviceCalls() as calls:
        data = torch.arange(6, device=CPU)
        calls.section = "layer 0"
        with calls.foreign():
            (data + 1).tolist()
            calls.launched("engine's")
            with calls.ours():
                data.add_(1)
                calls.launched("merge")
        calls.section = "layer 1"
        calls.launched("merge")
    assert calls.sections["layer 0"].launches == {"aten::add_": 1, "merge": 1}
    assert calls.total.launches["merge"] == 2
    assert not calls.total.waits
