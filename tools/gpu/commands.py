"""The commands of a first half hour on a GPU machine without a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools.gpu.parts import PARTS

__all__ = ["CALLS", "CALL_S", "Call", "markdown"]

CALL_S = 600
"""Seconds that one command may take there."""
TARGET = "/tmp/kvcore-gpu"


class Call(NamedTuple):
    """A command: the parts that it runs, and whether all folders must be unpacked before."""

    parts: tuple[str, ...]
    all_folders: bool


CALLS = (
    Call(("kernels", "worker", "decode", "prefill", "link"), all_folders=False),
    Call(("vllm", "sanitizer"), all_folders=True),
    Call(("bandwidth", "engine"), all_folders=False),
)
"""Each leaves a minute of `CALL_S` for unpacking and for the machine's start."""


def markdown(bundle: Path, folders: Sequence[str]) -> str:
    """Return the commands, for the folders of a bundle in ``bundle``.

    A call carries at most one folder. The first one has what kvcore itself imports.
    """
    limits = {part.name: part.limit_s for part in PARTS}
    calls: list[tuple[str | None, Call | None]] = []
    queue = list(folders)
    for call in CALLS:
        while call.all_folders and len(queue) > 1:
            calls.append((queue.pop(0), None))
        calls.append((queue.pop(0) if queue else None, call))
    lines = [
        "# A first half hour on a GPU machine without a network",
        "",
        "Run these in the tree's root, in this order, one after another while the machine is held.",
        "Each call needs the tree and the folder named, no other. `$OUT` is what comes back.",
    ]
    for number, (folder, running) in enumerate(calls, 1):
        parts = running.parts if running else ()
        took = sum(limits[name] for name in parts)
        what = f"parts {', '.join(parts)}, at most {took} s" if parts else "unpacking only"
        carried = f"`{bundle / folder}`" if folder else "nothing"
        lines += ["", f"## {number}. {what}; carry {carried}", "", "```"]
        steps = []
        if folder:
            place = bundle / folder
            steps.append(f"python3 {place}/unpack.py {place} {TARGET} || exit")
        if parts:
            steps += [
                f"export PYTHONPATH={TARGET}/site",
                f"python3 -m tools.gpu --parts {','.join(parts)} --out {TARGET}/results-{number}",
                "code=$?",
                f"cp {TARGET}/results-{number}/gpu-*.json {TARGET}/results-{number}/gpu-*.md $OUT/",
                f"tar czf $OUT/logs-{number}.tgz --exclude=*.safetensors --exclude=kv-* "
                f"--exclude='cache*' --exclude=triton -C {TARGET} results-{number}",
                "exit $code",
            ]
        lines += [*steps, "```"]
    lines += [
        "",
        "Then, here: `python -m tools.gpu.page FILE FILE FILE` shows the three results as one.",
        "What failed: run its part again with `CUDA_LAUNCH_BLOCKING=1`.",
    ]
    return "\n".join(lines) + "\n"
