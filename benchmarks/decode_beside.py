"""Inter-token time of decoding on a GPU, beside a running save and beside a running load.

    python -m benchmarks.decode_beside [--batch 8] [--context 4096] [--steps 200]

A step does what a decode step of Llama-3-8B's shape does: the matrix products of every layer with
random weights, and attention of each sequence's last token over its KV. It is captured in a CUDA
graph and replayed. The host waits for each step, as an engine waits for its token. Beside it, one
after the other:

    alone           nothing
    beside a save   kvcore's worker copies pages of the reference engine to host memory, without end
    beside a load   it copies blocks from host memory into those pages, layer by layer

Each round measures all three, so that the clock of the GPU affects them alike. A step counts as
"beside" if its transfer was in flight before and after it. An engine's saves end, so this is the
worst case.

`--dry-run` does all of it on a CPU with a tiny shape, without a graph. It tests the script, and its
times mean nothing. The exit status is 1 if a transfer changed a byte, or if no step on a GPU ran
beside one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks._report import Report, Row
from kvcore.config import load_config
from kvcore.testing.engine import EngineArgs, Llama, ReferenceEngine, random_llama
from kvcore.transfer.graph import Span, UnitTable
from kvcore.transfer.plan import layer_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("beside", "steps", "p50 ms", "p99 ms", "mean ms", "p50 to alone", "bar")
ALONE, SAVE, LOAD = "alone", "a save", "a load"
BARS = {SAVE: 1.03, LOAD: 1.05}
"""Most times by which the median step may take longer."""
BLOCK = 16
NAMESPACE = b"decode beside KV"
WAIT_S = 60.0


class Scale(NamedTuple):
    """Sizes of a run: the model, the decoded batch, and the blocks that a transfer moves."""

    shape: dict[str, Any]
    dtype: torch.dtype
    batch: int
    context: int
    blocks: int
    steps: int
    rounds: int


FULL = Scale(
    {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128,
     "intermediate": 14336, "vocabulary": 128256, "theta": 5e5},
    torch.bfloat16, batch=8, context=4096, blocks=2048, steps=200, rounds=3,
)  # fmt: skip
"""Llama-3-8B's shape. A transfer moves 4 GiB: it lasts about as long as ten steps."""

DRY = Scale(
    {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16,
     "intermediate": 128, "vocabulary": 512, "theta": 1e4},
    torch.float32, batch=2, context=32, blocks=512, steps=4, rounds=1,
)  # fmt: skip


class DecodeStep:
    """A decode step over fixed buffers. Calling it computes one and waits for it."""

    def __init__(self, model: Llama, scale: Scale) -> None:
        self._model = model
        self._device = model.device
        shape, batch = scale.shape, scale.batch
        options = {"device": model.device, "dtype": model.dtype}
        self._rows = torch.randn(batch, shape["hidden"], **options)
        size = batch, shape["kv_heads"], scale.context, shape["head_dim"]
        self._kv = [
            (torch.randn(size, **options), torch.randn(size, **options))
            for _ in range(shape["layers"])
        ]
        self._heads = shape["heads"], shape["head_dim"]
        self._step: Callable[[], object] = self._compute
        if self._device.type == "cuda":
            self._step = self._captured()

    def __call__(self) -> float:
        """Return the seconds until the step has ended."""
        began = time.perf_counter()
        self._step()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter() - began

    def _compute(self) -> Tensor:
        rows, (heads, dim) = self._rows, self._heads
        batch = len(rows)
        for layer, (keys, values) in zip(self._model.layers, self._kv, strict=True):
            normal = functional.rms_norm(rows, layer.norm.shape, layer.norm)
            queries = (normal @ layer.q.T).view(batch, heads, 1, dim)
            keys[:, :, -1] = (normal @ layer.k.T).view(batch, -1, dim)
            values[:, :, -1] = (normal @ layer.v.T).view(batch, -1, dim)
            mixed = functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
            rows = rows + mixed.reshape(batch, -1) @ layer.o.T
            normal = functional.rms_norm(rows, layer.mlp_norm.shape, layer.mlp_norm)
            inner = functional.silu(normal @ layer.gate.T) * (normal @ layer.up.T)
            rows = rows + inner @ layer.down.T
        return rows @ self._model.head.T

    def _captured(self) -> Callable[[], object]:
        aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(aside):  # what a first call allocates and chooses is not captured
            for _ in range(3):
                self._compute()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._kept = self._compute()
        return graph.replay


