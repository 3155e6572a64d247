"""Inputs of TensorRT-LLM's adapter: model facts, requests and graphs."""

from __future__ import annotations

from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from kvcore.transfer.graph import Path, Priority, Span, TransferGraph, TransferOp
from kvcore_trtllm.describe import ModelFacts  # after the skip
from support.identity import plain


def facts(**changes: Any) -> ModelFacts:
    values: dict[str, Any] = {
        "layers": 3,
        "kv_heads": 4,
        "head_dim": 8,
        "kv_factor": 2,
        "order": "HND",
        "world_size": 1,
        "page_tokens": 32,
        "kv_dtype": "float32",
        "config": {"model_type": "llama"},
        "identity": plain(),
    }
    return ModelFacts(**{**values, **changes})


def args(folder: FilePath | str = "", **changes: Any) -> SimpleNamespace:
    """Return the engine's arguments; ``a__b`` changes field ``b`` of field ``a``."""
    made = SimpleNamespace(
        model=str(folder),
        revision=None,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        context_parallel_size=1,
        enable_attention_dp=False,
        max_beam_width=1,
        attn_backend="TRTLLM",
        dtype="auto",
        quant_config=None,
        speculative_config=None,
        scheduler_config=SimpleNamespace(capacity_scheduler_policy="GUARANTEED_NO_EVICT"),
        kv_cache_config=SimpleNamespace(
            enable_block_reuse=True,
            enable_partial_reuse=False,
            tokens_per_block=32,
            dtype="auto",
            host_cache_size=0,
            max_attention_window=None,
        ),
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        place: Any = made
        for part in path:
            place = getattr(place, part)
        setattr(place, last, value)
    return made


def request(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"request_id": 1, "get_tokens": lambda beam: [], **fields})


def make_graph(graph_id: int, ops: int = 1) -> TransferGraph:
    made = tuple(TransferOp(i, Path.H2DISK, Span(0, 1), tier="disk") for i in range(ops))
    return TransferGraph(graph_id, Priority.SPILL, b"n", b"p", (b"k",), (0,), (0,), (), made)
