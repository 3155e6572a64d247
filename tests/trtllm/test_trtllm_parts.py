"""Parts of the TensorRT-LLM adapter that need no model: settings, layouts, messages, the leader."""

from __future__ import annotations

import importlib.util
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

torch = pytest.importorskip("torch")

from kvcore_trtllm import plugin  # noqa: E402  # after the skip
from kvcore_trtllm.describe import (  # noqa: E402
    ModelFacts,
    check_settings,
    describe,
    whole,
)
from kvcore_trtllm.layout import of_pool, of_regions  # noqa: E402
from kvcore_trtllm.messages import KVCoreMetadata, StepNews, StepPlan  # noqa: E402
from kvcore_trtllm.requests import RequestNamespaces, excluded, extras  # noqa: E402
from kvcore_trtllm.scheduler import Leader  # noqa: E402
from kvcore_trtllm.worker import Tally, WorkerSide  # noqa: E402

from kvcore.adapting.identity import weights_identity  # noqa: E402
from kvcore.adapting.model import LayerGroup  # noqa: E402
from kvcore.adapting.outbox import Outbox  # noqa: E402
from kvcore.adapting.rank import refuse_tier  # noqa: E402
from kvcore.config import Config, forwarded_config, load_config  # noqa: E402
from kvcore.errors import (  # noqa: E402
    CapacityError,
    ConfigError,
    FormatError,
    UnsupportedError,
)
from kvcore.index import BlockIndex, TierSpec  # noqa: E402
from kvcore.manager import HOST, KVManager  # noqa: E402
from kvcore.metrics import Metrics  # noqa: E402
from kvcore.policy import LRU  # noqa: E402
from kvcore.transfer.graph import OpReport, RowError, TransferGraph  # noqa: E402

ROOT = Path(__file__).parents[2]


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
        "weights": b"w",
    }
    return ModelFacts(**{**values, **changes})


# --- settings ---------------------------------------------------------------------------------


def args(folder: Path | str = "", **changes: Any) -> SimpleNamespace:
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


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_cache_config__enable_block_reuse": False}, "enable_block_reuse"),
        ({"kv_cache_config__enable_partial_reuse": True}, "enable_partial_reuse"),
        ({"kv_cache_config__host_cache_size": 1 << 30}, "host_cache_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"context_parallel_size": 2}, "context_parallel_size"),
        ({"max_beam_width": 4}, "max_beam_width"),
        ({"enable_attention_dp": True}, "enable_attention_dp"),
        (
            {"scheduler_config__capacity_scheduler_policy": "MAX_UTILIZATION"},
            "capacity_scheduler_policy",
        ),
    ],
)
def test_settings_under_which_kv_would_be_wrong(change: dict[str, Any], named: str) -> None:
    check_settings(args())
    with pytest.raises(ConfigError, match=named):
        check_settings(args(**change))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """A folder with a config and one byte of weights."""
    transformers: Any = pytest.importorskip("transformers")

    def make(kind: str = "LlamaConfig", **fields: Any) -> Path:
        sizes = {
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "hidden_size": 64,
            "intermediate_size": 64,
            "vocab_size": 128,
        }
        getattr(transformers, kind)(**{**sizes, **fields}).save_pretrained(tmp_path)
        (tmp_path / "model.bin").write_bytes(b"weights")
        return tmp_path

    return make


def test_a_llama_is_described(checkpoint: Callable[..., Path]) -> None:
    found = describe(args(checkpoint(dtype="bfloat16")))
    assert (found.layers, found.kv_heads, found.head_dim, found.kv_factor) == (3, 4, 8, 2)
    assert (found.kv_dtype, found.order, found.page_tokens) == ("bfloat16", "HND", 32)


