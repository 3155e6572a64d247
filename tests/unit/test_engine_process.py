"""The engine driver's protocol, against a child that is no engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import UnsupportedError
from kvcore.testing.engine_process import EngineDied, EngineFailed, EngineProcess

CHILD = """
import asyncio, os, subprocess, sys
from pathlib import Path
from kvcore.testing.engine_process import serve

running = {}

async def start(model, kvcore, **args):
    print("starting", model, kvcore, args, flush=True)
    if args.get("refuse"):
        raise ValueError("no such model")
    if args.get("helper"):
        subprocess.Popen(["sleep", "60"])
    return {"model": model, "kvcore": kvcore, "pid": os.getpid()}

async def generate(prompt, max_tokens, request_id, **options):
    if prompt == "crash":
        print("about to crash", flush=True)
        os._exit(3)
    if prompt == "boom":
        raise RuntimeError("out of pages")
    stop = running[request_id] = asyncio.Event()
    if prompt == "forever":
        await stop.wait()
    await asyncio.sleep(0.05 if prompt == "slow" else 0)
    tokens = list(prompt) if isinstance(prompt, list) else [len(prompt)]
    return {
        "request_id": request_id or "made-up", "token_ids": tokens[:max_tokens], "text": "",
        "prompt_tokens": len(prompt), "cached_tokens": 0, "ttft_s": 0.0, "total_s": 0.0,
        "finish_reason": "length", "kvcore": {"reused_tokens": 7, "tiers": {"host": 7}},
        "logprobs": [],
    }

async def abort(request_id):
    running[request_id].set()

async def reset_prefix_cache(connector, timeout_s):
    raise RuntimeError("pages are in use")

async def settle(timeout_s):
    raise RuntimeError("still saving")

async def metrics():
    return {"a": 1.0, "path": float("added" in os.environ["PYTHONPATH"].split(os.pathsep)[0])}

handlers = dict(start=start, generate=generate, abort=abort,
                reset_prefix_cache=reset_prefix_cache, settle=settle, metrics=metrics)
asyncio.run(serve(int(sys.argv[1]), handlers))
Path(os.environ["ENDED"]).write_text("yes")
"""

Start = Callable[..., EngineProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    package = tmp_path / "path" / "kvcore_fake"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "driver.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("ENDED", str(tmp_path / "ended"))

    def made(**args: Any) -> EngineProcess:
        return EngineProcess("a model", engine="fake", log=tmp_path / "log", **args)

    return made


def test_results_come_in_the_order_of_the_prompts(start: Start, tmp_path: Path) -> None:
    with start(kvcore={"host": {}}) as engine:
        assert engine.wait_ready()["kvcore"] == {"host": {}}
        found = engine.generate(["slow", [1, 2, 3], "abc"], max_tokens=2)
        assert [each.token_ids for each in found] == [[4], [1, 2], [3]]
        assert (found[0].reused_tokens, found[0].tiers) == (7, {"host": 7})
        assert engine.metrics() == {"a": 1.0, "path": 0.0}
    assert (tmp_path / "ended").exists(), "close() must let the child end by itself"


def test_a_path_that_is_added_leaves_the_childs_own(start: Start, tmp_path: Path) -> None:
    with start(env={"PYTHONPATH": str(tmp_path / "added")}) as engine:
        assert engine.metrics()["path"] == 1.0


def test_an_abort_overtakes_the_request_it_ends(start: Start) -> None:
    with start() as engine:
        future = engine.submit("forever", request_id="mine")
        engine.generate(["abc"])
        assert not future.done()
        engine.abort("mine")
        assert future.result(10).request_id == "mine"


def test_an_error_is_raised_where_it_was_caused_and_the_engine_goes_on(start: Start) -> None:
    with start() as engine:
        with pytest.raises(EngineFailed, match="generate: RuntimeError: out of pages"):
            engine.generate(["boom"])
        with pytest.raises(EngineFailed, match="pages are in use"):
            engine.reset_prefix_cache()
        with pytest.raises(EngineFailed, match="still saving"):
            engine.settle()
        assert engine.generate(["abc"])[0].token_ids == [3]


def test_a_refused_start_says_why(start: Start) -> None:
    engine = start(refuse=True)
    with pytest.raises(EngineFailed, match="no such model"):
        engine.wait_ready()
    engine.kill()


def test_a_crash_reaches_everyone_who_waits_with_the_log(start: Start) -> None:
    engine = start()
    waiting = engine.submit("forever", request_id="mine")
    with pytest.raises(EngineDied, match="about to crash"):
        engine.generate(["crash"])
    with pytest.raises(EngineDied):
        waiting.result(10)
    with pytest.raises(EngineDied):
        engine.generate(["abc"])
    with pytest.raises(EngineDied, match="exit code 3"):
        engine.close()
    engine.close()


def test_kill_ends_what_the_engine_started(start: Start, tmp_path: Path) -> None:
    engine = start(helper=True)
    engine.wait_ready()
    engine.kill()
    deadline = time.monotonic() + 60
    while _group_lives(engine.pid):
        assert time.monotonic() < deadline, "a process of the group outlived kill()"
        time.sleep(0.01)
    assert not (tmp_path / "ended").exists()


def test_an_engine_without_adapter_is_named() -> None:
    with pytest.raises(UnsupportedError, match="kvcore_nobody is not installed"):
        EngineProcess("a model", engine="nobody")


def _group_lives(group: int) -> bool:
    """Whether a process of the group still runs (one that is dead and not yet reaped does not)."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state not in "ZX" and group != os.getpgrp():
            return True
    return False
