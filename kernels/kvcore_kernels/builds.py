"""The configurations compiled ahead of time, which are those that launches choose for models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from kvcore.fusion.rope import Pairing, Rope
from kvcore.memory.layout import Axis, Plane
from kvcore_kernels.attend.kernel import attend_kernel
from kvcore_kernels.attend.launch import constants
from kvcore_kernels.balance import launch as balances
from kvcore_kernels.balance.kernel import balance_kernel
from kvcore_kernels.choose import launch as choices
from kvcore_kernels.choose.kernel import choose_kernel, keep_kernel
from kvcore_kernels.copy import launch as copies
from kvcore_kernels.copy.kernel import bounded_copy_kernel, copy_kernel
from kvcore_kernels.deviation import launch as deviations
from kvcore_kernels.deviation.kernel import deviation_kernel
from kvcore_kernels.merge import launch as merges
from kvcore_kernels.merge.kernel import ADDRESSES, merge_kernel
from kvcore_kernels.pack import launch as packs
from kvcore_kernels.pack.kernel import pack_kernel, unpack_kernel
from kvcore_kernels.planes import Words
from kvcore_kernels.shift import launch as shifts
from kvcore_kernels.shift.kernel import shift_kernel
from kvcore_kernels.smooth import launch as smooths
from kvcore_kernels.smooth.kernel import smooth_kernel
from kvcore_kernels.sums import launch as summing
from kvcore_kernels.sums.kernel import sum_kernel

__all__ = ["Build", "shipped"]


class Build(NamedTuple):
    """One compilation. ``signature`` has a type for every argument, "constexpr" for constants.

    ``unaligned`` names pointers that are not assumed to be multiples of 16 bytes. ``multiples``
    names integers that are assumed to be multiples of 16. ``targets`` names the targets it is
    shipped for; empty means all.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int
    unaligned: tuple[str, ...] = ()
    multiples: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()


def _build(
    name: str,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    warps: int = 4,
    stages: int = 3,
    unaligned: tuple[str, ...] = (),
    multiples: tuple[str, ...] = (),
    targets: tuple[str, ...] = (),
) -> Build:
    """Return a build. ``types`` has the types of arguments that are neither constants nor i32."""
    signature = {
        arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names
    }
    return Build(
        name, kernel, signature, dict(constants), warps, stages, unaligned, multiples, targets
    )


def shipped() -> Iterator[Build]:
    """Yield every build, op by op."""
    yield from _copies()
    yield from _shifts()
    yield from _attentions()
    yield from _deviations()
    yield from _choices()
    yield from _smooths()
    yield from _balances()
    yield from _merges()
    yield from _packs()
    yield from _sums()


def _tables(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "*i64")


_COPY = ("sources", "targets", "src_units", "dst_units")


def _copies() -> Iterator[Build]:
    words = {
        "wide": copies.tile_for(Words(8, 16), contiguous=True, cut=False, rows=128, dim=32),
        "latent": copies.tile_for(Words(8, 16), contiguous=True, cut=False, rows=64, dim=144),
        "8-byte": copies.tile_for(Words(8, 8), contiguous=True, cut=False, rows=128, dim=20),
        "strided": copies.tile_for(Words(2, 2), contiguous=False, cut=False, rows=128, dim=128),
        "packed": copies.tile_for(Words(2, 2), contiguous=False, cut=True, rows=128, dim=128),
        "byte": copies.tile_for(Words(1, 1), contiguous=False, cut=True, rows=128, dim=128),
    }
    for name, tile in words.items():
        for way, kernel in (("copy", copy_kernel), ("bounded copy", bounded_copy_kernel)):
            yield _build(
                f"{way} {name}", kernel, _tables(*_COPY), tile.constants(), unaligned=_COPY
            )


_SHIFT = ("sources", "targets", "ropes", "src_units", "dst_units", "turns")


def _shifts() -> Iterator[Build]:
    neox, gptj = (Rope(128, 128, pairing, 1e4) for pairing in (Pairing.NEOX, Pairing.GPTJ))
    wide = partial(shifts.tile_for, width=16, contiguous=True, cut=False)
    tiles = {
        "bf16 128": wide("bfloat16", neox, 128),
        "bf16 128 neighbours": wide("bfloat16", gptj, 128),
        "bf16 80 partial": wide("bfloat16", Rope(80, 32, Pairing.NEOX, 1e4), 80),
        "fp16 64": wide("float16", Rope(64, 64, Pairing.NEOX, 1e4), 64),
        "fp32 256": wide("float32", Rope(256, 256, Pairing.NEOX, 1e4), 256),
        "bf16 128 packed": shifts.tile_for(
            "bfloat16", neox, 128, width=2, contiguous=False, cut=True
        ),
    }
    types = _tables(*_SHIFT) | dict.fromkeys(("cos", "sin"), "*fp32")
    for name, tile in tiles.items():
        yield _build(f"shift {name}", shift_kernel, types, tile.constants(), unaligned=_SHIFT)


def _deviations() -> Iterator[Build]:
    types = _tables("which", "slots") | dict.fromkeys(ADDRESSES, "i64")
    types["out"] = "*fp32"
    for short, name, dim, width, which in (
        ("bf16 128", "bfloat16", 128, 16, True), ("bf16 128 all", "bfloat16", 128, 16, False),
        ("fp16 64", "float16", 64, 16, True), ("fp32 128", "float32", 128, 16, True),
        ("bf16 576", "bfloat16", 576, 16, True), ("bf16 80 unaligned", "bfloat16", 80, 2, True),
    ):  # fmt: skip
        tile = deviations.tile_for(name, dim, width=width, chosen=which)
        yield _build(
            f"deviation {short}", deviation_kernel, types, tile.constants(),
            unaligned=("which", "slots", "out"),
        )  # fmt: skip