def test_mla_is_one_latent_head(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("DeepseekV3Config", kv_lora_rank=24, qk_rope_head_dim=8, n_routed_experts=4)
    found = describe(args(folder))
    assert (found.kv_heads, found.head_dim, found.kv_factor) == (1, 32, 1)
    with pytest.raises(UnsupportedError, match="tensor_parallel_size=2"):
        describe(args(folder, tensor_parallel_size=2))


@pytest.mark.parametrize(
    ("fields", "change", "named"),
    [
        ({"kind": "MistralConfig", "sliding_window": 64}, {}, "window"),
        ({}, {"kv_cache_config__max_attention_window": [512]}, "window"),
        ({}, {"speculative_config": object()}, "draft"),
        ({}, {"attn_backend": "FLASHINFER_STAR_ATTENTION"}, "attn_backend"),
        ({}, {"kv_cache_config__dtype": "nvfp4"}, "NVFP4"),
    ],
)
def test_models_that_are_left_alone(
    checkpoint: Callable[..., Path], fields: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedError, match=named):
        describe(args(checkpoint(**fields), **change))


def test_kv_types(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    asked = SimpleNamespace(kv_cache_quant_algo="FP8", quant_algo=None)
    assert describe(args(folder, kv_cache_config__dtype="fp8")).kv_dtype == "float8_e4m3fn"
    assert describe(args(folder, quant_config=asked)).kv_dtype == "float8_e4m3fn"
    assert describe(args(folder, dtype="float16")).kv_dtype == "float16"


def test_fingerprints_tell_models_apart(checkpoint: Callable[..., Path]) -> None:
    groups = (LayerGroup(0, 32, (0, 1, 2)),)

    def fingerprint(given: ModelFacts) -> bytes:
        return whole(given, groups, 16).fingerprint

    base = describe(args(checkpoint(), dtype="float16"))
    assert fingerprint(base) == fingerprint(describe(args(checkpoint(), dtype="float16")))
    others = [
        describe(args(checkpoint(rms_norm_eps=0.5), dtype="float16")),
        describe(args(checkpoint(), dtype="bfloat16")),
        describe(args(checkpoint(), dtype="float16", kv_cache_config__dtype="fp8")),
    ]
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    stretched = checkpoint(rope_parameters=rope)
    others += [describe(args(stretched, dtype="float16", max_seq_len=n)) for n in (64, 128)]
    folder = checkpoint()
    (folder / "model.bin").write_bytes(b"other weights")
    weights_identity.cache_clear()
    others.append(describe(args(folder, dtype="float16")))
    found = {fingerprint(base), *map(fingerprint, others)}
    assert len(found) == 7


# --- layouts ----------------------------------------------------------------------------------


def numbered(*shape: int) -> Any:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).view(*shape)


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 1), (8, 5)])
def test_the_pool_is_read_as_the_engine_writes_it(order: str, world: int, rank: int) -> None:
    given = facts(order=order, world_size=world)
    start, stop = given.head_range(rank)
    heads = stop - start
    pool = numbered(5, 3, 2, heads * 32 * 8)
    inner = (heads, 32, 8) if order == "HND" else (32, heads, 8)
    elements = pool.view(5, 3, 2, *inner)
    elements = elements if order == "HND" else elements.transpose(3, 4)
    memory = of_pool(pool, given, rank)
    layout = memory.views[0].layout
    picks = np.random.default_rng(0)
    for _ in range(50):
        page, layer, kv, head, token, dim = (
            int(picks.integers(n)) for n in (5, 3, 2, heads, 32, 8)
        )
        place = layout.offset(layer, kv, page, head, token, dim)
        assert pool.flatten()[place] == elements[page, layer, kv, head, token, dim]
    assert memory.groups == (LayerGroup(0, 32, (0, 1, 2)),)


def test_pages_are_as_large_as_the_memory_says() -> None:
    latent = facts(kv_heads=1, kv_factor=1)
    pool = numbered(4, 3, 1, 64 * 8)
    assert of_pool(pool, latent, 0).facts.page_tokens == 64  # FlashMLA
    with pytest.raises(UnsupportedError, match="pages of 64 tokens"):
        of_pool(numbered(4, 3, 2, 64 * 4 * 8), facts(), 0)
    with pytest.raises(UnsupportedError, match="pages of 16 tokens"):  # two values a byte
        of_pool(numbered(4, 3, 2, 16 * 4 * 8), facts(), 0)


@pytest.mark.parametrize("shape", [(4, 2, 2, 1024), (4, 3, 1, 1024), (4, 3, 2048), (4, 3, 2, 1023)])
def test_pools_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match="kvcore expects"):
        of_pool(numbered(*shape), facts(), 0)


