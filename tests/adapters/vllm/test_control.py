"""What a request asks of kvcore, in vLLM's scheduler side: its loads, its saves, its answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcore.connector.control import RequestControl
from kvcore.index.policy import EveryPoint
from kvcore.model.keys import KeyChain
from kvcore.model.points import PointShape, StateGroup
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore_vllm.saves import Saves
from kvcore_vllm.tracked import Tracked
from support.vllm_leader import BLOCK, PROMPT, LeaderRig, request

PAGES = [np.arange(1, 27).tolist()]
CONTROLLED = "kvcore_request_controls_total"


def asking(rig: LeaderRig, name: str, asked: Any, salt: str | None = None) -> Any:
    """A request for ``PROMPT``, whose KV is all computed when it ends."""
    made = request(name)
    made.kv_transfer_params = {"kvcore": asked}
    made.cache_salt = salt
    made.num_computed_tokens, made.get_finished_reason = len(PROMPT), lambda: "stop"
    rig.requests[name] = made
    return made


def serve(rig: LeaderRig, name: str) -> tuple[Any, Any]:
    """From its lookup to its end. Return what the lookup gave and what the client is told."""
    found = rig.ask(name)
    blocks: Any = SimpleNamespace(get_block_ids=lambda: PAGES)
    rig.side.update_state_after_alloc(rig.requests[name], blocks, 0)
    told = rig.side.request_finished(rig.requests[name], PAGES)
    for graph in rig.side._plan.early_saves:
        rig.end(graph)
    rig.side._plan.early_saves.clear()
    return found, told


def held(rig: LeaderRig, salt: str) -> int:
    chain = KeyChain(rig.side.namespaces.of("", salt), BLOCK)
    chain.extend(PROMPT)
    return rig.manager.get_match(chain.keys, chain.namespace.digest).depth


def counted(rig: LeaderRig, name: str) -> dict[str, Any]:
    return rig.side.metrics.snapshot().get(name, {})


def test_a_request_that_asks_for_no_load_is_computed() -> None:
    rig = LeaderRig()
    asking(rig, "r", {"load": False})
    assert rig.ask("r") == (0, False)
    assert not counted(rig, "kvcore_misses_total"), "it waits, and is looked up again"
    found, told = serve(rig, "r")
    assert found == (0, False)
    assert told["kvcore"] == {"asked": {"load": False}, "reused_tokens": 0, "tiers": {}}
    assert counted(rig, "kvcore_misses_total") == {"asked": 1}
    assert counted(rig, "kvcore_lookup_tokens_total") == {"miss|": len(PROMPT)}
    assert counted(rig, CONTROLLED) == {"load|followed": 1}, "counted at each lookup"
    assert rig.ask("other")[0] == 400, "it was saved, and others are loaded"


@pytest.mark.parametrize(
    ("asked", "blocks"),
    [
        ({}, 25),
        ({"load": False}, 25),
        ({"save": False}, 0),
        ({"save_tokens": 0}, 0),
        ({"save_tokens": 15}, 0),
        ({"save_tokens": 16}, 1),
        ({"save_tokens": 100}, 6),
        ({"save_tokens": 10_000}, 25),
        ({"save_tokens": 100, "save": False}, 0),
        ({"save_tokens": "100"}, 0),
        ("no table", 0),
    ],
)
def test_no_more_is_saved_than_was_asked_for(asked: Any, blocks: int) -> None:
    rig = LeaderRig()
    asking(rig, "r", asked, salt="new")
    serve(rig, "r")
    assert held(rig, "new") == blocks


def test_a_client_is_told_why_its_request_was_computed_without_kvcore() -> None:
    """Whatever its tenant may have of a report: it is about nobody else."""
    rig = LeaderRig(settings={"clients": {"report": "off"}})
    asking(rig, "r", {"save": "no", "report": True})
    found, told = serve(rig, "r")
    assert found == (0, False)
    assert list(told["kvcore"]) == ["asked"]
    assert "kvcore.save is 'no'" in told["kvcore"]["asked"]["error"]
    assert counted(rig, "kvcore_misses_total") == {"unreadable": 1}
    asking(rig, "s", {"report": True})
    assert serve(rig, "s")[1] is None


def test_parameters_that_are_no_table_ask_for_nothing() -> None:
    rig = LeaderRig()
    asking(rig, "r", {})
    rig.requests["r"].kv_transfer_params = "kvcore"
    assert rig.ask("r") == (400, True)


@pytest.mark.parametrize(("most", "points"), [(None, [64, 128]), (127, [64]), (63, [])])
def test_a_resume_point_behind_what_may_be_saved_is_left(
    most: int | None, points: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with states is stored up to its points: none stands behind the tokens asked for."""
    groups = (LayerGroup(0, 64, (0,)), LayerGroup(1, 64, (1,), of="states"))
    shape = BlockShape(1, 2, 64, BLOCK, "float16")
    point = PointShape((StateGroup(1, ("state",), 64),), shape.nbytes, 64 // BLOCK)
    model = ModelDescription(shape, groups, b"f" * 32, 1, point=point)
    monkeypatch.setattr("support.vllm_leader.MODEL", model)
    saved: list[int] = []

    def save(self: Any, tracked: Tracked, blocks: int, *more: Any) -> None:
        saved.append(blocks * BLOCK)

    monkeypatch.setattr(Saves, "_blocks", save)
    rig = LeaderRig()
    rig.side._points = EveryPoint()  # what may be saved is asked here, not what is worth it
    asking(rig, "r", {})
    rig.ask("r")
    tracked = rig.side._requests["r"]
    tracked.control = RequestControl(save_tokens=most)
    offered = {"r": [(1, 5, 64), (1, 6, 128)]}
    state = SimpleNamespace(boundary_state_offloads=offered, get_block_ids=lambda name: PAGES)
    output: Any = SimpleNamespace(kv_connector_block_state=state)
    rig.side._saves._states(output, lambda graph: None)
    assert saved == points
