"""The wheel holds what its users call: no module of the kits is for this repository alone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = ("", "kernels", *(f"adapters/{name}" for name in ("vllm", "sglang", "trtllm")))
PACKAGES = ("kvcore", "kvcore_kernels", "kvcore_vllm", "kvcore_sglang", "kvcore_trtllm")
KITS = re.compile(r"kvcore\.(testing|harness)\.|kvcore_(vllm|sglang|trtllm)\.testing\.")
NAMES = re.compile(r"\bkvcore(?:_\w+)?(?:\.\w+)+")


def shipped() -> dict[str, Path]:
    """The modules of the wheel and their files."""
    found: dict[str, Path] = {}
    for source in SOURCES:
        home = ROOT / source
        for package in PACKAGES:
            for file in sorted((home / package).rglob("*.py")):
                name = ".".join(file.relative_to(home).with_suffix("").parts)
                found[name.removesuffix(".__init__")] = file
    return found


def used(module: str, file: Path, modules: dict[str, Path]) -> set[str]:
    """The modules that a module imports or names in a string, with the packages around them."""
    text = file.read_text()
    named: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import, which this test cannot follow"
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
    named |= set(re.findall(r"\"(kvcore[\w.]*\w)", text))
    parts = [name.split(".") for name in named]
    return {".".join(p[:n]) for p in parts for n in range(1, len(p) + 1)} & modules.keys()


def reached(modules: dict[str, Path], roots: set[str]) -> set[str]:
    found: set[str] = set()
    ahead = list(roots)
    while ahead:
        module = ahead.pop()
        if module not in found:
            found.add(module)
            ahead += used(module, modules[module], modules)
    return found


@pytest.mark.slow
def test_every_module_of_the_kits_is_for_users() -> None:
    """kvcore uses it, or the docs tell users to; drivers are imported by the engine's name."""
    modules = shipped()
    kits = {name for name in modules if KITS.match(name)}
    told = {
        name
        for page in (ROOT / "docs").glob("*.md")
        for match in NAMES.findall(page.read_text())
        for name in (match, match.rpartition(".")[0])
        if name in kits
    }
    drivers = {name for name in kits if re.search(r"testing\.(conformance|driver)$", name)}
    cases = {name for name in kits if name.startswith("kvcore.testing.conformance.cases.")}
    outside = {name for name in modules if not KITS.match(name)} - {"kvcore.testing"}
    assert len(kits) > 40
    alone = sorted(kits - reached(modules, told | drivers | cases | outside))
    assert not alone, "only this repository uses these: move them to devtools/"
