"""kill -9 at seeded points, on the real disk tier; and a short soak. More by command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.config import load_config
from kvcore.model.keys import ROOT_PARENT, KeyChain
from kvcore.testing.engine import EngineArgs, ReferenceEngine, random_llama

pytestmark = pytest.mark.slow


def disk_blocks(engine: ReferenceEngine, prompt: list[int]) -> int:
    """Leading blocks of a prompt that the disk tier holds."""
    assert engine.leader is not None
    leader = engine.leader
    chain = KeyChain(leader.namespaces.of("", ""), 16)
    chain.extend(prompt)
    return leader.manager.index.match(chain.keys).depths[1]


def test_what_a_crash_left_behind_does_not_come_back_after_a_clear(tmp_path: Path) -> None:
    """Blocks whose first one is gone are on the disk, and not in the index. Were they let be when
    everything is cleared, they would be found as soon as the first one is stored again."""
    model, prompt = random_llama(), list(range(1, 120))
    tables = {
        "host": {"capacity": "1MiB", "huge_pages": False},
        "disk": {"path": str(tmp_path / "kv"), "capacity": "2MiB"},
    }

    def start() -> ReferenceEngine:
        return ReferenceEngine(model, EngineArgs(), load_config(None, tables, {}))

    with start() as engine:
        engine.generate([prompt], 1)
        engine.settle()
        assert disk_blocks(engine, prompt) == 7
        disk = engine.workers[0].worker.tiers["disk"]
        disk.invalidate([r.slot for r in disk.scan() if r.parent == ROOT_PARENT])
    with start() as engine:
        assert disk_blocks(engine, prompt) == 0
        assert len(engine.workers[0].worker.tiers["disk"].scan()) == 6
        assert engine.leader is not None
        engine.leader.manager.clear()
        engine.generate([prompt[:17]], 1)
        engine.settle()
    with start() as engine:
        assert disk_blocks(engine, prompt) == 1


def run(module: str, *arguments: str) -> str:
    """What a command of `kvcore_devtools` prints. It forks, or looks at its own memory: it has a
    process of its own."""
    command = [sys.executable, "-m", f"kvcore_devtools.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_after_a_kill_whole_blocks_are_there_and_nothing_else(tmp_path: Path) -> None:
    """Eight rounds; `python -m kvcore_devtools.crash --rounds 200` does more."""
    said = run("crash", "--rounds", "8", "--seed", "3", "--folder", str(tmp_path))
    assert len(re.findall(r"'(?!not)\w+': \d+", said)) >= 3, f"hardly killed anywhere: {said}"
    assert list(tmp_path.iterdir()) == []


def test_a_killed_server_or_client_leaves_whole_blocks_and_right_answers(tmp_path: Path) -> None:
    """Six rounds; `python -m kvcore_devtools.crash --server --rounds 200` does more."""
    said = run("crash", "--server", "--rounds", "6", "--seed", "5", "--folder", str(tmp_path))
    assert re.search(r"'server, \w+': \d+", said), f"no server was killed: {said}"
    assert re.search(r"'engine, \w+': \d+", said), f"no engine was killed: {said}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_traffic_with_faults_leaves_nothing_behind(tmp_path: Path) -> None:
    """12 seconds; `python -m kvcore_devtools.soak --minutes 30` does more."""
    said = run("soak", "--minutes", "0.2", "--seed", "2", "--folder", str(tmp_path))
    assert "all right" in said
    assert re.search(r"[1-9]\d* faults", said), said
    assert int(re.search(r"(\d+) epochs", said)[1]) > 4, "the engine was not opened again"  # type: ignore[index]
    assert "'disk'" in said
    assert list(tmp_path.iterdir()) == []
