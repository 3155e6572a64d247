"""Creates .venvs/routers: the routers that demo/fleet.py puts in front of engines.

    python3 -m tools.env_routers            create it, or bring it up to date
    python3 -m tools.env_routers --check    report whether it is up to date (exit code 1 if not)

They come from the package index, in the versions that docs/events.md names. They have an
environment of their own, because they pin packages that engines need in other versions. The recipe
is not in tools/env.py: its environments are made anew whenever that file changes, and these
routers change more often than engines.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
from pathlib import Path

from tools import env

ROUTERS = {"ai-dynamo-runtime": "1.6.1", "sglang-router": "0.3.2", "vllm-router": "0.1.17"}
"""The packages, and their versions."""

PATH = env.ROOT / ".venvs" / "routers"


def stamp() -> dict[str, str]:
    """Return the digest of the inputs of an up-to-date environment."""
    inputs = f"{ROUTERS} {platform.machine()} {sys.version_info[:2]}"
    return {"routers": hashlib.sha256(inputs.encode()).hexdigest()}


def make(path: Path) -> None:
    """Bring the environment up to date. It has no engine and no kvcore."""
    packages = [f"{name}=={version}" for name, version in ROUTERS.items()]
    log = path.with_name(f"{path.name}-install.log")
    steps = [env.Step("routers", lambda made: made.pip("install", *packages))]
    env._make_whole(env.Environment(path, log), stamp(), steps)


def main(arguments: list[str] | None = None) -> int:
    """Create the environment, or check it. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python3 -m tools.env_routers", description=__doc__)
    parser.add_argument("--path", type=Path, default=PATH, help="by default .venvs/routers")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    options = parser.parse_args(arguments)
    if options.check:
        current = env.found_stamp(options.path) == stamp()
        print(f"{options.path} is {'up to date' if current else 'missing or out of date'}")
        return 0 if current else 1
    try:
        make(options.path)
    except env.EnvError as error:
        print(f"tools/env_routers.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
