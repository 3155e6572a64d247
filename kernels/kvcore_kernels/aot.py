"""Compiles every kernel in its shipped configurations, without a GPU, and says what each uses.

    python -m kvcore_kernels.aot [--target sm_90 ...] [--kernel copy ...] [--json FILE] [--table]

One line a build: registers a thread, bytes of shared memory, bytes a thread spilled to memory,
scalar registers that stand in lanes of vector registers (AMD: they cost an instruction, no memory),
bytes of the widest access of one thread to global memory. Exits with 1 when a build spills, or
wants more shared memory than a program may have. Must not run with TRITON_INTERPRET set: an
interpreted kernel has nothing to compile.
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

__all__ = ["TARGETS", "Usage", "compile_build", "main", "markdown"]

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes of shared memory that one program may have."""
_ALIGNMENT = 16


class Usage(NamedTuple):
    """What one build takes of the hardware."""

    kernel: str
    target: str
    registers: int
    shared: int
    spills: int
    lanes: int
    widest: int

    @property
    def fits(self) -> bool:
        """Spills nothing and finds its shared memory."""
        return not self.spills and self.shared <= _SHARED[self.target]


def compile_build(build: Build, target: str) -> Usage:
    """Compile for a GPU that need not be here. Blocks for seconds; raises UnsupportedError when the
    kernels are interpreted."""
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
    gpu = TARGETS[target]
    compiled = triton.compile(
        source, target=gpu, options={"num_warps": build.warps, "num_stages": build.stages}
    )
    if gpu.backend == "hip":
        text = compiled.asm["amdgcn"]
        registers, spills, lanes = _amd_usage(text)
    else:
        text = compiled.asm["ptx"]
        registers, spills = _nvidia_usage(compiled.asm["cubin"])
        lanes = 0
    shared = compiled.metadata.shared
    return Usage(build.name, target, registers, shared, spills, lanes, _widest(text))


def _aligned(build: Build) -> Iterator[tuple[int]]:
    """Places of the arguments that a launch finds to be multiples of 16."""
    for place, name in enumerate(build.kernel.arg_names):
        pointer = build.signature[name].startswith("*") and name not in build.unaligned
        if pointer or name in build.multiples:
            yield (place,)


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of local memory: what was spilled, since no kernel asks it."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(count) for name, count in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def _amd_usage(text: str) -> tuple[int, int, int]:
    """Vector registers a thread, its bytes of scratch memory, and scalars kept in lanes."""
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
    """Bytes of the widest load or store of global memory in PTX or in AMD's assembly."""
    ptx = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", text)
    asynchronous = re.findall(r"cp\.async\.c[ag]\.shared\.global\b[^;]*?0x(\w+)", text)
    amd = re.findall(r"(?:global|buffer|flat)_(?:load|store)_dword(?:x(\d))?", text)
    return max(
        [int(count or 1) * int(bits) // 8 for count, bits in ptx]
        + [int(size, 16) for size in asynchronous]
        + [4 * int(count or 1) for count in amd]
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
    """A line a build, a column a target: registers, KiB of shared memory where it is as much as
    one, and bytes spilled to memory where there are any."""
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
    parser.add_argument("--kernel", nargs="*", help="builds whose names begin so (default: all)")
    parser.add_argument("--json", type=Path, help="also write the table here")
    parser.add_argument("--table", action="store_true", help="at the end the table in Markdown")
    options = parser.parse_args(arguments)
    wanted = tuple(options.kernel or [""])
    builds = [build for build in shipped() if build.name.startswith(wanted)]
    table = list(_compiled(options.target, builds))
    if options.json:
        rows: list[dict[str, Any]] = [usage._asdict() for usage in table]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.table:
        print(markdown(table))
    return int(not all(usage.fits for usage in table))


if __name__ == "__main__":
    sys.exit(main())
