"""A third party's selector and device operations, as a plugin of its own.

The selector "faulty" fails every second time; "telling" picks rows by their number and writes what
it is shown to the folder ``told`` beside this file. Put this file's folder on PYTHONPATH and kvcore
finds it by its entry point (`support.faulty`). A tier that fails is
`kvcore.testing.faults.plugin`'s.

The device operations fail every load into the engine's pages while there is the file ``fails``
beside this one, and a blend's attention on the second rank now and then while there is the one that
``FAULTY_RANK`` names.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from kvcore.plugins import OpsPlugin, SelectorPlugin, hookimpl

BESIDE = Path(__file__).parent


def faulty_selector() -> Any:
    """Made when asked for: a plugin's module imports nothing heavy."""
    from kvcore.fusion.select import Candidates, Selector

    class FaultySelector(Selector):
        name = "faulty"

        def __init__(self) -> None:
            self._calls = itertools.count()

        def score(self, candidates: Candidates) -> Any:
            call = next(self._calls)
            if call % 2 or call > 3:
                raise RuntimeError(f"call {call} of a selector that fails")
            return candidates.key_deviation

    return FaultySelector()


def telling_selector() -> Any:
    import torch

    from kvcore.fusion.select import Candidates, Selector

    class TellingSelector(Selector):
        name = "telling"

        def __init__(self) -> None:
            self._folder = BESIDE / "told"
            self._folder.mkdir(exist_ok=True)
            self._calls = itertools.count()

        def score(self, candidates: Candidates) -> Any:
            told = {
                "layer": candidates.layer,
                "rows": candidates.rows,
                "keys": candidates.keys.clone(),
            }
            torch.save(told, self._folder / f"{next(self._calls):04}.pt")
            return (candidates.rows * 7919 % 1009).float()

    return TellingSelector()


@hookimpl
def kvcore_selectors() -> list[SelectorPlugin]:
    return [SelectorPlugin("faulty", faulty_selector), SelectorPlugin("telling", telling_selector)]


def faulty_fusion() -> Any:
    import torch

    from kvcore.fusion.ops import TorchFusion

    class FaultyFusion(TorchFusion):
        def __init__(self) -> None:
            self._calls = itertools.count()

        def attend(self, *args: Any) -> Any:
            failing = os.path.exists(os.environ.get("FAULTY_RANK", ""))
            if failing and torch.distributed.get_rank() == 1 and next(self._calls) % 3 == 2:
                raise RuntimeError("no memory on this rank")
            return super().attend(*args)

    return FaultyFusion()


def faulty_ops() -> Any:
    from kvcore.memory.copy.native import NativeOps

    class FaultyOps(NativeOps):
        name = "faulty"
        priority = -1

        def copy(self, copy: Any) -> None:
            from_arena = len(copy.src.tensors) == 1
            if from_arena and (BESIDE / "fails").exists():
                raise OSError("a copy that fails, as asked")
            super().copy(copy)

    return FaultyOps()


@hookimpl
def kvcore_ops() -> list[OpsPlugin]:
    return [OpsPlugin("faulty", faulty_ops, faulty_fusion)]
