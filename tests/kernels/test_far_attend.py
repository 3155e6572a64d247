"""Attention finds KV, queries and results beyond 2^31 elements though no stride is as large.

Strides below 2^31 reach a kernel as int32: without int64 indices, their products wrap around.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcore.memory.layout import Axis, KVLayout, KVView, Plane
from kvcore_kernels.attend.kernel import attend_kernel
from kvcore_kernels.attend.launch import attend_parts, attend_rows, constants
from kvcore_kernels.deviation.kernel import deviation_kernel
from kvcore_kernels.merge.kernel import ADDRESSES, merge_kernel
from support.moved_kernels import at_program, interpreted

NEAR, FAR = 64, 1 << 30
"""Elements from one to the next; the third is 2^31 away."""
DIM = 16
COUNT = 3


def three(stride: int, axis: int, seed: int) -> Tensor:
    """Return bfloat16 [3, 3, DIM] whose ``axis`` has this stride."""
    strides = [COUNT * NEAR, NEAR, 1]
    strides[axis] = stride if stride == FAR else strides[axis]
    memory = torch.empty(1 + sum(2 * s for s in strides[:2]) + DIM, dtype=torch.bfloat16)
    part = memory.as_strided((COUNT, COUNT, DIM), strides)
    values = torch.randn(part.shape, generator=torch.Generator().manual_seed(seed))
    return part.copy_(values)


def parts(stride: int, what: str, axis: int) -> Tensor:
    """Attend over K and V of three tokens and heads; one of the three tensors is far apart."""
    q, k, v = (
        three(stride if name == what else NEAR, axis, seed)
        for seed, name in enumerate(("queries", "keys", "values"))
    )
    return attend_parts(q, torch.arange(COUNT), k, v, 0.25, 0.0, 0)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("what", ["queries", "keys", "values"])
def test_rows_and_heads_far_apart(what: str, axis: int) -> None:
    assert torch.equal(parts(FAR, what, axis), parts(NEAR, what, axis))


TOKENS = 4
AXES = ("page", "run", "in a run")


def paged(stride: int, far: str) -> tuple[KVView, Tensor]:
    """Return three pages of four tokens in runs of two or four, and the page table."""
    inner = 4 if far == "in a run" else 2
    steps = {"page": 8 * NEAR, "run": 2 * NEAR, "in a run": NEAR}
    steps[far] = stride if stride == FAR else steps[far]
    token = Axis(steps["run"], inner, steps["in a run"])
    planes = tuple(Plane(0, part * DIM, steps["page"], 0, token, Axis(1), DIM) for part in range(2))
    layout = KVLayout("bfloat16", 3, 6 if far == "run" else TOKENS, 1, (planes,))
    size = max(layout.last_offset(plane) for plane in planes) + 1
    view = KVView(layout, [torch.empty(size, dtype=torch.bfloat16)])
    generator = torch.Generator().manual_seed(7)
    for kv, page, at in np.ndindex(2, 3, layout.page_tokens):
        first = layout.offset(0, kv, page, 0, at, 0)
        view.tensors[0][first : first + DIM] = torch.randn(DIM, generator=generator)
    return view, torch.tensor([2, 0, 1], dtype=torch.int32)


@pytest.mark.parametrize("far", AXES)
def test_pages_and_runs_far_apart(far: str) -> None:
    found = []
    for stride in (NEAR, FAR):
        view, table = paged(stride, far)
        last = 3 * view.layout.page_tokens - 1
        queries = torch.randn(2, 1, DIM, generator=torch.Generator().manual_seed(8)).bfloat16()
        found.append(attend_rows(queries, torch.tensor([2, last]), view, 0, table, scale=0.25))
    assert torch.equal(*found)


@interpreted
def test_results_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last program of as many rows as have 2^31 elements, alone."""
    heads, dim = 64, 32
    rows = (1 << 31) // (heads * dim) + 1
    key = Plane(0, 0, dim, 0, Axis(dim), Axis(1), dim)
    tile, fixed = constants(
        heads, 0, key, key, dim, latent=False, window=0, capped=False, full=False
    )
    each = tile.rows // fixed["GROUP"]
    number = (rows - 1) // each
    queries = torch.randn(1, heads, dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    values = torch.randn(1, 1, dim, generator=torch.Generator().manual_seed(2)).bfloat16()
    positions = torch.zeros(rows, dtype=torch.int64)
    out = torch.empty(rows, heads, dim, dtype=torch.bfloat16)
    assert fixed["GROUP"] == heads
    at_program(monkeypatch, (number, 0), 1)
    strides = dim, 0, dim, 0, 1, 0
    attend_kernel[(1, 1)](
        queries, out, positions, positions, values, values, *strides, *strides, rows, 1, 0, dim,
        0.25, 0.0, **fixed,
    )  # fmt: skip
    assert torch.equal(out[-1], values[0].expand(heads, dim))


@pytest.mark.parametrize("kernel", [merge_kernel, deviation_kernel])
def test_addresses_and_strides_are_64_bits_wide(kernel: object) -> None:
    """A compiled launch takes this from the kernel's signature, the interpreter from the number."""
    types = kernel.fn.__annotations__  # type: ignore[attr-defined]
    assert {types[name] for name in ADDRESSES} == {"tl.int64"}
