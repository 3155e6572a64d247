"""Runs of the same tests on one mutant after the other, in forks of a process that has collected.

    pytest collects ──▶ fork ──▶ functions get the mutant's code ──▶ the tests run ──▶ exit status
                   └──▶ fork ...

Only the forks differ from the sources: no file is changed, and processes that a test starts run the
code as it is. Code that runs at import cannot be changed this way.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from _pytest._io import TerminalWriter

__all__ = ["EachInAFork", "Task", "codes_of", "put_into"]

Task = Callable[[], None]
"""What a fork does before the tests: it changes code."""

_POLL_S = 0.02


class EachInAFork:
    """A plugin of pytest that runs the collected tests once for each task, each in a fork.

    ``tasks`` is asked for the next one when the one before has ended, and is sent its exit status,
    or None if it was killed after ``limit_s`` seconds.
    """

    def __init__(self, tasks: Iterator[Task], ended: Callable[[int | None], None]) -> None:
        self._tasks = tasks
        self._ended = ended
        self.limit_s = 600.0
        self.in_fork = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:
            return None
        for task in self._tasks:
            child = os.fork()
            if not child:
                self.in_fork = True
                os.setsid()
                _be_quiet(session)
                task()
                return None
            self._ended(self._wait(child))
        return True

    def _wait(self, child: int) -> int | None:
        until = time.monotonic() + self.limit_s
        status: int | None = None
        while time.monotonic() < until:
            done, code = os.waitpid(child, os.WNOHANG)
            if done:
                status = os.waitstatus_to_exitcode(code)
                break
            time.sleep(_POLL_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if status is None:
            os.waitpid(child, 0)
        return status


def _be_quiet(session: pytest.Session) -> None:
    """Write nothing more, also not through pytest's own copies of the streams."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter._tw = TerminalWriter(os.fdopen(nowhere, "w"))


def codes_of(source: str, file: str) -> dict[str, CodeType]:
    """Return the code of every function and method of a file, by qualified name."""
    found: dict[str, CodeType] = {}

    def look(code: CodeType, prefix: str) -> None:
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                name = prefix + inner.co_name
                found[name] = inner
                is_function = inner.co_flags & inspect.CO_OPTIMIZED  # else the body of a class
                look(inner, f"{name}.<locals>." if is_function else f"{name}.")

    look(compile(source, file, "exec", dont_inherit=True), "")
    return found


def put_into(module: ModuleType, codes: dict[str, CodeType]) -> None:
    """Give a module's functions and methods other code."""
    for function in _functions(vars(module).values(), module.__name__, set()):
        code = codes.get(function.__qualname__)
        if code is not None and code.co_freevars == function.__code__.co_freevars:
            function.__code__ = code


def _functions(values: Any, module: str, seen: set[int]) -> Iterator[FunctionType]:
    for value in list(values):
        if id(value) in seen:
            continue
        seen.add(id(value))
        if inspect.isclass(value) and value.__module__ == module:
            yield from _functions(vars(value).values(), module, seen)
        for inner in _inside(value):
            if isinstance(inner, FunctionType) and inner.__module__ == module:
                yield inner


def _inside(value: Any) -> Sequence[Any]:
    """Return the functions that a decorator or a descriptor has wrapped."""
    match value:
        case property():
            return [inspect.unwrap(one) for one in (value.fget, value.fset) if one is not None]
        case classmethod() | staticmethod():
            return [inspect.unwrap(value.__func__)]
        case functools.cached_property():
            return [inspect.unwrap(value.func)]
    return [inspect.unwrap(value)] if callable(value) and not inspect.isclass(value) else []


def main_in_fork(arguments: Sequence[str], plugin: EachInAFork) -> int:
    """Run pytest with the plugin. A fork ends here, with pytest's exit status."""
    try:
        status = int(pytest.main(list(arguments), plugins=[plugin]))
    except BaseException:
        if plugin.in_fork:
            os._exit(70)
        raise
    if plugin.in_fork:
        sys.stdout.flush()
        os._exit(status)
    return status
