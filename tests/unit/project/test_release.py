"""The requirements with hashes, and the bill of materials that a release is published with."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.deployment import DEPLOY, ROOT, release_tool
from tools.release import BUILD_LOCK, EXTRAS, LOCK, VLLM, Locked, project, read_lock

ENTRIES = read_lock(LOCK.read_text())
BUILD = read_lock(BUILD_LOCK.read_text())
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
OF_ENGINES_AND_DEVELOPMENT = {
    "bench", "dev", "docs", "kernels", "model", "sglang", "trtllm", "vllm"
}  # fmt: skip


def wanted() -> Iterator[Requirement]:
    """Yield what pyproject.toml says kvcore needs at run time."""
    table = project()["project"]
    optional = table["optional-dependencies"]
    assert optional.keys() == {*EXTRAS} | OF_ENGINES_AND_DEVELOPMENT, "decide on a new extra"
    for line in [*table["dependencies"], *(line for name in EXTRAS for line in optional[name])]:
        yield Requirement(line)


def on(python: str) -> dict[str, str]:
    """Return the values of markers on Linux with a version of Python."""
    return {
        "python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux",
        "platform_system": "Linux", "implementation_name": "cpython", "extra": "",
        "platform_python_implementation": "CPython", "platform_machine": "x86_64",
    }  # fmt: skip


def chosen(entries: list[Locked], python: str) -> dict[str, Locked]:
    """Return what pip installs from a lock, by name."""
    found = [
        entry
        for entry in entries
        if not entry.marker or Requirement(f"x; {entry.marker}").marker.evaluate(on(python))
    ]
    names = [entry.name for entry in found]
    assert len(set(names)) == len(names), "one version of each"
    return {entry.name: entry for entry in found}


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_is_locked_in_a_version_that_fits(python: str) -> None:
    there = chosen(ENTRIES, python)
    for requirement in wanted():
        if requirement.marker is None or requirement.marker.evaluate(on(python)):
            entry = there[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(entry.version), requirement
            assert "kvcore" in entry.needed_by


@pytest.mark.parametrize("python", PYTHONS)
def test_what_they_need_in_turn_is_locked_too(python: str) -> None:
    there = chosen(ENTRIES, python)
    seen = 0
    for name, entry in there.items():
        try:
            installed = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if installed.version != entry.version:
            continue
        seen += 1
        for line in installed.requires or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate(on(python)):
                assert canonicalize_name(needed.name) in there, f"{name} needs {line}"
    assert seen > 10


@pytest.mark.parametrize("entries", [ENTRIES, BUILD], ids=["run", "build"])
def test_every_file_is_known_by_its_hash(entries: list[Locked]) -> None:
    assert entries
    for entry in entries:
        assert entry.hashes, entry.name
        assert all(re.fullmatch(r"[0-9a-f]{64}", one) for one in entry.hashes), entry.name


@pytest.mark.parametrize(("path", "entries"), [(LOCK, ENTRIES), (BUILD_LOCK, BUILD)])
def test_nothing_in_a_lock_is_overlooked(path: Path, entries: list[Locked]) -> None:
    lines = path.read_text().splitlines()
    assert sum(line[:1] not in ("#", " ") for line in lines) == len(entries)
    hashes = sum(len(entry.hashes) for entry in entries)
    assert sum("--hash=" in line for line in lines) == hashes
    assert not any(re.search(r"://|--index|--find-links|\B-[cr] ", line) for line in lines)


def test_the_build_is_locked() -> None:
    there = chosen(BUILD, "3.12")
    for line in project()["build-system"]["requires"]:
        needed = Requirement(line)
        assert needed.specifier.contains(there[needed.name].version)


def test_the_image_installs_nothing_without_a_hash() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text().replace("\\\n", "")
    pips = re.findall(r"pip (?:install|wheel)[^\n&]*", dockerfile)
    assert len(pips) == 4
    for line in pips:
        assert "--require-hashes" in line or "--no-deps" in line, line
        assert "--no-deps" not in line or "--no-index" in line or "--no-build-isolation" in line
    assert f":v{VLLM}\n" in (DEPLOY / "pin-images").read_text(), "the lock is for this version"


@pytest.mark.slow
def test_the_bill_of_materials_is_complete_and_what_was_published_has_a_sum(tmp_path: Path) -> None:
    for name in ("kvcore-1-py3-none-any.whl", "kvcore-1.tar.gz"):
        (tmp_path / name).write_text(name)
    subprocess.run(  # validates the bill against the schema of CycloneDX
        [release_tool("python"), "-m", "tools.release", "files", str(tmp_path)],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True,
    )  # fmt: skip
    version = project()["project"]["version"]
    bill = json.loads((tmp_path / f"kvcore-{version}.cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    told = {(c["name"], c["version"]): c for c in bill["components"]}
    assert told.keys() == {(entry.name, entry.version) for entry in ENTRIES}
    for entry in ENTRIES:
        [files] = told[entry.name, entry.version]["externalReferences"]
        assert {one["content"] for one in files["hashes"]} == set(entry.hashes)
    needs = {each["ref"]: each.get("dependsOn", []) for each in bill["dependencies"]}
    direct = {ref.removeprefix("pkg:pypi/").partition("@")[0] for ref in
              needs[f"pkg:pypi/kvcore@{version}"]}  # fmt: skip
    assert direct == {canonicalize_name(requirement.name) for requirement in wanted()}
    assert bill["metadata"]["component"]["purl"] == f"pkg:pypi/kvcore@{version}"

    sums = dict(
        reversed(line.split("  ")) for line in (tmp_path / "SHA256SUMS").read_text().splitlines()
    )
    published = {path.name: path for path in tmp_path.iterdir() if path.name != "SHA256SUMS"}
    assert sums == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in published.items()
    }
    assert (tmp_path / f"kvcore-{version}-requirements.txt").read_text() == LOCK.read_text()
