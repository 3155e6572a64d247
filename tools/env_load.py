"""Creates .venvs/aiperf and .venvs/lmcache, which benchmarks/load.py can use.

    python3 -m tools.env_load            create them, or bring them up to date
    python3 -m tools.env_load --check    report whether they are up to date (exit code 1 if not)

aiperf is a load generator, whose requirements are of other versions than an engine's. LMCache is a
contender and brings a generator of its own. It runs in vLLM, and its requirements name CUDA's
packages, so its environment sees those of .venvs/vllm and has only what they lack.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
from pathlib import Path

from tools import env

AIPERF = "aiperf==0.13.0"
LMCACHE = "lmcache==0.5.6"
LMCACHE_NEEDS = (
    "aiofile==3.12.3",
    "aiofiles==25.1.0",
    "caio==0.12.10",
    "nvtx==0.2.17",
    "opentelemetry-exporter-prometheus==0.66b2",
)
"""What LMCache imports and vLLM's environment lacks."""

FOLDER = env.ROOT / ".venvs"


def stamp(packages: tuple[str, ...], base: Path | None = None) -> dict[str, str]:
    """Return the digest of the inputs of an up-to-date environment over ``base``."""
    below = "" if base is None else env.found_stamp(base)
    inputs = f"{packages} {below} {platform.machine()} {sys.version_info[:2]}"
    return {"load": hashlib.sha256(inputs.encode()).hexdigest()}


def stamps(folder: Path, base: Path) -> dict[Path, dict[str, str]]:
    """Return the wanted stamp of each environment."""
    return {
        folder / "aiperf": stamp((AIPERF,)),
        folder / "lmcache": stamp((LMCACHE, *LMCACHE_NEEDS), base),
    }


def make(folder: Path, base: Path) -> None:
    """Bring both environments up to date. Raises EnvError if ``base`` is missing."""
    if not env.found_stamp(base):
        raise env.EnvError(f"LMCache runs in vLLM, and {base} is missing: run tools/env.py vllm")
    steps = (
        [env.Step("aiperf", lambda made: made.pip("install", AIPERF))],
        [env.Step(f"LMCache over {base.name}", lambda made: _lmcache(made, base))],
    )
    for (path, wanted), recipe in zip(stamps(folder, base).items(), steps, strict=True):
        log = path.with_name(f"{path.name}-install.log")
        env._make_whole(env.Environment(path, log), wanted, recipe)


def _lmcache(made: env.Environment, base: Path) -> None:
    """Install LMCache where it sees the packages of ``base``.

    Unlike a layer it has a pip of its own, so that its command gets a script.
    """
    below = env.Environment(base, made.log).site
    (made.site / env.BASE).write_text(f"import site; site.addsitedir({str(below)!r})\n")
    made.pip("install", "--no-deps", LMCACHE, *LMCACHE_NEEDS)


def main(arguments: list[str] | None = None) -> int:
    """Create the environments, or check them. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python3 -m tools.env_load", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="by default .venvs")
    parser.add_argument("--base", type=Path, default=FOLDER / "vllm", help="by default .venvs/vllm")
    parser.add_argument("--check", action="store_true", help="only say if they are up to date")
    options = parser.parse_args(arguments)
    if options.check:
        wanted = stamps(options.folder, options.base)
        current = {path: env.found_stamp(path) == digest for path, digest in wanted.items()}
        for path, fits in current.items():
            print(f"{path} is {'up to date' if fits else 'missing or out of date'}")
        return 0 if all(current.values()) else 1
    try:
        make(options.folder, options.base)
    except env.EnvError as error:
        print(f"tools/env_load.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
