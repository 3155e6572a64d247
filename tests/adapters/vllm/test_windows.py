"""Layers with windows on vLLM: what resume points keep of them, when they are saved, and loads."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from kvcore.config import load_config
from kvcore.connector.leader import LeaderParts
from kvcore.connector.step_transport import Outbox
from kvcore.errors import UnsupportedError
from kvcore.explain.recorder import RequestRecorder
from kvcore.harness.models import tiny_model
from kvcore.index import BlockIndex, TierSpec
from kvcore.index.policy import EveryPoint, PointPolicy, SpacedPoints
from kvcore.manager import KVManager
from kvcore.model.points import PageWindow, PointShape, point_keys
from kvcore.model.spec import ModelDescription
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import OpReport, TransferGraph
from kvcore_vllm.describe import dense_windows, describe
from kvcore_vllm.leader import Leader
from kvcore_vllm.points import NULL_PAGE
from support.vllm_configs import changed
from support.vllm_leader import PROMPT, request

FULL = ["model.layers.1.self_attn.attn", "model.layers.3.self_attn.attn"]
WINDOWS = ["model.layers.0.self_attn.attn", "model.layers.2.self_attn.attn"]
WINDOW, PAGE = 64, 32


@cache
def _vllm_config() -> Any:
    model = tiny_model("gemma3", layers=4, heads=4, kv_heads=2, head_dim=64, vocabulary=512)
    args = EngineArgs(str(model), dtype="float32", enforce_eager=True, enable_prefix_caching=True)
    return args.create_engine_config()


def vllm_config(**changes: Any) -> Any:
    return changed(_vllm_config(), changes)


def full(**fields: Any) -> Any:
    kind = fields.pop("kind", FullAttentionSpec)
    given = {"block_size": PAGE, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    return kind(**given | fields)


def window(**fields: Any) -> Any:
    return full(kind=SlidingWindowSpec, **{"sliding_window": WINDOW, **fields})


def told(*specs: Any) -> KVCacheConfig:
    names = [FULL, WINDOWS, ["model.layers.4.self_attn.attn"]]
    groups = [KVCacheGroupSpec(n, s) for n, s in zip(names, specs, strict=False)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def described(block: int = 16, dense: str = "", *specs: Any, **changes: Any) -> Any:
    return describe(vllm_config(**changes), told(*(specs or (full(), window()))), block, dense)


# -- what is served ------------------------------------------------------------------------------


def test_a_resume_point_has_the_end_of_each_window() -> None:
    model = described()
    assert [group.of for group in model.groups] == ["blocks", "windows"]
    assert model.shape.layers == len(FULL)
    [found] = model.point.windows
    assert (found.names, found.before, found.blocks) == (tuple(WINDOWS), WINDOW - 1, 4)
    assert (model.point.every, model.point.spare, model.point.rows(9)) == (1, 1, 4)


def test_windows_of_another_type_are_no_part_of_a_point() -> None:
    """The namespace has the type and the scales of one kind of layer."""
    with pytest.raises(UnsupportedError, match="different heads or dtypes"):
        described(16, "", full(), window(dtype=torch.bfloat16))


def test_unlike_heads_are_served_where_the_layers_with_a_window_are_those_of_a_kind() -> None:
    """Gemma 4: blocks have heads of one kind, the ends of windows those of another."""
    other = window(num_kv_heads=1, head_size=32)
    model = described(16, "", full(), other)
    assert (model.shape.kv_heads, model.point.windows[0].shape.kv_heads) == (2, 1)
    assert model.point.rows(9) == 4
    with pytest.raises(UnsupportedError, match="different heads"):
        described(16, "dense", full(), other)
    narrow = full(num_kv_heads=1, head_size=8)
    with pytest.raises(UnsupportedError, match="different heads"):  # no row has such a layer
        described(16, "", narrow, window(num_kv_heads=8))


@pytest.mark.parametrize(("heads", "total"), [(1, 2), (3, 6)])
def test_ranks_with_other_heads_than_the_model_names_hold_equal_parts(
    heads: int, total: int
) -> None:
    """The model's number, 2 heads on two ranks, is of the layers with windows."""
    specs = full(num_kv_heads=heads, head_size=128), window(num_kv_heads=1)
    model = described(16, "", *specs, parallel_config__tensor_parallel_size=2)
    assert (model.shape.kv_heads, model.world_size) == (total, 2)
    assert {model.rank_shape(rank).kv_heads for rank in range(2)} == {heads}


