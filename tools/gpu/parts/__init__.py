"""The parts of `make gpu`: what each needs, and how long it may take.

A part is a function ``run(record, machine, scratch)``. It writes what it finds to the record. If
the machine lacks what it needs, it runs what it can and says what it left out. It fails by
recording a failure, by raising, or by not ending in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tools.gpu.record import Record

__all__ = ["PARTS", "TOTAL_S", "Part", "Run", "UnknownPartError", "chosen"]

TOTAL_S = 25 * 60
"""Seconds that all parts together may take."""

Machine = Mapping[str, Any]


class Run(Protocol):
    """What a part's function looks like. ``scratch`` is an empty folder of its own."""

    def __call__(self, record: Record, machine: Machine, scratch: Path) -> None: ...


class Part(NamedTuple):
    """A part of the run.

    Args:
        name: what GPU_PARTS calls it.
        title: what it shows, in a few words.
        needs: what the whole of it needs, in words.
        otherwise: what runs without that, in words; empty if nothing does.
        limit_s: seconds after which its processes are killed.
        function: a `Run`, as ``module:name``.
    """

    name: str
    title: str
    needs: str
    otherwise: str
    limit_s: int
    function: str


PARTS = (
    Part(
        "kernels", "Triton kernels, compiled, against their naive twins",
        "a GPU, Triton, pytest, hypothesis", "some builds, for a GPU that is not there",
        120, "tools.gpu.parts.kernels:run",
    ),
    Part(
        "worker", "CUDA worker, pinned arena, streams (tests/gpu)",
        "a GPU, pytest", "the tests, with pages in host memory",
        90, "tools.gpu.parts.worker:run",
    ),
    Part(
        "bandwidth", "copies and kernels beside cudaMemcpy",
        "a GPU, Triton", "the benchmark's dry run, in Triton's interpreter",
        180, "tools.gpu.parts.bandwidth:run",
    ),
    Part(
        "engine", "reference engine end to end: cold, host, disk, blend",
        "a GPU with about 50 GiB free, Triton", "the benchmark's dry run",
        300, "tools.gpu.parts.engine:run",
    ),
    Part(
        "decode", "inter-token time beside a running save and a running load",
        "a GPU", "the benchmark's dry run",
        90, "tools.gpu.parts.decode:run",
    ),
    Part(
        "prefill", "rates of saves and loads beside a prefill",
        "a GPU", "the benchmark's dry run",
        90, "tools.gpu.parts.prefill:run",
    ),
    Part(
        "link", "rates of the link by piece, what pinning costs others, loads behind loads",
        "a GPU", "the loads, in the CPU's memory",
        60, "tools.gpu.parts.link:run",
    ),
    Part(
        "vllm", "real vLLM: equal tokens, then times in Llama-3-8B's shape",
        "a GPU, vLLM", "equal tokens on vLLM's CPU build, with a tiny model",
        300, "tools.gpu.parts.vllm:run",
    ),
    Part(
        "sanitizer", "the worker's tests under compute-sanitizer",
        "a GPU, compute-sanitizer, pytest", "",
        120, "tools.gpu.parts.sanitizer:run",
    ),
)  # fmt: skip
"""In the order in which they run: what is most likely to be wrong comes first."""


class UnknownPartError(ValueError):
    """A part that does not exist was asked for. The message names those that do."""


def chosen(names: str | None, parts: tuple[Part, ...] = PARTS) -> tuple[Part, ...]:
    """Return the parts that ``names`` lists, separated by commas, in the order of ``parts``.

    None and an empty list mean all. Raises UnknownPartError.
    """
    asked = [name.strip() for name in (names or "").split(",") if name.strip()]
    known = [part.name for part in parts]
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise UnknownPartError(
            f"given {', '.join(map(repr, unknown))} in GPU_PARTS; there are {', '.join(known)}"
        )
    return tuple(part for part in parts if not asked or part.name in asked)
