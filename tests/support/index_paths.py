"""Blocks of an index named by paths: ``(1, 0)`` is child 0 of the root ``(1,)``."""

from __future__ import annotations

NAMESPACES = (b"n" * 16, b"m" * 16)
Path = tuple[int, ...]


def key_of(path: Path) -> bytes:
    return bytes(path).ljust(16, b"\xff")


def keys_of(path: Path) -> list[bytes]:
    return [key_of(path[: i + 1]) for i in range(len(path))]


def path_of(key: bytes) -> Path:
    return tuple(key.rstrip(b"\xff"))


def space_of(path: Path) -> bytes:
    return NAMESPACES[path[0] % 2]
