"""Shipped configurations compile for every GPU served, without one, and spill nothing.

`make test` compiles one build of each kernel for each GPU, for each GPU another one. All for all
take two minutes of a core; `make test-all` and ``python -m kvcore_kernels.aot`` compile them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def covering() -> dict[str, list[str]]:
    """Return the names of builds to compile for each GPU. A name begins with the kernel."""
    from kvcore_kernels.builds import shipped

    chosen: dict[str, list[str]] = {}
    for number, target in enumerate(TARGETS):
        of_kernel: dict[str, list[str]] = {}
        for build in shipped():
            if target in (build.targets or TARGETS):
                of_kernel.setdefault(build.name.split()[0], []).append(build.name)
        chosen[target] = [names[number % len(names)] for names in of_kernel.values()]
    return chosen


# In processes of their own: in this one the kernels are interpreted.


def run(*arguments: str, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "kvcore_kernels.aot", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.fixture(
    scope="module",
    params=[
        *((target, "covering") for target in TARGETS),
        *(pytest.param((target, "all"), marks=pytest.mark.exhaustive) for target in TARGETS),
    ],
    ids="-".join,
)
def table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    target, which = request.param
    path: Path = tmp_path_factory.mktemp("aot") / "table.json"
    chosen = ["--build", *covering()[target]] if which == "covering" else []
    done = run("--target", target, *chosen, "--json", str(path))
    assert path.exists(), done.stdout + done.stderr
    rows = json.loads(path.read_text())
    least = len(chosen) - 1 if chosen else 50
    return {"rows": rows, "returncode": done.returncode, "least": least}


def test_no_build_spills(table: dict[str, Any]) -> None:
    assert table["rows"]
    assert not [row for row in table["rows"] if row["spills"]]
    assert table["returncode"] == 0


def test_aligned_memory_is_moved_16_bytes_at_a_time(table: dict[str, Any]) -> None:
    """Or half the memory's speed is reached: a lost alignment hint is seen only here."""
    narrow = ("8-byte", "strided", "packed", "byte", "unaligned")
    of_scores = ("balance", "choose", "keep", "smooth")
    wide = [
        row
        for row in table["rows"]
        if not row["kernel"].startswith(of_scores) and not row["kernel"].endswith(narrow)
    ]
    assert len(table["rows"]) >= table["least"]
    assert not [row for row in wide if row["widest"] != 16]


def test_every_kernel_is_built(table: dict[str, Any]) -> None:
    built = {row["kernel"].split()[0] for row in table["rows"]}
    assert built == {
        "attend", "balance", "bounded", "choose", "copy", "deviation", "keep", "merge", "pack",
        "shift", "smooth", "sums", "unpack",
    }  # fmt: skip


EXACT = """
import sys
from kvcore_kernels.aot import compiled
from kvcore_kernels.builds import shipped
for build in shipped():
    if build.name in sys.argv[1:]:
        text = compiled(build, "sm_90").asm["ptx"]
        print(build.name, [word for word in ("div.full.f32", "div.approx.f32") if word in text])
"""


def test_what_must_equal_its_twin_divides_exactly() -> None:
    """Triton's `/` is off by up to two units of the last place on a GPU, not in the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    names = ["smooth", "choose", "keep", "pack int8 16", "unpack int8 16", "shift bf16 128"]
    command = [sys.executable, "-c", EXACT, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert sorted(done.stdout.splitlines()) == sorted(f"{name} []" for name in names), done.stderr


def test_what_is_built_where_there_is_no_gpu_exists() -> None:
    """`make gpu` builds a sample there; a name of it that is no build's would leave it out."""
    from kvcore_kernels.builds import shipped
    from tools.gpu.parts.kernels import SAMPLE as NAMED

    builds = [build.name for build in shipped()]
    assert not [name for name in NAMED if not any(build.startswith(name) for build in builds)]


def test_interpreted_kernels_are_refused_by_name() -> None:
    done = run("--target", "sm_90", "--kernel", "copy wide", interpret=True)
    assert done.returncode == 1
    assert "TRITON_INTERPRET is set" in done.stderr
