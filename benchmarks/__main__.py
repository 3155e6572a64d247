"""``python -m benchmarks [NAME ...]``: run benchmarks one after another.

Without names, run those that take minutes and need neither a GPU, another engine nor a store.
"""

from __future__ import annotations

import runpy
import sys

ALL = (
    "control_plane",
    "copies",
    "transfers",
    "disk",
    "index_rebuild",
    "chunk_find",
    "events",
    "fusion_overlap",
    "vllm_ttft",
)
APART = (
    "fusion_quality",
    "fusion_gate",
    "blend_host",
    "blend_ranks",
    "kernels",
    "server",
    "load",
    "step_cost",
    "end_to_end",
    "decode_beside",
    "sglang_ttft",
    "vllm_states",
    "remote",
    "protection",
)
"""Run only when named: these take hours, or need a GPU, another engine or stores."""


def main() -> None:
    chosen = sys.argv[1:] or list(ALL)
    unknown = [name for name in chosen if name not in ALL + APART]
    if unknown:
        raise SystemExit(f"no benchmark {', '.join(unknown)}; there are {', '.join(ALL)}")
    for name in chosen:
        sys.argv = [f"benchmarks.{name}"]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")


if __name__ == "__main__":
    main()
