"""The planner where SGLang asks what can be loaded: obeyed when it knows, silent when not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kvcore.manager.load_advisor import LoadAdvisor
from kvcore.telemetry.metrics import MissReason
from kvcore.telemetry.rates import ForwardPart
from kvcore_sglang.fusion_scheduler import Asking
from support.sglang import SETTINGS, MHATokenToKVPool, SGLangRig, text

LENGTH = 496
"""Tokens of the prompt: whole blocks of 16. The engine computes one more."""
PROMPT = text(LENGTH, 3)
PART = 192


class OnDisk:
    """A rig on whose disk `PROMPT` lies, as another left it."""

    def __init__(self, folder: Path, *, planner: bool = True, page: int = 16) -> None:
        disk = {"path": str(folder / "kv"), "capacity": "64MiB"}
        plans = {"planner": {"enabled": planner}, "sglang": {"prefetch": "wait"}}
        settings: dict[str, Any] = {**SETTINGS, **plans, "disk": disk}
        first = SGLangRig(MHATokenToKVPool(page), page, settings)
        first.keep(PROMPT)
        first.close()
        self.rig = SGLangRig(MHATokenToKVPool(page), page, settings)

    @property
    def planning(self) -> LoadAdvisor:
        assert self.rig.planning is not None
        return self.rig.planning

    def teach(self, **seconds: float) -> None:
        """Let 100 tokens take 10 ms to compute, and a megabyte of each tier so many ``seconds``."""
        rates = self.planning.planner.rates
        for n in (1, 2, 3, 4) * 20:
            rates.prefilled([ForwardPart(100 * n, 0)], n * 0.01)
            for tier, each in seconds.items():
                rates.loaded(tier, n * 1_000_000, n * each)

    def ask(self, device: int = 0) -> tuple[int, bool]:
        """Look up once; return the tokens to load, and whether the request is held back."""
        asking = Asking(np.array([*PROMPT, 7]), None, fresh=True)
        gain = self.rig.leader.lookup("r", np.array(PROMPT), device, self.rig.namespace, asking)
        return gain, self.rig.leader.holds("r")

    @property
    def misses(self) -> dict[str, float]:
        counted = self.rig.leader.metrics.snapshot().get("kvcore_misses_total", {})
        return {name: count for name, count in counted.items() if count}


@pytest.fixture
def made(tmp_path: Path, rigs: list[SGLangRig]) -> OnDisk:
    found = OnDisk(tmp_path)
    rigs.append(found.rig)
    return found


@pytest.mark.parametrize("device", [0, 32, 320, 448])
def test_with_unknown_rates_every_answer_is_the_one_without_a_planner(
    made: OnDisk, tmp_path: Path, rigs: list[SGLangRig], device: int
) -> None:
    plain = OnDisk(tmp_path / "other", planner=False)
    rigs.append(plain.rig)
    assert plain.rig.planning is None
    assert made.ask(device) == plain.ask(device) == (0, device < 448)
    gains = {rig.lookup("r", PROMPT, device) for rig in (made.rig, plain.rig)}
    assert gains == {LENGTH - device if device < 448 else 0}


def test_a_slow_disk_is_a_miss_that_names_the_plan_and_holds_nobody(made: OnDisk) -> None:
    made.teach(disk=10.0, host=10.0)
    for _ in range(3):
        assert made.ask() == (0, False)
    assert made.misses == {MissReason.PLANNED.value: 1}
    assert made.rig.leader.manager.in_flight == 0, "nothing comes from the disk"


def test_a_fast_disk_is_loaded_as_ever(made: OnDisk) -> None:
    made.teach(disk=1e-4, host=1e-4)
    gain = made.rig.lookup("r", PROMPT)
    assert gain == LENGTH
    assert made.rig.load("r", PROMPT, 0, gain)
    assert made.misses == {}


@pytest.mark.parametrize("device", [0, 64])
def test_what_is_in_host_memory_is_loaded_and_what_is_behind_it_on_a_slow_disk_computed(
    made: OnDisk, device: int
) -> None:
    part = PROMPT[:PART]
    assert made.rig.lookup("part", part) == PART
    assert made.rig.load("part", part, 0, PART)
    made.teach(disk=10.0, host=1e-4)
    assert made.ask(device) == (PART - device, False)
    assert made.rig.load("r", PROMPT, device, PART - device)
    assert made.misses == {}
    assert made.rig.leader.manager.in_flight == 0


def test_a_request_waits_no_longer_than_its_plan(
    made: OnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least a quarter of a second. Without rates it waits for the deadline of loads."""
    now = 100.0
    monkeypatch.setattr(made.rig.leader._staging, "_clock", lambda: now)
    monkeypatch.setattr(made.rig.worker, "poll", list)  # nobody hears that the blocks have come
    launched: list[float | None] = []
    launch = made.rig.leader.manager.launch

    def note(planned: Any, *args: Any, **more: Any) -> Any:
        launched.append(planned.graph.deadline_s)
        return launch(planned, *args, **more)

    monkeypatch.setattr(made.rig.leader.manager, "launch", note)
    made.teach(disk=1e-4, host=1e-4)
    assert made.ask() == (0, True)
    assert launched == [0.25]
    now += 0.2
    assert made.ask() == (0, True)
    now += 0.1
    assert made.ask() == (0, False)


def test_forwards_and_loads_teach_the_planner(tmp_path: Path, rigs: list[SGLangRig]) -> None:
    settings = {**SETTINGS, "planner": {"enabled": True}}
    rig = SGLangRig(MHATokenToKVPool(16), 16, settings, timed=True)
    rigs.append(rig)
    rig.keep(PROMPT)
    assert rig.planning is not None
    request = rig.planning.ask(
        rig.leader.manager.get_match([], rig.namespace.digest), LENGTH + 1, 0
    )
    assert rig.planning.planner.ways(request).unmeasured
    for number in range(3):
        assert rig.load(f"r{number}", PROMPT, 0, rig.lookup(f"r{number}", PROMPT))
    for number in range(3):
        with rig.worker.forward([ForwardPart(100 + number, 0)]):
            pass
    assert rig.leader.state["in_flight"] == 0
    assert not rig.planning.planner.ways(request).unmeasured
