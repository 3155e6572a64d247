"""Archives of files, cut into parts, and laid into folders of a limited size.

files ── write_archive ──▶ NAME.tar.xz ── cut ──▶ NAME.tar.xz.00, .01, ... ── lay ──▶ folders
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.gpu.unpack import MANIFEST, sha256

__all__ = ["Folder", "Member", "cut", "lay", "write_archive", "write_folders"]

RESERVE = 64 << 10
"""Bytes of a folder that are kept for the manifest and the script."""


class Member(NamedTuple):
    """A file in an archive."""

    name: str
    content: bytes
    mode: int = 0o644


class Folder(NamedTuple):
    """A folder's name, and the files that go there."""

    name: str
    files: list[Path]


def write_archive(path: Path, members: Iterable[Member]) -> None:
    """Write a tar with xz. Equal members give equal bytes."""
    with tarfile.open(path, "w:xz", preset=3) as tar:
        for member in sorted(members):
            info = tarfile.TarInfo(member.name)
            info.size, info.mode = len(member.content), member.mode
            tar.addfile(info, io.BytesIO(member.content))


def cut(archive: Path, limit: int) -> list[Path]:
    """Return the archive, or its parts of at most ``limit`` bytes each, which then replace it."""
    size = archive.stat().st_size
    if size <= limit:
        return [archive]
    parts = []
    with archive.open("rb") as file:
        for number in range(-(-size // limit)):
            part = archive.with_name(f"{archive.name}.{number:02}")
            part.write_bytes(file.read(limit))
            parts.append(part)
    archive.unlink()
    return parts


def lay(sizes: Sequence[tuple[str, int]], limit: int) -> list[list[str]]:
    """Return names in groups of at most ``limit`` bytes, in their order.

    A group is closed when the next file does not fit: what is needed first is in the first groups.
    Raises ValueError if a file is larger than ``limit``.
    """
    groups: list[list[str]] = []
    room = -1
    for name, size in sizes:
        if size > limit:
            raise ValueError(f"{name} has {size} bytes, a folder holds {limit}: cut it first")
        if size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    return groups


def write_folders(
    out: Path, archives: Mapping[str, Sequence[Path]], limit: int, notes: Mapping[str, Any]
) -> list[Folder]:
    """Move the parts of all archives into folders ``1``, ``2``, ... with manifest and script.

    ``notes`` are copied into the manifest. Each folder has at most ``limit`` bytes in all.
    """
    files = {path.name: path for parts in archives.values() for path in parts}
    sizes = [(name, path.stat().st_size) for name, path in files.items()]
    folders = [
        Folder(str(number), [files[name] for name in names])
        for number, names in enumerate(lay(sizes, limit - RESERVE), 1)
    ]
    manifest = {
        **notes,
        "archives": {name: [path.name for path in parts] for name, parts in archives.items()},
        "folders": {
            folder.name: {
                path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
                for path in folder.files
            }
            for folder in folders
        },
    }
    script = Path(__file__).with_name("unpack.py")
    told = json.dumps(manifest, indent=1) + "\n"
    if len(told.encode()) + script.stat().st_size > RESERVE:
        raise ValueError(f"the manifest has {len(told)} bytes, more than is reserved: {RESERVE}")
    for folder in folders:
        place = out / folder.name
        place.mkdir()
        for path in folder.files:
            path.rename(place / path.name)
        (place / MANIFEST).write_text(told)
        shutil.copyfile(script, place / script.name)
    return folders
