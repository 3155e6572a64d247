"""Copies compile nothing after `prepare`: no number that varies between them chooses a build.

In a process of its own: in this one the kernels are interpreted. There a launch stops where Triton
would look for its build, which needs no GPU.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import torch

from kvcore.memory.copy import HeadRange
from kvcore.memory.copy.link import Way
from kvcore.model.shape import BlockShape
from kvcore_devtools.gpu import Machine, installed
from kvcore_kernels.ops import TritonOps
from kvcore_kernels.pack.launch import pack_blocks, unpack_blocks
from kvcore_kernels.testing import ORDERS, arena_view, vllm_view
from support.links import on_gpu, on_host

COUNTS = (1, 2, 15, 16, 17, 64, 500)


def test_nothing_is_compiled_after_the_preparation() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    new = json.loads(done.stdout)
    assert set(new) == {"prepared", "copies", "sums", "packs"}
    assert len(new["prepared"]) == 2, "one within the GPU for both directions, one over the link"
    assert new["copies"] == []
    assert len(new["sums"]) == 1
    assert len(new["packs"]) == 2, "one packs, one unpacks"


class Builds:
    """The builds that launches look for, each noted the first time. It replaces Triton's launch."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import make_backend
        from triton.runtime import jit

        backend, seen = make_backend(GPUTarget("cuda", 90, 32)), set()
        self.found: list[str] = []

        def run(kernel, *args, grid, warmup, **kwargs):  # type: ignore[no-untyped-def]
            bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
            key = f"{kernel.__name__} {bind(*args, **kwargs)[1:]}"
            if key not in seen:
                seen.add(key)
                self.found.append(key)

        jit.JITFunction.run = run

    def take(self) -> list[str]:
        found, self.found = self.found, []
        return found


def main() -> None:
    """Print which builds each kind of work looks for first."""
    builds = Builds()
    shape = BlockShape(4, 2, 64, 16, "bfloat16")
    new = {}
    with installed(Machine(eager=1.0)) as machine:
        pages = on_gpu(machine, vllm_view(shape, 500, 16, ORDERS[1]))
        blocks = on_host(machine, arena_view(shape, 500))
        TritonOps().prepare(pages, blocks, 16)
        new["prepared"] = builds.take()
        work = itertools.product(COUNTS, ([0, 1, 2, 3], [2], [1, 2]))
        for count, layers in work:
            units = np.arange(count)
            TritonOps(Way.STAGED).copy_blocks(pages, units, blocks, units, layers)
            TritonOps(Way.STAGED).copy_blocks(blocks, units, pages, units, layers)
            TritonOps(Way.KERNEL).copy_blocks(blocks, units, pages, units, layers)
        new["copies"] = builds.take()
    data = torch.zeros(1 << 20, dtype=torch.uint8)
    for count in COUNTS:
        TritonOps().sums(data, [16 * i for i in range(count)], 4096)
    new["sums"] = builds.take()
    wide = vllm_view(shape, 500, 16, ORDERS[1])
    packed = arena_view(replace(shape, dtype="float8_e4m3fn"), 500)
    scales, heads = torch.zeros(500, 4, 2, 2), HeadRange(0, 0, 2)
    for count, layers in itertools.product(COUNTS, ([0, 1, 2, 3], [3])):
        units = np.arange(count)
        pack_blocks(wide, units[:, None], packed, units, scales, layers, heads)
        unpack_blocks(packed, units, scales, wide, units[:, None], layers, heads)
    new["packs"] = builds.take()
    print(json.dumps(new))


if __name__ == "__main__":
    main()
