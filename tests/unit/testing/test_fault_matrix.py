"""Every fault at every seam, on the reference engine: answers stay those of the engine without
kvcore, come in time, and nothing is left over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcore.config import load_config
from kvcore.harness.prompts import words
from kvcore.testing.engine import EngineArgs, Llama, ReferenceEngine
from kvcore.testing.faults import FITS, Fault, Faults, FaultyStore, Rule, Seam
from kvcore.testing.faults.engine import faulty_engine, held, nothing_left
from kvcore.tiers.remote import memory
from kvcore.tiers.remote.memory import MemoryStore

pytestmark = pytest.mark.slow

ANSWER = 4
IN_TIME_S = 50.0
"""Hangs end at 60 s: what took less did not wait for one. The machine may be busy."""
FOR_EVER = 1000.0

CANNOT = {
    (Seam.SUBMIT, Fault.LOST): "graphs go by a call, or with the engine's own messages",
    (Seam.REPORT, Fault.LOST): "reports come by a call, or with the engine's own messages",
    (Seam.SUBMIT, Fault.HANG): "the engine's own thread",
    (Seam.CANCEL, Fault.HANG): "the engine's own thread",
    (Seam.INVALIDATE, Fault.HANG): "the engine's own thread",
    (Seam.REPORT, Fault.HANG): "the engine's own thread",
}
"""Cells that there are not, and why. Killed processes are in test_crash.py."""

STORE_SEAMS = {Seam.STORE_GET, Seam.STORE_PUT, Seam.STORE_EXISTS}
NO_WAY_OUT = {Seam.LOAD, Seam.SAVE, Seam.DEVICE}
"""A copy to or from the engine's pages is waited for, whatever it takes: its memory is in use."""
IN_STEP = {Seam.LOAD, Seam.SAVE, Seam.DEVICE, Seam.SUBMIT, Seam.REPORT}
"""Seams that loads from host memory pass too, layer by layer while the forward runs: both ways."""


def cells() -> list[tuple[Seam, Fault]]:
    every = [(seam, fault) for seam in Seam for fault in Fault if fault in FITS[seam]]
    return [cell for cell in every if cell not in CANNOT and cell[1] is not Fault.KILL]


def prompts() -> list[list[int]]:
    """Some share a beginning."""
    shared = words(0, 64)
    return [words(1, 150), shared + words(2, 60), shared + words(3, 90), words(4, 33)]


@pytest.fixture(scope="module")
def right(model: Llama) -> list[list[int]]:
    with ReferenceEngine(model, EngineArgs(num_pages=128, prefix_cache=False)) as engine:
        return engine.generate(prompts(), ANSWER)


def settings(folder: Path, seam: Seam, in_step: bool, to_device: str = "off") -> dict[str, Any]:
    """Host memory for some of the prompts only, a tier below it, and short deadlines."""
    below: dict[str, Any] = {
        "disk": {
            "path": str(folder),
            "capacity": "16MiB",
            "sync_interval_s": 0.01,
            "to_device": to_device,
        }
    }
    if seam in STORE_SEAMS:
        options = {"name": str(folder), "lookup_s": 0.3, "deadline_s": 0.3, "retries": 1}
        below = {
            "tiers": {"shelf": {"plugin": "memory-store", "capacity": "16MiB", "options": options}}
        }
    return {
        "host": {"capacity": "192KiB", "huge_pages": False},
        "transfer": {
            "load_deadline_s": 0.4,
            "sync_load_max": "1GiB" if in_step else 0,
            "batch_blocks": 2,
        },
        "log": {"level": "error"},
        **below,
    }


def rule(seam: Seam, fault: Fault) -> Rule:
    """What hangs, hangs for ever where that can be survived. Half of the points go wrong."""
    if fault is Fault.HANG:
        skip, seconds = int(seam is not Seam.STORE_EXISTS), 1.0 if seam in NO_WAY_OUT else FOR_EVER
        return Rule(fault, seam, skip=skip, limit=1, seconds=seconds)
    seconds = {Fault.LATENCY: 0.02, Fault.CLOCK_JUMP: 5.0}.get(fault, 0.0)
    return Rule(fault, seam, rate=0.5, seconds=seconds)


