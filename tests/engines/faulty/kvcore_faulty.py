"""A third party's tier, selector and device operations, as a plugin of its own.

The tier is the naive one, slow and failing as told. The selector "faulty" fails every second time;
"telling" picks rows by their number and writes what it is shown to the folder ``TELLING`` names.

Put this folder on PYTHONPATH and kvcore finds it by its entry point. Options: ``read_delay_s``
before every batch of reads; ``fail_every`` n: each n-th block that is read is said to be gone;
``die_after`` n: after n blocks read, every call fails.

The device operations fail every load into the engine's pages while there is the file that
``FAULTY_OPS`` names, and a blend's attention on the second rank now and then while there is the one
that ``FAULTY_RANK`` names.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

from kvcore.errors import TierError, TierUnavailable
from kvcore.plugins import OpsPlugin, SelectorPlugin, TierContext, TierPlugin, hookimpl
from kvcore.tiers.base import BlockRead, BlockWrite
from kvcore.tiers.memory import MemoryTier


class FaultyTier(MemoryTier):
    def __init__(
        self, context: TierContext, read_delay_s: float = 0, fail_every: int = 0, die_after: int = 0
    ) -> None:
        super().__init__(context.capacity // context.slot_nbytes, context.slot_nbytes)
        self._delay = read_delay_s
        self._fail_every = fail_every
        self._die_after = die_after
        self._reads = itertools.count(1)
        self._seen = 0

    def write(self, requests: Sequence[BlockWrite]) -> list[TierError | None]:
        self._check_alive()
        return super().write(requests)

    def read(self, requests: Sequence[BlockRead]) -> list[TierError | None]:
        time.sleep(self._delay)
        return [self._read_one(request) for request in requests]

    def _read_one(self, request: BlockRead) -> TierError | None:
        self._seen = next(self._reads)
        self._check_alive()
        if self._fail_every and self._seen % self._fail_every == 0:
            return TierUnavailable(f"block {self._seen} is not to be had today")
        [result] = super().read([request])
        return result

    def _check_alive(self) -> None:
        if self._die_after and self._seen > self._die_after:
            raise TierUnavailable("this tier has died")


@hookimpl
def kvcore_tiers() -> list[TierPlugin]:
    return [TierPlugin("faulty", "remote", lambda c: FaultyTier(c, **c.options))]


def faulty_selector() -> Any:
    """Made when asked for: a plugin's module imports nothing heavy."""
    from kvcore.fusion.select import Seen, Selector

    class FaultySelector(Selector):
        name = "faulty"

        def __init__(self) -> None:
            self._calls = itertools.count()

        def score(self, seen: Seen) -> Any:
            call = next(self._calls)
            if call % 2 or call > 3:
                raise RuntimeError(f"call {call} of a selector that fails")
            return seen.key_deviation

    return FaultySelector()


def telling_selector() -> Any:
    from pathlib import Path

    import torch

    from kvcore.fusion.select import Seen, Selector

    class TellingSelector(Selector):
        name = "telling"

        def __init__(self) -> None:
            self._folder = Path(os.environ["TELLING"])
            self._folder.mkdir(exist_ok=True)
            self._calls = itertools.count()

        def score(self, seen: Seen) -> Any:
            told = {"layer": seen.layer, "rows": seen.rows, "keys": seen.keys.clone()}
            torch.save(told, self._folder / f"{next(self._calls):04}.pt")
            return (seen.rows * 7919 % 1009).float()

    return TellingSelector()


@hookimpl
def kvcore_selectors() -> list[SelectorPlugin]:
    return [SelectorPlugin("faulty", faulty_selector), SelectorPlugin("telling", telling_selector)]


def faulty_ops() -> Any:
    import torch

    from kvcore.ops.fusion import TorchFusion
    from kvcore.ops.native import NativeOps

    class FaultyFusion(TorchFusion):
        def __init__(self) -> None:
            self._calls = itertools.count()

        def attend(self, *args: Any) -> Any:
            failing = os.path.exists(os.environ.get("FAULTY_RANK", ""))
            if failing and torch.distributed.get_rank() == 1 and next(self._calls) % 3 == 2:
                raise RuntimeError("no memory on this rank")
            return super().attend(*args)

    class FaultyOps(NativeOps):
        name = "faulty"
        priority = -1

        def copy(self, src: Any, *args: Any, **options: Any) -> None:
            from_arena = len(src.tensors) == 1
            if from_arena and os.path.exists(os.environ.get("FAULTY_OPS", "")):
                raise OSError("a copy that fails, as asked")
            super().copy(src, *args, **options)

        def fusion(self) -> Any:
            return FaultyFusion()

    return FaultyOps()


@hookimpl
def kvcore_ops() -> list[OpsPlugin]:
    return [OpsPlugin("faulty", faulty_ops)]
