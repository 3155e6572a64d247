"""Attention of one tile of rows and one KV head."""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attend_kernel"]


@triton.jit
def _axis(index, stride, INNER: tl.constexpr, inner_stride):
    """``kvcore.layout.Axis`` at ``index``, an int32: int64."""
    return (index // INNER).to(tl.int64) * stride + (index % INNER).to(tl.int64) * inner_stride


@triton.jit
def attend_kernel(
    queries,  # [rows, q_heads, head_dim]
    out,  # [rows, q_heads, v_dim], contiguous
    positions,  # [rows]
    page_table,  # [pages]
    keys,
    values,
    k_strides,  # int64 [6]: page, head, token, token inner, dim, dim inner stride
    v_strides,
    rows,
    tokens,
    query_row,
    query_head,
    scale,
    soft_cap,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    LATENT: tl.constexpr,
    K_TOKEN: tl.constexpr,
    K_DIM: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_INNER: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    V_TILE: tl.constexpr,
):
    """out[r, h] = softmax_n(cap(scale * q[r, h] . k[n, g])) @ v[n, g], n in the row's window

    g is the KV head of query head h; cap(x) = c tanh(x / c) or x; row r sees max(0, p - WINDOW + 1) <= n <= p with
    p = positions[r], all from 0 where WINDOW is 0. Online softmax in base 2: for each tile of N
    keys m' = max(m, max s), l' = l 2^(m - m') + sum 2^(s - m'), o' = o 2^(m - m') + 2^(s - m') v.

    Program (row tile, group) packs GROUP query heads of M / GROUP rows, so K and V are read once for
    all of them; SPLIT such groups share a KV head. It starts at the first key that any of its rows sees and ends at its largest
    position: pages outside are not touched. Tiles that all rows see whole are not masked. The head
    dim is MAIN, a power of two, and a TAIL.
    """
    group = tl.program_id(1)
    lane = tl.arange(0, M)
    ROWS: tl.constexpr = M // GROUP
    row = tl.program_id(0) * ROWS + lane // GROUP
    head = group * GROUP + lane % GROUP
    real = (lane < ROWS * GROUP) & (row < rows)
    at = tl.load(positions + row, mask=real, other=-1).to(tl.int32)
    largest = tl.minimum(tl.max(at, 0), tokens - 1)
    smallest = tl.min(tl.where(real, at, 2147483647), 0)
    first = 0
    common = 0
    if WINDOW:
        first = tl.maximum(smallest - WINDOW + 1, 0)
        common = tl.maximum(largest - WINDOW + 1, 0)
    main, tail = tl.arange(0, MAIN), MAIN + tl.arange(0, TAIL)
    v_dims = tl.arange(0, V_TILE)
    q_row = row.to(tl.int64) * query_row + head.to(tl.int64) * query_head
    q = tl.load(queries + q_row[:, None] + main[None, :], mask=real[:, None], other=0.0)
    HAS_TAIL: tl.constexpr = HEAD_DIM > MAIN
    if HAS_TAIL:
        q_mask = real[:, None] & (tail < HEAD_DIM)[None, :]
        q_tail = tl.load(queries + q_row[:, None] + tail[None, :], mask=q_mask, other=0.0)
    kv_head = (group // SPLIT).to(tl.int64)
    k_base = keys + kv_head * tl.load(k_strides + 1)
    v_base = values + kv_head * tl.load(v_strides + 1)
    k_page, v_page = tl.load(k_strides), tl.load(v_strides)
    k_token, v_token = tl.load(k_strides + 2), tl.load(v_strides + 2)
    k_main = _axis(main, tl.load(k_strides + 4), K_DIM, tl.load(k_strides + 5))
    k_tail = _axis(tail, tl.load(k_strides + 4), K_DIM, tl.load(k_strides + 5))
    v_main = _axis(v_dims, tl.load(v_strides + 4), V_INNER, tl.load(v_strides + 5))
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    result = tl.zeros([M, V_TILE], tl.float32)
    for start in range(first // N * N, largest + 1, N):
        n = start + tl.arange(0, N)
        there = (n >= first) & (n <= largest)
        page = tl.load(page_table + n // PAGE, mask=there, other=0).to(tl.int64)
        slot = n % PAGE
        k_row = page * k_page + _axis(slot, k_token, K_TOKEN, tl.load(k_strides + 3))
        k = tl.load(k_base + k_row[:, None] + k_main[None, :], mask=there[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_TAIL:
            k_mask = there[:, None] & (tail < HEAD_DIM)[None, :]
            k2 = tl.load(k_base + k_row[:, None] + k_tail[None, :], mask=k_mask, other=0.0)
            s = tl.dot(q_tail, tl.trans(k2), s, input_precision="ieee")
        s *= scale
        if CAPPED:
            s = soft_cap * (1.0 - 2.0 / (tl.exp2(s / soft_cap * 2.8853900817779268) + 1.0))
        s *= 1.4426950408889634
        if (start + N - 1 > smallest) | (start < common):
            seen = (n[None, :] <= at[:, None]) & there[None, :]
            if WINDOW:
                seen = seen & (n[None, :] > at[:, None] - WINDOW)
            s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(best, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(p, 1)
        if LATENT:
            v = k
        else:
            v_row = page * v_page + _axis(slot, v_token, V_TOKEN, tl.load(v_strides + 3))
            v_mask = there[:, None] & (v_dims < V_DIM)[None, :]
            v = tl.load(v_base + v_row[:, None] + v_main[None, :], mask=v_mask, other=0.0)
        result = tl.dot(
            p.to(v.dtype), v, result * shrink[:, None], input_precision="ieee"
        )
        best = higher
    result = result / total[:, None]
    place = (row.to(tl.int64) * (tl.num_programs(1) * GROUP) + head) * V_DIM
    mask = real[:, None] & (v_dims < V_DIM)[None, :]
    tl.store(out + place[:, None] + v_dims[None, :], result.to(out.dtype.element_ty), mask=mask)
