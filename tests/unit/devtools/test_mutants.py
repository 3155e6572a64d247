"""Mutants: each differs in one place that decides, and Python accepts it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvcore_devtools.copies import ROOT
from kvcore_devtools.mutants.forks import codes_of, put_into
from kvcore_devtools.mutants.operators import mutants_of
from kvcore_devtools.mutants.packages import PACKAGES

SOURCE = '''
class Table:
    """Blocks, 16 tokens each."""

    size: int = 4

    def take(self, count: int = 8) -> int:
        if self.closed and count:
            raise ValueError(f"{count + 1}")
        self.used += count
        _log.info("took %d", 3)
        self.notify(self.used < self.size)
        return self.used
'''


def test_each_kind_of_change_is_made_where_code_decides() -> None:
    made = [(one.line, one.kind) for one in mutants_of(SOURCE)]
    assert made == [
        (8, "negate"), (8, "swap"), (10, "drop"), (12, "drop"), (12, "compare"), (13, "return"),
    ]  # fmt: skip


def test_a_mutant_is_the_file_with_one_change() -> None:
    texts = [one.source for one in mutants_of(SOURCE)]
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    assert "if not (self.closed and count):" in texts[0]
    assert "if self.closed or count:" in texts[1]
    assert "self.used += count" not in texts[2]
    assert "notify" not in texts[3]
    assert "self.notify(self.used <= self.size)" in texts[4]
    assert texts[5].rstrip().endswith("return\n        return self.used")
    for text in texts:
        assert len(set(plain) - set(text.splitlines())) <= 1


def test_every_package_has_its_sources_and_tests() -> None:
    for package in PACKAGES.values():
        files = package.files(ROOT)
        assert len(files) >= len(package.sources)
        assert all((ROOT / test).exists() for test in package.tests)


MODULE = """
import functools

class Pool:
    def __init__(self):
        self.free = 1

    @property
    def full(self):
        return self.free < 1

    @staticmethod
    @functools.cache
    def twice(count):
        return count + count

    @functools.cached_property
    def half(self):
        return self.free + 1

class Bounded(Pool):
    def take(self):
        super().__init__()
        return self.free
"""


def test_functions_get_other_code_wherever_they_stand() -> None:
    module = ModuleType("pools")
    exec(compile(MODULE, "pools.py", "exec"), vars(module))
    pool = module.Bounded()
    for change in (
        ("self.free < 1", "self.free <= 1"), ("count + count", "count - count"),
        ("self.free + 1", "self.free + 5"), ("return self.free\n", "return 7\n"),
    ):  # fmt: skip
        put_into(module, codes_of(MODULE.replace(*change), "pools.py"))
        found = (pool.full, module.Pool.twice(4), module.Pool().half, pool.take())
        module.Pool.twice.cache_clear()
        assert found == {
            "self.free < 1": (True, 8, 2, 1), "count + count": (False, 0, 2, 1),
            "self.free + 1": (False, 8, 6, 1), "return self.free\n": (False, 8, 2, 7),
        }[change[0]]  # fmt: skip


@pytest.mark.slow
def test_each_run_is_a_fork_and_its_end_is_told(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text("def count():\n    return 1\n")
    (tmp_path / "test_counted.py").write_text(
        "import counted, time\n\ndef test_count():\n    assert counted.count() == 1\n"
    )
    script = """
import importlib, sys, time
from kvcore_devtools.mutants.forks import EachInAFork, codes_of, main_in_fork, put_into

ends = []

def become(value):
    source = f"def count():\\n    return {value}\\n"
    put_into(importlib.import_module("counted"), codes_of(source, "counted.py"))

def tasks():
    yield lambda: become("1")
    yield lambda: become("2")
    plugin.limit_s = 0.5
    yield lambda: become("__import__('time').sleep(60)")

plugin = EachInAFork(tasks(), ends.append)
print(main_in_fork(["-p", "no:cacheprovider", "test_counted.py"], plugin), ends)
"""
    path = os.pathsep.join([*sys.path, str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "0 [0, 1, None]"
