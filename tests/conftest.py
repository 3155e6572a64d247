"""Settings for every test."""

import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Two busy cores: a slow example is the machine's doing, and a flaky deadline tells nothing.
settings.register_profile("kvcore", deadline=None, print_blob=True)
# Half of the usual number of examples, and the same ones every time: new ones are tried everywhere
# else. A test that names a number itself keeps it.
settings.register_profile("ci", settings.get_profile("kvcore"), derandomize=True, max_examples=50)
# For `make test-unit`, which is run after each edit.
settings.register_profile("quick", settings.get_profile("ci"), max_examples=10)
settings.load_profile("kvcore")

ANSWERS = Path(__file__).parent / "answers"
"""What engines without kvcore answer; made by `make answers`, verified by `make test-all`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--answers",
        choices=["use", "record", "verify"],
        default="use",
        help="answers of engines without kvcore: use the files, record what is missing, or verify",
    )
    parser.addoption("--table", type=Path, help="note seconds and engine starts in this folder")


KEPT = ("KVCORE__LOG__", "KVCORE__EXPLAIN__", "KVCORE__TRACE__")
"""Settings that show what a failing test does (CONTRIBUTING.md). Others do not reach a test."""
OWN = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    _take_cores()  # before kvcore is imported, which remembers them
    config.stash[OWN] = Path(tempfile.mkdtemp(prefix="kvcore-tests-"))
    _leave_the_machine_alone(config.stash[OWN])
    from kvcore.harness import recorded

    mode = recorded.Mode(config.getoption("--answers"))
    recorded.use(recorded.Answers(ANSWERS, mode))
    if (folder := config.getoption("--table")) is not None:
        from support.suite_table import SuiteTable

        config.pluginmanager.register(SuiteTable(folder))


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[OWN], ignore_errors=True)


def pytest_collection_finish() -> None:
    from support.collector import forget_imports

    forget_imports()


def _leave_the_machine_alone(own: Path) -> None:
    """Let neither settings nor a server of this machine's user reach a test.

    The default folder of a server, in which engines without one keep notes too, is in ``own``. An
    engine in a child process has the user's. Models are kept in the user's cache, or in ``own`` if
    the cache cannot be written.
    """
    for name in [name for name in os.environ if name.startswith("KVCORE_")]:
        if not name.startswith(KEPT):
            del os.environ[name]
    with suppress(ImportError):  # the packages of settings may be missing on a machine with a GPU
        from kvcore.config import paths

        paths.RUN, paths.MEMORY = own / "run", own / "shm"
        for folder in (paths.RUN, paths.MEMORY):
            folder.mkdir(mode=0o755)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcore"
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
    if not os.access(cache, os.W_OK):
        os.environ["XDG_CACHE_HOME"] = str(own)


def _take_cores() -> None:
    """Workers that run side by side get cores of their own, and so do the engines they start: two
    engines that share cores wait for each other's threads at every barrier."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw").removeprefix("gw")
    if worker:
        cores = sorted(os.sched_getaffinity(0))
        mine = cores[int(worker) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]
        os.sched_setaffinity(0, mine or cores)
        if len(mine) == 1:  # as what is told so: engines with one environment share their imports
            os.environ["OMP_NUM_THREADS"] = "1"
        if torch := sys.modules.get("torch"):
            # Imported by another conftest, it has counted the cores already, and threads that share
            # one core wait for each other by spinning.
            torch.set_num_threads(len(mine) or 1)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """`make test PYTEST="-k name"` runs two parts: nothing of that name in one is no failure."""
    from kvcore.harness import recorded

    recorded.save()
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.option.keyword:
        session.exitstatus = pytest.ExitCode.OK


STOPS = re.compile(r"stands aside|has stopped after|saves no more|out of step")
"""What an engine's log says where kvcore has stopped, or a thread of it."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """Show with a failure why kvcore has stopped in an engine that still runs: its log is gone at
    the next start, and a shared engine fails many tests after the first."""
    report = yield
    if report.failed and (module := sys.modules.get("kvcore.harness.engine_process")):
        for process in list(module.EngineProcess.living):
            lines: list[str] = []
            with suppress(OSError):
                lines = process.log.read_text(errors="replace").splitlines()
            said = [at for at, line in enumerate(lines) if STOPS.search(line)]
            if said:
                told = "\n".join(lines[said[0] : said[0] + 40])
                report.sections.append((f"kvcore in the engine with process {process.pid}", told))
    return report


@pytest.fixture(autouse=True)
def kvcore_logs_as_before() -> Iterator[None]:
    """A test that configures kvcore's logging leaves the others' alone."""
    root = logging.getLogger("kvcore")
    before = root.level, root.propagate, list(root.handlers)
    _set_level(root, logging.NOTSET)
    root.propagate = True
    yield
    root.handlers[:] = before[2]
    _set_level(root, before[0])
    root.propagate = before[1]


def _set_level(logger: logging.Logger, level: int) -> None:
    """Set it if it is another: that visits every logger, of which vLLM brings thousands."""
    if logger.level != level:
        logger.setLevel(level)


@pytest.fixture
def rigs() -> Iterator[list[Any]]:
    """What a test puts here is closed when it ends."""
    made: list[Any] = []
    yield made
    for rig in made:
        rig.close()
