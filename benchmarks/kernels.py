"""Triton kernels on a GPU, against the GPU's limits and against other ways to do the same.

`python -m benchmarks.kernels` needs a GPU. Correctness is checked first: every way of every small
case must give what torch's way gives. Then each op is measured over sizes from one block to several
GiB, against:

    copies, shift, pack, merge   bytes read and written, by the rate of a copy on the device
    to and from the host         bytes, by the rate of the link to pinned memory
    attend                       useful flops, by FlashAttention's dense causal rate

The smallest sizes stay in the GPU's cache and may exceed these rates; bars are for the largest.

`--dry-run` does all of it on a CPU, in Triton's interpreter, with tiny sizes. It tests the script,
and its times mean nothing. The exit status is 1 if a way is wrong.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks._report import Report, Row
from kvcore.memory.device import device_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from benchmarks._kernel_cases import Case, Scale

COLUMNS = (
    "op", "size", "way", "ms", "host ms", "GB/s", "TFLOP/s", "of floor", "bar", "agrees",
)  # fmt: skip
SMALL = 64 << 20
"""Bytes of results up to which ways are checked against each other."""
FASTER = 5.0
"""Factor by which attention of 15% of 16k tokens must be faster than torch's with a mask."""
ROUND_S = 0.5
"""Approximate seconds for all rounds of one way."""


class Timing(NamedTuple):
    """Medians over rounds: seconds until the work is done, and until the call returns."""

    seconds: float
    host_s: float


class Clock:
    """A clock for calls on one device. On a GPU it uses events on the current stream."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device = device
        self.rounds = rounds

    def __call__(self, way: Callable[[], object]) -> Timing:
        """Call ``way`` twice to warm up, then for as many rounds as `ROUND_S` allows, at least 3.

        A clock with one round makes one call.
        """
        if self.rounds == 1:
            return self._once(way)
        way()
        once = self._once(way)
        count = max(3, min(self.rounds, int(ROUND_S / max(once.seconds, 1e-9))))
        timings = [self._once(way) for _ in range(count)]
        return Timing(*(statistics.median(column) for column in zip(*timings, strict=True)))

    def _once(self, way: Callable[[], object]) -> Timing:
        if self.device.type != "cuda":
            began = time.perf_counter()
            way()
            took = time.perf_counter() - began
            return Timing(took, took)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        start.record()
        began = time.perf_counter()
        way()
        returned = time.perf_counter() - began
        end.record()
        end.synchronize()
        return Timing(start.elapsed_time(end) / 1e3, returned)


# --- floors ---------------------------------------------------------------------------------------


def measured_floors(clock: Clock, dry: bool) -> dict[str, float]:
    """Measure the rates of this machine.

    They are bytes a second of copies (read and written) and of the link, and flops a second of a
    matrix product in bfloat16.
    """
    device = clock.device
    nbytes, side = (1 << 12, 32) if dry else (1 << 30, 8192)
    here, there = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    square = torch.randn(side, side, device=device).to(torch.bfloat16)
    return {
        "copy": 2 * nbytes / clock(lambda: there.copy_(here)).seconds,
        "to host": nbytes / clock(lambda: host.copy_(here, non_blocking=True)).seconds,
        "to device": nbytes / clock(lambda: here.copy_(host, non_blocking=True)).seconds,
        "matmul": 2 * side**3 / clock(lambda: square @ square).seconds,
    }


def flash_rate(clock: Clock, scale: Scale, context: int) -> float:
    """Measure the useful flops a second of dense causal FlashAttention over ``context`` tokens."""
    shape, heads = scale.shape, scale.query_heads
    dtype = getattr(torch, shape.dtype)
    size = (1, heads, context, shape.head_dim)
    q, k, v = (torch.randn(size, device=clock.device).to(dtype) for _ in range(3))

    def way() -> Tensor:
        with _flash(clock.device):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    flops = 2 * heads * shape.head_dim * context * (context + 1)
    return flops / clock(way).seconds


def _flash(device: torch.device) -> AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device.type == "cuda" else nullcontext()


# --- right, then fast -----------------------------------------------------------------------------


def disagreeing(case: Case) -> list[str]:
    """Return the ways whose result differs from torch's; none if torch has no way.

    If torch's own result is all zeros, that way is returned: the memory held zeros before, so such
    a result shows nothing.
    """
    if "torch" not in case.ways:
        return []
    results = {name: _result(case, way) for name, way in case.ways.items()}
    right = results["torch"]
    if not any(bool(tensor.float().any()) for tensor in right):
        return ["torch"]
    return [
        name
        for name, got in results.items()
        if not all(_close(*pair, case.tolerance) for pair in zip(got, right, strict=True))
    ]


def _result(case: Case, way: Callable[[], object]) -> list[Tensor]:
    """Return what a way writes over zeros, or what it returns."""
    for tensor in case.written:
        tensor.zero_()
    out = way()
    if case.written:
        return [tensor.clone() for tensor in case.written]
    assert isinstance(out, Tensor)
    return [out]


def _close(got: Tensor, right: Tensor, tolerance: float) -> bool:
    if not tolerance:
        return torch.equal(got, right)
    return torch.allclose(got.float(), right.float(), rtol=tolerance, atol=tolerance)


def rows_of(
    case: Case, clock: Clock, floors: dict[str, float], wrong: Sequence[str]
) -> Iterator[Row]:
    """Yield a row of the report for every way that does not run out of memory."""
    for name, way in case.ways.items():
        try:
            timing = clock(way)
        except torch.OutOfMemoryError:
            print(f"{case.op}, {case.size}: {name} ran out of memory", flush=True)
            continue
        rate = case.amount / timing.seconds
        is_flops = case.floor == "flash"
        yield {
            "op": case.op,
            "size": case.size,
            "way": name,
            "ms": timing.seconds * 1e3,
            "host ms": timing.host_s * 1e3,
            "GB/s": rate / 1e9 if case.amount and not is_flops else None,
            "TFLOP/s": rate / 1e12 if is_flops else None,
            "of floor": rate / floors[case.floor] if case.amount else None,
            "bar": case.bar if name == "triton" else None,
            "agrees": name not in wrong,
        }


def measured(report: Report, clock: Clock, scale: Scale, largest: int) -> list[str]:
    """Fill the report. Return what was wrong, in words."""
    from benchmarks._kernel_cases import cases

    wrong = {}
    for case in cases(scale, clock.device, min(largest, SMALL)):
        wrong[case.op, case.size] = disagreeing(case)
    bad = [f"{op}, {size}: {name}" for (op, size), names in wrong.items() for name in names]
    print(f"{len(wrong)} cases compared, {len(bad)} ways wrong", *bad, sep="\n  ", flush=True)
    floors = report.notes["floors"]
    for case in cases(scale, clock.device, largest):
        if case.floor == "flash" and f"flash {case.context}" not in floors:
            floors[f"flash {case.context}"] = flash_rate(clock, scale, case.context)
        here = {**floors, "flash": floors.get(f"flash {case.context}")}
        for row in rows_of(case, clock, here, wrong.get((case.op, case.size), ())):
            report.add(**row)
    return bad


def below_the_bar(rows: Sequence[Row]) -> list[str]:
    """Return what misses its bar at its op's largest size, or is not `FASTER` than a mask."""
    last = {row["op"]: row for row in rows if row["bar"] is not None}
    low = [
        f"{op}, {row['size']}: {row['of floor']:.2f} of the floor, wanted {row['bar']}"
        for op, row in last.items()
        if row["of floor"] < row["bar"]
    ]
    times = {row["way"]: row["ms"] for row in rows if row["size"] == "15% of 16384"}
    if "masked SDPA" in times and times["masked SDPA"] < FASTER * times["triton"]:
        low.append(f"attention of 15% of 16384: {times['masked SDPA'] / times['triton']:.1f}x SDPA")
    return low