@pytest.mark.parametrize("sizes", [(1, 2), (1, 4), (2, 8)])
def test_any_number_of_ranks_has_the_windows_of_one_namespace(sizes: tuple[int, int]) -> None:
    one, other = (
        described(
            16,
            "",
            full(num_kv_heads=max(2 // ranks, 1)),
            window(num_kv_heads=max(2 // ranks, 1)),
            parallel_config__tensor_parallel_size=ranks,
        )
        for ranks in sizes
    )
    assert (one.fingerprint, one.shape) == (other.fingerprint, other.shape)
    assert one.point.counts == other.point.counts
    assert one.point.rows(9) == other.point.rows(9)
    assert one.point.by_heads
    assert other.part(0).heads == (0, 1)


@pytest.mark.parametrize("name", ["num_global_key_value_heads", "other_kv_heads"])
def test_ranks_are_not_taken_to_share_heads_where_the_config_names_several_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two ranks each has one head of either kind; which, nobody says."""
    config = vllm_config(parallel_config__tensor_parallel_size=2)
    heads = full(num_kv_heads=1), window(num_kv_heads=1)
    assert describe(config, told(*heads), 16).point.by_heads
    monkeypatch.setattr(config.model_config.hf_text_config, name, 1, raising=False)
    model = describe(config, told(*heads), 16)
    assert not model.point.by_heads
    ones = described(16, "", *heads)
    assert model.fingerprint != ones.fingerprint


def test_the_layers_of_each_group_are_part_of_the_namespace() -> None:
    """Another version may form other groups, whose rows have other layers."""
    one = described(16, "", full(), window(), window())
    groups = told(full(), window(), window()).kv_cache_groups
    swapped = [
        groups[0],
        *(
            replace(g, layer_names=n.layer_names)
            for g, n in zip(groups[1:], groups[:0:-1], strict=True)
        ),
    ]
    other = describe(vllm_config(), replace(told(), kv_cache_groups=swapped), 16)
    assert one.fingerprint != other.fingerprint


def test_a_draft_model_goes_on_some_tokens_before_a_boundary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcore_vllm.describe.lookahead", lambda config: 3)
    model = described()
    assert (model.point.windows[0].blocks, model.point.spare) == (5, 17)


@pytest.mark.parametrize(
    ("specs", "dense"),
    [
        ((full(), window()), "of something"),
        ((window(), window()), ""),
        ((full(), full(kind=ChunkedLocalAttentionSpec, attention_chunk_size=64)), ""),
        ((full(), full()), ""),
    ],
    ids=["dense", "windows only", "chunked", "none"],
)
def test_blocks_keep_all_where_points_are_not_for_it(specs: tuple[Any, ...], dense: str) -> None:
    model = described(16, dense, *specs)
    assert model.point is None
    assert model.shape.layers == 4


def test_windows_are_dense_if_the_settings_say_so() -> None:
    assert not dense_windows(load_config(None, {}, env={}))
    dense = load_config(None, {"vllm": {"windows": "dense"}}, env={})
    assert dense_windows(dense) == 'vllm.windows is "dense"'


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_engines_of_all_roles_have_one_namespace(role: str) -> None:
    """A consumer finds what a producer saved."""
    with_role = described(kv_transfer_config=SimpleNamespace(kv_role=role))
    assert with_role == described()
    assert with_role.point is not None


def test_dense_windows_and_other_windows_are_other_namespaces() -> None:
    others = [
        described(),
        described(16, "dense"),
        described(16, "", full(), window(sliding_window=32)),
        described(16, "", full(), window(head_size=32)),
    ]
    assert len({model.fingerprint for model in others}) == len(others)


# -- the scheduler side --------------------------------------------------------------------------


class Rig:
    """A leader of such a model. Pages of full attention are 100 and up, of windows 200 and up."""

    def __init__(
        self,
        host: int = 512,
        points: PointPolicy | None = None,
        model: ModelDescription | None = None,
        **settings: Any,
    ) -> None:
        self.model = model or described()
        self.index = BlockIndex([TierSpec("host", host)])
        self.outbox = Outbox(1)
        self.manager = KVManager(self.index, self.outbox, points=self.model.point)
        parts = LeaderParts[Any](
            manager=self.manager,
            transport=self.outbox,
            metrics=Metrics("leader"),
            recorder=RequestRecorder(),
            points=points or SpacedPoints(),
        )
        self.leader = Leader(load_config(None, settings), self.model, parts, self.outbox, {})
        self.known = len(PROMPT)

    def ask(self, name: str = "r", tokens: list[int] = PROMPT, computed: int = 0) -> Any:
        self.request = request(name)
        self.request._all_token_ids = self.request.prompt_token_ids = tokens
        self.request.num_tokens = self.request.num_prompt_tokens = len(tokens)
        return self.leader.get_num_new_matched_tokens(self.request, computed)

    def pages(self, computed: int, stop: int) -> list[list[int]]:
        """The tables of a step that computes [computed, stop): what a window left is gone."""
        count = -(-stop // PAGE)
        kept = [
            200 + i if (i + 1) * PAGE > computed - WINDOW + 1 else NULL_PAGE for i in range(count)
        ]
        return [[100 + i for i in range(count)], kept]

    def step(self, computed: int, scheduled: int) -> list[TransferGraph]:
        """Compute tokens of the request, and return the saves of the step, all ended."""
        name, stop = self.request.request_id, computed + scheduled
        self.request.num_computed_tokens = computed
        output = SimpleNamespace(
            num_scheduled_tokens={name: scheduled},
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: self.pages(computed, stop)
            ),
        )
        tracked, saves = self.leader._requests.get(name), list[TransferGraph]()
        assert tracked is not None
        self.leader._saves._windows(tracked, output, self.model.point, saves.append)  # type: ignore[arg-type]
        return self.end(saves)

    def end(self, graphs: list[TransferGraph]) -> list[TransferGraph]:
        for graph in graphs:
            for op in graph.ops:
                self.manager.complete(OpReport(graph.graph_id, op.op_id))
        self.index.check_integrity()
        return list(graphs)

    def finish(self, computed: int) -> list[TransferGraph]:
        self.leader._plan.early_saves.clear()
        self.answer(computed)
        return self.end(self.leader._plan.early_saves)

    def answer(self, computed: int) -> Any:
        """End the request, and return what its client gets."""
        self.request.num_computed_tokens = computed
        self.request.get_finished_reason = lambda: None
        return self.leader.request_finished(self.request, self.pages(computed - 1, computed))

    def load(self, tokens: int, pages: list[list[int]]) -> list[TransferGraph]:
        """Take up the offer as vLLM does."""
        given: Any = SimpleNamespace(get_block_ids=lambda: pages)
        self.leader.update_state_after_alloc(self.request, given, tokens)
        return [graph for _, graph in self.leader._plan.async_loads]


def test_the_end_of_a_prompt_is_saved_in_the_step_that_computes_it() -> None:
    rig = Rig()
    assert rig.ask() == (0, False)
    assert rig.step(0, 200) == []
    [graph] = rig.step(200, 201)
    chain = rig.leader._requests.get("r").chain.keys  # type: ignore[union-attr]
    assert graph.keys == (*chain[:25], *point_keys(chain[24], 4))
    assert graph.point == 25
    full_, windows = (table.array() for table in graph.units)
    assert full_[:25].min() >= 0 > full_[25:].max()
    assert windows[:25].max() < 0
    assert windows[25:].ravel().tolist() == [424, 423, 422, 421], "from the boundary backwards"
    rig.leader._requests.clear()
    assert rig.ask() == (400, True)


def test_last_pages_of_windows_are_saved_with_a_prompt_and_not_with_an_answer() -> None:
    """Their pages are of several precisions, and vLLM zeroes those that a request has left."""
    plain = described(PAGE)
    assert plain.point is not None
    [dense] = plain.point.windows
    nbytes = (dense.shape.layer_nbytes,) * len(dense.names)
    seen = PageWindow(1, dense.names, PAGE, nbytes, dense.before, dense.spare)
    point = PointShape((), plain.point.row_nbytes, 1, page_windows=(seen,))
    rig = Rig(model=replace(plain, point=point), block={"tokens": PAGE})
    tokens = [*PROMPT, *range(1, 100)]
    rig.ask(tokens=tokens)
    rig.request.num_prompt_tokens = len(PROMPT)
    [graph] = rig.step(0, len(PROMPT))
    end = len(PROMPT) // PAGE
    rows = graph.units[1].array()[len(PROMPT) // PAGE :].tolist()
    assert rows == point.state_rows * [[200 + end - 1 - i for i in range(seen.pages)]]
    assert rig.leader._paging.sees(rig.pages(447, 448), 448 // PAGE)
    assert rig.finish(448) == []
    rig.leader._requests.clear()
    assert rig.ask("next", tokens) == (len(PROMPT) // PAGE * PAGE, True)


@pytest.mark.parametrize("there", [True, False])
def test_the_end_of_an_answer_is_saved_if_its_window_is_there(there: bool) -> None:
    """vLLM may have dropped the first page of the window before the last whole block."""
    rig = Rig()
    tokens = [*PROMPT, *range(1, 100)]
    rig.ask(tokens=tokens)
    rig.request.num_prompt_tokens = len(PROMPT)
    rig.step(0, len(PROMPT))
    pages = rig.pages(449, 450)
    if not there:
        pages[1][12] = NULL_PAGE
    rig.pages = lambda computed, stop: pages  # type: ignore[method-assign]
    found = rig.finish(450)
    assert bool(found) is there
    if there:
        assert found[0].keys[-1] == point_keys(rig_chain(rig, tokens)[27], 4)[-1]


REMOTE = {"do_remote_decode": True}


@pytest.mark.parametrize("there", [True, False])
def test_the_end_of_a_prompt_is_promised_and_no_end_of_its_answer(there: bool) -> None:
    """Also if the window has left it since. A prompt that vLLM holds itself is promised as far."""
    for more in (0, 64):
        rig = Rig()
        tokens = [*PROMPT, *range(1, more + 1)]
        for computed in (0, 400):
            rig.ask(f"r{computed}", tokens, computed)
            rig.request.num_prompt_tokens = len(PROMPT)
            rig.request.kv_transfer_params = REMOTE
            rig.step(computed, len(PROMPT) - computed)
            if not there:
                rig.pages = lambda computed, stop: [[], []]  # type: ignore[method-assign]
            told = rig.answer(len(tokens))["kvcore"]["promise"]
            assert told["blocks"] == len(PROMPT) // 16
            rig.end(rig.leader._plan.early_saves)


def test_a_point_that_the_policy_declines_is_not_promised() -> None:
    rig = Rig(points=SpacedPoints(ends=False))
    rig.ask()
    rig.request.kv_transfer_params = REMOTE
    rig.step(0, len(PROMPT))
    rig.pages = lambda computed, stop: [[], []]  # type: ignore[method-assign]
    assert rig.answer(len(PROMPT)) is None


def rig_chain(rig: Rig, tokens: list[int]) -> list[bytes]:
    rig.ask("chain", tokens)
    return list(rig.leader._requests.get("chain").chain.keys)  # type: ignore[union-attr]


def test_a_point_is_saved_where_a_prompt_parts_from_an_earlier_one() -> None:
    rig = Rig()
    rig.ask()
    rig.step(0, len(PROMPT))
    parted = [*PROMPT[:200], *range(1000, 1200)]
    assert rig.ask("parted", parted) == (0, False), "no point is within what they share"
    graphs = rig.step(0, len(parted))
    assert [graph.point for graph in graphs] == [0, 13], "behind 12 blocks, and at the end"
    assert rig.ask("third", [*PROMPT[:200], *range(3000, 3200)]) == (192, True)


@pytest.mark.slow
def test_a_long_answer_has_a_point_once_in_a_while() -> None:
    """A point has four rows, so 32 blocks and more are between two of them."""
    rig = Rig()
    rig.ask(tokens=list(range(1, 2000)))
    rig.request.num_prompt_tokens = 100
    saved = [len(graph.keys) - 4 for at in range(90, 1900) for graph in rig.step(at, 1)]
    assert saved[0] == 6, "the last block of the prompt"
    assert len(saved) == 4, "and at 768, 1280 and 1792 tokens"
    tracked = rig.leader._requests.get("r")
    assert tracked is not None
    assert (tracked.last_point, tracked.saved_blocks) == (1792, 112)


def test_a_request_is_looked_at_again_when_it_reaches_a_point() -> None:
    rig = Rig()
    rig.ask(tokens=list(range(1, 1300)))
    rig.request.num_prompt_tokens = 100
    due: list[int] = []
    rig.leader._saves._due.again = lambda name, steps: due.append(steps)  # type: ignore[method-assign]
    rig.step(0, 90)
    rig.step(90, 11)
    assert due == [6, 256 - 101], "the last block of the prompt, and what the policy is offered"


@pytest.mark.parametrize(("points", "saved"), [(SpacedPoints(ends=False), 0), (EveryPoint(), 2)])
def test_the_policy_chooses(points: PointPolicy, saved: int) -> None:
    rig = Rig(points=points)
    rig.ask()
    assert len(rig.step(0, len(PROMPT))) == saved


def test_nothing_is_saved_without_a_page_of_the_window() -> None:
    rig = Rig()
    rig.ask()
    rig.pages = lambda computed, stop: [[100 + i for i in range(13)], [200] * 11 + [NULL_PAGE, 9]]  # type: ignore[method-assign]
    assert rig.step(0, len(PROMPT)) == []
    assert rig.index.num_used("host") == 0


def test_behind_a_prompt_nothing_is_saved_if_the_settings_say_so() -> None:
    rig = Rig(vllm={"save_decode": False})
    rig.ask(tokens=list(range(1, 1300)))
    rig.request.num_prompt_tokens = 100
    assert [len(graph.keys) for graph in rig.step(0, 1200)] == [6 + 4]
    assert rig.finish(1200) == []


def loaded_rig() -> Rig:
    rig = Rig()
    rig.ask()
    rig.step(0, len(PROMPT))
    rig.leader._requests.clear()
    assert rig.ask() == (400, True)
    return rig


def test_a_load_fills_the_pages_that_the_next_token_sees() -> None:
    rig = loaded_rig()
    [graph] = rig.load(400, [list(range(100, 113)), [NULL_PAGE] * 10 + [210, 211, 212]])
    windows = graph.units[1].array()
    assert windows[25:].ravel().tolist() == [424, 423, 422, 421]
    assert windows[:25].max() < 0


def test_a_hit_of_a_whole_prompt_goes_on_at_its_last_token() -> None:
    rig = Rig()
    tokens = PROMPT[:400]
    rig.ask(tokens=tokens)
    rig.step(0, len(tokens))
    rig.leader._requests.clear()
    assert rig.ask(tokens=tokens) == (399, True)
    [graph] = rig.load(399, [list(range(100, 113)), [NULL_PAGE] * 10 + [210, 211, 212]])
    assert graph.point == 25


@pytest.mark.parametrize(
    ("tokens", "table"),
    [(398, [NULL_PAGE] * 10 + [210, 211, 212]), (400, [NULL_PAGE] * 11 + [211, 212]), (400, [])],
    ids=["fewer tokens than the point has", "a page is missing", "no pages"],
)
def test_a_load_that_would_leave_a_window_empty_is_told_as_failed(
    tokens: int, table: list[int]
) -> None:
    rig = loaded_rig()
    assert rig.load(tokens, [list(range(100, 113)), table]) == []
    assert rig.leader._plan.failed_loads == ["r"]
    rig.index.check_integrity()
    assert rig.manager.in_flight == 0
