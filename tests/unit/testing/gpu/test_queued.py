"""Torch on the recording device: late, in order, with the right results, and with reused memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcore.memory.device import device_of
from kvcore_devtools.gpu import Machine, installed, queued_torch
from kvcore_devtools.gpu.memory import tensor_spans
from support.budget import examples

pytestmark = pytest.mark.slow  # torch's dispatch takes seconds to come up

CPU = torch.device("cpu")
SIDE = 4


def device_made(fill: float) -> Tensor:
    return torch.full((SIDE, SIDE), fill, device=CPU)


def _put(a: Tensor, b: Tensor) -> Tensor:
    a[1:3] = b[:2].clone()
    return a


def _scatter(a: Tensor, b: Tensor) -> Tensor:
    rows = torch.tensor([2, 0], device=CPU)
    a[rows] = b.index_select(0, rows)
    return a


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "matmul": lambda a, b: a @ b / SIDE,
    "view": lambda a, b: a.t(),
    "copy of a view": lambda a, b: a.t().reshape(-1).view(SIDE, SIDE),
    "in place": lambda a, b: a.mul_(0.5),
    "slices": _put,
    "indices": _scatter,
    "out": lambda a, b: torch.maximum(a, b, out=torch.empty_like(a)),
    "sort": lambda a, b: torch.sort(a, dim=0).values,
    "branch": lambda a, b: a if bool((a > b).all()) else b,
    "mask": lambda a, b: a.masked_fill(a > b, 0.25),
    "by mask": lambda a, b: a.sum() * torch.ones_like(a[a > 0.3].sum()).expand(SIDE, SIDE).clone(),
    "host": lambda a, b: a + torch.tensor(b.tolist(), device=CPU),
    "new": lambda a, b: a.new_zeros(SIDE, SIDE) + torch.arange(SIDE, device=a.device),
    "upload": lambda a, b: a + torch.ones(SIDE).to(a.device),
    "attention": lambda a, b: torch.nn.functional.scaled_dot_product_attention(
        a[None], b[None], a[None]
    )[0],
}


def program(steps: list[tuple[str, int, int]]) -> list[Tensor]:
    """Run steps on some tensors; each replaces one of them."""
    held = [device_made(0.5), device_made(-1.0), device_made(2.0)]
    for name, first, second in steps:
        held[first] = STEPS[name](held[first], held[second])
    return held


@settings(max_examples=examples(30))
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 2), st.integers(0, 2)), max_size=12
    ),
    st.integers(0, 2**20),
)
def test_every_program_has_the_results_of_plain_torch(
    steps: list[tuple[str, int, int]], seed: int
) -> None:
    plain = [one.clone() for one in program(steps)]
    with installed(Machine(seed)) as machine:
        with queued_torch(machine), torch.inference_mode():
            queued = [one.cpu() for one in program(steps)]
        machine.check()
    for one, other in zip(plain, queued, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_nothing_runs_before_something_waits_for_it() -> None:
    with installed(Machine(0, eager=0.0)) as machine, queued_torch(machine) as at_once:
        made = device_made(1.0) + 1
        with at_once():
            assert made.isnan().all(), "fresh memory holds what nobody has written"
        assert not machine.counts["host_waits"]
        assert made.tolist() == [[2.0] * SIDE] * SIDE
        assert machine.counts["host_waits"] == 1
        machine.check()


def test_tensors_of_the_host_are_the_hosts() -> None:
    with installed(Machine(0)) as machine, queued_torch(machine):
        known = torch.arange(4) + torch.zeros(4)
        assert known.tolist() == [0, 1, 2, 3]
        assert not machine.counts
        with pytest.raises(RuntimeError, match="on the device and on the host"):
            device_made(1.0) + known


def test_what_a_launch_is_given_is_what_the_host_had_then() -> None:
    with installed(Machine(0, eager=0.0)) as machine, queued_torch(machine):
        known, made = torch.zeros(SIDE, SIDE), device_made(1.0)
        made.copy_(known)
        known += 7
        assert made.tolist() == [[0.0] * SIDE] * SIDE


@pytest.mark.parametrize("follows", [False, True])
def test_work_on_another_stream_needs_an_order(follows: bool) -> None:
    with installed(Machine(0)) as machine, queued_torch(machine):
        made, device = device_made(1.0), device_of(CPU)
        side = device.stream()
        if follows:
            side.follow(device.current_stream().record())
        with side.issuing():
            made.mul_(2)
        machine.finish()
    assert {fault.kind for fault in machine.faults} == (set() if follows else {"race"})


# -- memory that is given out again -----------------------------------------------------------


def test_memory_is_given_out_again_while_queued_work_uses_it() -> None:
    with installed(Machine(0, eager=0.0)) as machine, queued_torch(machine):
        first = device_made(1.0)
        address, doubled = first.data_ptr(), first * 2
        del first
        second = device_made(5.0)
        assert second.data_ptr() == address
        assert doubled.tolist() == [[2.0] * SIDE] * SIDE
        machine.check()


@pytest.mark.parametrize("how", ["nothing", "hold", "follow"])
def test_memory_of_one_stream_that_another_uses_needs_a_hold(how: str) -> None:
    """It is reused on the stream that it was made on, as `torch.Tensor.record_stream` says."""
    reused = False
    for seed in range(6):
        with installed(Machine(seed)) as machine, queued_torch(machine):
            device = device_of(CPU)
            main, side = device.current_stream(), device.stream()
            first = device_made(1.0)
            address = first.data_ptr()
            side.follow(main.record())
            with side.issuing():
                _ = first * 2
                if how == "hold":
                    side.hold(first)
            if how == "follow":
                main.follow(side.record())
            del first
            second = device_made(5.0)
            reused |= second.data_ptr() == address
            machine.finish()
        assert {fault.kind for fault in machine.faults} == ({"race"} if how == "nothing" else set())
    assert reused or how == "hold"


def test_streams_do_not_share_what_they_give_back() -> None:
    with installed(Machine(0)) as machine, queued_torch(machine):
        first = device_made(1.0)
        address = first.data_ptr()
        del first
        with device_of(CPU).stream().issuing():
            assert device_made(2.0).data_ptr() != address
        assert device_made(2.0).data_ptr() == address


# -- ranges -----------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
    st.integers(0, 3),
)
def test_the_bytes_of_a_view_are_those_of_its_elements(
    size: list[int], random: object, skip: int
) -> None:
    whole = torch.arange(1000, dtype=torch.int16)
    strides = [random.choice([0, 1, 2, 5, 7]) for _ in size]  # type: ignore[attr-defined]
    view = whole.as_strided(size, strides, skip)
    known = {
        int(value) * 2 + byte + whole.data_ptr() for value in view.flatten() for byte in range(2)
    }
    found = [at for start, stop in tensor_spans(view) for at in range(start, stop)]
    assert sorted(known) == found
