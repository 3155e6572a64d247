"""Pack what a GPU machine without a network lacks (`make gpu-bundle`).

    python -m tools.gpu.bundle [--out FOLDER] [--cache FOLDER] [--experts] [--model FOLDER]

The machine meant has Linux x86-64, Python 3.12, torch 2.11 for CUDA 13, Triton 3.6, transformers,
pytest, and no network. Files reach it in folders of a limited size, together with this tree.

    index ── pip download ──▶ wheels ── taken apart ──▶ archives ── cut ──▶ OUT/1, OUT/2, ...

vLLM's wheel asks for another torch, but its compiled operators use torch's stable interface only.
So it is not installed: its files are unpacked beside the other packages. Left out is what kvcore
does not need there: FlashAttention 2 (vLLM does not import without one of 2 and 3), the Rust front
end, DeepGEMM.

Wheels are kept in OUT/wheels (or --cache) and are not downloaded twice. OUT/COMMANDS.md says what
to run on the machine, in order.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename

from tools.gpu import commands
from tools.gpu.metadata import project
from tools.gpu.packing import Member, cut, write_archive, write_folders

VLLM = "0.32.0"
PYTHON = "3.12"
MIB = 1 << 20
LIMIT_MIB = 56
"""MiB of a folder: with the tree of 7 MiB it stays below 64."""
PLATFORMS = ("any", *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)))
MARKERS = {
    "python_version": PYTHON, "python_full_version": f"{PYTHON}.3", "sys_platform": "linux",
    "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix",
    "implementation_name": "cpython", "platform_python_implementation": "CPython", "extra": "",
}  # fmt: skip


def listed(name: str) -> tuple[str, ...]:
    """Return the lines of a file beside this one, without comments."""
    lines = Path(__file__).with_name(name).read_text().splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


WHEELS = listed("wheels.txt")
"""Packages to pack."""
THERE = listed("image.txt")
"""Packages that are on the machine."""
KERNELS = "vllm/_C_stable_libtorch.abi3.so"
ATTENTION = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
EXPERTS = "vllm/_moe_C_stable_libtorch.abi3.so"
COMPILED = (ATTENTION, KERNELS, EXPERTS)
"""vLLM's compiled files that are packed, each in a piece of its own."""


class Piece(NamedTuple):
    """An archive: its name, what it is for, and where its files come from."""

    name: str
    what: str
    members: Iterator[Member]