def region(tensor: Any, buffers: list[tuple[int, str]], expansion: int = 1) -> SimpleNamespace:
    """A region of the newer interface over ``tensor`` [slots, elements]."""
    return SimpleNamespace(
        size=tensor.shape[1] * tensor.element_size(),
        num_slots=tensor.shape[0],
        buffers=[SimpleNamespace(layer_id=i, role=r, expansion=expansion) for i, r in buffers],
        as_tensor=lambda dtype: tensor.view(dtype) if tensor.dtype != dtype else tensor,
    )


def layout_of(*groups: tuple[tuple[int, ...], list[Any]], page_tokens: int = 32) -> SimpleNamespace:
    return SimpleNamespace(
        tokens_per_block=page_tokens,
        groups=[
            SimpleNamespace(layer_ids=layers, regions=regions, replicated_regions=())
            for layers, regions in groups
        ],
    )


def test_regions_by_layer_group() -> None:
    part = 4 * 32 * 8
    full = numbered(6, 4 * part)
    keys, values = numbered(5, part), numbered(5, part) + 1
    layout = layout_of(
        ((0, 2), [region(full, [(0, "key"), (0, "value"), (2, "key"), (2, "value")])]),
        ((1,), [region(keys, [(1, "DataRole.KEY")]), region(values, [(1, "DataRole.VALUE")])]),
    )
    memory = of_regions(layout, facts(), 0)
    assert memory.groups == (LayerGroup(0, 32, (0, 2)), LayerGroup(1, 32, (1,)))
    first, second = memory.views
    elements = full.view(6, 2, 2, 4, 32, 8)
    place = first.layout.offset(1, 0, 3, 2, 7, 5)
    assert full.flatten()[place] == elements[3, 1, 0, 2, 7, 5]
    assert second.layout.planes[0][1].tensor == 1
    place = second.layout.offset(0, 1, 4, 1, 2, 3)
    assert values.flatten()[place] == values.view(5, 4, 32, 8)[4, 1, 2, 3]


def test_regions_that_kvcore_does_not_know() -> None:
    part = 4 * 32 * 8
    both = [(i, role) for i in range(3) for role in ("key", "value")]
    good = numbered(4, 6 * part)
    of_regions(layout_of(((0, 1, 2), [region(good, both)])), facts(), 0)
    bad = [
        layout_of(((0, 1), [region(numbered(4, 4 * part), both[:4])])),
        layout_of(((0, 1, 2), [region(numbered(4, 6 * part + 8), both)])),
        layout_of(((0, 1, 2), [region(good, [*both[:5], (2, "index_k")])])),
        layout_of(((0, 1, 2), [region(good, both, expansion=2)])),
    ]
    for layout in bad:
        with pytest.raises(UnsupportedError):
            of_regions(layout, facts(), 0)


# --- messages ---------------------------------------------------------------------------------


def test_metadata_survives_a_broadcast() -> None:
    plan = StepPlan(fence=[1, 2], lost_loads=[7], broken="because")
    sent = pickle.loads(pickle.dumps(KVCoreMetadata.of(plan)))
    assert sent.plan() == plan
    assert KVCoreMetadata.of(StepPlan()).payload == b""
    assert KVCoreMetadata().plan() == StepPlan()
    with pytest.raises(FormatError, match="step plan"):
        KVCoreMetadata(b"\xc1").plan()


def graph(graph_id: int, ops: int = 1) -> TransferGraph:
    from kvcore.transfer.graph import Path as Direction
    from kvcore.transfer.graph import Priority, Span, TransferOp

    made = tuple(TransferOp(i, Direction.H2DISK, Span(0, 1), tier="disk") for i in range(ops))
    return TransferGraph(graph_id, Priority.SPILL, b"n", b"p", (b"k",), (0,), (0,), (), made)


def test_an_op_has_ended_when_all_ranks_say_so() -> None:
    queues: list[list[bytes]] = [[], []]

    def gather(mine: bytes) -> list[bytes]:
        return [mine, queues[1].pop(0)]

    tally = Tally(2, gather)
    assert tally.exchange(StepNews()) is None  # nothing open: no word to the others
    tally.expect(graph(1, ops=2))
    encode = msgspec.msgpack.encode
    good, bad = OpReport(1, 0), OpReport(1, 1, {0: RowError.IO})
    queues[1] = [encode(StepNews([bad])), encode(StepNews([good])), encode(StepNews())]
    assert tally.exchange(StepNews([good])) == ([], [{}, {}])
    assert tally.exchange(StepNews()) == ([good], [{}, {}])
    assert tally.exchange(StepNews([OpReport(1, 1)])) == ([bad], [{}, {}])
    assert tally.exchange(StepNews()) is None


