"""Cases mean the same on another device: strides, offsets and shared storages are kept."""

from __future__ import annotations

from types import FunctionType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcore.fusion.plan import LayerKV
from kvcore.model.shape import BlockShape
from kvcore_kernels.fusion_rows import Strided
from kvcore_kernels.planes import PlaneTable
from kvcore_kernels.testing import ENGINES, assert_same, raw, twin
from support.moved_kernels import Mover, _noted_planes, _noted_rows, launches, moved

CPU = torch.device("cpu")


@given(
    engine=st.sampled_from(sorted(ENGINES)), dtype=st.sampled_from(["bfloat16", "float8_e4m3fn"])
)
def test_a_view_is_the_same_there_and_what_is_written_comes_back(engine: str, dtype: str) -> None:
    view = ENGINES[engine](BlockShape(2, 2, 64, 16, dtype), 3, 16)
    before, mover = twin(view), Mover(CPU)
    there = mover.there(view)
    assert_same(there, view)
    for a, b in zip(there.tensors, view.tensors, strict=True):
        assert (a.stride(), a.storage_offset()) == (b.stride(), b.storage_offset())
        assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
    shared = [len({t.untyped_storage().data_ptr() for t in v.tensors}) for v in (view, there)]
    assert shared[0] == shared[1]
    raw(there.tensors[0]).bitwise_not_()
    assert_same(view, before)
    mover.write_back()
    assert torch.equal(raw(view.tensors[0]), ~raw(before.tensors[0]))


def test_arguments_that_share_memory_share_it_there() -> None:
    memory = torch.arange(8)

    def launch(a: torch.Tensor, *, b: torch.Tensor) -> torch.Tensor:
        b += 1
        return a * 10

    assert moved(launch, CPU)(memory[1::2], b=memory).tolist() == [20, 40, 60, 80]
    assert memory.tolist() == list(range(1, 9))


def test_parts_in_a_tuple_are_moved() -> None:
    given = LayerKV(torch.arange(4), torch.arange(4, 8))

    def launch(parts: LayerKV, more: list[torch.Tensor]) -> None:
        assert more[0].data_ptr() == parts.keys.data_ptr() != given.keys.data_ptr()
        parts.values[0] = 9

    moved(launch, CPU)(given, [given.keys])
    assert given.values.tolist() == [9, 5, 6, 7]


def test_addresses_are_those_of_the_memory_there() -> None:
    part, view = torch.zeros(3, 1, 8), ENGINES["slots"](BlockShape(1, 1, 8, 4, "float32"), 2, 4)
    rows, planes, mover = _noted_rows(part), _noted_planes(view, [0], 0), Mover(CPU)
    there, table = mover.there(rows), mover.there(planes)
    assert there.address == mover.there(part).data_ptr() != part.data_ptr()
    assert there[1:] == rows[1:]
    wanted = [tensor.data_ptr() for tensor in mover.there(view).tensors]
    assert table.rows[:, 0].tolist() == wanted != planes.rows[:, 0].tolist()


@pytest.mark.parametrize("unknown", [Strided(1, 1, 1, 1, 1), PlaneTable(raw(torch.ones(1)), False)])
def test_addresses_of_memory_that_nobody_knows_are_refused(unknown: object) -> None:
    with pytest.raises(TypeError, match="not moved"):
        Mover(CPU).there([unknown])


def test_of_large_memory_what_is_used_is_moved() -> None:
    """Bytes at both ends and in the middle, written here or there."""
    size = (1 << 31) + 12345
    here, mover = torch.empty(size, dtype=torch.uint8), Mover(CPU)
    here[:2], here[-1] = 5, 6
    there = mover.there(here)
    assert there[0] == there[1] == 5
    assert there[-1] == 6
    there[1], there[1 << 30] = 7, 8
    mover.write_back()
    assert [int(here[at]) for at in (0, 1, 1 << 30, -1)] == [5, 7, 8, 6]


def test_every_op_is_moved() -> None:
    found = {launch.__name__ for launch in launches()}
    assert found >= {
        "attend_rows", "copy_shifted", "copy_units", "deviations", "keep_above", "keep_top",
        "merge_rows", "pack_blocks", "sums", "unpack_blocks",
    }  # fmt: skip
    assert not found & {"tile_for", "has_fp8", "constants"}
    assert all(isinstance(launch, FunctionType) for launch in launches())


@pytest.mark.parametrize("error", [ValueError, KeyError])
def test_errors_pass(error: type[Exception]) -> None:
    def launch(a: torch.Tensor) -> None:
        raise error(str(a.device))

    with pytest.raises(error, match="cpu"):
        moved(launch, CPU)(torch.zeros(1))
