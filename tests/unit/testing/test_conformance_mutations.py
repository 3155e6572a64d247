"""The kit itself: adapters with one mistake each, planted in the reference engine, are caught.

Each mistake is tried on the cases that must see it, and the sound engine passes the same cases in
`tests/unit/testing/test_conformance.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec import structs

pytest.importorskip("transformers")

from kvcore.connector.control import RequestControl
from kvcore.connector.page_table import Paging
from kvcore.fusion import ops
from kvcore.manager.base import Lane
from kvcore.memory.layout import KVView
from kvcore.model.keys import Namespace
from kvcore.model.spec import ModelDescription
from kvcore.testing.conformance import CASES, Driver, Kit, find_driver
from kvcore.testing.conformance.reference import ReferenceDriver
from kvcore.testing.engine import ReferenceEngine, Request
from kvcore.testing.engine.fusing import RankBlender
from kvcore.testing.engine.leader import Leader, Lookup
from kvcore.testing.engine.model import RankModel
from kvcore.testing.engine.transport import DirectTransport
from kvcore.transfer.graph import SKIP, OpReport, Priority, TransferGraph, UnitTable
from kvcore.transfer.graph import Path as Direction
from kvcore.worker import worker as kvcore_worker  # after the skip

pytestmark = pytest.mark.engine

# --- the mistakes -----------------------------------------------------------------------------


class SlotOffByOne(Leader):
    """Loads go one slot too far."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._paging = _Shifted(self._model.groups, 8, no_page=-1)


class _Shifted(Paging):
    def units(
        self, pages: Any, start: int, stop: int, from_token: int = 0, point: Any = None
    ) -> list[UnitTable]:
        tables = super().units(pages, start, stop, from_token, point)
        return [UnitTable.of(_moved(t.array()), t.unit_tokens) for t in tables]

    def whole_units(
        self, pages: Any, start: int, stop: int, point: Any = None
    ) -> list[UnitTable] | None:
        return super().units(pages, start, stop, point=point)


def _moved(units: Any) -> Any:
    moved = units.copy()
    moved[units != SKIP] += 1
    return moved


class EarlyPublish(DirectTransport):
    """A save is reported as done when it is submitted; the copy takes its time."""

    def submit(self, graph: TransferGraph, lane: Lane | None = None) -> None:
        super().submit(graph, lane)
        if graph.priority is Priority.SAVE:
            self._whole += [OpReport(graph.graph_id, op.op_id) for op in graph.ops]

    def _take(self, report: OpReport) -> None:
        if (report.graph_id, report.op_id) not in self._told:
            super()._take(report)

    def poll(self) -> Sequence[OpReport]:
        reports = super().poll()
        self._told.update((report.graph_id, report.op_id) for report in reports)
        return reports

    def __init__(self, workers: Any) -> None:
        super().__init__(workers)
        self._told: set[tuple[int, int]] = set()


class MissingSalt(Leader):
    """Tenants share a namespace."""

    def namespace_of(self, request: Request) -> Namespace:
        return self.namespaces.of()


class MissingLora(Leader):
    """KV is found whatever LoRA weights it was made with."""

    def namespace_of(self, request: Request) -> Namespace:
        return self.namespaces.of(salt=request.salt)


class DeafToLoads(Leader):
    """A request is loaded whatever it asks."""

    def lookup(self, request: Request, computed: int) -> Lookup | None:
        tracked = self._track(request)
        if not tracked.control.error:
            tracked.control = RequestControl(True, *structs.astuple(tracked.control)[1:])
        return super().lookup(request, computed)


class DeafToSaves(Leader):
    """A request is saved whatever it asks."""

    def save(self, request: Request) -> None:
        self._track(request).control = RequestControl()
        super().save(request)


class OneFingerprint(ReferenceEngine):
    """Every model is taken for the same one."""

    def describe(self, block_tokens: int) -> ModelDescription:
        return replace(super().describe(block_tokens), fingerprint=bytes(16))


class LayersSwapped(ReferenceEngine):
    """The first two layers are told to kvcore in each other's place: alone it never notices."""

    def view(self, part: RankModel) -> KVView:
        first, second, *rest = range(self.model.spec.layers)
        return super().view(part).select_layers([second, first, *rest])


class OthersLayers(ModelDescription):
    """Each pipeline stage is taken to hold the other's layers."""

    def layer_range(self, rank: int) -> tuple[int, int]:
        return super().layer_range(self.world_size - 1 - rank)


class OthersHeads(ModelDescription):
    """Each rank is taken to hold the heads one further on."""

    def head_range(self, rank: int) -> tuple[int, int]:
        return super().head_range((rank + 1) % self.world_size)


