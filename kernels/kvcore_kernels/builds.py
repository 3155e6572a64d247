"""The configurations that are compiled ahead of time: those a launch chooses for real models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvcore_kernels.copy import kernel as copy
from kvcore_kernels.copy.launch import tile_for
from kvcore_kernels.planes import Words

__all__ = ["Build", "shipped"]


class Build(NamedTuple):
    """One compilation. ``signature`` has a type for every argument, "constexpr" for constants."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int
    unaligned: tuple[str, ...] = ()


def _build(
    name: str,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    warps: int = 4,
    stages: int = 3,
    unaligned: tuple[str, ...] = (),
) -> Build:
    """``types`` names the arguments that are not constants; others default to i32."""
    signature = {
        arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names
    }
    return Build(name, kernel, signature, dict(constants), warps, stages, unaligned)


def shipped() -> Iterator[Build]:
    """Every build, op by op."""
    yield from _copies()


_TABLES = ("sources", "targets", "src_units", "dst_units")


def _copies() -> Iterator[Build]:
    words = {
        "wide": tile_for(Words(8, 16), contiguous=True, cut=False, rows=128, dim=32),
        "latent": tile_for(Words(8, 16), contiguous=True, cut=False, rows=64, dim=144),
        "8-byte": tile_for(Words(8, 8), contiguous=True, cut=False, rows=128, dim=20),
        "strided": tile_for(Words(2, 2), contiguous=False, cut=False, rows=128, dim=128),
        "packed": tile_for(Words(2, 2), contiguous=False, cut=True, rows=128, dim=128),
        "byte": tile_for(Words(1, 1), contiguous=False, cut=True, rows=128, dim=128),
    }
    for name, tile in words.items():
        yield _build(
            f"copy {name}",
            copy.copy_kernel,
            dict.fromkeys(_TABLES, "*i64"),
            tile.constants(),
            unaligned=_TABLES,
        )
