"""The list of mistakes does not rot: each can still be put back, and names tests of `make test`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvcore_devtools.copies import ROOT, Outcome
from kvcore_devtools.mistakes.__main__ import _verdict, main
from kvcore_devtools.mistakes.book import MISTAKES, Mistake

each = pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)

TEST = re.compile(r"(tests/[\w/]+\.py)::(?:(\w+)::)?(\w+)(\[.+\])?")


def is_left_out(node: ast.AST) -> bool:
    """Return True if a mark of a test, a class or a module leaves it to `make test-all`.

    One of a single case is not looked at: a case that does not run is told by `make mistakes`.
    """
    text = ast.unparse(node)
    return "mark.exhaustive" in text and not text.startswith("pytest.mark.parametrize")


def found_in(body: list[ast.stmt], name: str) -> ast.FunctionDef | ast.ClassDef | None:
    named = (ast.FunctionDef, ast.ClassDef)
    return next((one for one in body if isinstance(one, named) and one.name == name), None)


@each
def test_a_mistake_changes_the_sources_as_they_are(mistake: Mistake) -> None:
    changed = mistake.applied(ROOT)
    assert changed != (ROOT / mistake.file).read_text()
    compile(changed, mistake.file, "exec")


@each
def test_a_mistake_names_tests_that_make_test_runs(mistake: Mistake) -> None:
    assert mistake.found_by
    for test in mistake.found_by:
        match = TEST.fullmatch(test)
        assert match is not None, f"{test} names no test"
        module = ast.parse((ROOT / match[1]).read_text())
        marks = [one for one in module.body if isinstance(one, ast.Assign)]
        marked = [one for one in marks if ast.unparse(one.targets[0]) == "pytestmark"]
        body = module.body
        if match[2]:
            group = found_in(body, match[2])
            assert isinstance(group, ast.ClassDef), f"{match[1]} has no class {match[2]}"
            marked += group.decorator_list
            body = group.body
        function = found_in(body, match[3])
        assert isinstance(function, ast.FunctionDef), f"{match[1]} has no test {match[3]}"
        marked += function.decorator_list
        assert not any(map(is_left_out, marked)), f"{test} is left to `make test-all`"


def test_mistakes_are_named_once_and_found_twice() -> None:
    names = [mistake.name for mistake in MISTAKES]
    assert len(set(names)) == len(names) == 10
    assert all(mistake.breaks.endswith(".") for mistake in MISTAKES)
    assert all(len(mistake.found_by) > 1 for mistake in MISTAKES)


def test_a_mistake_that_the_sources_have_outgrown_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text("again()\nagain()\n")
    mistake = Mistake(
        name="gone", breaks="It.", commit="", file="twice.py", old="again()", new="", found_by=()
    )
    with pytest.raises(ValueError, match="2 times; write the mistake anew"):
        mistake.applied(tmp_path)


@pytest.mark.parametrize(
    ("status", "results", "verdict"),
    [
        (1, {"t.py::test[a]": "PASSED", "t.py::test[b]": "FAILED"}, "found"),
        (1, {"t.py::test": "PASSED"}, "not found"),
        (1, {"t.py::test": "ERROR"}, "not found"),
        (1, {"t.py::test_another": "FAILED"}, "did not run"),
        (2, {"t.py::test": "FAILED"}, "did not run"),
        (None, {}, "hangs"),
    ],
)
def test_only_a_test_that_fails_finds(
    status: int | None, results: dict[str, str], verdict: str
) -> None:
    """Neither an error before it, nor a module that cannot be collected, nor another test."""
    assert _verdict(Outcome(status, 1.0, "", results), "t.py::test") == verdict


def test_a_name_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["a-wrong-lock"])
    assert "no mistake is named a-wrong-lock; there are a-wrong-key" in capsys.readouterr().err
    assert main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(MISTAKES)
