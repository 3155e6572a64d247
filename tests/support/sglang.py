"""SGLang's leader and worker over pools of token slots, without the engine.

The KV of a token is a number computed from its whole prefix, so that every load can be checked
against the oracle `expected`. Slots of the pool are poisoned before a load. Needs torch.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")


from kvcore.config import load_config  # noqa: E402
from kvcore.connector.build import (  # noqa: E402
    ManagerParts,
    build_leader,
    build_worker,
    leader_parts,
)
from kvcore.connector.forward_timer import ForwardTimer  # noqa: E402
from kvcore.connector.fusion_messages import (  # noqa: E402
    BlendOrder,
    BlendReport,
    BlendTime,
    slots_of,
)
from kvcore.connector.fusion_scheduler import FusionTraits  # noqa: E402
from kvcore.connector.step_transport import Outbox  # noqa: E402
from kvcore.explain.recorder import RequestRecorder  # noqa: E402
from kvcore.fusion.segments import Segments  # noqa: E402
from kvcore.memory.device import device_of  # noqa: E402
from kvcore.model.shape import BlockShape  # noqa: E402
from kvcore.model.spec import LayerGroup, ModelDescription  # noqa: E402
from kvcore.telemetry.metrics import Data  # noqa: E402
from kvcore.telemetry.rates import ForwardPart  # noqa: E402
from kvcore.transfer.graph import OpReport  # noqa: E402
from kvcore.transfer.plan import layer_steps  # noqa: E402
from kvcore_sglang.describe import Rank, Served  # noqa: E402  (needs torch)
from kvcore_sglang.fusion_scheduler import SglangFusionScheduler  # noqa: E402
from kvcore_sglang.layout import read_pool  # noqa: E402
from kvcore_sglang.leader import Leader  # noqa: E402
from kvcore_sglang.ranks import NoLinks  # noqa: E402
from kvcore_sglang.worker import WorkerConnector  # noqa: E402

LAYERS, HEADS, DIM, SLOTS = 3, 2, 4, 2048
SETTLE_S = 60.0


class MHATokenToKVPool:
    """The part of SGLang's pool of this name that the adapter reads."""

    dtype = store_dtype = torch.float32

    def __init__(self, page: int, slots: int = SLOTS, v_dim: int = DIM) -> None:
        self.k_buffer = [torch.zeros(slots + page, HEADS, DIM) for _ in range(LAYERS)]
        self.v_buffer = [torch.zeros(slots + page, HEADS, v_dim) for _ in range(LAYERS)]

    @property
    def buffers(self) -> list[Any]:
        return [*self.k_buffer, *self.v_buffer]


class MLATokenToKVPool:
    dtype = store_dtype = torch.bfloat16

    def __init__(self, page: int, slots: int = SLOTS) -> None:
        self.kv_buffer = [
            torch.zeros(slots + page, 1, 12, dtype=torch.bfloat16) for _ in range(LAYERS)
        ]

    @property
    def buffers(self) -> list[Any]:
        return self.kv_buffer


POOLS = {"mha": MHATokenToKVPool, "mla": MLATokenToKVPool}


def prefix_numbers(tokens: list[int]) -> list[int]:
    """Return for each token a small number computed from it and all tokens before it."""
    state, found = hashlib.sha256(), []
    for token in tokens:
        state.update(token.to_bytes(4, "little"))
        found.append(state.digest()[0])
    return found


class Landing:
    """A replacement for blends: loads the chunks of orders, and makes nothing of them."""

    def __init__(self, worker: Any, page: int) -> None:
        self._worker, self._page = worker, page
        self.landed: list[BlendOrder] = []

    def begin(self, orders: list[BlendOrder], mark: Any) -> list[OpReport]:
        self.landed += orders
        for order in orders:
            slots = slots_of(order, self._page)
            for chunk in order.chunks:
                assert not self._worker.submit(chunk.into(slots), None, mark())
        return []

    def run(self, landed: Any) -> list[int]:
        for layer in range(LAYERS):
            landed(layer)
        for order in self.landed:
            for chunk in order.chunks:
                self._worker.follow(chunk.graph.graph_id)
        return []

    def take_reports(self) -> list[BlendReport]:
        return [BlendReport(order.request_id) for order in self.landed]

    def take_profile(self) -> list[tuple[int, float]]:
        return []

    def take_times(self) -> list[BlendTime]:
        return []


