"""Every kind of probe holds on a small engine, and fails by name once its interface is gone."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from kvcore.engines.probes import Binds, Either, Fields, Has, Overrides, Probe, Takes, Want
from kvcore.engines.sources import Sources
from kvcore.engines.verdict import Standing, judge, judge_sources, require
from kvcore.errors import UnsupportedError
from kvcore.plugins import EngineSpec, ServeCommand
from tests.support.probes import unnoticed

ENGINE = {
    "__init__.py": "from .inner import Base as Shown\nfrom .star import *\n",
    "inner/__init__.py": "from toyengine.inner.base import Base\n",
    "inner/base.py": """
from abc import abstractmethod
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from toyengine.star import Absent

class Root:
    inherited: int = 0

class Base(Root):
    def __init__(self, config, role=None):
        self._hidden = config

    @property
    def seen(self): ...

    @abstractmethod
    def load(self, request, *, wait=False): ...

    def save(self, pages, **options): ...

class Output:
    pages: list
    copies: list = None
""",
    "star.py": "def starred(one, two=2): ...\n",
}
CONNECTOR = """
from toyengine.inner.base import Base

class Ours(Base):
    def load(self, request, *, wait=False): ...
    def save(self, pages, **options): ...
    def beyond(self): ...
    def _own(self): ...
