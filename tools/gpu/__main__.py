"""Run kvcore on a GPU, part by part: `python -m tools.gpu [--parts a,b] [--out FOLDER]`.

GPU_PARTS in the environment chooses parts too. On a machine without a GPU everything runs that can,
and each part says what it left out. The exit status is 1 if something that could run has failed,
and 2 if a part is unknown.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.gpu.machine import gpu_missing
from tools.gpu.parts import PARTS, UnknownPartError, chosen
from tools.gpu.runner import Runner, environment, look_at_machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen parts and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tools.gpu")
    parser.add_argument("--parts", default=os.environ.get("GPU_PARTS"), help="names, with commas")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--list", action="store_true", help="name the parts and end")
    options = parser.parse_args(arguments)
    if options.list:
        for part in PARTS:
            print(f"{part.name:10} {part.limit_s:4} s  {part.title}; needs {part.needs}")
        return 0
    try:
        parts = chosen(options.parts)
    except UnknownPartError as error:
        print(error, file=sys.stderr)
        return 2
    env = environment(options.out / "gpu-metadata")
    machine = look_at_machine(env)
    missing = gpu_missing(machine)
    print(f"GPU: {machine['gpu'] if not missing else f'none, {missing}'}", flush=True)
    return Runner(options.out, machine, env).run(parts)


if __name__ == "__main__":
    sys.exit(main())
