"""Compiles ``_copy.c`` beside itself: ``python -m kvcore.memory.copy.build_native``.

Used by the wheel's build hook and by hand. Needs only a C11 compiler: ``$CC``, otherwise ``cc``.
Uses only the standard library, so that the build hook can run it by path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE / "_copy.c"
TARGET = HERE / "_copy.so"
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-fvisibility=default",
    "-Wall",
    "-Wextra",
    "-Werror",
)


def compiler() -> str | None:
    """Return the C compiler to use, or None if there is none."""
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")


def build(target: Path = TARGET, *flags: str) -> Path:
    """Compile the library to ``target``, with extra ``flags``, and replace it atomically.

    Raises RuntimeError with the reason if it fails.
    """
    found = compiler()
    if found is None:
        raise RuntimeError("no C compiler: install gcc or clang, or set CC")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [found, *FLAGS, *flags, str(SOURCE), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        made.replace(target)
    return target


if __name__ == "__main__":
    try:
        print(build())
    except RuntimeError as error:
        sys.exit(str(error))
