"""What SGLang's leader tells of requests: where their KV lay, what loads took and saved."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kvcore.explain.file import read_records
from kvcore.telemetry.rates import ForwardPart
from kvcore_sglang.gate import LayerGate
from support.sglang import SETTINGS, MHATokenToKVPool, SGLangRig, text


def told(rig: SGLangRig, folder: Path) -> dict[str, dict[str, Any]]:
    """Records by request; none but the last of each name."""
    rig.close()
    found = list(read_records(folder))
    assert len({record["request"] for record in found}) == len(found), "one was written twice"
    return {record["request"]: record for record in found}


def test_each_request_is_told_once_with_where_its_kv_lay(tmp_path: Path) -> None:
    disk = {"path": str(tmp_path / "kv"), "capacity": "64MiB"}
    records = tmp_path / "records"
    settings = {
        **SETTINGS,
        "disk": disk,
        "sglang": {"prefetch": "wait"},
        "explain": {"path": str(records)},
    }
    tokens = text(500, 3)
    first = SGLangRig(MHATokenToKVPool(1), 1, settings)
    assert first.lookup("cold", tokens) == 0
    first.keep(tokens)
    first.leader.ended("cold", "stop")
    assert told(first, records)["cold"]["misses"] == [{"cause": "never seen"}]
    rig = SGLangRig(MHATokenToKVPool(1), 1, settings)
    gain = rig.lookup("disk", tokens)
    assert rig.load("disk", tokens, 0, gain)
    rig.lookup("disk", tokens, 496)  # it goes on behind what was loaded
    rig.leader.ended("disk", "stop")
    rig.leader.ended("disk", "stop")
    gain = rig.lookup("host", tokens)
    assert rig.load("host", tokens, 0, gain)
    rig.leader.ended("host", "length")
    other = rig.leader.namespaces.of("", "tenant")
    assert rig.leader.lookup("tenant", np.array(tokens), 0, other) == 0
    rig.leader.ended("tenant", "abort")
    assert rig.lookup("short", tokens[:40]) == 0
    rig.leader.ended("short", "stop")
    found = told(rig, records)
    assert found["disk"]["matched"] == [{"tier": "disk", "tokens": [0, 496]}]
    assert found["disk"]["loaded"] == {"disk": 496}
    assert (found["disk"]["outcome"], found["disk"]["misses"]) == ("stop", [])
    assert list(found["disk"]["ms"]) == ["lookup", "load", "rest"]
    assert found["host"]["loaded"] == {"host": 496}
    assert found["host"]["outcome"] == "length"
    assert found["tenant"]["misses"] == [{"cause": "other namespace", "differed": ["cache_salt"]}]
    assert "too short" in [miss["cause"] for miss in found["short"]["misses"]]
    unknown = found["host"]["otherwise"]["unknown"]
    assert "prefill: this engine's forwards are not timed" in unknown
    assert "nothing was found to load" in found["tenant"]["otherwise"]["unknown"]


def test_a_load_that_failed_and_one_that_is_gone_are_told(tmp_path: Path) -> None:
    settings = {**SETTINGS, "explain": {"path": str(tmp_path)}}
    rig = SGLangRig(MHATokenToKVPool(1), 1, settings)
    tokens = text(320, 4)
    rig.keep(tokens)
    gain = rig.lookup("failed", tokens)
    assert rig.load("failed", tokens, 0, gain)
    rig.leader.refuse(["failed"])
    assert rig.lookup("failed", tokens) == 0
    rig.leader.ended("failed", "stop")
    gain = rig.lookup("gone", tokens)
    assert gain == 320
    rig.leader.manager.clear()
    assert not rig.load("gone", tokens, 0, gain)
    rig.leader.ended("gone", "stop")
    assert rig.lookup("evicted", tokens) == 0
    rig.leader.ended("evicted", "stop")
    found = told(rig, tmp_path)
    for name in ("failed", "gone"):
        assert found[name]["failures"] == 1
        assert found[name]["misses"][-1] == {"cause": "failed"}
        assert found[name]["loaded"] == {}
    [miss] = found["evicted"]["misses"]
    assert (miss["cause"], miss["tier"]) == ("evicted", "host")


def test_loads_are_estimated_by_what_they_took(tmp_path: Path) -> None:
    rig = SGLangRig(MHATokenToKVPool(1), 1, {**SETTINGS, "explain": {"path": str(tmp_path)}})
    texts = [text(320, seed) for seed in range(30, 35)]
    for tokens in texts:
        rig.keep(tokens)
    for n, tokens in enumerate(texts):
        assert rig.load(str(n), tokens, 0, rig.lookup(str(n), tokens))
        rig.leader.ended(str(n), "stop")
    found = told(rig, tmp_path)
    assert found["0"]["otherwise"]["loading_ms"] is None
    assert found["4"]["otherwise"]["loading_ms"] > 0
    assert found["4"]["otherwise"]["unknown"] == ["prefill: this engine's forwards are not timed"]
    assert found["4"]["otherwise"]["load_all_ms"] is None


def saved(rig: SGLangRig) -> dict[str, float]:
    """Seconds to the first token, of requests that loaded: expected as they were, and otherwise."""
    return dict(rig.leader.metrics.snapshot().get("kvcore_expected_ttft_seconds_total", {}))


def forwards(rig: SGLangRig, *rows: int) -> None:
    gate = LayerGate(rig.worker, layers=2, layerwise=True)
    for count in rows:
        with gate.around_forward([ForwardPart(count, 0)]):
            pass


def test_what_loads_save_is_counted_where_forwards_were_timed(rigs: list[SGLangRig]) -> None:
    """With no record of requests: from when prefill and loads were measured, and once each."""
    rig = SGLangRig(MHATokenToKVPool(1), 1, SETTINGS, timed=True)
    rigs.append(rig)
    texts = [text(320, seed) for seed in range(50, 60)]
    for tokens in texts:
        rig.keep(tokens)

    def answer(n: int) -> None:
        assert rig.load(str(n), texts[n], 0, rig.lookup(str(n), texts[n]))
        rig.lookup(str(n), texts[n], 320)  # it goes on behind what was loaded
        rig.leader.ended(str(n), "stop")

    for n in range(4):
        answer(n)
    assert not saved(rig), "prefill is a guess"
    forwards(rig, 100, 200, 300)
    answer(4)
    once = saved(rig)
    assert once["recompute"] > 0
    assert once["load"] > 0
    rig.leader.ended("4", "stop")
    assert saved(rig) == once
    answer(5)
    assert saved(rig)["recompute"] > once["recompute"]
    before = saved(rig)
    rig.load("6", texts[6], 0, rig.lookup("6", texts[6]))
    rig.leader.refuse(["6"])
    rig.leader.ended("6", "stop")
    assert saved(rig) == before, "it was computed"


def test_nothing_is_counted_where_forwards_are_not_timed(rigs: list[SGLangRig]) -> None:
    rig = SGLangRig(MHATokenToKVPool(1), 1, SETTINGS)
    rigs.append(rig)
    forwards(rig, 100, 200, 300, 400)
    tokens = text(320, 60)
    rig.keep(tokens)
    for n in range(5):
        assert rig.load(str(n), tokens, 0, rig.lookup(str(n), tokens))
        rig.leader.ended(str(n), "stop")
    assert not saved(rig)
    assert rig.worker.take_forwards() == []


def test_a_forward_that_waits_or_decodes_is_not_timed(rigs: list[SGLangRig]) -> None:
    rig = SGLangRig(MHATokenToKVPool(1), 1, SETTINGS, timed=True)
    rigs.append(rig)
    tokens = text(320, 61)
    rig.keep(tokens)
    slots = rig.slots(rig.lookup("waits", tokens))
    gate = LayerGate(rig.worker, layers=2, layerwise=True)
    index = gate.start(rig.leader.load("waits", slots).graphs)
    for consumer, parts in (
        (index, [ForwardPart(500, 0)]),  # in step with its loads
        (-1, []),  # nobody knows what it is
        (-1, [ForwardPart(1, 400)] * 200),
    ):
        gate.set_consumer(consumer)
        with gate.around_forward(parts):
            gate.wait_until(0)
    assert gate.finish(index)
    assert rig.worker.take_forwards() == []
    timed = [ForwardPart(40, 16), ForwardPart(1, 400)]
    with gate.around_forward(timed):
        pass
    [(parts, seconds)] = rig.worker.take_forwards()
    assert parts == timed
    assert seconds > 0
    with contextlib.suppress(RuntimeError), gate.around_forward(timed):
        raise RuntimeError("half a forward")
    assert rig.worker.take_forwards() == []