def _choices() -> Iterator[Build]:
    types = _tables("rows", "out", "positions", "offset_of") | {
        "scores": "*fp32", "kept": "*i32", "bound": "fp32",
    }  # fmt: skip
    block = {"BLOCK": choices.BLOCK}
    for name, kernel, unaligned in (
        ("choose", choose_kernel, ("rows", "scores", "out", "kept")),
        ("keep", keep_kernel, ("positions", "offset_of", "scores", "out")),
    ):
        yield _build(name, kernel, types, block, warps=choices.WARPS, unaligned=unaligned)


def _smooths() -> Iterator[Build]:
    types = _tables("rows") | dict.fromkeys(("scores", "out"), "*fp32")
    yield _build(
        "smooth", smooth_kernel, types, {"BLOCK": smooths.BLOCK}, warps=smooths.WARPS,
        unaligned=("rows", "scores", "out"),
    )  # fmt: skip


def _balances() -> Iterator[Build]:
    names = "one", "other", "out"
    yield _build(
        "balance", balance_kernel, dict.fromkeys(names, "*fp32"), {"BLOCK": balances.BLOCK},
        warps=balances.WARPS, unaligned=names,
    )  # fmt: skip


def _sums() -> Iterator[Build]:
    types = _tables("data", "offsets", "out") | {"last": "i64"}
    yield _build("sums", sum_kernel, types, summing.constants(), multiples=("words",))


def _merges() -> Iterator[Build]:
    types = _tables("slots") | dict.fromkeys(ADDRESSES, "i64")
    for name, tile in {
        "wide": merges.tile_for(16, 128, 2),
        "latent": merges.tile_for(16, 576, 2),
        "unaligned": merges.tile_for(2, 80, 2),
    }.items():
        yield _build(f"merge {name}", merge_kernel, types, tile.constants(), unaligned=("slots",))


_PACK = ("sources", "targets", "places", "units", "blocks")


def _packs() -> Iterator[Build]:
    types = _tables(*_PACK) | {"scales": "*fp32"}
    for name, packed, block, dim, native in (
        ("e4m3 16", "float8_e4m3fn", 16, 128, False),
        ("e4m3 16 native", "float8_e4m3fn", 16, 128, True),
        ("e4m3 256", "float8_e4m3fn", 256, 128, False),
        ("e4m3 256 native", "float8_e4m3fn", 256, 128, True),
        ("e4m3 latent", "float8_e4m3fn", 64, 576, False),
        ("int8 16", "int8", 16, 128, False),
        ("int8 256", "int8", 256, 128, False),
    ):
        tile = packs.tile_for(
            "bfloat16", packed, 1, block, dim,
            width=16, packed_width=16, contiguous=True, cut=False, native=native,
        )  # fmt: skip
        targets = ("sm_90", "sm_100") if native else ()
        for way, kernel, fixed in (
            ("pack", pack_kernel, tile.constants() | tile.limits()),
            ("unpack", unpack_kernel, tile.constants()),
        ):
            yield _build(f"{way} {name}", kernel, types, fixed, unaligned=_PACK, targets=targets)


_HEADS = {
    "bf16": {"64": (64, 64, 4), "80": (80, 80, 1), "128": (128, 128, 4), "192": (192, 128, 1),
             "256": (256, 256, 2), "latent": (576, 512, 128)},
    "fp32": {"64": (64, 64, 4), "128": (128, 128, 4)},
}  # fmt: skip
"""Head dim, value dim and query heads per KV head, by the dtype of queries and KV."""


def _attentions() -> Iterator[Build]:
    for dtype, shapes in _HEADS.items():
        for name, (dim, v_dim, group) in shapes.items():
            yield _attention(f"attend {dtype} {name}", dtype, dim, v_dim, group)
    yield _attention("attend fp16 128", "fp16", 128, 128, 4)
    yield _attention("attend bf16 128 rows", "bf16", 128, 128, 4, page=0)
    yield _attention("attend fp32 128 rows", "fp32", 128, 128, 4, page=0)
    yield _attention("attend bf16 128 window", "bf16", 128, 128, 4, window=4096)
    yield _attention("attend bf16 256 capped", "bf16", 256, 256, 2, capped=True)
    yield _attention("attend bf16 256 window capped", "bf16", 256, 256, 2, 4096, capped=True)


def _attention(
    name: str,
    dtype: str,
    dim: int,
    v_dim: int,
    group: int,
    window: int = 0,
    capped: bool = False,
    page: int = 16,
) -> Build:
    key, value = (Plane(0, 0, 0, 0, Axis(1), Axis(1), d) for d in (dim, v_dim))
    tile, fixed = constants(
        group, page, key, value, v_dim,
        latent=dim > 256, window=window, capped=capped, full=dtype == "fp32",
    )  # fmt: skip
    types = dict.fromkeys(("queries", "out", "keys", "values"), f"*{dtype}")
    types |= {"positions": "*i64", "page_table": "*i32"}
    types |= dict.fromkeys(("scale", "soft_cap"), "fp32")
    return _build(
        name, attend_kernel, types, fixed,
        warps=tile.warps, stages=tile.stages, multiples=_STRIDES,
        unaligned=("positions", "page_table"),
    )  # fmt: skip


_STRIDES = (
    "query_row", "query_head", "k_page", "k_head", "k_token", "v_page", "v_head", "v_token",
)  # fmt: skip