# --- identity ---------------------------------------------------------------------------------


def request(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"request_id": 1, "get_tokens": lambda beam: [], **fields})


def test_namespaces_differ_by_what_the_version_tells() -> None:
    spaces = RequestNamespaces(Config(), b"model")
    given = [
        request(),
        request(cache_salt="a"),
        request(cache_salt=None, cache_salt_id=5),
        request(lora_task_id=1),
        request(lora_task_id=2),
        request(lora_task_id=1, py_lora_path="/weights/a"),
    ]
    assert len({spaces.of(one).digest for one in given}) == len(given)
    assert spaces.of(request()) is spaces.of(request(cache_salt=None))
    again = RequestNamespaces(Config(), b"model")
    assert again.of(given[1]).digest == spaces.of(given[1]).digest
    assert again.of(given[5]).digest == spaces.of(given[5]).digest
    assert again.of(given[3]).digest != spaces.of(given[3]).digest  # a number means nothing there


def test_pictures_and_what_cannot_be_told() -> None:
    picture = request(multimodal_hashes=[[1, 2]], multimodal_positions=[3], multimodal_lengths=[4])
    assert [tuple(extra) for extra in extras(picture)] == [(3, 4, b"1,2")]
    assert extras(request()) == []
    assert not excluded(picture)
    assert excluded(request(multimodal_embedding=object()))
    assert excluded(request(is_attention_dp_dummy=True))
    assert excluded(request(prompt_embedding_table=object()))


# --- the leader -------------------------------------------------------------------------------


def make_leader(sync_load_max: str = "512MiB") -> Leader:
    settings = {
        "block": {"tokens": 16},
        "trtllm": {"min_load_tokens": 1},
        "transfer": {"sync_load_max": sync_load_max},
    }
    config = load_config(overrides=settings, env={})
    outbox = Outbox()
    index = BlockIndex([TierSpec(HOST, 64, LRU, {})])
    manager = KVManager(index, outbox)
    model = whole(facts(page_tokens=16), (LayerGroup(0, 16, (0, 1, 2)),), 16)
    return Leader(config, model, manager, outbox, Metrics("leader"), {})


def asked(number: int, tokens: list[int]) -> SimpleNamespace:
    return request(request_id=number, get_tokens=lambda beam: list(tokens))


def data(number: int, tokens: list[int], pages: list[int], at: int, count: int) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=number,
        new_tokens=tokens,
        new_block_ids=pages,
        computed_position=at,
        num_scheduled_tokens=count,
    )


def output(new: list[Any] | None = None, cached: list[Any] | None = None) -> SimpleNamespace:
    return SimpleNamespace(new_requests=new or [], cached_requests=cached or [])


def begin(leader: Leader, number: int, tokens: list[int], pages: list[int]) -> StepPlan:
    """The first step of a request that the engine has nothing of."""
    one = asked(number, tokens)
    matched, _ = leader.match(one, 0)
    leader.allocated(one, [pages])
    return leader.build_plan(output([data(number, tokens, pages, 0, len(tokens) - matched)]))


def end(leader: Leader, plan: StepPlan) -> None:
    """All ranks did what the plan says."""
    graphs = [g for _, g in (*plan.early_saves, *plan.late_saves, *plan.async_loads)]
    graphs += plan.sync_loads
    leader.take_news([OpReport(g.graph_id, op.op_id) for g in graphs for op in g.ops], [])


PROMPT = list(range(100, 148))


def test_a_page_that_a_save_reads_is_fenced_when_it_is_given_away() -> None:
    leader = make_leader()
    plan = begin(leader, 1, PROMPT, [0, 1, 2])
    [(number, save)] = plan.late_saves
    assert (number, plan.fence) == (1, [])
    other = begin(leader, 2, list(range(48)), [5, 2, 7])
    assert other.fence == [save.graph_id]
    assert other.cancel == []
    end(leader, plan)
    end(leader, other)
    assert begin(leader, 3, list(range(200, 248)), [0, 1, 2]).fence == []


