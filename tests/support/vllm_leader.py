"""The scheduler side of vLLM's connector, with a prompt on disk and time that stands still."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from kvcore.config import load_config
from kvcore.connector.leader import LeaderParts
from kvcore.connector.step_transport import Outbox
from kvcore.explain.recorder import RequestRecorder
from kvcore.index import BlockIndex, TierSpec
from kvcore.manager import Backing, KVManager, TransferOptions
from kvcore.model.keys import KeyChain
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import OpReport, RowError, TransferGraph
from kvcore_vllm.leader import Leader

BLOCK, LAYERS = 16, 4
SHAPE = BlockShape(LAYERS, 2, 64, BLOCK, "float16")
MODEL = ModelDescription(SHAPE, (LayerGroup(0, BLOCK, tuple(range(LAYERS))),), b"f" * 32, 1)
PROMPT = list(range(1, 402))
PAGES: Any = SimpleNamespace(get_block_ids=lambda: [np.arange(1, 27).tolist()])


def request(name: str) -> Any:
    return SimpleNamespace(
        request_id=name, num_tokens=len(PROMPT), num_prompt_tokens=len(PROMPT),
        prompt_token_ids=PROMPT, prompt_embeds=None, pooling_params=None, resumable=False,
        skip_reading_prefix_cache=False,
        mm_features=[],
        _all_token_ids=PROMPT, lora_request=None, cache_salt=None, kv_transfer_params=None,
    )  # fmt: skip


class LeaderRig:
    """A scheduler side with ``PROMPT`` on disk. ``options`` are its further arguments."""

    def __init__(
        self, host: int = 64, *, settings: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.now = 0.0
        self.requests: dict[str, Any] = {}
        self.index = BlockIndex([TierSpec("host", host), TierSpec("disk", 64)])
        self.outbox = Outbox(1)
        self.config = load_config(None, settings or {})
        self.manager = KVManager(
            self.index,
            self.outbox,
            backing=[Backing("disk")],
            options=TransferOptions(range(100, 104)),
        )
        metrics, recorder = Metrics("leader"), RequestRecorder()
        recorder.count_in(metrics)
        parts = LeaderParts[Any](
            manager=self.manager, transport=self.outbox, metrics=metrics, recorder=recorder
        )
        self.side = Leader(self.config, MODEL, parts, self.outbox, {}, **options)
        self.chain = KeyChain(self.side.namespaces.of(), BLOCK)
        self.chain.extend(PROMPT)
        self.space = self.chain.namespace.digest
        self.index.lifecycle.commit(
            self.index.lifecycle.reserve("disk", self.chain.keys, 0, 25, self.space)
        )

    def ask(self, name: str, computed: int = 0) -> Any:
        asked = self.requests.setdefault(name, request(name))
        return self.side.get_num_new_matched_tokens(asked, computed)

    def load(self, name: str) -> TransferGraph:
        """Take up the offer as vLLM does, and return the graph of the load."""
        before = len(self.side._plan.async_loads)
        self.side.update_state_after_alloc(self.requests[name], PAGES, 400)
        loads = self.side._plan.async_loads
        assert len(loads) == before + 1
        return loads[-1][1]

    def end(self, graph: TransferGraph, why: RowError | None = None) -> None:
        """Every op of it ends: well, or none that reads does, and what waits for it neither."""
        for op in graph.ops:
            reason = why if op.path.reads_tier else RowError.CANCELLED
            failed = {} if why is None else dict.fromkeys(range(*op.rows), reason)
            self.manager.complete(OpReport(graph.graph_id, op.op_id, failed))
        self.index.check_integrity()