class BundleError(RuntimeError):
    """The bundle cannot be made. The message says what to change."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Download, pack and describe. Return 1 if that is not possible, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        prog="python -m tools.gpu.bundle",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("results/gpu-bundle"))
    parser.add_argument("--cache", type=Path, help="folder of wheels (default: OUT/wheels)")
    parser.add_argument("--max-mib", type=int, default=LIMIT_MIB, help="MiB of a folder")
    parser.add_argument("--vllm", default=VLLM, help="version of vLLM")
    parser.add_argument("--experts", action="store_true", help="add kernels of mixtures of experts")
    parser.add_argument("--model", type=Path, help="add a folder with a model")
    options = parser.parse_args(arguments)
    try:
        make(options)
    except BundleError as error:
        print(f"gpu-bundle: {error}", file=sys.stderr)
        return 1
    return 0


def make(options: argparse.Namespace) -> None:
    """Write all folders, the manifest in each, and the commands. Raises BundleError."""
    out, cache = options.out, options.cache or options.out / "wheels"
    if not 1 <= options.max_mib <= 60:
        raise BundleError(f"given --max-mib {options.max_mib}: give 1 to 60")
    cache.mkdir(parents=True, exist_ok=True)
    engine = one_wheel(cache, Requirement(f"vllm=={options.vllm}"))
    wheels = resolved(cache, engine)
    for old in (child for child in out.iterdir() if child.name.isdigit()):
        shutil.rmtree(old)
    limit = options.max_mib * MIB
    archives: dict[str, list[Path]] = {}
    whats: dict[str, str] = {}
    for piece in pieces(engine, list(wheels.values()), options.experts, options.model):
        path = out / f"{piece.name}.tar.xz"
        write_archive(path, piece.members)
        size = path.stat().st_size
        archives[path.name] = cut(path, limit - (1 * MIB))
        whats[path.name] = piece.what
        print(f"{path.name}: {size / MIB:.1f} MiB, {len(archives[path.name])} part(s)", flush=True)
    skipped = left_out(engine, options.experts)
    notes = {
        "made_for": f"Python {PYTHON}, Linux x86_64",
        "vllm": options.vllm,
        "what": whats,
        "wheels": {name: path.name for name, path in wheels.items()},
        "unmet": unmet([engine, *wheels.values()]),
        "left_out": [name for name in skipped if "/include/" not in name],
        "headers_left_out": sum("/include/" in name for name in skipped),
    }
    folders = write_folders(out, archives, limit, notes)
    for folder in folders:
        used = sum(path.stat().st_size for path in (out / folder.name).iterdir())
        print(f"{out / folder.name}: {used / MIB:.1f} MiB of {options.max_mib}")
    (out / "COMMANDS.md").write_text(commands.markdown(out, [f.name for f in folders]))
    print((out / "COMMANDS.md").read_text())


# -- wheels ---------------------------------------------------------------------------------


def resolved(cache: Path, engine: Path) -> dict[str, Path]:
    """Return a wheel for each of `WHEELS`, such that all that is required of them holds."""
    wanted = {name: SpecifierSet() for name in WHEELS}
    own = [Requirement(text) for text in project()["dependencies"]]
    found: dict[str, Path] = {}
    for _ in range(4):
        given = [*own, *requirements(engine)]
        given += [need for wheel in found.values() for need in requirements(wheel)]
        changed = False
        for need in given:
            name = canonicalize_name(need.name)
            if name in wanted and need.specifier & wanted[name] != wanted[name]:
                wanted[name] &= need.specifier
                changed = True
        if found and not changed:
            return found
        found = {
            name: one_wheel(cache, Requirement(f"{name}{specifier}"))
            for name, specifier in wanted.items()
        }
    raise BundleError("the requirements of the wheels do not settle: see WHEELS")


def one_wheel(cache: Path, need: Requirement) -> Path:
    """Return the newest wheel in the cache that meets a requirement, downloaded if none does."""
    if (held := _held(cache, need)) is None:
        _download(cache, need)
        held = _held(cache, need)
    if held is None:
        raise BundleError(f"no wheel of {need} for Python {PYTHON} on Linux x86_64 was found")
    return held


def _held(cache: Path, need: Requirement) -> Path | None:
    fitting = []
    for path in cache.glob("*.whl"):
        name, version, *_ = parse_wheel_filename(path.name)
        if name == canonicalize_name(need.name) and need.specifier.contains(
            version, prereleases=True
        ):
            fitting.append((version, path))
    return max(fitting)[1] if fitting else None


def _download(cache: Path, need: Requirement) -> None:
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
        "--python-version", PYTHON, "--implementation", "cp",
        "--abi", "cp312", "--abi", "abi3", "--abi", "none", "--dest", str(cache),
    ]  # fmt: skip
    for platform in PLATFORMS:
        command += ["--platform", platform]
    print(f"downloading {need}", flush=True)
    done = subprocess.run([*command, str(need)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BundleError(f"pip cannot download {need}: {done.stderr.strip()[-500:]}")


def requirements(wheel: Path) -> list[Requirement]:
    """Return what a wheel requires on the machine, without extras."""
    with zipfile.ZipFile(wheel) as file:
        [name] = [n for n in file.namelist() if n.endswith(".dist-info/METADATA")]
        lines = Parser().parsestr(file.read(name).decode()).get_all("Requires-Dist") or []
    needs = [Requirement(line) for line in lines]
    return [need for need in needs if need.marker is None or need.marker.evaluate(MARKERS)]


def unmet(wheels: Sequence[Path]) -> dict[str, list[str]]:
    """Return what is required and neither packed nor there, with who requires it."""
    missing: dict[str, list[str]] = {}
    for wheel in wheels:
        for need in requirements(wheel):
            name = canonicalize_name(need.name)
            if name not in {*WHEELS, *THERE, "vllm"}:
                missing.setdefault(name, []).append(wheel.name.partition("-")[0])
    return dict(sorted(missing.items()))


# -- pieces ---------------------------------------------------------------------------------


def pieces(
    engine: Path, wheels: Sequence[Path], experts: bool, model: Path | None
) -> Iterator[Piece]:
    """Yield the archives, in the order in which the machine needs them."""
    yield Piece(
        "packages", "what kvcore and vLLM import and the machine lacks",
        (member for wheel in wheels for member in wheel_members(wheel)),
    )  # fmt: skip
    yield Piece("vllm", "vLLM without compiled files", engine_members(engine, compiled=False))
    yield Piece("vllm-attention", "FlashAttention 3", chosen_members(engine, ATTENTION))
    yield Piece("vllm-kernels", "vLLM's compiled operators", chosen_members(engine, KERNELS))
    if experts:
        what = "vLLM's compiled operators for mixtures of experts"
        yield Piece("vllm-experts", what, chosen_members(engine, EXPERTS))
    if model is not None:
        yield Piece(f"model-{model.name}", "a model", model_members(model))


def wheel_members(wheel: Path) -> Iterator[Member]:
    """Yield a wheel's files as an installer would lay them below ``site``. Scripts are left out."""
    with zipfile.ZipFile(wheel) as file:
        for info in file.infolist():
            if not info.is_dir() and (name := _installed(info.filename)):
                yield Member(f"site/{name}", file.read(info))


def _installed(name: str) -> str:
    """Return the path of a wheel's file in a folder of packages; "" if it does not belong there."""
    first, _, rest = name.partition("/")
    if not first.endswith(".data"):
        return name
    kind, _, inside = rest.partition("/")
    return inside if kind in ("purelib", "platlib") else ""


def engine_members(engine: Path, compiled: bool) -> Iterator[Member]:
    """Yield vLLM's files that are in pieces of their own, or all others that are not left out."""
    skipped = set(left_out(engine, experts=True))
    for member in wheel_members(engine):
        name = member.name.removeprefix("site/")
        if name not in skipped and (name in COMPILED) == compiled:
            yield member


def chosen_members(engine: Path, name: str) -> Iterator[Member]:
    """Yield one of vLLM's compiled files."""
    found = [m for m in engine_members(engine, compiled=True) if m.name == f"site/{name}"]
    if not found:
        raise BundleError(f"{engine.name} has no {name}: this release is built in another way")
    yield from found


def left_out(engine: Path, experts: bool) -> list[str]:
    """Return vLLM's files that are not packed: compiled ones, and headers for compiling more."""
    kept = {*COMPILED} if experts else {*COMPILED} - {EXPERTS}
    with zipfile.ZipFile(engine) as file:
        names = [info.filename for info in file.infolist() if not info.is_dir()]
    return [
        name
        for name in names
        if name not in kept
        and (name.endswith(".so") or name == "vllm/vllm-rs" or "/include/" in name)
    ]


def model_members(folder: Path) -> Iterator[Member]:
    """Yield a model's files below ``models``."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield Member(f"models/{folder.name}/{path.relative_to(folder)}", path.read_bytes())


if __name__ == "__main__":
    sys.exit(main())
