"""Stand-ins for SGLang's CUDA-only modules: inert for SGLang, absent for others, loud if used."""

from __future__ import annotations

import builtins
import importlib.util
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import UnsupportedError
from kvcore_sglang.testing import hicache, standins

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs source text as the module it names, with stand-ins for all three libraries."""
    monkeypatch.setattr(builtins, "__import__", builtins.__import__)
    monkeypatch.setattr(standins, "_absent", lambda name: True)
    assert standins.install() == standins.MODULES

    def as_module(source: str, name: str = "sglang.srt.layers.one") -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": name}
        exec(source, names)
        return names

    return as_module


KERNEL = """
import triton
import triton.language as tl
from triton.language.extra import libdevice

@triton.autotune(configs=[triton.Config({"B": 16}, num_warps=4)], key=["n"])
@triton.jit
def add(x, n: tl.constexpr, kind: tl.dtype | None = None):
    "Adds."

@triton.jit(do_not_specialize=["n"])
def sub(x, n):
    pass

class Descriptor(tl.tensor):
    size = tl.float32

blocks, room = triton.cdiv(10, 4), triton.next_power_of_2(5)
"""


def test_a_module_of_kernels_can_be_imported(run: Run) -> None:
    names = run(KERNEL)
    assert (names["blocks"], names["room"]) == (3, 8)
    assert names["add"].__doc__ == "Adds."
    assert names["Descriptor"]().size is not None


def test_a_kernel_that_is_launched_says_which_and_what_to_do(run: Run) -> None:
    names = run(KERNEL)
    for launch in (lambda: names["add"][(1,)](2, 3), lambda: names["sub"](2, 3)):
        with pytest.raises(UnsupportedError, match=r"sglang.srt.layers.one.(add|sub) was called"):
            launch()


def test_what_asks_for_the_device_hears_that_there_is_none(run: Run) -> None:
    with pytest.raises(UnsupportedError, match="triton is not installed"):
        run("import triton\ntriton.runtime.driver.active.get_current_target()")


@pytest.mark.parametrize("name", ["sgl_kernel.silu_and_mul", "torchvision.transforms.Resize"])
def test_functions_of_the_other_libraries_are_loud(run: Run, name: str) -> None:
    module, _, function = name.rpartition(".")
    with pytest.raises(UnsupportedError, match=name):
        run(f"from {module} import {function}\n{function}(1)")


def test_others_still_find_the_libraries_absent(run: Run) -> None:
    for importer in ("transformers.utils", "sglangish", "__main__"):
        with pytest.raises(ModuleNotFoundError):
            run("import sgl_kernel", name=importer)
    assert "sgl_kernel" not in sys.modules
    assert importlib.util.find_spec("sgl_kernel") is None


def test_relative_and_ordinary_imports_are_untouched(run: Run) -> None:
    import json

    assert run("import json.decoder as found")["found"] is json.decoder
    with pytest.raises(ImportError):
        run("from .triton import jit")


def test_nothing_changes_where_all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "__import__", builtins.__import__)
    monkeypatch.setattr(standins, "_absent", lambda name: False)
    before = builtins.__import__
    assert standins.install() == ()
    assert builtins.__import__ is before


def test_it_is_installed_once(run: Run) -> None:
    once = builtins.__import__
    standins.install()
    assert builtins.__import__ is once


def test_slots_are_handed_to_requests_in_order() -> None:
    torch = pytest.importorskip("torch")
    table = torch.zeros(3, 6, dtype=torch.int32)
    standins.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]),
        table,
        torch.tensor([1, 0]),
        torch.tensor([4, 2]),
        torch.tensor([11, 12, 13, 21, 22]),
        6,
    )
    assert table.tolist() == [[21, 22, 0, 0, 0, 0], [0] * 6, [0, 11, 12, 13, 0, 0]]


def test_rows_are_copied_as_if_read_first() -> None:
    torch = pytest.importorskip("torch")
    buffers = [torch.arange(12.0).view(6, 2), torch.arange(6, dtype=torch.int16).view(6, 1)]
    want = [buffer.clone() for buffer in buffers]
    source, target = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 5])
    for buffer in want:
        buffer[target] = buffer[source]
    standins.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers]),
        torch.tensor([buffer.stride(0) * buffer.element_size() for buffer in buffers]),
        target,
        source,
    )
    assert all(map(torch.equal, buffers, want))


@given(st.integers(0, 30), st.randoms())
def test_hicaches_copies_put_every_slot_where_it_belongs(count: int, picks: random.Random) -> None:
    """Against indexing, which is the naive way; slots in runs and alone."""
    torch = pytest.importorskip("torch")
    source = [torch.arange(40 * 3.0).view(40, 3) + 1000 * i for i in range(2)]
    target = [torch.zeros(40, 3) for _ in source]
    taken, places = _some_slots(count, picks), _some_slots(count, picks)
    want = [buffer.clone() for buffer in target]
    for a, b in zip(source, want, strict=True):
        b[torch.tensor(places, dtype=torch.int64)] = a[torch.tensor(taken, dtype=torch.int64)]
    slots = torch.tensor(taken, dtype=torch.int64), torch.tensor(places, dtype=torch.int64)
    hicache.transfer_kv_direct(source, target, *slots, page_size=1)
    assert all(map(torch.equal, target, want))


def _some_slots(count: int, picks: random.Random) -> list[int]:
    """Of 40, in runs cut at random and shuffled."""
    runs, start = [], 0
    while start < 40:
        stop = min(40, start + picks.randint(1, 8))
        runs.append(range(start, stop))
        start = stop
    picks.shuffle(runs)
    return [slot for run in runs for slot in run][:count]