class Transfers(AbstractContextManager["Transfers"]):
    """Saves and loads of ``scale.blocks`` blocks of an engine's pages, one transfer at a time."""

    def __init__(self, model: Llama, scale: Scale, backend: str) -> None:
        self._scale = scale
        pages = EngineArgs(num_pages=2 * scale.blocks + 8, page_tokens=BLOCK)
        token = model.block_shape(BLOCK).nbytes // BLOCK
        config = load_config(
            None,
            {
                "block": {"tokens": BLOCK},
                # Room for two chains, and for blocks in transit.
                "host": {"capacity": (2 * scale.blocks + 64) * BLOCK * token},
                "ops": {"backend": backend},
                "transfer": {"load_deadline_s": WAIT_S},
            },
        )
        self.engine = ReferenceEngine(model, pages, config)
        self._manager: Any = self.engine.leader.manager  # type: ignore[union-attr]
        self._part: Any = self.engine._parts[0]
        order = np.random.default_rng(0).permutation(pages.num_pages).astype(np.int64)
        self._home, self._away = order[: scale.blocks], order[scale.blocks : 2 * scale.blocks]
        self._chains = 0
        self._held: list[bytes] = []
        self._graph: Any = None
        self.done = {SAVE: 0, LOAD: 0}
        for tensor in self._part.view().tensors:
            tensor.normal_()

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def start(self, what: str) -> None:
        """Start a transfer if none is in flight."""
        if self.in_flight:
            return
        if what == SAVE:
            self._chains += 1
            names = np.random.default_rng(self._chains).bytes(16 * self._scale.blocks)
            self._held = [names[i : i + 16] for i in range(0, len(names), 16)]
            planned = self._manager.plan_save(self._held, NAMESPACE, len(self._held))
            assert planned is not None, "the host tier has room for a chain"
            places = self._home[slice(*planned.blocks), None]
            self._graph = self._manager.launch(planned, [UnitTable.of(places, BLOCK)])
        else:
            hit = self._manager.get_match(self._held, NAMESPACE)
            if hit.depth != len(self._held):
                raise RuntimeError(f"{hit.depth} of {len(self._held)} blocks were saved")
            steps = layer_steps(self._scale.shape["layers"])
            units = [UnitTable.of(self._away[:, None], BLOCK)]
            planned = self._manager.plan_load(hit, Span(0, hit.depth), layers=steps)
            self._graph = self._manager.launch(planned, units)
        self.done[what] += 1

    @property
    def in_flight(self) -> bool:
        """True if the last transfer still runs. Takes in the reports that are there."""
        self._manager.pump()
        return self._graph is not None and self._manager.is_in_flight(self._graph.graph_id)

    def end(self) -> None:
        """Wait until no transfer is in flight."""
        limit = time.monotonic() + WAIT_S
        while self.in_flight:
            if time.monotonic() > limit:
                raise RuntimeError(f"a transfer did not end within {WAIT_S:g} s")
            time.sleep(0.001)

    def intact(self) -> bool:
        """Return True if the pages that were loaded into hold what the saved ones hold."""
        home, away = (torch.from_numpy(pages) for pages in (self._home, self._away))
        return all(
            torch.equal(tensor[home.to(tensor.device)], tensor[away.to(tensor.device)])
            for tensor in self._part.view().tensors
        )


