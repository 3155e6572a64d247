"""Writes what a release needs beside its packages. Runs in tools/env.py's environment `release`.

    python -m tools.release lock        write deploy/requirements*.txt anew, from the package index
    python -m tools.release files DIR   write the bill of materials and SHA256SUMS beside packages

deploy/requirements.txt lists what kvcore and its extras need at run time, in versions that vLLM
accepts, with the hash of every file of each version. pip refuses a file with another hash.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
LOCK = DEPLOY / "requirements.txt"
BUILD_LOCK = DEPLOY / "requirements-build.txt"

VLLM = "0.32.0"
"""The version in deploy/Dockerfile's image. Its requirements limit the versions in the lock."""

EXTRAS = ("etcd", "events", "mooncake", "objects", "redis", "server", "spans")
"""Extras whose requirements are in the lock. The others are for engines and development."""

HEADER = "# Written by `make lock`: every file that pip may install, by its hash.\n"


def project() -> dict[str, Any]:
    """Return pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return table


# -- requirements with hashes -------------------------------------------------------------------


def lock() -> None:
    """Resolve the requirements of kvcore and of its build, and write both files."""
    with tempfile.TemporaryDirectory(prefix="kvcore-lock-") as folder:
        engine, limits = Path(folder) / "engine.in", Path(folder) / "limits.txt"
        engine.write_text(f"vllm=={VLLM}; python_version >= '3.11' and sys_platform == 'linux'\n")
        extras = [argument for name in EXTRAS for argument in ("--extra", name)]
        _resolve(limits, "pyproject.toml", *extras, str(engine))
        _resolve(LOCK, "pyproject.toml", *extras, "--constraint", str(limits), "--generate-hashes")
        build = Path(folder) / "build.in"
        build.write_text("\n".join(project()["build-system"]["requires"]))
        _resolve(BUILD_LOCK, str(build), "--generate-hashes")


def _resolve(output: Path, *arguments: str) -> None:
    """Have uv write the versions for every Python and platform that kvcore supports."""
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    lowest = project()["project"]["requires-python"].removeprefix(">=")
    done = subprocess.run(
        [
            str(uv), "pip", "compile", *arguments, "--universal", "--python-version", lowest,
            "--no-header", "--annotation-style", "line", "--quiet",
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"uv cannot resolve the requirements:\n{done.stderr}")
    output.write_text(HEADER + _plain(done.stdout))


def _plain(text: str) -> str:
    """Leave the paths of this run out of the comments that say what needs a package."""
    text = text.replace("kvcore (pyproject.toml)", "kvcore")
    text = re.sub(r"-[cr] [^\s,]+(, )?|, -[cr] [^\s,]+", "", text)
    return re.sub(r"\n +# via *(?=\n)", "", text)


@dataclass(frozen=True)
class Locked:
    """A version of a package, and the files that pip may install for it."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]
    needed_by: tuple[str, ...]


_ENTRY = re.compile(
    r"^(?P<name>[a-z0-9-]+)(?:\[[^]]*\])?==(?P<version>[^\s;]+)(?: ; (?P<marker>[^\\\n]+?))?"
    r"(?P<hashes>(?: \\\n    --hash=sha256:[0-9a-f]{64})*)(?:\n    # via (?P<via>.+))?$",
    re.MULTILINE,
)


def read_lock(text: str) -> list[Locked]:
    """Return the entries of a lock."""
    return [
        Locked(
            entry["name"],
            entry["version"],
            entry["marker"] or "",
            tuple(re.findall(r"sha256:(\w+)", entry["hashes"])),
            tuple((entry["via"] or "").split(", ")) if entry["via"] else (),
        )
        for entry in _ENTRY.finditer(text)
    ]


# -- the bill of materials ----------------------------------------------------------------------


def bill_of_materials(entries: Sequence[Locked], version: str) -> str:
    """Return a CycloneDX bill of materials of kvcore and what it needs at run time, as JSON."""
    from cyclonedx.model import (
        ExternalReference,
        ExternalReferenceType,
        HashAlgorithm,
        HashType,
        Property,
        XsUri,
    )
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    def component(entry: Locked) -> Component:
        purl = PackageURL("pypi", name=entry.name, version=entry.version)
        files = ExternalReference(
            type=ExternalReferenceType.DISTRIBUTION,
            url=XsUri(str(purl)),
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=one) for one in entry.hashes],
        )
        where = [Property(name="kvcore:marker", value=entry.marker)] if entry.marker else []
        return Component(
            type=ComponentType.LIBRARY, name=entry.name, version=entry.version, purl=purl,
            bom_ref=str(purl), external_references=[files], properties=where,
        )  # fmt: skip

    own = PackageURL("pypi", name="kvcore", version=version)
    root = Component(
        type=ComponentType.LIBRARY, name="kvcore", version=version, purl=own, bom_ref=str(own)
    )
    made: dict[str, list[Component]] = {"kvcore": [root]}
    for entry in entries:
        made.setdefault(entry.name, []).append(component(entry))
    bom = Bom(components=[one for name, all_ in made.items() if name != "kvcore" for one in all_])
    bom.metadata.component = root
    needs: dict[str, set[str]] = {name: set() for name in made}
    for entry in entries:
        for user in entry.needed_by:
            needs[user].add(entry.name)
    for user, names in needs.items():
        for one in made[user]:
            bom.register_dependency(one, [other for name in names for other in made[name]])
    text: str = JsonV1Dot6(bom).output_as_string(indent=2)
    return text


def check_bill(text: str) -> None:
    """Raise SystemExit if a bill of materials does not follow the CycloneDX schema."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise SystemExit(f"the bill of materials is not CycloneDX 1.6: {error}")


def files(folder: Path) -> None:
    """Write the bill of materials, the lock and SHA256SUMS beside the packages in ``folder``."""
    packages = sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])
    if len(packages) != 2:
        raise SystemExit(f"{folder} holds {len(packages)} packages; build the two of one version")
    version = project()["project"]["version"]
    bill = bill_of_materials(read_lock(LOCK.read_text()), version)
    check_bill(bill)
    made = [folder / f"kvcore-{version}.cdx.json", folder / f"kvcore-{version}-requirements.txt"]
    made[0].write_text(bill + "\n")
    made[1].write_text(LOCK.read_text())
    sums = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in (*packages, *made)]
    (folder / "SHA256SUMS").write_text("".join(sums))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.release", description="See the top.")
    parser.add_argument("what", choices=["lock", "files"])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    options = parser.parse_args(arguments)
    if options.what == "lock":
        lock()
    else:
        files(options.folder)


if __name__ == "__main__":
    main()