def test_a_new_page_of_a_running_request_is_fenced_too() -> None:
    leader = make_leader()
    save = begin(leader, 1, PROMPT, [0, 1, 2]).late_saves[0][1]
    begin(leader, 2, list(range(16)), [5])
    plan = leader.build_plan(output(cached=[data(2, [16], [1], 16, 1)]))
    assert plan.fence == [save.graph_id]


def test_requests_that_kvcore_does_not_know_give_pages_away_as_well() -> None:
    leader = make_leader()
    save = begin(leader, 1, PROMPT, [0, 1, 2]).late_saves[0][1]
    dummy = request(request_id=9, is_dummy_request=True)
    assert leader.match(dummy, 0) == (0, False)
    leader.allocated(dummy, [[1]])
    assert leader.build_plan(output([data(9, [0], [1], 0, 1)])).fence == [save.graph_id]


def parked(leader: Leader) -> TransferGraph:
    """A load on its way into pages 10, 11, 12 for request 5."""
    end(leader, begin(leader, 1, PROMPT, [0, 1, 2]))
    one = asked(5, PROMPT)
    assert leader.match(one, 0) == (47, True)
    leader.allocated(one, [[10, 11, 12]])
    plan = leader.build_plan(output())
    [(number, load)] = plan.async_loads
    assert (number, plan.fence, plan.cancel) == (5, [], [])
    return load


def test_a_load_of_an_aborted_request_is_stopped_when_its_page_is_given_away() -> None:
    leader = make_leader(sync_load_max="0B")
    load = parked(leader)
    plan = begin(leader, 6, list(range(48)), [20, 11, 21])
    assert (plan.cancel, plan.fence) == ([load.graph_id], [load.graph_id])


def test_a_load_into_a_page_that_is_reused_is_waited_for() -> None:
    leader = make_leader(sync_load_max="0B")
    load = parked(leader)
    one = asked(6, PROMPT[:40])
    leader.match(one, 32)  # the engine has its first two pages
    leader.allocated(one, [[10, 11, 30]])
    plan = leader.build_plan(output([data(6, PROMPT[:40], [10, 11, 30], 32, 8)]))
    assert (plan.cancel, plan.fence) == ([], [load.graph_id])


class _Slow:
    """A worker whose loads end when a step waits for them; the first ``failing`` attempts fail."""

    def __init__(self, failing: int) -> None:
        self.failing = failing
        self.attempts = 0
        self._running: list[TransferGraph] = []
        self._reports: list[OpReport] = []

    def submit(self, graph: TransferGraph) -> list[OpReport]:
        self.attempts += 1
        self._running.append(graph)
        return []

    def wait_device(self, graph_id: int) -> None:
        for graph in self._running:
            failed = {0: RowError.IO} if self.attempts <= self.failing else {}
            self._reports += [OpReport(graph.graph_id, op.op_id, failed) for op in graph.ops]
        self._running.clear()

    def poll(self) -> list[OpReport]:
        found, self._reports = self._reports, []
        return found

    def cancel(self, graph_id: int) -> None:
        pass

    def wait_report(self, timeout: float) -> bool:
        return True

    @property
    def writes(self) -> bool:
        return bool(self._running)


@pytest.mark.parametrize(("failing", "cancel", "broken"), [
    (1, False, False), (3, False, True), (1, True, False),
])  # fmt: skip
def test_a_fence_waits_until_a_load_is_not_tried_again(
    failing: int, cancel: bool, broken: bool
) -> None:
    """Between two attempts nothing is under way, and the next writes to the page again."""
    worker: Any = _Slow(failing)
    side = WorkerSide(
        worker,
        Tally(1, lambda mine: [mine]),
        layers=1,
        layerwise=True,
        metrics=Metrics(),
        open_tier=refuse_tier,
    )
    side.begin(StepPlan(async_loads=[(5, graph(1))]))
    plan = StepPlan(fence=[1], cancel=[1] if cancel else [])
    side.begin(plan)
    assert not worker.writes
    assert worker.attempts == (1 if cancel else min(failing + 1, 3))
    assert bool(plan.broken) == broken


