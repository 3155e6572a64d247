"""Unpack folders of `make gpu-bundle` on a machine without a network. Standard library only.

    python3 FOLDER/unpack.py FOLDER [FOLDER ...] TARGET

A copy of this file lies in every folder. Sums are checked first. Packages go to TARGET/site, which
then belongs on PYTHONPATH. A piece that was cut is joined once all its parts are there; until then
its parts wait in TARGET/parts. Folders may come in any order, in one call or in several, and twice.
The exit status is 1 if a file is damaged, and nothing is unpacked then.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
CHUNK = 1 << 20


class DamagedError(ValueError):
    """A file is not what the manifest says."""


def main(arguments: list[str]) -> int:
    """Unpack. Return 1 if a file is damaged, 2 if the arguments are wrong, else 0."""
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    *folders, target = map(Path, arguments)
    try:
        for folder in folders:
            check(folder)
    except DamagedError as error:
        print(f"{error}: pack or carry the folder again", file=sys.stderr)
        return 1
    for folder in folders:
        unpack(folder, target)
    return 0


def check(folder: Path) -> None:
    """Compare each file of a folder with the manifest's size and sum. Raises DamagedError."""
    for name, wanted in _manifest(folder)["folders"][folder.name].items():
        path = folder / name
        if not path.exists():
            raise DamagedError(f"{path} is missing")
        if path.stat().st_size != wanted["bytes"]:
            raise DamagedError(f"{path} has {path.stat().st_size} bytes, not {wanted['bytes']}")
        if sha256(path) != wanted["sha256"]:
            raise DamagedError(f"{path} has another sha256 than the manifest")


def unpack(folder: Path, target: Path) -> None:
    """Keep a folder's files, and extract every archive all of whose parts are there now."""
    manifest = _manifest(folder)
    parts = target / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    here = manifest["folders"][folder.name]
    for archive, names in manifest["archives"].items():
        done = parts / f"{archive}.done"
        if done.exists():
            continue
        for name in names:
            if name in here:
                shutil.copyfile(folder / name, parts / name)
        missing = [name for name in names if not (parts / name).exists()]
        if missing:
            print(f"{archive}: waits for {', '.join(missing)}")
            continue
        joined = parts / archive
        if names != [archive]:
            join([parts / name for name in names], joined)
        extract(joined, target)
        for path in {joined, *(parts / name for name in names)}:
            path.unlink()
        done.touch()
        print(f"{archive}: unpacked")


def join(parts: list[Path], whole: Path) -> None:
    """Write the parts, one after another, to ``whole``."""
    with whole.open("wb") as out:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, out, CHUNK)


def extract(archive: Path, target: Path) -> None:
    """Extract an archive below ``target``."""
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(target, filter="data")
        else:
            tar.extractall(target)


def sha256(path: Path) -> str:
    """Return the digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
