"""A step's work in the leader follows what changes in the step, not how many requests run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kvcore.config import load_config
from kvcore.connector.leader import LeaderParts
from kvcore.connector.messages import StepReport
from kvcore.connector.step_transport import Outbox
from kvcore.explain.recorder import RequestRecorder
from kvcore.fusion.options import FusionOptions
from kvcore.index import BlockIndex, TierSpec
from kvcore.manager import KVManager
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import OpReport, TransferGraph
from kvcore_vllm import due
from kvcore_vllm.fusion_scheduler import VllmFusionRequest
from kvcore_vllm.leader import Leader
from kvcore_vllm.messages import KVCoreWorkerMetadata

BLOCK, RUN, PROMPT = 16, 64, 100
MODEL = ModelDescription(
    BlockShape(1, 1, 8, BLOCK, "float16"), (LayerGroup(0, BLOCK, (0,)),), b"f" * 32, 1
)


class Request(SimpleNamespace):
    """A request of vLLM that counts how often its progress is read."""

    seen: ClassVar[Counter[str]] = Counter()

    @property
    def num_computed_tokens(self) -> int:
        self.seen[self.request_id] += 1
        return self.computed

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)

    def get_finished_reason(self) -> None:
        """Return None: the reason is only recorded."""


WINDOWED = replace(MODEL, groups=(LayerGroup(0, BLOCK, (0,)), LayerGroup(1, BLOCK, (1,))))
"""Layer 1 has a window, and pages of its own."""


class Engine:
    """A leader, requests that run, and workers that end every save by the next step."""

    def __init__(
        self, requests: int, *, tail: int = 1, model: ModelDescription = MODEL, **vllm: Any
    ) -> None:
        config = load_config(None, {"vllm": vllm})
        self._groups = range(len(model.groups))
        index, self.outbox = BlockIndex([TierSpec("host", 40 * requests)]), Outbox(1)
        metrics, recorder = Metrics("leader"), RequestRecorder()
        recorder.count_in(metrics)
        self.manager = KVManager(index, self.outbox, metrics=metrics)
        parts = LeaderParts[Any](
            manager=self.manager, transport=self.outbox, metrics=metrics, recorder=recorder
        )
        self.side = Leader(config, model, parts, self.outbox, {})
        self.requests = {f"r{i}": self._request(i, PROMPT + i * tail) for i in range(requests)}
        self.saved: Counter[str] = Counter()
        for request in self.requests.values():
            self.side.get_num_new_matched_tokens(request, 0)
        self.step({r.request_id: r.num_tokens for r in self.requests.values()}, new=self.requests)

    @staticmethod
    def _request(i: int, tokens: int) -> Any:
        prompt = [i * 7919 + position for position in range(tokens)]
        return Request(
            request_id=f"r{i}",
            computed=0,
            num_prompt_tokens=tokens,
            prompt_token_ids=prompt,
            _all_token_ids=list(prompt),
            prompt_embeds=None,
            skip_reading_prefix_cache=False,
            pooling_params=None,
            mm_features=[],
            lora_request=None,
            cache_salt=None,
            kv_transfer_params=None,
            resumable=False,
        )

    def step(
        self,
        tokens: Mapping[str, int],
        *,
        new: Iterable[str] = (),
        resumed: Iterable[str] = (),
        lag: int = 0,
    ) -> list[TransferGraph]:
        """Run a step; return its saves. Token ids trail the positions by ``lag`` tokens."""
        output: Any = SimpleNamespace(
            num_scheduled_tokens=dict(tokens),
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_new_reqs=[SimpleNamespace(req_id=n, block_ids=self._pages(n)) for n in new],
            scheduled_cached_reqs=SimpleNamespace(
                resumed_req_ids=set(resumed), new_block_ids=[None] * len(tokens)
            ),
            new_block_ids_to_zero=None,
            kv_cache_block_copies=None,
            kv_connector_block_state=SimpleNamespace(get_block_ids=self._pages),
        )
        saves = self.side.build_connector_meta(output).plan().late_saves
        for name, count in tokens.items():
            request = self.requests[name]
            request.computed += count
            while request.num_tokens < request.computed + 1 - lag:
                request._all_token_ids.append(7)
        reports = [OpReport(graph.graph_id, op.op_id) for graph in saves for op in graph.ops]
        ended: Any = SimpleNamespace(
            kv_connector_worker_meta=KVCoreWorkerMetadata([StepReport(reports)]),
            finished_recving=None,
            failed_recving=None,
        )
        self.side.update_connector_output(ended)
        return saves

    def _pages(self, name: str) -> list[list[int]]:
        first = 1 + int(name[1:]) * 100
        return [
            [page + 10_000 * group for page in range(first, first + 100)] for group in self._groups
        ]

    def blocks_saved(self, name: str) -> int:
        return self.side._requests[name].saved_blocks


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due, "RUN_TOKENS", RUN)


def test_only_requests_that_may_complete_a_block_are_looked_at() -> None:
    engine = Engine(256)
    one_each = dict.fromkeys(engine.requests, 1)
    engine.step(one_each)
    for _ in range(2 * RUN):
        Request.seen.clear()
        saves = engine.step(one_each)
        assert len(saves) == 256 // RUN
        assert len(Request.seen) == len(saves)
    engine.side.check_integrity()


def test_a_step_in_which_nothing_completes_looks_at_nobody() -> None:
    engine = Engine(64, tail=0)
    one_each = dict.fromkeys(engine.requests, 1)
    looked = []
    for _ in range(RUN):
        Request.seen.clear()
        saves = engine.step(one_each)
        looked.append(len(Request.seen))
        assert len(saves) in (0, 64)
    assert sorted(looked) == [0] * (RUN - 1) + [64]


def test_a_prompt_among_many_that_decode_is_all_that_is_looked_at() -> None:
    engine = Engine(64, tail=0)
    engine.step(dict.fromkeys(engine.requests, 1))
    request = engine._request(64, 200)
    engine.requests["r64"] = request
    engine.side.get_num_new_matched_tokens(request, 0)
    Request.seen.clear()
    tokens = dict.fromkeys(engine.requests, 1) | {"r64": 90}
    assert len(engine.step(tokens, new=["r64"])) == 1
    assert set(Request.seen) == {"r64"}
    assert len(engine.step(tokens | {"r64": 110})) == 1
    assert engine.blocks_saved("r64") == 200 // BLOCK


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_no_block_is_missed_whatever_is_scheduled(
    monkeypatch: pytest.MonkeyPatch, lag: int
) -> None:
    """Requests pause, resume, and get several tokens at once, as with speculation."""
    monkeypatch.setattr(due, "RUN_TOKENS", 0)
    engine = Engine(8)
    for step in range(150):
        tokens = {
            name: 3 if (step + i) % 11 == 0 else 1
            for i, name in enumerate(engine.requests)
            if (step + i) % 7 and not (i == 3 and 40 < step < 61)
        }
        resumed = ["r3"] if step == 61 else []
        before = {name: engine.requests[name].computed for name in tokens}
        known = {name: engine.requests[name].num_tokens for name in tokens}
        engine.step(tokens, resumed=resumed, lag=lag)
        for name, count in tokens.items():
            complete = min(before[name] + count, known[name]) // BLOCK
            assert engine.blocks_saved(name) == complete, f"{name} in step {step}"


def test_generated_tokens_are_saved_in_runs_and_the_rest_at_the_end() -> None:
    engine = Engine(1)
    [request] = engine.requests.values()
    counts = [graph.num_rows for _ in range(150) for graph in engine.step({"r0": 1})]
    assert counts == [2, 4]  # up to tokens 128 and 192; the prompt's blocks end at 96
    engine.side.request_finished(request, engine._pages("r0"))
    [last] = engine.side._plan.early_saves
    assert last.num_rows == request.computed // BLOCK - 192 // BLOCK == 3


def test_pages_that_may_leave_a_window_are_saved_as_soon_as_they_are_full() -> None:
    engine = Engine(1, model=WINDOWED)
    counts = [graph.num_rows for _ in range(150) for graph in engine.step({"r0": 1})]
    assert counts == [1] * 9  # up to tokens 112, 128 ... 240


def test_a_request_that_ended_is_not_looked_at_again() -> None:
    engine = Engine(2, tail=0)
    request = engine.requests.pop("r1")
    engine.side.request_finished(request, engine._pages("r1"))
    engine.requests["r1"] = engine._request(1, 20)
    engine.side.get_num_new_matched_tokens(engine.requests["r1"], 0)
    engine.step({"r0": 1, "r1": 20}, new=["r1"])
    Request.seen.clear()
    for _ in range(RUN - 40):
        engine.step(dict.fromkeys(engine.requests, 1))
    assert not Request.seen["r1"]


def test_prompts_only_stops_looking_when_a_request_decodes() -> None:
    engine = Engine(4, save_decode=False)
    one_each = dict.fromkeys(engine.requests, 1)
    for _ in range(BLOCK * 5):
        engine.step(one_each)
    Request.seen.clear()
    for _ in range(BLOCK * 5):
        assert not engine.step(one_each)
    assert not Request.seen


def test_a_blended_request_is_looked_at_no_more_once_it_is_approximate() -> None:
    engine = Engine(1)
    tracked = engine.side._requests["r0"]
    options = FusionOptions(enabled=True)
    tracked.fusing = VllmFusionRequest("r0", options, approximate_from=PROMPT)
    engine.step({"r0": 2 * BLOCK})  # several tokens: it is looked at
    assert tracked.saved_blocks == PROMPT // BLOCK
    Request.seen.clear()
    for _ in range(3 * RUN):
        assert engine.step({"r0": 1}) == []
    assert Request.seen["r0"] == 0
