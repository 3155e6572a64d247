"""`make gpu` goes on after whatever a part does, and says what was wrong."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.testing.waiting import until
from support import gpu_parts
from tools.gpu import __main__ as command
from tools.gpu import commands, page
from tools.gpu.metadata import ROOT, write_dist_info
from tools.gpu.parts import PARTS, TOTAL_S, UnknownPartError, chosen
from tools.gpu.record import Record, read
from tools.gpu.runner import Runner

pytestmark = pytest.mark.slow

MACHINE: dict[str, Any] = {
    "gpu": None,
    "why_no_gpu": "torch sees no GPU",
    "system": "Linux",
    "python": "3.12.3",
    "cores": 16,
    "cpu": "a CPU",
    "versions": {"torch": "2.11.0", "vllm": None},
    "commit": "0123456789ab",
    "changed_files": 0,
}
NAMES = [part.name for part in PARTS]


@pytest.fixture
def env() -> dict[str, str]:
    path = [str(ROOT), str(ROOT / "tests"), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def run(tmp_path: Path, env: dict[str, str], *parts: Any) -> tuple[int, dict[str, Any]]:
    runner = Runner(tmp_path, MACHINE, env)
    code = runner.run(parts)
    return code, json.loads(runner.json_path.read_text())


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_it_goes_on_after_every_way_to_fail(tmp_path: Path, env: dict[str, str]) -> None:
    names = ["raises", "crashes", "is_killed", "finds_a_fault", "says_nothing", "passes"]
    names += ["finds_a_fault_and_is_killed", "measures"]
    parts = [*map(gpu_parts.part, names), gpu_parts.part("hangs", limit_s=3)]
    code, result = run(tmp_path, env, *parts, gpu_parts.part("leaves_out"))
    found = {part["name"]: part for part in result["parts"]}
    assert code == 1
    assert {name: part["state"] for name, part in found.items()} == {
        "raises": "failed", "crashes": "failed", "is_killed": "failed", "hangs": "failed",
        "finds_a_fault": "failed", "says_nothing": "left out", "passes": "passed",
        "leaves_out": "left out", "finds_a_fault_and_is_killed": "failed",
        "measures": "passed",
    }  # fmt: skip
    assert found["raises"]["why"] == "it ended with exit status 1"
    assert found["raises"]["tail"][-1] == "RuntimeError: the kernel is not there"
    assert any("tests/support" in line for line in found["raises"]["tail"])
    assert not any(str(ROOT) in line for line in found["raises"]["tail"]), "results are published"
    assert found["crashes"]["why"] == "it was ended by SIGSEGV"
    assert any("about to read address 0" in line for line in found["crashes"]["tail"])
    assert found["is_killed"]["why"] == "it was ended by SIGKILL"
    assert found["finds_a_fault"]["why"] == "a comparison: row 7 differs"
    both = "it was ended by SIGKILL; a comparison: row 7 differs"
    assert found["finds_a_fault_and_is_killed"]["why"] == both
    assert found["hangs"]["why"] == "it ran past its limit of 3 s and was killed"
    for name in ("raises", "crashes", "hangs"):
        assert [line["what"] for line in found[name]["found"]] == ["measured before"]


@pytest.mark.parametrize(("name", "limit_s"), [("hangs", 3), ("leaves_a_process", 60)])
def test_nothing_that_a_part_started_is_left(
    tmp_path: Path, env: dict[str, str], name: str, limit_s: int
) -> None:
    run(tmp_path, env, gpu_parts.part(name, limit_s))
    [written] = tmp_path.glob(f"gpu-*/{name}/pid")
    until(lambda: not is_running(int(written.read_text())))  # a killed process may take a moment


def test_missed_bars_and_what_is_left_out_are_no_failure(
    tmp_path: Path, env: dict[str, str]
) -> None:
    code, result = run(tmp_path, env, gpu_parts.part("passes"), gpu_parts.part("leaves_out"))
    assert code == 0
    [figures] = [[f for f in part["found"] if f["kind"] == "figure"] for part in result["parts"]][
        :1
    ]
    assert [figure["met"] for figure in figures] == [True, False]


def test_the_result_is_written_after_each_part(tmp_path: Path, env: dict[str, str]) -> None:
    """What was measured is kept if the whole run is killed."""
    runner = Runner(tmp_path, MACHINE, env)
    assert json.loads(runner.json_path.read_text())["parts"] == []
    runner.run([gpu_parts.part("passes")])
    assert len(json.loads(runner.json_path.read_text())["parts"]) == 1
    assert runner.json_path.with_suffix(".md").read_text() == page.markdown(runner.result)


# -- parts ----------------------------------------------------------------------------------


def test_all_parts_end_within_25_minutes() -> None:
    assert TOTAL_S == 25 * 60
    assert sum(part.limit_s for part in PARTS) <= TOTAL_S
    assert len(set(NAMES)) == len(NAMES)


def test_every_part_has_its_function() -> None:
    """They are found without importing what a part needs."""
    for part in PARTS:
        module, _, name = part.function.partition(":")
        source = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text()
        assert f"def {name}(record: Record, machine: Machine, scratch: Path)" in source


def test_the_calls_of_a_half_hour_run_every_part_once_within_a_call() -> None:
    assert sorted(name for call in commands.CALLS for name in call.parts) == sorted(NAMES)
    limits = {part.name: part.limit_s for part in PARTS}
    for call in commands.CALLS:
        assert sum(limits[name] for name in call.parts) <= commands.CALL_S - 60


@given(st.lists(st.sampled_from(NAMES), max_size=5), st.sampled_from([",", " , ", ",,"]))
def test_parts_are_taken_in_the_order_of_the_run(names: list[str], comma: str) -> None:
    got = [part.name for part in chosen(comma.join(names))]
    assert got == [name for name in NAMES if name in names or not names]


@given(st.text(st.characters(categories=["L"]), min_size=1).filter(lambda n: n not in NAMES))
def test_an_unknown_part_is_refused_with_those_that_exist(name: str) -> None:
    with pytest.raises(UnknownPartError) as error:
        chosen(f"kernels,{name}")
    assert repr(name) in str(error.value)
    assert all(known in str(error.value) for known in NAMES)


def test_the_command_refuses_an_unknown_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPU_PARTS", "kernel")
    assert command.main(["--out", str(tmp_path)]) == 2
    assert "given 'kernel' in GPU_PARTS; there are kernels, worker" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# -- records and pages ----------------------------------------------------------------------


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert read(path) == []
    Record(path).passed("whole")
    with path.open("a") as file:
        file.write('{"kind": "passed", "what": "half')
    assert [line["what"] for line in read(path)] == ["whole"]


@given(value=st.floats(0, 10), bar=st.floats(0, 10))
def test_a_bar_is_met_at_its_value(
    tmp_path_factory: pytest.TempPathFactory, value: float, bar: float
) -> None:
    path = tmp_path_factory.mktemp("record") / "lines"
    record = Record(path)
    record.figure("least", value, "x", at_least=bar)
    record.figure("most", value, "x", at_most=bar)
    least, most = read(path)
    assert (least["met"], most["met"]) == (value >= bar, value <= bar)


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=30)
FOUND = st.one_of(
    st.builds(
        lambda what, value, met: {
            "kind": "figure", "what": what, "value": value, "unit": "GB/s", "met": met,
            "bar": None if met is None else "at least 1",
        },
        TEXT, st.floats(-1e6, 1e6), st.sampled_from([None, True, False]),
    ),
    st.builds(
        lambda kind, what, detail: {"kind": kind, "what": what, "detail": detail},
        st.sampled_from(["passed", "failed", "left out"]), TEXT, TEXT,
    ),
)  # fmt: skip


def cells(line: str) -> list[str]:
    """Return the cells of a row of a Markdown table."""
    return line.replace("\\|", "").strip().strip("|").split("|")


@given(found=st.lists(FOUND, max_size=6), why=TEXT, tail=st.lists(TEXT, max_size=2))
def test_whatever_is_found_every_row_has_the_cells_of_its_table(
    found: list[dict[str, Any]], why: str, tail: list[str]
) -> None:
    state = "failed" if why else "passed"
    part = {"name": "kernels", "state": state, "why": why, "tail": tail, "found": found}
    result = {"date": "2026-11-24", "machine": MACHINE, "parts": [{**part, "seconds": 3.0}]}
    columns, rows = 0, 0
    for line in page.markdown(result).splitlines():
        if not line.startswith("|"):
            columns = 0
        elif not columns:
            columns = len(cells(line))
        else:
            assert len(cells(line)) == columns, line
            rows += not line.startswith("|---")
    shown = [line for line in found if line["kind"] in ("figure", "left out")]
    assert rows == 1 + len(shown)


def test_results_of_several_calls_are_one(tmp_path: Path) -> None:
    def part(name: str, state: str) -> dict[str, Any]:
        return {"name": name, "state": state}

    first = {"date": "1", "machine": {"gpu": None}, "parts": [part("a", "failed"), part("b", "x")]}
    second = {"date": "2", "machine": {"gpu": "H100"}, "parts": [part("a", "passed")]}
    assert page.merged([first, second]) == {
        "date": "2", "machine": {"gpu": "H100"}, "parts": [part("a", "passed"), part("b", "x")],
    }  # fmt: skip


def test_the_page_shows_the_result_that_is_kept() -> None:
    table = page.markdown(json.loads(page.DATA.read_text()))
    written = page.PAGE.read_text()
    assert page.between(written, table) == written, "run: python -m tools.gpu.page"


def test_the_page_names_every_part_and_its_limit() -> None:
    written = page.PAGE.read_text()
    for part in PARTS:
        row = f"`{part.name}`", part.title, part.needs, part.otherwise, str(part.limit_s)
        assert f"| {' | '.join(row)} |" in written


# -- a tree that is not installed -----------------------------------------------------------


def test_plugins_are_found_in_a_tree_that_is_not_installed(tmp_path: Path) -> None:
    write_dist_info(tmp_path)
    [found] = importlib.metadata.distributions(path=[str(tmp_path)])
    groups = {(point.group, point.name): point.value for point in found.entry_points}
    assert found.name == "kvcore"
    assert groups["vllm.general_plugins", "kvcore"] == "kvcore_vllm.plugin:register"
    assert groups["kvcore.plugins", "triton"] == "kvcore_kernels.plugin"
