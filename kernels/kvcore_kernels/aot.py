"""Compile every kernel in its shipped configurations, without a GPU, and report its resources.

    python -m kvcore_kernels.aot [--target sm_90 ...] [--kernel copy ...] [--build NAME ...]
                                 [--json FILE] [--table]

Each build is one line: registers per thread, bytes of shared memory, bytes spilled to memory per
thread, scalar registers kept in lanes of vector registers (on AMD; they cost an instruction but no
memory), and bytes of the widest access of one thread to global memory. The exit status is 1 if a
build spills or needs more shared memory than a program may have. TRITON_INTERPRET must not be set,
because interpreted kernels cannot be compiled.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvcore.errors import UnsupportedError
from kvcore_kernels.builds import Build, shipped

__all__ = ["TARGETS", "Usage", "compile_build", "compiled", "main", "markdown"]

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Maximum bytes of shared memory of one program."""
_ALIGNMENT = 16


class Usage(NamedTuple):
    """The hardware resources of one build."""

    kernel: str
    target: str
    registers: int
    shared: int
    spills: int
    lanes: int
    widest: int

    @property
    def fits(self) -> bool:
        """Whether nothing spills and the shared memory suffices."""
        return not self.spills and self.shared <= _SHARED[self.target]


def compiled(build: Build, target: str) -> Any:
    """Compile for a GPU that need not be present; return Triton's result. Blocks for seconds.

    Raises UnsupportedError if the kernels are interpreted.
    """
    if not hasattr(build.kernel, "cache_key"):
        raise UnsupportedError(
            "the kernels are interpreted (TRITON_INTERPRET is set) and cannot be compiled: unset it"
        )
    source = ASTSource(
        build.kernel,
        signature=build.signature,
        constexprs=build.constants,
        attrs={place: [["tt.divisibility", _ALIGNMENT]] for place in _aligned(build)},
    )
    options = {"num_warps": build.warps, "num_stages": build.stages}
    return triton.compile(source, target=TARGETS[target], options=options)


def compile_build(build: Build, target: str) -> Usage:
    """Return what a build for a GPU needs. Blocks and raises as `compiled` does."""
    made = compiled(build, target)
    if TARGETS[target].backend == "hip":
        text = made.asm["amdgcn"]
        registers, spills, lanes = _amd_usage(text)
    else:
        text = made.asm["ptx"]
        registers, spills = _nvidia_usage(made.asm["cubin"])
        lanes = 0
    shared = made.metadata.shared
    return Usage(build.name, target, registers, shared, spills, lanes, _widest(text))


def _aligned(build: Build) -> Iterator[tuple[int]]:
    """Yield the indices of arguments that a launch specializes as multiples of 16."""
    for place, name in enumerate(build.kernel.arg_names):
        pointer = build.signature[name].startswith("*") and name not in build.unaligned
        if pointer or name in build.multiples:
            yield (place,)


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Return registers per thread and bytes of local memory, which only spills use here."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(count) for name, count in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def _amd_usage(text: str) -> tuple[int, int, int]:
    """Return vector registers and scratch bytes per thread, and scalars kept in lanes."""
    found = {
        name: int(count)
        for name, count in re.findall(
            r"\.(vgpr_count|private_segment_fixed_size|sgpr_spill_count):\s+(\d+)", text
        )
    }
    return (
        found["vgpr_count"], found["private_segment_fixed_size"], found["sgpr_spill_count"]
    )  # fmt: skip


def _widest(text: str) -> int:
    """Return the bytes of the widest global load or store in PTX or AMD assembly."""
    ptx = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", text)
    asynchronous = re.findall(r"cp\.async\.c[ag]\.shared\.global\b[^;]*?0x(\w+)", text)
    amd = re.findall(r"(?:global|buffer|flat)_(?:load|store)_dword(?:x(\d))?", text)
    narrow = re.findall(r"(?:global|buffer|flat)_(?:load|store)_[us]?(byte|short)", text)
    return max(
        [int(count or 1) * int(bits) // 8 for count, bits in ptx]
        + [int(size, 16) for size in asynchronous]
        + [4 * int(count or 1) for count in amd]
        + [2 if kind == "short" else 1 for kind in narrow]
    )


def _compiled(targets: Iterable[str], builds: Sequence[Build]) -> Iterator[Usage]:
    for target in targets:
        for build in builds:
            if build.targets and target not in build.targets:
                continue
            usage = compile_build(build, target)
            print(
                f"{usage.target:8} {usage.kernel:44} {usage.registers:4} registers "
                f"{usage.shared:7} shared {usage.spills:5} spilled {usage.lanes:4} lanes "
                f"{usage.widest:3} widest",
                flush=True,
            )
            yield usage


def markdown(table: Iterable[Usage]) -> str:
    """Return a Markdown table with a row for each build and a column for each target.

    A cell has the registers, the KiB of shared memory if it is at least one, and the bytes spilled
    to memory if there are any.
    """
    cells: dict[str, dict[str, str]] = {}
    for usage in table:
        text = str(usage.registers)
        text += f", {usage.shared / 1024:.3g} KiB" if usage.shared >= 1024 else ""
        text += f", {usage.spills} spilled" if usage.spills else ""
        cells.setdefault(usage.kernel, {})[usage.target] = text
    targets = list(dict.fromkeys(target for row in cells.values() for target in row))
    lines = [["build", *targets], ["---"] * (len(targets) + 1)]
    lines += [[name, *(row.get(target, "") for target in targets)] for name, row in cells.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvcore_kernels.aot", description=__doc__)
    parser.add_argument("--target", nargs="*", choices=TARGETS, default=list(TARGETS))
    parser.add_argument(
        "--kernel", nargs="*", help="builds whose names begin with this (default: all)"
    )
    parser.add_argument("--build", nargs="*", help="builds of exactly these names (default: all)")
    parser.add_argument("--json", type=Path, help="also write the table here")
    parser.add_argument(
        "--table", action="store_true", help="print the table in Markdown at the end"
    )
    options = parser.parse_args(arguments)
    wanted = tuple(options.kernel or [""])
    builds = [build for build in shipped() if build.name.startswith(wanted)]
    if options.build is not None:
        builds = [build for build in builds if build.name in options.build]
    table = list(_compiled(options.target, builds))
    if options.json:
        rows: list[dict[str, Any]] = [usage._asdict() for usage in table]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.table:
        print(markdown(table))
    return int(not all(usage.fits for usage in table))


if __name__ == "__main__":
    sys.exit(main())
