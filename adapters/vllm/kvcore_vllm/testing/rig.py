"""Configurations that vLLM has by default on a GPU, on a CPU. For tests only.

    EngineProcess(model, asynchronous=True)       asynchronous scheduling
    EngineProcess(model, env=V2)                  Model Runner V2, in Triton's interpreter
    EngineProcess(model, **PIECEWISE)             the model's graph, split at attention, run eagerly
    EngineProcess(model, steps="FILE")            record the order of the scheduler's calls

vLLM's CPU platform switches asynchronous scheduling and piecewise compilation off, and takes Model
Runner V2 only if Triton has a CPU backend. The functions of this module undo that. Each says on
standard error what it replaced.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

__all__ = [
    "PIECEWISE",
    "STEPS",
    "V1_INTERPRETED",
    "V2",
    "V2_RUNNER",
    "InWorker",
    "Overlap",
    "interpret",
    "keep",
    "overlap",
    "record",
    "sample_rows_at_once",
]

V2: Mapping[str, str] = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
"""Environment variables of an engine's process for Model Runner V2 on a CPU."""

V1_INTERPRETED: Mapping[str, str] = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""The same for Model Runner V1, which needs Triton where drafts go on from states.

torch's compiler would ask Triton for its compiler.
"""

PIECEWISE: Mapping[str, Any] = {
    "piecewise": True,
    "enforce_eager": False,
    "compilation_config": {
        "mode": 3,
        "backend": "eager",
        "compile_sizes": [],
        "pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False},
    },
}
"""Arguments for ``torch.compile`` in pieces, as on a GPU, which are then run without a compiler.

The passes that are off need modules of CUDA builds. On a CPU nothing else sets ``compile_sizes``.
"""

V2_RUNNER = "vllm.v1.worker.cpu.model_runner"
"""Module of Model Runner V2's class for a CPU."""

STEPS = "kvcore_steps"
"""Key of vLLM's ``additional_config`` that names the file for `kvcore_vllm.testing.steps`."""


def interpret() -> None:
    """Make vLLM use Triton on a CPU, if ``TRITON_INTERPRET=1`` has its kernels interpreted.

    Must run before vLLM is imported, in every process of the engine. The program that vLLM's
    processes are spawned from calls it at its top level, which a spawned process runs again.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or "vllm" in sys.modules:
        return
    from triton.backends import backends  # type: ignore[import-untyped]

    class Driver:
        @classmethod
        def is_active(cls) -> bool:
            return True

    backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)
    _say("Triton's kernels are interpreted, behind a CPU backend that Triton does not have")


def keep(asynchronous: bool, piecewise: bool) -> None:
    """Have vLLM's CPU platform leave settings as vLLM chose them.

    With ``asynchronous``, that is asynchronous scheduling. With ``piecewise``, it is the mode and
    the backend of the compilation: the model's graph is split at the attention of each layer.

    Needed only in the process that makes the engine's config, which the others are given.
    """
    from vllm.platforms.cpu import CpuPlatform

    platform: Any = CpuPlatform
    check = platform.check_and_update_config.__func__

    def keeping(cls: type[Any], vllm_config: Any) -> None:
        scheduler, compilation = vllm_config.scheduler_config, vllm_config.compilation_config
        chosen = scheduler.async_scheduling
        compiled = compilation.mode, compilation.backend
        check(cls, vllm_config)
        if asynchronous:
            scheduler.async_scheduling = chosen
        if piecewise:
            compilation.mode, compilation.backend = compiled

    platform.check_and_update_config = classmethod(keeping)
    if asynchronous:
        _say("asynchronous scheduling, which vLLM's CPU platform switches off, is left on")
    if piecewise:
        _say("the graph is split in pieces, which vLLM's CPU platform switches off")


def record(vllm_config: Any, path: str) -> None:
    """Have the engine core write the order of the scheduler's calls to a file."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    kind = vllm_config.scheduler_config.get_scheduler_cls()
    name = "Asynchronous" if kind is AsyncScheduler else "Synchronous"
    vllm_config.scheduler_config.scheduler_cls = f"kvcore_vllm.testing.steps.{name}"
    vllm_config.additional_config = {**vllm_config.additional_config, STEPS: path}


class InWorker:
    """Methods for vLLM's workers (``worker_extension_cls``), called with ``collective_rpc``."""

    model_runner: Any

    def kvcore_runner(self) -> str:
        """Return the full name of the class that runs the model in this worker.

        If its kernels are interpreted, make the sampler quick first.
        """
        kind = type(self.model_runner)
        if os.environ.get("TRITON_INTERPRET") == "1" and kind.__module__ == V2_RUNNER:
            sample_rows_at_once()
        return f"{kind.__module__}.{kind.__qualname__}"

    def kvcore_pieces(self) -> int:
        """Return into how many pieces ``torch.compile`` has split graphs in this worker."""
        from vllm.compilation.counter import compilation_counter

        return int(compilation_counter.num_piecewise_graphs_seen)


def sample_rows_at_once() -> None:
    """Have Model Runner V2's sampler read a row of logits in one program, not in blocks of 1024.

    The interpreter spends milliseconds on a program, whatever its size, and SmolLM2's vocabulary
    has 48 blocks: without this, sampling takes most of a step. Idempotent.
    """
    from vllm.v1.worker.gpu.sample import gumbel

    module: Any = gumbel
    if not isinstance(module._gumbel_sample_kernel, _RowsAtOnce):
        module._gumbel_sample_kernel = _RowsAtOnce(module._gumbel_sample_kernel)
        _say("the sampler's kernel reads a row of logits in one program, not in blocks")


class _RowsAtOnce:
    """A launcher of vLLM's sampling kernel with one program for each row of logits.

    The kernel writes the best token of each block of a row, and its value, to two tensors of shape
    [rows, blocks]. The block is made as long as the row here, so the first column has the result.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        rows, blocks = grid

        def launch(*args: Any, **options: Any) -> None:
            _, _, best_value, *_ = args
            best_value[:, 1:] = float("-inf")
            block = options["BLOCK_SIZE"] * blocks
            options["BLOCK_SIZE"] = 1 << (block - 1).bit_length()
            self._kernel[(rows, 1)](*args, **options)

        return launch


class Overlap(NamedTuple):
    """The number of steps with tokens, and how many of them were scheduled ``ahead``.

    A step is ahead if it was scheduled before the output of the step before it was read.
    """

    steps: int
    ahead: int


def overlap(record: Path) -> Overlap:
    """Read the file that `kvcore_vllm.testing.steps` wrote."""
    under_way = steps = ahead = 0
    for line in record.read_text().split():
        if line == "read":
            under_way -= 1
            continue
        steps += 1
        ahead += under_way > 0
        under_way += 1
    return Overlap(steps, ahead)


def _say(what: str) -> None:
    warnings.warn(f"kvcore's test rig: {what}", stacklevel=3)
