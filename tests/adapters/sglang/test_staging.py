"""SGLang's requests whose KV lies on disk: held back until it is staged, late, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kvcore.errors import KVCoreError
from kvcore_sglang.leader import REST_S
from support.sglang import SETTINGS, MHATokenToKVPool, SGLangRig, text


def test_blocks_of_the_disk_are_staged_before_they_are_answered(
    rigs: list[SGLangRig], tmp_path: Path
) -> None:
    disk = {"path": str(tmp_path / "kv"), "capacity": "64MiB"}
    settings = {**SETTINGS, "disk": disk, "sglang": {"prefetch": "wait"}}
    tokens = text(500, 3)
    first = SGLangRig(MHATokenToKVPool(16), 16, settings)
    first.keep(tokens)
    first.close()
    second = SGLangRig(MHATokenToKVPool(1), 1, settings)
    rigs.append(second)
    gain = second.lookup("again", tokens)
    assert gain == 496
    assert second.load("again", tokens, 0, gain)
    assert second.leader.state["requests"]["again"] == {"disk": 496}
    assert second.lookup("host", tokens) == 496
    assert second.load("host", tokens, 0, 496)
    assert second.leader.state["requests"]["host"] == {"host": 496}


FromDisk = Callable[..., SGLangRig]


@pytest.fixture
def from_disk(rigs: list[SGLangRig], tmp_path: Path) -> FromDisk:
    """Makes a rig on whose disk a prompt lies, as another left it."""

    def made(sglang: dict[str, Any], tokens: list[int], **host: Any) -> SGLangRig:
        disk = {"path": str(tmp_path / "kv"), "capacity": "64MiB"}
        host = {**SETTINGS["host"], "policy": "lru", **host}  # it goes when others come
        settings = {**SETTINGS, "host": host, "disk": disk, "sglang": sglang}
        first = SGLangRig(MHATokenToKVPool(1), 1, settings)
        first.keep(tokens)
        first.close()
        second = SGLangRig(MHATokenToKVPool(1), 1, settings)
        rigs.append(second)
        return second

    return made


def held_back(rig: SGLangRig, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Nothing that the worker did is heard of until the returned function is called."""
    poll = rig.worker.poll
    monkeypatch.setattr(rig.worker, "poll", list)
    return lambda: monkeypatch.setattr(rig.worker, "poll", poll)


def ask_once(rig: SGLangRig, rid: str, tokens: list[int]) -> tuple[int, bool]:
    gain = rig.leader.lookup(rid, np.array(tokens), 0, rig.namespace)
    return gain, rig.leader.holds(rid)


def missed(rig: SGLangRig) -> dict[str, float]:
    counted = rig.leader.metrics.snapshot().get("kvcore_misses_total", {})
    return {name: count for name, count in counted.items() if count}