def test_promised_blocks_stay_until_they_are_loaded() -> None:
    """Between the promise and the plan other requests may want the room."""
    leader = make_leader()
    end(leader, begin(leader, 1, PROMPT, [0, 1, 2]))
    one = asked(2, PROMPT)
    assert leader.match(one, 0) == (47, False)
    leader.manager.index.evict(HOST, 64)
    leader.allocated(one, [[4, 5, 6]])
    plan = leader.build_plan(output([data(2, PROMPT, [4, 5, 6], 0, 1)]))
    assert len(plan.sync_loads) == 1
    end(leader, plan)
    leader.check_integrity()
    assert len(leader.manager.index.evict(HOST, 64)) == 3  # nothing is pinned any more


@pytest.mark.parametrize("pages", [[4, 5], [4, -1, 6]])
def test_promised_tokens_need_a_page(pages: list[int]) -> None:
    leader = make_leader()
    end(leader, begin(leader, 1, PROMPT, [0, 1, 2]))
    one = asked(2, PROMPT)
    leader.match(one, 0)
    leader.allocated(one, [pages])
    with pytest.raises(CapacityError, match=r"0\.\.47 were promised"):
        leader.build_plan(output([data(2, PROMPT, pages, 0, 1)]))


def test_nothing_is_kept_that_was_not_computed() -> None:
    """Chunks count up to where they end, and a bound that lags is caught up with at the end."""
    leader = make_leader()
    one = asked(1, PROMPT)
    leader.match(one, 0)
    leader.allocated(one, [[0, 1, 2]])
    plan = leader.build_plan(output([data(1, PROMPT, [0, 1, 2], 0, 20)]))
    assert [g.num_rows for _, g in plan.late_saves] == [1]
    plan = leader.build_plan(output(cached=[data(1, [], [], 20, 27)]))
    assert [g.num_rows for _, g in plan.late_saves] == [1]  # 47 tokens: block 2 lacks one
    assert leader.finished(asked(1, [*PROMPT, 1]), [[0, 1, 2]])
    assert leader.build_plan(output()).early_saves == []  # the prompt was not finished


def test_the_last_block_is_kept_when_a_request_ends() -> None:
    leader = make_leader()
    begin(leader, 1, PROMPT[:47], [0, 1, 2])
    # With overlap the 48th token was computed and is told of only now, with the one after it.
    assert leader.finished(asked(1, [*PROMPT, 1]), [[0, 1, 2]])
    assert [g.num_rows for _, g in leader.build_plan(output()).early_saves] == [1]


def test_pages_that_the_engine_lacks_are_not_saved() -> None:
    leader = make_leader()
    plan = begin(leader, 1, PROMPT, [0, 1])
    assert plan.late_saves == []


# --- configuration and start ------------------------------------------------------------------


def test_settings_come_through_the_forwarded_variable(tmp_path: Path) -> None:
    file = tmp_path / "kvcore.toml"
    file.write_text('[host]\ncapacity = "2GiB"\n')
    name = "TRTLLM_KVCORE_CONFIG"
    from_file = forwarded_config({name: str(file), "KVCORE__BLOCK__TOKENS": "32"})
    assert (from_file.host.capacity, from_file.block.tokens) == (2 << 30, 32)
    given = {name: '{"host": {"capacity": "3GiB"}}', "KVCORE__BLOCK__TOKENS": "32"}
    whole_config = forwarded_config(given)
    assert (whole_config.host.capacity, whole_config.block.tokens) == (3 << 30, 16)
    assert forwarded_config({}) == Config()
    with pytest.raises(ConfigError, match="is not JSON"):
        forwarded_config({name: "{"})
    with pytest.raises(ConfigError, match=r"host\.capacity"):
        forwarded_config({name: '{"host": {"capacty": 1}}'})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


