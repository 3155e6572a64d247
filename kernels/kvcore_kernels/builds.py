"""The configurations that are compiled ahead of time: those a launch chooses for real models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvcore.layout import Axis, Plane
from kvcore_kernels.attend import kernel as attend
from kvcore_kernels.attend.launch import constants
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
    yield from _attentions()


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


_HEADS = {
    "bf16": {"64": (64, 64, 4), "80": (80, 80, 1), "128": (128, 128, 4), "192": (192, 128, 1),
             "256": (256, 256, 2), "latent": (576, 512, 128)},
    "fp32": {"64": (64, 64, 4), "128": (128, 128, 4)},
}  # fmt: skip
"""Head dim, value dim and query heads a KV head, by the dtype of queries and KV."""


def _attentions() -> Iterator[Build]:
    for dtype, shapes in _HEADS.items():
        for name, (dim, v_dim, group) in shapes.items():
            yield _attention(f"attend {dtype} {name}", dtype, dim, v_dim, group)
    yield _attention("attend fp16 128", "fp16", 128, 128, 4)
    yield _attention("attend bf16 128 window", "bf16", 128, 128, 4, window=4096)
    yield _attention("attend bf16 256 capped", "bf16", 256, 256, 2, capped=True)


def _attention(
    name: str, dtype: str, dim: int, v_dim: int, group: int, window: int = 0, capped: bool = False
) -> Build:
    planes = [Plane(0, 0, 0, 0, Axis(1), Axis(1), d) for d in (dim, v_dim)]
    tile, fixed = constants(
        group, 16, *planes, v_dim,
        latent=dim > 256, window=window, capped=capped, full=dtype == "fp32",
    )  # fmt: skip
    types = dict.fromkeys(("queries", "out", "keys", "values"), f"*{dtype}")
    types |= {"positions": "*i64", "page_table": "*i32"}
    types |= dict.fromkeys(("k_strides", "v_strides"), "*i64")
    types |= dict.fromkeys(("scale", "soft_cap"), "fp32")
    return _build(
        name, attend.attend_kernel, types, fixed, warps=tile.warps, stages=tile.stages
    )