def test_a_request_is_held_back_for_the_disk_and_others_are_not(
    from_disk: FromDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, here = text(500, 30), text(300, 31)
    rig = from_disk({"prefetch": "wait"}, tokens)
    rig.keep(here)
    let_go = held_back(rig, monkeypatch)
    for _ in range(5):
        assert ask_once(rig, "far", tokens) == (0, True)
        assert ask_once(rig, "near", here) == (288, False)
    assert not missed(rig), "what is still to come is not missing"
    rig.leader.ask_anew("far")
    assert not rig.leader.holds("far"), "the engine asked no more: it has the prompt itself"
    let_go()
    rig.settle()
    assert ask_once(rig, "far", tokens) == (496, False)
    assert rig.load("far", tokens, 0, 496)
    assert rig.leader.state["requests"]["far"] == {"disk": 496}


def test_only_an_idle_engine_rests_for_a_request_that_is_held_back(
    from_disk: FromDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = text(500, 34)
    rig = from_disk({"prefetch": "wait"}, tokens)
    let_go = held_back(rig, monkeypatch)
    rested: list[float] = []
    monkeypatch.setattr(rig.worker, "wait_graph", rested.append)
    assert ask_once(rig, "far", tokens) == (0, True)
    assert not rested
    assert rig.leader.holds("far", resting=True)
    assert rested == [REST_S]
    let_go()
    rig.settle()
    assert ask_once(rig, "far", tokens) == (496, False)
    assert not rig.leader.holds("far", resting=True)
    assert rested == [REST_S], "it has no more to wait for"


def test_what_is_late_is_computed_and_found_by_the_next(
    from_disk: FromDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = text(500, 32)
    rig = from_disk({"prefetch": "timeout", "prefetch_timeout_s": 5}, tokens)
    now = 100.0
    monkeypatch.setattr(rig.leader._staging, "_clock", lambda: now)
    let_go = held_back(rig, monkeypatch)
    assert ask_once(rig, "late", tokens) == (0, True)
    now += 4.9
    assert ask_once(rig, "late", tokens) == (0, True)
    now += 0.1
    assert not rig.leader.holds("late"), "held longer than its setting says"
    for _ in range(3):
        assert ask_once(rig, "late", tokens) == (0, False)
    assert missed(rig) == {"pending": 1}, "one request, one miss"
    let_go()
    rig.settle()
    assert ask_once(rig, "next", tokens) == (496, False)


def test_a_request_waits_once_whatever_it_waits_for(
    from_disk: FromDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that come and go again keep nobody waiting for ever."""
    tokens = text(500, 33)
    held = {"prefetch": "timeout", "prefetch_timeout_s": 5}
    rig = from_disk(held, tokens, capacity="240KiB")
    assert 32 <= rig.leader.manager.index.num_slots("host") < 62, "one prompt, and not two"
    now = 100.0
    monkeypatch.setattr(rig.leader._staging, "_clock", lambda: now)
    rounds = 0
    while ask_once(rig, "r", tokens)[1] or rig.leader.holds("r"):
        now += 1.0
        rounds += 1
        assert rounds <= 5
        rig.settle()
        for seed in (2 * rounds, 2 * rounds + 1):  # more than host memory holds
            rig.keep(text(500, 100 + seed))
    assert rounds == 5


def two_on_disk(rigs: list[SGLangRig], tmp_path: Path) -> tuple[SGLangRig, dict[str, list[int]]]:
    """A rig whose disk has two prompts, of which host memory holds one."""
    tokens = {"one": text(500, 50), "two": text(500, 51)}
    settings: dict[str, Any] = {
        "host": {"capacity": "240KiB", "huge_pages": False},
        "disk": {"path": str(tmp_path / "kv"), "capacity": "64MiB"},
        "sglang": {"prefetch": "wait"},
    }
    first = SGLangRig(MHATokenToKVPool(1), 1, settings)
    for prompt in tokens.values():
        first.keep(prompt)
    first.close()
    rig = SGLangRig(MHATokenToKVPool(1), 1, settings)
    rigs.append(rig)
    slots = rig.leader.manager.index.num_slots("host")
    assert 32 <= slots < 62, slots
    return rig, tokens


def test_two_that_do_not_fit_together_come_up_one_after_the_other(
    rigs: list[SGLangRig], tmp_path: Path
) -> None:
    """Side by side each would push out what came for the other, until both were late."""
    rig, tokens = two_on_disk(rigs, tmp_path)
    waiting, rounds = dict(tokens), 0
    while waiting:
        rounds += 1
        assert rounds < 50, f"{list(waiting)} wait for each other"
        asked = {rid: ask_once(rig, rid, prompt) for rid, prompt in waiting.items()}
        rig.settle()
        for rid, (gain, held) in asked.items():
            if not held:
                assert gain == 496, f"{rid} is computed"
                assert rig.load(rid, waiting.pop(rid), 0, gain)
    assert not missed(rig)


@pytest.mark.parametrize("how", ["aborted", "another prompt", "flushed", "too late"])
def test_one_that_goes_makes_room_for_the_next(
    how: str, rigs: list[SGLangRig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, tokens = two_on_disk(rigs, tmp_path)
    now = 100.0
    monkeypatch.setattr(rig.leader._staging, "_clock", lambda: now)
    assert ask_once(rig, "one", tokens["one"]) == (0, True)
    rig.settle()
    for _ in range(3):
        assert ask_once(rig, "two", tokens["two"]) == (0, True)
        rig.settle()
    now += 20
    if how == "aborted":
        rig.leader.ended("one", "abort")
    elif how == "flushed":
        rig.leader.forget_requests()
    elif how == "another prompt":
        assert ask_once(rig, "one", text(40, 52)) == (0, False)
    else:
        now += 5
        assert ask_once(rig, "two", tokens["two"]) == (0, True), "the first is not late yet"
        now += 6
        assert not rig.leader.holds("one")
        rig.leader._asked["two"].wait.since = now  # it came later than the first
    assert ask_once(rig, "two", tokens["two"]) == (0, True)
    rig.settle()
    assert ask_once(rig, "two", tokens["two"]) == (496, False)
    assert rig.load("two", tokens["two"], 0, 496)


def test_best_effort_answers_at_once_and_stages_for_the_next(
    rigs: list[SGLangRig], tmp_path: Path
) -> None:
    disk = {"path": str(tmp_path / "kv"), "capacity": "64MiB"}
    settings = {**SETTINGS, "disk": disk, "sglang": {"prefetch": "best_effort"}}
    tokens = text(500, 3)
    first = SGLangRig(MHATokenToKVPool(1), 1, settings)
    first.keep(tokens)
    first.close()
    second = SGLangRig(MHATokenToKVPool(1), 1, settings)
    rigs.append(second)
    second.lookup("early", tokens)
    second.settle()
    gain = second.lookup("early", tokens)
    assert gain == 496
    assert second.load("early", tokens, 0, gain)


def test_blocks_that_are_evicted_before_they_are_staged_cost_a_miss(
    from_disk: FromDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetching one chunk of a blend may evict the blocks of the next one."""
    tokens = text(500, 3)
    rig = from_disk({"prefetch": "wait"}, tokens)

    def gone(*args: Any, **options: Any) -> None:
        raise KVCoreError("a block is in no tier: match again")

    with monkeypatch.context() as patched:
        patched.setattr(rig.leader.manager, "plan_fetch", gone)
        assert rig.lookup("evicted", tokens) == 0
    assert not rig.leader.disabled
    assert rig.lookup("again", tokens) == 496


def test_a_rotten_block_on_disk_is_computed_again(
    rigs: list[SGLangRig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = {"path": str(tmp_path / "kv"), "capacity": "64MiB"}
    settings = {**SETTINGS, "disk": disk, "sglang": {"prefetch": "wait"}}
    tokens = text(500, 4)
    first = SGLangRig(MHATokenToKVPool(1), 1, settings)
    first.keep(tokens)
    first.close()
    [data] = (tmp_path / "kv").rglob("shard-0.data")
    with data.open("r+b") as file:
        file.seek(20 * 4096 + 100)  # somewhere in the 21st block
        file.write(b"\xa5" * 64)
    second = SGLangRig(MHATokenToKVPool(1), 1, settings)
    rigs.append(second)
    gain = second.lookup("rotten", tokens)
    assert 0 < gain < 496
    assert second.load("rotten", tokens, 0, gain)
    assert second.keep(tokens), "the rest is saved again"
    assert second.lookup("healed", tokens) == 496
    assert second.load("healed", tokens, 0, 496)