def measure(step: DecodeStep, transfers: Transfers, what: str, steps: int) -> list[float]:
    """Return the seconds of up to ``steps`` steps, all of them beside ``what``."""
    taken: list[float] = []
    for _ in range(20 * steps):
        if what != ALONE:
            transfers.start(what)
        seconds = step()
        if what == ALONE or transfers.in_flight:
            taken.append(seconds)
        if len(taken) == steps:
            break
    transfers.end()
    return taken


def rows_of(taken: dict[str, list[float]]) -> list[Row]:
    """Return a row for each way; `p50 to alone` is a ratio of medians."""
    alone = float(np.median(taken[ALONE]))
    return [
        {
            "beside": what,
            "steps": len(times),
            "p50 ms": float(np.median(times)) * 1e3,
            "p99 ms": float(np.percentile(times, 99)) * 1e3,
            "mean ms": float(np.mean(times)) * 1e3,
            "p50 to alone": float(np.median(times)) / alone,
            "bar": BARS.get(what),
        }
        for what, times in taken.items()
        if times
    ]


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Plot median and 99th percentile of every way."""
    axes = figure.subplots()
    for column in ("p50 ms", "p99 ms"):
        axes.plot(
            [row["beside"] for row in rows], [row[column] for row in rows], "o-", label=column
        )
    axes.set_ylim(bottom=0)
    axes.legend()


def run(scale: Scale, device: torch.device, backend: str, out: Path) -> int:
    """Measure and write the report. Return 1 if something was wrong, else 0."""
    model = random_llama(**scale.shape, device=str(device), dtype=scale.dtype)
    notes = {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "torch": torch.__version__,
        **scale._asdict(),
        "dtype": str(scale.dtype),
    }
    report = Report("decode_beside", COLUMNS, "the same steps with no transfer beside", notes)
    wrong: list[str] = []
    taken: dict[str, list[float]] = {ALONE: [], SAVE: [], LOAD: []}
    # Not `inference_mode`, in which kvcore's threads are not: they may not write to its tensors.
    with torch.no_grad(), Transfers(model, scale, backend) as transfers:
        report.notes |= transfers.engine.implementations
        step = DecodeStep(model, scale)
        for _ in range(10):
            step()
        for what in (SAVE, LOAD):  # compiles kernels and touches memory
            transfers.start(what)
            transfers.end()
        for number in range(scale.rounds):
            for what, times in taken.items():
                times += measure(step, transfers, what, scale.steps)
            print(f"round {number + 1} of {scale.rounds} measured", flush=True)
        report.notes["transfers"] = dict(transfers.done)
        if not transfers.intact():
            wrong.append("what was loaded is not what was saved")
    if device.type == "cuda":  # on a CPU a transfer may well end within a step
        wrong += [f"no step ran beside {what}" for what, times in taken.items() if not times]
    for row in rows_of(taken):
        report.add(**row)
    report.notes["wrong"] = wrong
    report.finish(out, draw)
    print(f"{len(wrong)} wrong", *wrong, sep="\n  ")
    return int(bool(wrong))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        prog="python -m benchmarks.decode_beside",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--batch", type=int, help="sequences that are decoded together")
    parser.add_argument("--context", type=int, help="tokens of each sequence")
    parser.add_argument("--steps", type=int, help="steps of each way in a round")
    parser.add_argument("--backend", default="auto", help="kvcore's ops.backend")
    parser.add_argument("--dry-run", action="store_true", help="run on a CPU; times mean nothing")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    os.environ.setdefault("COLUMNS", "120")
    if not options.dry_run and not torch.cuda.is_available():
        print("torch sees no GPU: `--dry-run` tests the script on a CPU", file=sys.stderr)
        return 2
    given = {name: getattr(options, name) for name in ("batch", "context", "steps")}
    scale = (DRY if options.dry_run else FULL)._replace(
        **{name: value for name, value in given.items() if value is not None}
    )
    device = torch.device("cpu" if options.dry_run else "cuda")
    if options.dry_run:  # more threads would wait for each other wherever cores are busy
        torch.set_num_threads(1)
    return run(scale, device, options.backend, options.out)


if __name__ == "__main__":
    sys.exit(main())