class SGLangRig:
    """An engine with one rank. `compute` stands for its forward pass, `slots` for its allocator."""

    def __init__(
        self,
        pool: Any,
        page: int,
        kvcore: dict[str, Any],
        *,
        timed: bool = False,
        publish: Callable[[Data], None] | None = None,
    ) -> None:
        listed = {"list_requests": True, **kvcore.get("sglang", {})}
        self.config = load_config(overrides={**kvcore, "sglang": listed}, env={})
        self.page = page
        self.pool = pool
        found = read_pool(pool, page)
        shape = BlockShape(
            found.layers,
            found.heads,
            found.dim,
            self.config.block.tokens,
            found.dtype,
            kv_factor=1 if found.v_dim is None else 2,
            v_head_dim=found.v_dim,
        )
        groups = (LayerGroup(0, page, tuple(range(found.layers))),)
        model = ModelDescription(shape, groups, b"model-of-tests-1", 1)
        self.served = Served(model, Rank(0, 1, None), found, page, 1000)
        parts = build_worker(self.config, model, 0, [found.view])
        self.engine = parts.worker
        self.blends: Any = Landing(parts.worker, page)
        clock = ForwardTimer[Sequence[ForwardPart]](device_of(None)) if timed else None
        self.worker = WorkerConnector(parts, blends=self.blends, clock=clock)
        outbox, recorder = Outbox(), RequestRecorder.of(self.config)
        made = build_leader(self.config, model, outbox, recorder)
        self.planning = recorder.weigh_alone(
            self.config,
            model,
            made.manager,
            made.read_paths,
            min_load_tokens=self.config.sglang.min_load_tokens,
            layerwise=self.config.sglang.layerwise,
            times_forwards=timed,
        )
        self.leader = Leader(
            self.config,
            model,
            leader_parts(
                made,
                outbox,
                recorder,
                self._fusion(made) if self.config.fusion.enabled else None,
                self.planning,
            ),
            outbox,
            self.worker,
            NoLinks(),
            made.open_tiers,
            publish,
        )
        self.random = random.Random(7)
        self.namespace = self.leader.namespaces.of("", None)

    def settle(self) -> None:
        """Wait until nothing is in flight."""
        limit = time.monotonic() + SETTLE_S
        while self.leader.state["in_flight"]:
            assert time.monotonic() < limit
            self.worker.wait_report(0.02)

    def _fusion(self, parts: ManagerParts) -> SglangFusionScheduler:
        shape = self.served.model.shape
        segments = Segments(self.config.block.tokens, min_tokens=self.config.fusion.min_tokens)
        steps = layer_steps(shape.layers)
        return SglangFusionScheduler(
            self.config,
            shape.nbytes,
            parts.manager,
            segments,
            steps,
            parts.metrics,
            FusionTraits(self.page, ends_at_page=True),
        )

    def slots(self, tokens: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the slots of whole pages, in no order. Page 0 is padding."""
        pages = -(-tokens // self.page)
        picked = self.random.sample(range(1, SLOTS // self.page), pages)
        places = [page * self.page + i for page in picked for i in range(self.page)]
        return np.array(places[:tokens], dtype=np.int64)

    def expected(self, tokens: list[int], buffer: int) -> Any:
        """Return the expected content of one buffer of the pool, [tokens, heads, dim]."""
        like = self.pool.buffers[buffer]
        numbers = torch.tensor(prefix_numbers(tokens), dtype=torch.float32)
        heads, dim = like.shape[1:]
        grid = torch.arange(heads * dim, dtype=torch.float32).view(heads, dim)
        return (numbers[:, None, None] + grid / 4 + buffer * 8).to(like.dtype)

    def compute(self, tokens: list[int], slots: Any) -> None:
        for i, buffer in enumerate(self.pool.buffers):
            buffer[torch.from_numpy(slots)] = self.expected(tokens, i)

    def insert(self, tokens: list[int], slots: Any) -> bool:
        """Offer the tokens in the tree at ``slots``. Return True if something was left to save."""
        offer = self.leader.offer()
        order = self.leader.inserted(np.array(tokens), self.namespace, slots, [offer])
        self.worker.carry_out(order)
        self.settle()
        assert self.leader.done_offers() == 1
        self.leader.take_offer()
        return bool(order.graphs)

    def keep(self, tokens: list[int]) -> bool:
        whole = tokens[: len(tokens) // self.page * self.page]
        slots = self.slots(len(whole))
        self.compute(whole, slots)
        return self.insert(whole, slots)

    def lookup(self, rid: str, tokens: list[int], device: int = 0) -> int:
        """Look up as the scheduler does: again while the request is held back."""
        while True:
            gain = self.leader.lookup(rid, np.array(tokens), device, self.namespace)
            if not self.leader.holds(rid, resting=True):
                return gain

    def load(self, rid: str, tokens: list[int], device: int, gain: int) -> bool:
        """Load what was looked up into poisoned slots, and check every element.

        Returns False if the load was refused or failed.
        """
        slots = self.slots(gain)
        for buffer in self.pool.buffers:
            buffer[torch.from_numpy(slots)] = float("nan")
        order = self.leader.load(rid, slots)
        if order.empty:
            return False
        [graph] = order.graphs
        self.worker.start_loads([graph])
        for layer in range(LAYERS):
            self.worker.wait_layer([graph.graph_id], layer)
            self.check(tokens, device, slots, layer)
        landed = self.worker.finish([graph.graph_id])
        self.settle()
        return landed

    def check(self, tokens: list[int], device: int, slots: Any, layer: int) -> None:
        for i in range(layer, len(self.pool.buffers), LAYERS):
            want = self.expected(tokens, i)[device : device + len(slots)]
            got = self.pool.buffers[i][torch.from_numpy(slots)]
            assert torch.equal(got, want), f"layer {layer}, buffer {i}"

    def close(self) -> None:
        self.worker.close()
        self.leader.check_integrity()
        self.leader.close()


def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


SETTINGS: dict[str, Any] = {"host": {"capacity": "4MiB", "huge_pages": False}}
