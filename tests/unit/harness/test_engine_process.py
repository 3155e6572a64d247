"""The engine driver's protocol, against a child that is no engine."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import KVCoreError, UnsupportedError
from kvcore.harness import engine_forks
from kvcore.harness.engine_process import EngineDied, EngineFailed, EngineProcess, run_program

pytestmark = pytest.mark.slow  # most tests start a process

CHILD = """
import asyncio, os, subprocess, sys
from pathlib import Path
from kvcore.harness.engine_process import serve

running = {}

async def start(model, kvcore, **args):
    print("starting", model, kvcore, args, flush=True)
    if args.get("refuse"):
        raise ValueError("no such model")
    if args.get("helper"):
        subprocess.Popen(["sleep", "60"])
    compiled = os.environ.get("TORCH_EXTENSIONS_DIR")
    names = ("KVCORE_TRIED", "UCX_TRIED", "TORCHDYNAMO_DISABLE")
    own = {name: os.environ[name] for name in names if name in os.environ}
    told = dict(model=model, kvcore=kvcore, pid=os.getpid(), compiled=compiled, env=own)
    return {**told, "uncompiled": seen}

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
    first = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    return {"a": 1.0, "added": float(first.endswith("/added") and first in sys.path)}

handlers = dict(start=start, generate=generate, abort=abort,
                reset_prefix_cache=reset_prefix_cache, settle=settle, metrics=metrics)

seen = None

def preload(model):
    global seen
    seen = os.environ.get("TORCHDYNAMO_DISABLE")
    print("preloading", model, flush=True)
    if model == "unknown":
        raise ImportError("no modules for this")
    return ["Large", "Larger"] if model.endswith("large") else None

def run(descriptor):
    asyncio.run(serve(descriptor, handlers))
    Path(os.environ["ENDED"]).write_text("yes")

if __name__ == "__main__":
    run(int(sys.argv[1]))
"""

Start = Callable[..., EngineProcess]


@pytest.fixture(params=[False, True], ids=["by itself", "forked"])
def start(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """Starts the child, as a process that imports its modules and as a fork of one that has."""
    package = tmp_path / "path" / "kvcore_fake"
    (package / "testing").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "testing" / "driver.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(package.parent))
    root = Path(engine_forks.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (package.parent, root))))
    monkeypatch.setenv("ENDED", str(tmp_path / "ended"))

    monkeypatch.setattr(engine_forks, "_DEVICES", ())

    def made(model: str = "a model", **args: Any) -> EngineProcess:
        args = {"forked": request.param, **args}
        return EngineProcess(model, engine="fake", log=tmp_path / "log", **args)

    yield made
    engine_forks.close()


def test_results_come_in_the_order_of_the_prompts(start: Start, tmp_path: Path) -> None:
    with start(kvcore={"host": {}}) as engine:
        assert engine.wait_ready()["kvcore"] == {"host": {}}
        found = engine.generate(["slow", [1, 2, 3], "abc"], max_tokens=2)
        assert [each.token_ids for each in found] == [[4], [1, 2], [3]]
        assert (found[0].reused_tokens, found[0].tiers) == (7, {"host": 7})
        assert engine.metrics() == {"a": 1.0, "added": 0.0}
    assert (tmp_path / "ended").exists(), "close() must let the child end by itself"


def test_a_path_that_is_added_leaves_the_childs_own(start: Start, tmp_path: Path) -> None:
    with start(env={"PYTHONPATH": str(tmp_path / "added")}) as engine:
        assert engine.metrics()["added"] == 1.0


def test_what_the_interpreters_environment_has_compiled_is_loaded(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that compiles it in the user's folder races with others that do so too."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "of the user")
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    with start(python=python) as engine:
        assert engine.wait_ready()["compiled"] == "of the user"
    folder = tmp_path / "environment" / "var" / "torch_extensions"
    folder.mkdir(parents=True)
    with start(python=python) as engine:
        assert engine.wait_ready()["compiled"] == str(folder)
    with start(python=python, env={"TORCH_EXTENSIONS_DIR": "of a test"}) as engine:
        assert engine.wait_ready()["compiled"] == "of a test"


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
    _wait_until_gone(engine.pid)
    assert not (tmp_path / "ended").exists()


def test_an_engine_without_adapter_is_named() -> None:
    with pytest.raises(UnsupportedError, match="install the package kvcore_nobody"):
        EngineProcess("a model", engine="nobody")


# -- forks ----------------------------------------------------------------------------------------


forks = pytest.mark.parametrize("start", [True], indirect=True, ids=["forked"])


def imports(start: Start, **args: Any) -> int:
    """Which process has imported the modules of a child that this starts."""
    with start(**args) as engine:
        pid = engine.wait_ready()["pid"]
        assert pid == engine.pid
        return _parent(_parent(pid))


@forks
def test_modules_are_imported_once_for_many(start: Start, tmp_path: Path) -> None:
    first = imports(start)
    assert imports(start) == first != os.getpid()
    assert "preloading" not in (tmp_path / "log").read_text(), "a log is its engine's own"
    assert (tmp_path / "log").read_text().count("starting a model") == 2


@forks
def test_a_process_serves_the_architectures_for_which_it_has_imported(
    start: Start, tmp_path: Path
) -> None:
    def of(architecture: str, name: str = "model") -> str:
        folder = tmp_path / architecture / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        return str(folder)

    some = imports(start, model=of("Large", "large"))
    assert imports(start, model=of("Larger")) == some
    every = imports(start, model=of("Small"))
    assert every != some
    assert imports(start, model=of("Smaller")) == every
    assert imports(start, model=of("Larger", "another")) in (some, every)


@forks
def test_what_a_process_is_given_at_its_start_is_its_own(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork has its mother's: each environment, folder and set of cores has another."""
    found = [imports(start), imports(start, env={"ENDED": str(tmp_path / "other")})]
    assert (tmp_path / "other").exists()
    monkeypatch.chdir(tmp_path)
    found.append(imports(start))
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5})
        found.append(imports(start))
    assert len(set(found)) == 4
    lives = [mother for mother in found if Path(f"/proc/{mother}").exists()]
    assert lives == found[-engine_forks.KEPT :], "no more are kept"


