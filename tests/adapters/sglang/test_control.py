"""What a request asks of kvcore on SGLang, where the tree takes KV and not a request."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvcore.connector.control import ControlReader, RequestControl  # noqa: E402
from kvcore.telemetry.metrics import Metrics  # noqa: E402
from kvcore_sglang import hooks  # noqa: E402
from kvcore_sglang.messages import Order  # noqa: E402
from support.sglang import SETTINGS, MHATokenToKVPool, SGLangRig, text  # noqa: E402


def req(asked: Any, rid: str = "r") -> Any:
    given = asked if isinstance(asked, str) else json.dumps(asked)
    params = SimpleNamespace(custom_params={"kvcore": given})
    return SimpleNamespace(rid=rid, sampling_params=params)


LINKER: list[Any] = []
"""`KVCoreLinker`, for the test that runs."""


@pytest.fixture(autouse=True)
def linker(linker_class: Any) -> None:
    LINKER[:] = [linker_class]


def linker_of(rig: SGLangRig | None) -> Any:
    linker = object.__new__(LINKER[0])
    metrics = Metrics() if rig is None else rig.leader.metrics
    linker._controls, linker._saving = ControlReader(metrics), None
    return linker


def rig_of(rigs: list[SGLangRig], **settings: Any) -> SGLangRig:
    rig = SGLangRig(MHATokenToKVPool(16), 16, {**SETTINGS, **settings})
    rigs.append(rig)
    return rig


def lookup(rig: SGLangRig, rid: str, tokens: list[int], asked: Any) -> int:
    control = linker_of(rig).control_of(req(asked, rid))
    return rig.leader.lookup(rid, np.array(tokens), 0, rig.namespace, control=control)


@pytest.mark.parametrize(
    ("asked", "reason"), [({"load": False}, "asked"), ({"load": "no"}, "unreadable")]
)
def test_a_request_that_asks_for_no_load_is_computed(
    rigs: list[SGLangRig], asked: Any, reason: str, tmp_path: Any
) -> None:
    rig = rig_of(rigs, explain={"path": str(tmp_path)})
    tokens = text(320, 1)
    rig.keep(tokens)
    assert rig.lookup("other", tokens) == 320
    for _ in range(3):
        assert lookup(rig, "r", tokens, asked) == 0
        assert not rig.leader.holds("r")
    assert rig.leader.load("r", rig.slots(320)).empty
    counted = rig.leader.metrics.snapshot()
    assert counted["kvcore_misses_total"] == {reason: 1}, "it is looked up while it waits"
    journal = rig.leader.recorder.journal
    assert journal is not None
    record = journal.get("r")
    assert record is not None
    assert record.as_dict(for_client=True)["asked"]
    assert record.misses[-1].cause.value.startswith("the request")
    assert lookup(rig, "again", tokens, {"save": False}) == 320


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, 304),
        ({"save": False}, 0),
        ({"save_tokens": 15}, 0),
        ({"save_tokens": 100}, 96),
        ({"save_tokens": 9999}, 304),
        ({"save_tokens": []}, 0),
    ],
)
def test_no_more_of_an_insert_is_saved_than_its_request_asks(
    rigs: list[SGLangRig], asked: Any, found: int
) -> None:
    rig = rig_of(rigs)
    tokens = text(304, 2)
    slots = rig.slots(304)
    rig.compute(tokens, slots)
    offer = rig.leader.offer()
    control = linker_of(rig).control_of(req(asked))
    order = rig.leader.inserted(np.array(tokens), rig.namespace, slots, [offer], control)
    rig.worker.carry_out(order)
    rig.settle()
    assert rig.leader.done_offers() == 1, "the tree would keep its pages locked"
    rig.leader.take_offer()
    assert rig.lookup("r", tokens) == found


def test_a_request_is_read_once(rigs: list[SGLangRig]) -> None:
    rig = rig_of(rigs)
    linker, asked = linker_of(rig), req({"save": False})
    assert linker.control_of(asked) is linker.control_of(asked)
    counted = rig.leader.metrics.snapshot()["kvcore_request_controls_total"]
    assert counted == {"save|followed": 1}


class Saver:
    """A linker, as far as the hook around a checkpoint sees it."""

    wants_inserts = True

    def __init__(self) -> None:
        self.saving: Any = lambda req: self.calls.append(req)
        self.calls: list[Any] = []


@pytest.mark.parametrize("fails", [False, True])
def test_the_linker_knows_whose_kv_the_tree_takes(fails: bool) -> None:
    linker, asked = Saver(), req({})
    cache = SimpleNamespace(linker=SimpleNamespace(cache_linker=linker))

    def checkpoint(cache: Any, req: Any, *, up_to: int) -> str:
        assert linker.calls == [req]
        if fails:
            raise RuntimeError("SGLang's own")
        return f"up to {up_to}"

    if fails:
        with pytest.raises(RuntimeError, match="own"):
            hooks.around_checkpoint(checkpoint, cache, asked, up_to=7)
    else:
        assert hooks.around_checkpoint(checkpoint, cache, asked, up_to=7) == "up to 7"
    assert linker.calls == [asked, None], "what comes next is not its KV"
    other = SimpleNamespace(linker=None)
    assert hooks.around_checkpoint(lambda c, r, up_to: up_to, other, asked, up_to=9) == 9


def test_an_insert_of_no_known_request_is_saved_whole(rigs: list[SGLangRig]) -> None:
    """The wish of the request that is named counts, and no wish where none is."""
    rig, linker = rig_of(rigs), linker_of(None)
    seen: list[RequestControl] = []
    leader: Any = SimpleNamespace(inserted=lambda *more: seen.append(more[-1]) or Order())
    linker._parts = rig
    linker._namespace = lambda *_: rig.namespace
    linker._tokens = lambda key: np.arange(32)
    for known in (None, req({"save": False}), None):
        linker.saving(known)
        linker._inserted(leader, None, torch.arange(32), [])
    assert [control.saves_all for control in seen] == [True, False, True]


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("asked", [{}, {"save": False}, {"save_tokens": 9}, {"save": 1}])
def test_without_the_hook_such_a_request_stays_out_of_the_tree(
    asked: Any, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "fit", lambda of: fits if of is hooks.SAVE_HOOKS else True)
    assert linker_of(None).keeps_out(req(asked)) == (bool(asked) and not fits)


@pytest.mark.parametrize("out", [True, False])
def test_what_is_kept_out_is_barred_before_it_is_looked_up(out: bool) -> None:
    linker = SimpleNamespace(
        wants_inserts=True, vocabulary=1000, stages=False, keeps_out=lambda req: out
    )
    cache = SimpleNamespace(linker=SimpleNamespace(cache_linker=linker))
    made = SimpleNamespace(
        rid="r", origin_input_ids=[1], skip_radix_cache_insert=False, multimodal_inputs=None
    )

    class Scheduler:
        tree_cache, waiting_queue = cache, [made]

    scheduler, message = Scheduler(), SimpleNamespace(rid="r")
    hooks.around_handle_generate_request(lambda s, m: None, scheduler, message)
    assert made.skip_radix_cache_insert is out
