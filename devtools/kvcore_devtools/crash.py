"""Crash rounds: SIGKILL at random points, then a check of what is left on disk.

python -m kvcore_devtools.crash --rounds 200 --seed 7     an engine: `crash_engine`
python -m kvcore_devtools.crash --server                  a server and clients: `crash_server`
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kvcore_devtools.crash_engine import crash_rounds
from kvcore_devtools.crash_server import server_rounds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to test; default: a temporary one"
    )
    parser.add_argument(
        "--server", action="store_true", help="kill a server, or an engine that is its client"
    )
    options = parser.parse_args(arguments)
    rounds = server_rounds if options.server else crash_rounds
    logging.getLogger("kvcore").setLevel(logging.ERROR)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = rounds(Path(folder), options.rounds, options.seed, _progress)
    assert found.reused, "nothing was reused from the disk, so the rounds prove nothing"
    print(f"{found} in {time.monotonic() - started:.0f} s")


def _progress(line: str) -> None:
    print(f"\r{line}", end="", file=sys.stderr)


if __name__ == "__main__":
    main()
