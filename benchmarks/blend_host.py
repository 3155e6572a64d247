"""The host's part of a blend: what it asks of a GPU, and how long that takes. Needs no GPU.

    python -m benchmarks.blend_host [--tokens 8192] [--ratio .15] [--selector runs] [--json FILE]

A blend of Llama-3-8B's shape runs with the Triton operations over memory of a CPU. Kernels are
bound and looked up as for a GPU, and not launched (`kvcore_kernels.unlaunched`). The engine's
layers compute nothing. `kvcore_devtools.gpu.counting` counts what kvcore asks for besides them. The
seconds are the CPU time of the thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcore.fusion.attend import Attention
from kvcore.fusion.decoder import Attend, DecoderLayers, HiddenState
from kvcore.fusion.fusor import BlendJob, Fusor
from kvcore.fusion.ops import Sample
from kvcore.fusion.placed import PlacedChunks, in_slots
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Pairing, Rope
from kvcore.fusion.select import BUILTIN_SELECTORS, Ratio
from kvcore.memory.layout import KVView, sglang_layout
from kvcore_devtools.gpu.counting import Counts, DeviceCalls
from kvcore_kernels.fusion import TritonFusion
from kvcore_kernels.ops import TritonOps
from kvcore_kernels.unlaunched import unlaunched

LAYERS, HEADS, KV_HEADS, DIM = 32, 32, 8, 128
PAGE, HIDDEN = 16, 8
DEVICE = torch.device("cpu")
QUESTION = 32


class Idle(DecoderLayers):
    """Layers that give the views of one projection to ``attend``, and compute nothing."""

    def __init__(self, rows: int, calls: DeviceCalls | None) -> None:
        self.layers = LAYERS
        self.attention = (Attention(DIM**-0.5),) * LAYERS
        self._calls = calls
        width = (HEADS + 2 * KV_HEADS) * DIM
        self._qkv = torch.zeros(rows, width, dtype=torch.bfloat16, device=DEVICE)
        self._sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
        self._views: dict[int, list[Tensor]] = {}

    def embed(self, tokens: Tensor) -> Tensor:
        with self._foreign():
            return torch.zeros(len(tokens), HIDDEN, device=DEVICE)

    def run(self, layer: int, positions: Tensor, state: HiddenState, attend: Attend) -> HiddenState:
        with self._foreign():
            q, k, v = self.projected(len(positions))
            with nullcontext() if self._calls is None else self._calls.ours():
                attend(q, k, v)
            return HiddenState(state.hidden, state.hidden)

    def projected(self, rows: int) -> list[Tensor]:
        if rows not in self._views:
            parts = torch.split(self._qkv[:rows], self._sizes, dim=1)
            self._views[rows] = [part.view(rows, -1, DIM) for part in parts]
        return self._views[rows]

    def _foreign(self) -> AbstractContextManager[None]:
        return nullcontext() if self._calls is None else self._calls.foreign()


class Walk(Fusor):
    """A blend whose look is not run: it computes on a CPU what would take minutes there."""

    def _look(self, *_: Any) -> Tensor:
        return torch.zeros(self.tokens, device=DEVICE)

    tokens = 0


class World:
    """Memory for blends of up to ``tokens`` tokens, and one prompt of that length."""

    def __init__(self, tokens: int, chunks: int = 8, prefix: int = 500) -> None:
        self.tokens = tokens
        ids = np.random.default_rng(tokens).permutation(-(-tokens // PAGE))
        slots = (ids[:, None] * PAGE + np.arange(PAGE)).ravel()
        pages = [torch.empty(2, len(slots), KV_HEADS, DIM, dtype=torch.bfloat16)] * LAYERS
        keys, values = [one[0] for one in pages], [one[1] for one in pages]
        self.view = KVView(sglang_layout(keys, values, PAGE, "bfloat16"), [*keys, *values])
        self.ropes = [Rope(DIM, DIM, Pairing.NEOX, 5e5)] * LAYERS
        each = (tokens - prefix - QUESTION) // chunks
        gap = 20
        starts = [prefix + gap + n * each for n in range(chunks)]
        self.places = in_slots(slots, 0, prefix)
        for n, start in enumerate(starts):
            self.places += in_slots(slots, start, start + each - gap, 100 + n * 13)
        rows = [torch.arange(start, start + each - gap) for start in starts]
        offsets = [torch.arange(each - gap)] * chunks
        self.job = BlendJob(
            torch.arange(tokens), prefix, tokens - QUESTION, torch.cat(rows), torch.cat(offsets)
        )

    def sample(self, layers: Idle) -> Sample:
        """Return what `FusionOps.prepare` gets."""
        q, k, v = layers.projected(16)
        return Sample(q, LayerKV(k, v), layers.attention, self.ropes, self.view)

    def blend(
        self,
        ratio: float,
        selector: str,
        begins: Callable[[int], None],
        calls: DeviceCalls | None = None,
        *,
        look: bool = False,
    ) -> None:
        """Blend the prompt. ``begins`` is called at the begin of every layer."""
        job = self.job
        fresh = BlendJob(job.tokens, job.exact, job.stop, job.chunks, job.offsets)

        def sink(layer: int, kv: LayerKV) -> None:
            if calls is not None:
                calls.launched("engine's write")

        placed = PlacedChunks(
            self.tokens, self.view, self.places, self.ropes, begins, sink,
            TritonOps(), TritonFusion(),
        )  # fmt: skip
        fusor = (Fusor if look else Walk)(Idle(self.tokens, calls), ops=TritonFusion())
        if isinstance(fusor, Walk):
            fusor.tokens = self.tokens
        fusor.blend(fresh, placed, BUILTIN_SELECTORS[selector](), Ratio(ratio, spread=0.5))


def count(world: World, ratio: float, selector: str, *, look: bool = False) -> dict[str, Counts]:
    """Return what a blend asks for by its parts: before the layers, each look, and each layer."""
    calls = DeviceCalls(multiplies=False)
    looks = range(LAYERS if look else 0)
    begun: list[int] = []

    def begins(layer: int) -> None:
        calls.section = f"{'look' if len(begun) in looks else 'layer'} {layer}"
        begun.append(layer)

    job = world.job
    calls.mark_host((job.tokens, job.chunks, job.offsets))
    with unlaunched(calls.launched), calls:
        calls.section = "before"
        world.blend(ratio, selector, begins, calls, look=look)
    return calls.sections


def host_seconds(world: World, ratio: float, selector: str, repeats: int) -> list[float]:
    """Return the least CPU seconds of each layer of the walk over some blends."""
    torch.set_num_threads(1)
    runs = []
    with unlaunched(lambda _: None):
        for _ in range(repeats + 1):
            times: list[float] = []

            def begins(layer: int, times: list[float] = times) -> None:
                times.append(time.thread_time())

            world.blend(ratio, selector, begins)
            times.append(time.thread_time())
            walk = times[-LAYERS - 1 :]
            runs.append([b - a for a, b in pairwise(walk)])
    return [min(layer) for layer in zip(*runs[1:], strict=True)]


def new_builds(tokens: list[int], ratio: float, selector: str) -> list[tuple[str, str]]:
    """Return the builds that blends of these lengths compile after `FusionOps.prepare`."""
    with torch.inference_mode(), unlaunched(lambda _: None) as builds:
        for length in tokens:
            world = World(length)
            if length == tokens[0]:
                TritonFusion().prepare(world.sample(Idle(16, None)), TritonOps())
                before = len(builds)
            world.blend(ratio, selector, lambda _: None)
        return builds[before:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--selector", default="runs", choices=sorted(BUILTIN_SELECTORS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the counts here, and do not measure")
    options = parser.parse_args()
    world = World(options.tokens)
    sections = count(world, options.ratio, options.selector)
    if BUILTIN_SELECTORS[options.selector]().needs_question:
        small = count(World(1024), options.ratio, options.selector, look=True)
        sections |= {name: one for name, one in small.items() if name.startswith("look")}
    found: dict[str, Any] = {
        name: {
            "launches": dict(one.launches),
            "waits": dict(one.waits),
            "uploads": one.uploads,
            "upload_bytes": one.upload_bytes,
        }
        for name, one in sections.items()
    }
    if options.json is not None:
        lengths = [options.tokens, 900, 1000, 1777, 2049]
        builds = new_builds(lengths, options.ratio, options.selector)
        options.json.write_text(json.dumps({"sections": found, "builds": builds}))
        return
    print(f"{'section':10} launches  waits  uploads  bytes sent")
    for name, one in sections.items():
        print(
            f"{name:10} {one.launches.total():8} {one.waits.total():6} {one.uploads:8} "
            f"{one.upload_bytes:11}"
        )
    seconds = host_seconds(world, options.ratio, options.selector, options.repeats)
    steady = seconds[3:-1]
    print(
        f"host time a layer: median {statistics.median(steady) * 1e6:.0f} us, "
        f"most {max(steady) * 1e6:.0f} us; first layers "
        f"{', '.join(f'{one * 1e6:.0f}' for one in seconds[:3])} us"
    )


if __name__ == "__main__":
    main()