@forks
def test_a_path_alone_is_given_to_a_fork_of_the_same_process(start: Start, tmp_path: Path) -> None:
    assert imports(start) == imports(start, env={"PYTHONPATH": str(tmp_path / "added")})


@forks
def test_variables_that_no_import_reads_are_given_to_forks_of_the_same_process(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = imports(start)
    monkeypatch.setenv("KVCORE_TRIED", "by the test")
    assert imports(start) == plain
    with start(env={"KVCORE_TRIED": "here", "UCX_TRIED": "too"}) as engine:
        assert _parent(_parent(engine.pid)) == plain
        assert engine.wait_ready()["env"] == {"KVCORE_TRIED": "here", "UCX_TRIED": "too"}
    with start() as engine:
        assert engine.wait_ready()["env"] == {"KVCORE_TRIED": "by the test"}
    monkeypatch.delenv("KVCORE_TRIED")
    with start() as engine:
        assert engine.wait_ready()["env"] == {}


@forks
def test_functions_that_are_imported_for_forks_are_not_compiled(start: Start) -> None:
    """torch looks at the variable when it is asked to compile. A fork may compile its model."""
    with start() as engine:
        about = engine.wait_ready()
    assert (about["uncompiled"], about["env"]) == ("1", {})


@forks
def test_a_child_outlives_the_process_it_is_a_fork_of(start: Start, tmp_path: Path) -> None:
    with start() as engine:
        mother = _parent(_parent(engine.pid))
        engine_forks.close()
        assert not Path(f"/proc/{mother}").exists()
        assert engine.generate(["abc"])[0].token_ids == [3]
    assert (tmp_path / "ended").exists()


@forks
def test_modules_that_cannot_be_imported_say_why(start: Start) -> None:
    with pytest.raises(KVCoreError, match="no modules for this"):
        start(model="unknown")
    assert imports(start) > 0, "another is tried"


PROGRAM = """
import os, subprocess, sys
import kvcore_fake.testing.driver as driver
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpgrp(), __name__, sys.argv[1:], driver.seen, os.environ.get("KVCORE_TRIED"), flush=True)
if sys.argv[1] == "fails":
    raise SystemExit("a reason")
if sys.argv[1] == "hangs":
    left.wait()
"""


@pytest.mark.parametrize("devices", [(), ("/dev/null",)], ids=["forked", "by itself"])
def test_a_program_finds_the_engine_imported(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...]
) -> None:
    """It ends with all that it has started; if it fails or hangs, its output says why."""
    monkeypatch.setattr(engine_forks, "_DEVICES", devices)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    said = run_program("fake", "a model", program, "one", 2, env={"KVCORE_TRIED": "here"})
    group, told = said.splitlines()[-1].split(maxsplit=1)
    assert told == f"__main__ ['one', '2'] {None if devices else 1} here"
    _wait_until_gone(int(group))
    with pytest.raises(EngineDied, match=r"(?s)program.py ended with exit code 1.*a reason"):
        run_program("fake", "a model", program, "fails")
    with pytest.raises(EngineDied, match=r"program.py did not end within 1 s"):
        run_program("fake", "a model", program, "hangs", timeout_s=1)


@forks
def test_where_a_fork_could_wake_a_gpu_there_is_none(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_forks, "_DEVICES", ("/dev/null",))
    with start() as engine:
        assert _parent(engine.pid) == os.getpid()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _wait_until_gone(group: int) -> None:
    deadline = time.monotonic() + 60
    while _group_lives(group):
        assert time.monotonic() < deadline, "a process of the group outlived its leader"
        time.sleep(0.01)


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