# --- the report -----------------------------------------------------------------------------------


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Plot the share of the floor that our kernels reach, over the sizes of every op."""
    ours = [row for row in rows if row["bar"] is not None]
    axes = figure.subplots()
    axes.barh([f"{row['op']}, {row['size']}" for row in ours], [row["of floor"] for row in ours])
    axes.plot([row["bar"] for row in ours], range(len(ours)), "k|", label="bar")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize="xx-small")
    axes.set_xlabel("of the floor")
    axes.legend()


def described(device: torch.device, dry: bool) -> dict[str, Any]:
    """Return what the numbers depend on, besides the machine."""
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {
        "gpu": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "dry_run": dry,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.kernels")
    parser.add_argument("--rounds", type=int, default=50, help="most rounds of each way")
    parser.add_argument("--gib", type=float, default=4.0, help="most GiB of KV on one side")
    parser.add_argument(
        "--dry-run", action="store_true", help="run tiny sizes on a CPU; times mean nothing"
    )
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    os.environ.setdefault("COLUMNS", "120")  # the table's width, if nothing else sets it
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        print("torch sees no GPU: `--dry-run` tests the script on a CPU", file=sys.stderr)
        return 2
    from benchmarks._kernel_cases import DRY, FULL

    torch.manual_seed(0)
    scale, rounds = (DRY, 1) if options.dry_run else (FULL, options.rounds)
    device = torch.device("cpu" if options.dry_run else "cuda")
    # kvcore copies on a stream of its own. The default one does not take the driver's batched copy.
    with device_of(device).stream().issuing():
        clock = Clock(device, rounds)
        notes = described(device, options.dry_run)
        notes["floors"] = measured_floors(clock, options.dry_run)
        report = Report(
            "kernels", COLUMNS, "copies, link and FlashAttention of the same GPU", notes
        )
        try:
            wrong = measured(report, clock, scale, int(options.gib * (1 << 30)))
            report.notes["wrong"] = wrong
        finally:  # keep what was measured before an op failed
            report.finish(options.out, draw)
    low = below_the_bar(report.rows)
    print(f"{len(low)} below the bar", *low, sep="\n  ")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