@pytest.fixture
def start(
    model: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ReferenceEngine]]:
    """Engines over the folder; nothing may be left of them."""
    made: list[tuple[ReferenceEngine, Faults]] = []

    def build(faults: Faults, seam: Seam, in_step: bool, to_device: str = "off") -> ReferenceEngine:
        config = load_config(None, settings(tmp_path / "kv", seam, in_step, to_device))
        engine = faulty_engine(model, EngineArgs(num_pages=64), config, faults)
        made.append((engine, faults))
        return engine

    with nothing_left():
        yield build
        for engine, faults in made:
            faults.clear()
            engine.close()


def ask(engine: ReferenceEngine, right: Sequence[Sequence[int]]) -> None:
    """All prompts, in time and right."""
    engine.forget()
    started = time.monotonic()
    assert engine.generate(prompts(), ANSWER) == right
    assert time.monotonic() - started < IN_TIME_S


@pytest.mark.parametrize(("seam", "fault"), cells(), ids=lambda value: value.value)
def test_cell(
    seam: Seam,
    fault: Fault,
    start: Callable[..., ReferenceEngine],
    right: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = Faults(seed=len(seam.value) + len(fault.value))
    store = FaultyStore(MemoryStore(), faults)
    monkeypatch.setitem(memory._stores, str(tmp_path / "kv"), store)  # type: ignore[arg-type]
    ways = [(in_step, "off") for in_step in ((False, True) if seam in IN_STEP else (False,))]
    if seam in (Seam.TIER_READ, Seam.FILE_READ):
        ways.append((False, "on"))
    for in_step, to_device in ways:
        engine = start(faults, seam, in_step, to_device)
        faults.set(rule(seam, fault))
        for rounds in range(12):  # what is read was written before: how soon depends on the disk
            if rounds >= 3 and faults.struck[seam, fault]:
                break
            ask(engine, right)
            time.sleep(0.01)
        provoke(engine, seam)
        assert faults.struck[seam, fault], "the fault did not happen"
        faults.clear()
        engine.settle()
        engine.check_integrity()
        assert not held(engine)
        for _ in range(2):  # it heals
            ask(engine, right)
            engine.settle()
        engine.check_integrity()
        engine.close()


def test_a_failed_copy_whose_report_comes_late(
    start: Callable[..., ReferenceEngine], right: list[list[int]]
) -> None:
    """What the forward computed on it is not taken before the report is there. The soak found it:
    each fault alone did no harm."""
    faults = Faults()
    engine = start(faults, Seam.DEVICE, True)
    for _ in range(3):
        ask(engine, right)
        engine.settle()
        faults.set(Rule(Fault.ERROR, Seam.DEVICE), Rule(Fault.REORDER, Seam.REPORT))
        ask(engine, right)
        assert faults.struck[Seam.DEVICE, Fault.ERROR], "nothing was loaded"
        assert faults.struck[Seam.REPORT, Fault.REORDER]
        faults.clear()
    ask(engine, right)
    engine.settle()
    engine.check_integrity()
    assert not held(engine)


def test_tiers_stay_open_while_something_hangs_in_them(
    start: Callable[..., ReferenceEngine],
) -> None:
    """Closed under a read that goes on later, a file's number would be another file's by then."""
    faults = Faults()
    engine = start(faults, Seam.TIER_WRITE, False)
    faults.set(Rule(Fault.HANG, Seam.FILE_WRITE, seconds=FOR_EVER))
    engine.generate(prompts()[:1], ANSWER)
    worker = engine.workers[0].worker
    while not faults.struck[Seam.FILE_WRITE, Fault.HANG]:
        time.sleep(0.01)
    assert not worker.close(timeout=0.2)
    tier = worker.tiers["disk"]
    assert tier.scan() == []
    faults.clear()
    assert worker.close()
    assert tier.scan(), "what hung has been written after all"


def provoke(engine: ReferenceEngine, seam: Seam) -> None:
    """What traffic alone does not do: clear everything, or give up a load."""
    assert engine.leader is not None
    for _ in range(4):
        if seam is Seam.INVALIDATE:
            engine.settle()
            engine.leader.clear()
            engine.generate(prompts()[:2], ANSWER)
        elif seam is Seam.CANCEL:
            engine.forget()
            for prompt in prompts():
                request = engine.submit(prompt, ANSWER)
                engine.step()
                engine.abort(request)
