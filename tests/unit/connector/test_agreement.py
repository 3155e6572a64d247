"""Tensor-parallel ranks agree over a real Gloo group."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
import torch.multiprocessing as processes  # noqa: E402

from kvcore.connector.engine_layers import Agreement  # noqa: E402

pytestmark = pytest.mark.slow

RANKS, TIMES = 3, 40


def wells(rank: int) -> list[bool]:
    """What a rank says each time: it is well three times in four."""
    return [random.Random(f"{rank} {time}").random() < 0.75 for time in range(TIMES)]


def agree(rank: int, folder: str) -> None:
    """Agree on one rank, in and outside of inference mode in turn, and write the answers.

    The object is made in inference mode, and another one outside of it.
    """
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS
    )
    group = SimpleNamespace(cpu_group=torch.distributed.group.WORLD)
    answers = []
    for made_in in (torch.inference_mode, nullcontext):
        with made_in():
            agreement = Agreement(SimpleNamespace(get_tp_group=lambda: group))
        for time, well in enumerate(wells(rank)):
            with torch.inference_mode() if time % 2 else nullcontext():
                answers.append(agreement(well))
    Path(folder, str(rank)).write_text("".join(str(int(answer)) for answer in answers))
    torch.distributed.destroy_process_group()


def test_ranks_agree_only_if_all_are_well(tmp_path: Path) -> None:
    processes.spawn(agree, (str(tmp_path),), nprocs=RANKS)
    said = [wells(rank) for rank in range(RANKS)]
    wanted = "".join(str(int(all(one[time] for one in said))) for time in range(TIMES))
    assert {"0", "1"} <= set(wanted)
    assert [Path(tmp_path, str(rank)).read_text() for rank in range(RANKS)] == [2 * wanted] * RANKS


def test_a_rank_alone_agrees_with_itself() -> None:
    agreement = Agreement(None)
    assert [agreement(True), agreement(False)] == [True, False]


def test_an_engine_may_make_its_tensors_elsewhere() -> None:
    """Engines build their models in a context in which tensors are made on the device."""
    group = SimpleNamespace(cpu_group=None)
    with torch.device("meta"):
        agreement = Agreement(SimpleNamespace(get_tp_group=lambda: group))
    assert agreement._number.shape == (1,)