def described_as(kind: type[ModelDescription]) -> type[ReferenceEngine]:
    class Mistaken(ReferenceEngine):
        def describe(self, block_tokens: int) -> ModelDescription:
            right = super().describe(block_tokens)
            parts = (right.shape, right.groups, right.fingerprint, right.world_size)
            return kind(*parts, stages=right.stages)

    return Mistaken


class UnrotatedKeys(RankBlender):
    """K of a chunk stays as it was computed, wherever the chunk now stands."""

    def ropes(self) -> Sequence[Any]:
        return [None] * self._model.model.spec.layers


def planted(engine: type[ReferenceEngine] = ReferenceEngine, **parts: Any) -> Driver:
    class Broken(engine):  # type: ignore[valid-type, misc]
        pass

    for name, part in parts.items():
        setattr(Broken, name, part)

    class BrokenDriver(ReferenceDriver):
        engine_type: ClassVar[type[ReferenceEngine]] = Broken

    return BrokenDriver()


CAUGHT = r"differ|oracle|were stored|wrote|another model|\{0: 0"
"""What a case says of a wrong answer or a wrong count."""


# --- caught -----------------------------------------------------------------------------------


@pytest.fixture
def fails(tmp_path: Path) -> Callable[..., None]:
    """Asserts that a case fails on a driver, as a wrong answer or a wrong count."""

    def check(driver: Driver, name: str, partners: Sequence[Driver] = ()) -> None:
        [case] = [one for one in CASES if one.name == name]
        with Kit(driver, tmp_path, partners=partners) as kit:
            assert not case.lacks(kit)
            with pytest.raises(
                AssertionError,
                match=r"differ|oracle|were stored|wrote|another model|\{0: 0|to be computed|saved",
            ):
                case.run(kit)

    return check


@pytest.fixture
def slow_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    run = kvcore_worker.DeviceCopy.run

    def slow(self: Any, graph: Any, op: Any, rows: list[int]) -> Any:
        if op.path is Direction.D2H:
            time.sleep(2.0)  # longer than the answer takes to come
        return run(self, graph, op, rows)

    monkeypatch.setattr(kvcore_worker.DeviceCopy, "run", slow)


def test_a_slot_off_by_one(fails: Callable[..., None]) -> None:
    fails(planted(leader_type=SlotOffByOne), "small-blocks")


@pytest.mark.usefixtures("slow_saves")
def test_blocks_published_before_they_are_written(fails: Callable[..., None]) -> None:
    fails(planted(transport_type=EarlyPublish), "asked-again-at-once")


def test_a_salt_that_is_left_out(fails: Callable[..., None]) -> None:
    fails(planted(leader_type=MissingSalt), "salts-kept-apart")


def test_lora_weights_that_are_left_out(fails: Callable[..., None]) -> None:
    fails(planted(leader_type=MissingLora), "lora-kept-apart")


@pytest.mark.parametrize("leader", [DeafToLoads, DeafToSaves])
def test_wishes_that_are_not_heard(fails: Callable[..., None], leader: type[Leader]) -> None:
    fails(planted(leader_type=leader), "as-the-request-asks")


@pytest.mark.parametrize("case", ["another-rope-is-apart", "another-revision-is-apart"])
def test_models_that_are_not_told_apart(fails: Callable[..., None], case: str) -> None:
    fails(planted(OneFingerprint), case)


@pytest.mark.parametrize("case", ["reads-what-others-wrote", "others-read-what-it-wrote"])
def test_two_layers_swapped(fails: Callable[..., None], case: str) -> None:
    fails(planted(LayersSwapped), case, [find_driver("reference")])


@pytest.mark.parametrize("kind", [OthersLayers, OthersHeads])
def test_ranks_that_are_told_wrong_parts(
    fails: Callable[..., None], kind: type[ModelDescription]
) -> None:
    fails(planted(described_as(kind)), "another-number-of-stages")


def test_keys_that_are_not_rotated(fails: Callable[..., None]) -> None:
    fails(planted(blender_type=UnrotatedKeys), "as-the-oracle")


@pytest.mark.parametrize(
    "case", ["as-the-oracle", "everything-recomputed", "no-row-sees-the-future"]
)
def test_a_row_that_sees_the_token_after_it(
    fails: Callable[..., None], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = ops.attend_rows

    def leaking(q: Any, positions: Any, keys: Any, values: Any, attention: Any) -> Any:
        return sound(q, (positions + 1).clamp_max(len(keys) - 1), keys, values, attention)

    monkeypatch.setattr(ops, "attend_rows", leaking)
    fails(find_driver("reference"), case)