def test_serve_writes_the_engines_options(home: Path) -> None:
    mine = home / "options.yaml"
    mine.write_text("kv_cache_config: {dtype: fp8}\nmax_num_tokens: 512\n")
    config = load_config(
        overrides={"host": {"capacity": "2GiB"}, "namespace": {"secret": "s"}}, env={}
    )
    command = plugin.serve("m", config, ["--tp_size", "2", "--extra_llm_api_options", str(mine)])
    assert command.argv[1:4] == ["m", "--tp_size", "2"]
    assert command.argv[4] == "--extra_llm_api_options"
    options = yaml.safe_load(Path(command.argv[5]).read_text())
    assert options["max_num_tokens"] == 512
    assert options["kv_cache_config"] == {"dtype": "fp8", **plugin.CACHE}
    assert options["kv_connector_config"] == plugin.CONNECTOR
    assert forwarded_config(command.env) == config
    assert "s" not in command.argv
    assert plugin.serve("m", config, []).argv[2] == "--extra_llm_api_options"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("kv_connector_config: {connector: lmcache}", "kv_connector_config"),
        ("kv_cache_config: {enable_partial_reuse: true}", "enable_partial_reuse"),
        ("[]", "a table"),
        ("{", "cannot be read"),
    ],
)
def test_serve_refuses_options_that_do_not_fit(home: Path, text: str, named: str) -> None:
    mine = home / "options.yaml"
    mine.write_text(text)
    with pytest.raises(ConfigError, match=named):
        plugin.serve("m", Config(), [f"--config={mine}"])
    with pytest.raises(ConfigError, match="without a file"):
        plugin.serve("m", Config(), ["--config"])


def test_the_plugin_is_light() -> None:
    code = (
        "import sys, kvcore_trtllm.plugin as p; p.status(); "
        "print([n for n in ('torch', 'transformers', 'tensorrt_llm') if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_connector_named_is_the_one_there_is() -> None:
    source = (ROOT / "adapters/trtllm/kvcore_trtllm/connector.py").read_text()
    for name in ("connector_scheduler_class", "connector_worker_class"):
        assert f"class {plugin.CONNECTOR[name]}(" in source


# --- the script for a GPU ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def verify() -> Any:
    spec = importlib.util.spec_from_file_location(
        "verify_on_gpu", ROOT / "adapters/trtllm/verify_on_gpu.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["verify_on_gpu"] = module
    spec.loader.exec_module(module)
    return module


def engine(answer: Callable[[bool], int], log: str) -> Callable[..., Any]:
    """Stands for engines in processes: ``answer(with kvcore)`` is the token they give."""

    def process(order: dict[str, Any]) -> tuple[dict[str, Any], str]:
        with_kvcore = order["kvcore"] is not None
        rounds = [[[answer(with_kvcore)]] for _ in order["salts"]]
        return {"answers": rounds}, log if with_kvcore else ""

    return process


def test_verifying_finds_what_is_wrong(verify: Any, tmp_path: Path) -> None:
    right = engine(lambda _: 1, "load request=1\nblend request=1")
    for case in verify.CASES:
        process = right if case.finds else engine(lambda _: 1, "")
        assert verify.run(case, "m", 1, tmp_path, process).passed, case.name
    hit, apart = verify.CASES[0], next(case for case in verify.CASES if not case.finds)
    blend = next(case for case in verify.CASES if case.ratio == 0.15)
    wrong = [
        (hit, engine(lambda kvcore: 1 + kvcore, "load request=1"), "answers differ"),
        (hit, engine(lambda _: 1, ""), "0 found"),
        (blend, engine(lambda _: 1, "load request=1"), "0 found"),
        (blend, engine(lambda kvcore: 1 + kvcore, "blend request=1"), "round 1"),
        (hit, engine(lambda _: 1, "load request=1\nkvcore stands aside: x"), "stands aside"),
        (apart, right, "expected none"),
    ]
    for case, process, named in wrong:
        outcome = verify.run(case, "m", 1, tmp_path, process)
        assert not outcome.passed
        assert named in outcome.detail
        assert "FAIL" in verify.table([outcome])


def test_orders_to_engines_are_plain_data(verify: Any, tmp_path: Path) -> None:
    seen: list[str] = []

    def process(order: dict[str, Any]) -> tuple[dict[str, Any], str]:
        seen.append(json.dumps(order))
        return {"answers": [[[1]] for _ in order["salts"]]}, "load request=1"

    for case in verify.CASES:
        verify.run(case, "m", 1, tmp_path, process)
    assert len(seen) >= 2 * len(verify.CASES)