"""
OVERRIDES = Overrides(("toyengine.inner:Base",), "toyours.connector:Ours", beside=("beyond",))


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write(tmp_path / "toyengine", ENGINE)
    write(tmp_path / "toyours", {"connector.py": CONNECTOR})
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "toyengine"


HELD: list[tuple[Want, str, str]] = [
    (Has("toyengine:Shown"), "inner/base.py", "Base"),
    (Has("toyengine:starred"), "star.py", "starred"),
    (Has("toyengine.inner.base:Base.seen"), "inner/base.py", "seen"),
    (Has("gone|toyengine.star:starred"), "star.py", "starred"),
    (Fields("toyengine.inner:Base", "_hidden", "seen", "inherited"), "inner/base.py", "_hidden"),
    (Fields("toyengine.inner:Base", "inherited"), "inner/base.py", "inherited"),
    (Takes("toyengine.inner:Base.save", ("self", "pages", "options")), "inner/base.py", "pages"),
    (Takes("toyengine:starred", ("one",), more=True), "star.py", "one"),
    (Binds("toyengine:starred", 1), "star.py", "starred"),
    (Binds("toyengine:starred", 1, ("two",)), "star.py", "two"),
    (Binds("toyengine.inner:Base", 1, ("role",)), "inner/base.py", "role"),
    (Binds("toyengine.inner.base:Output", keywords=("pages",)), "inner/base.py", "pages"),
    (OVERRIDES, "inner/base.py", "save"),
    (OVERRIDES, "inner/base.py", "wait"),
    (Either((Has("toyengine:nothing"),), (Has("toyengine:starred"),)), "star.py", "starred"),
]


@pytest.mark.parametrize(("want", "file", "name"), HELD)
def test_a_renamed_interface_is_missed(engine: Path, want: Want, file: str, name: str) -> None:
    probe = Probe("it", "to be here", (want,))
    assert not probe.failure(Sources("toyengine"))
    text = (engine / file).read_text()
    (engine / file).write_text(re.sub(rf"\b{name}\b", "renamed", text))
    assert probe.failure(Sources("toyengine"))


@pytest.mark.parametrize(
    ("want", "lacks"),
    [
        (Has("toyengine.gone:a"), "toyengine.gone: no such module"),
        (Has("toyengine.inner.base:Absent"), "toyengine.inner.base has no Absent"),
        (Binds("toyengine:starred", 3), "too many positional arguments"),
        (Binds("toyengine.inner.base:Output"), "missing a required argument: 'pages'"),
        (Takes("toyengine.inner:Base", ()), "not a function"),
        (
            Overrides(("toyengine.inner:Base",), "toyours.connector:Ours"),
            "toyengine.inner:Base has no beyond",
        ),
    ],
)
def test_what_is_missing_is_named(engine: Path, want: Want, lacks: str) -> None:
    assert lacks in Probe("it", "to be here", (want,)).failure(Sources("toyengine"))


@pytest.mark.parametrize("loaded", [False, True])
def test_a_new_abstract_method_is_missed(
    engine: Path, loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = engine / "inner/base.py"
    new = "@abstractmethod\n    def new(self): ...\n\n    def save("
    base.write_text(base.read_text().replace("def save(", new))
    if loaded:  # as in the engine's own processes
        for name in ("toyengine", "toyengine.inner", "toyengine.inner.base"):
            module = ModuleType(name)
            module.__file__ = str(base)
            module.__path__ = [str(engine)]
            monkeypatch.setitem(sys.modules, name, module)
    wants = (replace(OVERRIDES, bases=("toyengine.inner.base:Base",)),)
    failure = Probe("it", "to be here", wants).failure(Sources("toyengine"))
    assert "wants new, which kvcore does not define" in failure


def test_sources_that_cannot_be_parsed_are_a_failure(engine: Path) -> None:
    (engine / "star.py").write_text("def (")
    assert "cannot be read" in Probe("it", "to", (Has("toyengine.star:a"),)).failure(
        Sources("toyengine")
    )


# -- verdicts -----------------------------------------------------------------------------------

NEEDED = Probe("door", "to get in", (Has("toyengine:starred"),))
EXTRA = Probe("window", "to look out", (Has("toyengine:nothing"),), without="no view")


def spec(*probes: Probe, package: str = "toyengine") -> EngineSpec:
    return EngineSpec(
        "toy",
        ("no-such-distribution",),
        lambda *_: ServeCommand([], {}),
        lambda: "",
        package,
        ("1.2.0",),
        lambda: probes,
    )


@pytest.mark.parametrize(
    ("version", "standing"),
    [
        ("1.2.0", Standing.TRIED),
        ("1.2", Standing.TRIED),
        ("1.2.0+cpu", Standing.TRIED),
        ("1.2.1", Standing.PROBED),
        ("1.1.0", Standing.PROBED),
        ("1.2.0rc1", Standing.PROBED),
        ("1.2.0.post1", Standing.PROBED),
        ("1.2.1.dev3+g12ab", Standing.PROBED),
        ("unknown", Standing.PROBED),
    ],
)
def test_the_standing_of_versions(engine: Path, version: str, standing: Standing) -> None:
    sources = Sources("toyengine")
    assert judge_sources(spec(NEEDED), version, sources).standing is standing
    broken = Probe("door", "to get in", (Has("toyengine:gone"),))
    assert judge_sources(spec(broken), version, sources).standing is Standing.NOT_SERVED


def test_a_failed_probe_says_what_to_do(engine: Path) -> None:
    (engine / "star.py").write_text("")
    with pytest.raises(UnsupportedError) as raised:
        require(spec(NEEDED, EXTRA))
    for part in (
        "probe 'door' failed: toyengine has no starred. It is needed to get in",
        "install no-such-distribution 1.2.0, or a newer kvcore",
    ):
        assert part in str(raised.value)


def test_an_optional_interface_that_is_absent_is_told(engine: Path) -> None:
    verdict = require(spec(NEEDED, EXTRA))
    assert verdict.standing is Standing.PROBED, "its distribution is unknown"
    assert "1 probes hold; no view (toyengine has no nothing)" in verdict.about
    verdict.holds("door")
    with pytest.raises(UnsupportedError, match="has no nothing"):
        verdict.holds("window")


def test_an_engine_that_is_not_there() -> None:
    assert judge(spec(NEEDED, package="nosuchpackage")).standing is Standing.ABSENT
    with pytest.raises(UnsupportedError, match=r"not installed; tried are 1\.2\.0: install"):
        require(spec(NEEDED, package="nosuchpackage"))


# -- the engines' probes ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM's sources")
def test_every_interface_of_vllm_is_missed_when_it_is_renamed(tmp_path: Path) -> None:
    from kvcore_vllm.engine import ENGINE as VLLM

    verdict = judge(VLLM)
    assert verdict.standing is Standing.TRIED
    assert not verdict.lost
    assert unnoticed(Sources("vllm"), VLLM.probes(), tmp_path) == []


def test_every_interface_of_tensorrt_llm_is_missed_when_it_is_renamed(tmp_path: Path) -> None:
    from kvcore_trtllm.plugin import ENGINE as TRTLLM
    from kvcore_trtllm.testing import installed

    for version in ("1.2", "1.3"):
        with installed(version):
            verdict = judge(TRTLLM)
            assert verdict.standing is Standing.PROBED
            assert not verdict.lost
            sources = Sources("tensorrt_llm")
            assert unnoticed(sources, TRTLLM.probes(), tmp_path / version) == []


@pytest.mark.slow
def test_asking_for_a_verdict_imports_no_engine() -> None:
    code = (
        "import sys; from kvcore.plugins import PluginManager; "
        "from kvcore.engines.verdict import judge; "
        "[judge(found.item) for found in PluginManager().found('engine')]; "
        "assert not {'torch', 'vllm', 'sglang', 'tensorrt_llm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
