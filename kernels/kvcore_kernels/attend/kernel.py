"""The attention kernel: one tile of rows and one group of query heads per program."""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attend_kernel"]


@triton.jit
def _axis(index, stride, RUN: tl.constexpr, run_stride):
    """Return the offset of ``index`` (int32) on a ``kvcore.memory.layout.Axis``.

    RUN is the axis's inner size; 0 means that it is contiguous.
    """
    if RUN:
        run = (index // RUN).to(tl.int64)
        offset = run * stride + (index % RUN).to(tl.int64) * run_stride
    else:
        offset = index
    return offset


@triton.jit
def _slot(page_table, n, there, PAGE: tl.constexpr):
    """Return the page of token ``n`` as int64, and its token in there; if PAGE is 0, n and 0."""
    if PAGE:
        page = tl.load(page_table + n // PAGE, mask=there, other=0).to(tl.int64)
        slot = n % PAGE
    else:
        page = n.to(tl.int64)
        slot = n * 0
    return page, slot


@triton.jit
def _visible(s, n, at, there, last, smallest, WINDOW: tl.constexpr):
    """Return scores with -inf at keys that their row does not see, and the keys that any sees."""
    used = there
    if WINDOW:
        seen = (n[None, :] <= at[:, None]) & (n[None, :] > at[:, None] - WINDOW)
        s = tl.where(seen, s, float("-inf"))
        used = there & (tl.max(seen.to(tl.int32), 0) > 0)
    elif last > smallest:
        s = tl.where(n[None, :] <= at[:, None], s, float("-inf"))
    return s, used


@triton.jit(
    do_not_specialize=["rows", "tokens", "scale", "soft_cap"],
    do_not_specialize_on_alignment=["positions", "page_table"],
)
def attend_kernel(
    queries,  # [rows, q_heads, head_dim]
    out,  # [rows, q_heads, v_dim], contiguous
    positions,  # [rows]
    page_table,  # [pages]; not read if PAGE is 0
    keys,  # the plane's memory from its first element
    values,
    k_page,  # strides as in kvcore.memory.layout.Plane; _run is an axis's inner stride
    k_head,
    k_token,
    k_token_run,
    k_dim,
    k_dim_run,
    v_page,
    v_head,
    v_token,
    v_token_run,
    v_dim,
    v_dim_run,
    rows: tl.int32,
    tokens: tl.int32,
    query_row,
    query_head,
    scale: tl.float32,
    soft_cap: tl.float32,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    LATENT: tl.constexpr,
    K_TOKEN_RUN: tl.constexpr,
    K_DIM_RUN: tl.constexpr,
    V_TOKEN_RUN: tl.constexpr,
    V_DIM_RUN: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    V_TILE: tl.constexpr,
):
    """Compute attention of scattered rows over paged KV.

    out[r, h] = softmax_n(cap(scale q[r, h] . k[n, g])) @ v[n, g], n in the row's window

    g is the KV head of query head h. cap(x) = c tanh(x / c), or x if CAPPED is false. The row at
    position p sees max(0, p - WINDOW + 1) <= n <= p; if WINDOW is 0, it sees all from 0. The
    softmax is online and in base 2: for each tile of N keys, m' = max(m, max s),
    l' = l 2^(m - m') + sum 2^(s - m'), o' = o 2^(m - m') + 2^(s - m') v.

    Program (row tile, group) packs GROUP query heads of M / GROUP rows, so K and V are read once
    for all of them. SPLIT such groups share a KV head. It starts at the first key that any of its
    rows sees and ends at its largest position; other pages are not touched. Tiles that all rows see
    completely are not masked. V between the windows of two rows is not read, because its pages may
    have been freed and hold anything. The head dim is split into MAIN, a power of two, and a TAIL.
    """
    group = tl.program_id(1)
    lane = tl.arange(0, M)
    ROWS: tl.constexpr = M // GROUP
    row = tl.program_id(0) * ROWS + lane // GROUP
    head = group * GROUP + lane % GROUP
    real = (lane < ROWS * GROUP) & (row < rows)
    at = tl.load(positions + row, mask=real, other=-1).to(tl.int32)
    at = tl.minimum(at, tokens - 1)
    largest = tl.max(at, 0)
    smallest = tl.min(tl.where(real, at, 2147483647), 0)
    first = 0
    if WINDOW:
        first = tl.maximum(smallest - WINDOW + 1, 0)
    main, tail = tl.arange(0, MAIN), MAIN + tl.arange(0, TAIL)
    v_dims = tl.arange(0, V_TILE)
    q_row = row.to(tl.int64) * query_row + head.to(tl.int64) * query_head
    q = tl.load(queries + q_row[:, None] + main[None, :], mask=real[:, None], other=0.0)
    HAS_TAIL: tl.constexpr = HEAD_DIM > MAIN
    if HAS_TAIL:
        q_mask = real[:, None] & (tail < HEAD_DIM)[None, :]
        q_tail = tl.load(queries + q_row[:, None] + tail[None, :], mask=q_mask, other=0.0)
    kv_head = (group // SPLIT).to(tl.int64)
    k_base = keys + kv_head * k_head
    v_base = values + kv_head * v_head
    k_main = _axis(main, k_dim, K_DIM_RUN, k_dim_run)
    k_tail = _axis(tail, k_dim, K_DIM_RUN, k_dim_run)
    v_main = _axis(v_dims, v_dim, V_DIM_RUN, v_dim_run)
    to_base_2 = 1.4426950408889634
    if not CAPPED:
        to_base_2 *= scale
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    result = tl.zeros([M, V_TILE], tl.float32)
    for start in range(first // N * N, largest + 1, N):
        n = start + tl.arange(0, N)
        there = (n >= first) & (n <= largest)
        page, slot = _slot(page_table, n, there, PAGE)
        k_row = page * k_page + _axis(slot, k_token, K_TOKEN_RUN, k_token_run)
        k = tl.load(k_base + k_row[:, None] + k_main[None, :], mask=there[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_TAIL:
            k_mask = there[:, None] & (tail < HEAD_DIM)[None, :]
            k2 = tl.load(k_base + k_row[:, None] + k_tail[None, :], mask=k_mask, other=0.0)
            s = tl.dot(q_tail, tl.trans(k2), s, input_precision="ieee")
        if CAPPED:
            grown = tl.exp2(s * (scale / soft_cap * 2.8853900817779268))
            s = soft_cap * (1.0 - 2.0 / (grown + 1.0))
        s *= to_base_2
        s, used = _visible(s, n, at, there, start + N - 1, smallest, WINDOW)
        higher = tl.maximum(best, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(p, 1)
        if LATENT:
            v = k
            if WINDOW:
                v = tl.where(used[:, None], v, 0.0)
        else:
            v_row = page * v_page + _axis(slot, v_token, V_TOKEN_RUN, v_token_run)
            v_mask = used[:, None] & (v_dims < V_DIM)[None, :]
            v = tl.load(v_base + v_row[:, None] + v_main[None, :], mask=v_mask, other=0.0)
        result = tl.dot(p.to(v.dtype), v, result * shrink[:, None], input_precision="ieee")
        best = higher
    result = result / total[:, None]
    place = (row.to(tl.int64) * (tl.num_programs(1) * GROUP) + head) * V_DIM
    mask = real[:, None] & (v_dims < V_DIM)[None, :]
    tl.store(out + place[:, None] + v_dims[None, :], result.to(out.dtype.element_ty), mask=mask)
