"""Inputs of TensorRT-LLM's adapter: model facts, requests and graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from kvcore.model.identity import Weights
from kvcore.transfer.graph import Path, Priority, Span, TransferGraph, TransferOp
from kvcore_trtllm.describe import ModelFacts  # after the skip


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
        "identity": {"model_type": "llama"},
        "weights": Weights(b"w"),
    }
    return ModelFacts(**{**values, **changes})


def request(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"request_id": 1, "get_tokens": lambda beam: [], **fields})


def make_graph(graph_id: int, ops: int = 1) -> TransferGraph:
    made = tuple(TransferOp(i, Path.H2DISK, Span(0, 1), tier="disk") for i in range(ops))
    return TransferGraph(graph_id, Priority.SPILL, b"n", b"p", (b"k",), (0,), (0,), (), made)
