"""Models with states on vLLM: what is served, and what the scheduler side saves and loads of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
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
from kvcore.model.points import last_point_key, point_keys
from kvcore.model.spec import ModelDescription
from kvcore.runtime.build import geometry
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import OpReport, RowError, TransferGraph
from kvcore_vllm.build import build_scheduler_side
from kvcore_vllm.describe import describe
from kvcore_vllm.leader import Leader
from kvcore_vllm.points import NULL_PAGE, ask_for_junction
from support.vllm_configs import changed
from support.vllm_leader import PROMPT, request

WINDOW = ["model.layers.8.self_attn.attn"]
ATTENTION = ["model.layers.2.self_attn.attn", "model.layers.5.self_attn.attn"]
STATES = [f"model.layers.{layer}.conv" for layer in (0, 1, 3, 4)]
STEP = 128


@cache
def _vllm_config() -> Any:
    model = tiny_model("lfm2", layers=6, heads=4, kv_heads=2, head_dim=64, vocabulary=512)
    args = EngineArgs(str(model), dtype="float32", enforce_eager=True, enable_prefix_caching=True)
    return args.create_engine_config()


def vllm_config(**changes: Any) -> Any:
    return changed(_vllm_config(), changes)


def attention(**fields: Any) -> Any:
    kind = fields.pop("kind", FullAttentionSpec)
    given = {"block_size": STEP, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    return kind(**given | fields)


def state(**fields: Any) -> MambaSpec:
    given: dict[str, Any] = {
        "block_size": STEP,
        "shapes": ((2, 256),),
        "dtypes": (torch.float32,),
        "page_size_padded": attention().page_size_bytes,
        "mamba_type": "short_conv",
        "mamba_cache_mode": "align",
    }
    return MambaSpec(**given | fields)


def told(*specs: Any) -> KVCacheConfig:
    names = [ATTENTION, STATES[:2], STATES[2:], WINDOW]
    groups = [KVCacheGroupSpec(n, s) for n, s in zip(names, specs, strict=False)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def described(block: int = 16, **changes: Any) -> Any:
    return describe(vllm_config(**changes), told(attention(), state(), state()), block)


def window(**fields: Any) -> Any:
    return attention(kind=SlidingWindowSpec, **{"sliding_window": 100, **fields})


def with_windows(block: int = 16, dense: str = "", **fields: Any) -> Any:
    """Describe the model with a further layer that has a window."""
    specs = attention(), state(), state(), window(**fields)
    return describe(vllm_config(), told(*specs), block, dense)


# -- what is served ------------------------------------------------------------------------------


def test_a_resume_point_has_the_states_of_all_layers() -> None:
    model = described()
    row = 2 * 2 * 2 * 64 * 16 * 4
    assert [group.of for group in model.groups] == ["blocks", "states", "states"]
    assert model.shape.layers == 2
    assert model.point.row_nbytes == row
    assert model.point.run_nbytes == 4 * 2 * 256 * 4
    assert model.point.every == STEP // 16
    assert [each.names for each in model.point.states] == [tuple(STATES[:2]), tuple(STATES[2:])]


def test_drafts_without_a_model_change_nothing() -> None:
    drafting = vllm_config(speculative_config=SimpleNamespace(method="ngram"))
    assert describe(drafting, told(attention(), state(), state()), 16) == described()


@pytest.mark.parametrize(("wanted", "found"), [(16, 16), (256, 128), (48, 16), (200, 8)])
def test_blocks_end_where_states_do(wanted: int, found: int) -> None:
    model = described(wanted)
    assert model.shape.block_tokens == found
    assert model.point.every * found == STEP


def test_boundaries_may_lie_inside_a_page_of_states() -> None:
    """vLLM then has states at the ends of its hash blocks."""
    groups = told(attention(block_size=64), state(block_size=256), state(block_size=256))
    assert describe(vllm_config(), groups, 16).point.every == 64 // 16
    shorter = vllm_config(cache_config__prefix_match_unit=32)
    assert describe(shorter, groups, 16).point.every == 32 // 16


def test_a_point_has_the_ends_of_windows_behind_the_states() -> None:
    """The model goes on at the boundary itself, whose states it has."""
    model = with_windows()
    assert [group.of for group in model.groups] == ["blocks", "states", "states", "windows"]
    assert model.shape == described().shape
    assert model.point.states == described().point.states
    [found] = model.point.windows
    assert (found.names, found.before, found.blocks, found.spare) == (tuple(WINDOW), 99, 7, 0)
    assert model.point.spare == 0
    assert model.point.every == STEP // 16
    assert model.fingerprint != described().fingerprint
    assert model.fingerprint != with_windows(sliding_window=101).fingerprint


@pytest.mark.parametrize(
    ("dense", "fields", "why"),
    [
        (
            'vllm.windows is "dense"',
            {},
            'states beside layers with windows.*but vllm.windows is "dense"',
        ),
        ("", {"num_kv_heads": 8}, "different heads"),  # no row has such a layer
        ("", {"kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}, "different heads or dtypes"),
    ],
)
def test_windows_that_no_point_can_keep_are_refused(
    dense: str, fields: dict[str, Any], why: str
) -> None:
    with pytest.raises(UnsupportedError, match=why):
        with_windows(dense=dense, **fields)


@pytest.mark.parametrize("kind", ["attention", "latents", "windows", "packed"])
def test_ranks_that_keep_the_same_heads_store_states_of_their_own(kind: str) -> None:
    """Stores tell ranks apart by their parts of a block. Of equal parts one is stored."""
    one = {"num_kv_heads": 1}
    specs = [attention(**one), state(), state()]
    if kind == "latents":
        specs[0] = latents()
    elif kind == "windows":
        specs.append(window(**one))
    elif kind == "packed":
        specs[0] = latents(cache_dtype_str="fp8_ds_mla", state_content_bytes=656)
    model = describe(vllm_config(parallel_config__tensor_parallel_size=4), told(*specs), 16)
    assert len(set(geometry(model).parts)) == model.world_size == 4
    assert {model.rank_shape(rank).kv_heads for rank in range(4)} == {1}


def latents(**fields: Any) -> Any:
    given: dict[str, Any] = {"num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    return MLAAttentionSpec(**{"block_size": STEP, **given, **fields})


def test_kimi_linear_keeps_latents_in_blocks_and_its_states_in_points() -> None:
    """vLLM's kernels for it need a GPU. Each rank has all latents, and its heads of the states."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    for ranks in (1, 2):
        shapes = MambaStateShapeCalculator.kda_state_shape(ranks, 32, 128)
        found = state(
            block_size=2048,
            shapes=shapes,
            dtypes=(torch.bfloat16, torch.float32),
            page_size_padded=latents(block_size=2048).page_size_bytes,
            mamba_type="gdn",
        )
        model = describe(
            vllm_config(parallel_config__tensor_parallel_size=ranks),
            told(latents(block_size=2048), found, found),
            16,
        )
        row = 2 * 576 * 16 * 2
        assert (model.rank_shape(0).nbytes, model.point.row_nbytes) == (row, row)
        assert model.shape.kv_factor == 1
        assert model.point.every == 2048 // 16
        state_nbytes = 3 * 32 * 128 * 3 * 2 + 32 * 128 * 128 * 4
        assert [each.nbytes * ranks for each in model.point.states] == [state_nbytes] * 2


SCALED = {"dtype": torch.int8, "kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD}


def packed(block: int = 16, *more: Any, **changes: Any) -> ModelDescription:
    """Describe the model with a scale for each token and head."""
    specs = attention(**SCALED), state(), state(), *more
    return describe(vllm_config(**changes), told(*specs), block)


def test_pages_of_vllms_own_format_are_blocks_beside_states() -> None:
    model = packed(16, window(**SCALED))
    assert model.packed is not None
    assert (model.packed.page_tokens, model.shape.block_tokens) == (STEP, STEP)
    assert [group.of for group in model.groups] == ["blocks", "states", "states", "windows"]
    assert model.point is not None
    assert (model.point.every, model.point.spare) == (1, 0)
    whole = tuple(replace(each, sections=()) for each in described().point.states)
    assert model.point.states == whole
    [found] = model.point.page_windows
    assert (found.names, found.pages, found.before) == (tuple(WINDOW), 1, 99)
    others = packed(), packed(cache_config__prefix_match_unit=STEP)
    assert {model.fingerprint, described().fingerprint}.isdisjoint(o.fingerprint for o in others)
    changed = state(shapes=((4, 128),))
    other = describe(vllm_config(), told(attention(**SCALED), state(), changed), 16)
    assert other.fingerprint != packed().fingerprint


def test_states_inside_a_page_of_vllms_own_format_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"KV quantisation INT8.*every 64 tokens.*prefix_ma"):
        packed(cache_config__prefix_match_unit=64)


def test_states_of_several_shapes_in_one_table_are_refused_by_workers() -> None:
    """The leader knows one of them. What it plans is refused, and kvcore stands aside."""
    specs = {STATES[0]: state(), STATES[1]: state(shapes=((4, 128),))}
    both = UniformTypeKVCacheSpecs(block_size=STEP, kv_cache_specs=specs)
    with pytest.raises(UnsupportedError, match="states of 2 shapes in one page table"):
        describe(vllm_config(), told(attention(), both), 16)
    alike = replace(both, kv_cache_specs={name: state() for name in STATES[:2]})
    assert describe(vllm_config(), told(attention(), alike), 16).point == (
        describe(vllm_config(), told(attention(), state()), 16).point
    )


@pytest.mark.parametrize(
    ("groups", "changes", "why"),
    [
        (told(attention(), state(mamba_cache_mode="all")), {}, "mamba_cache_mode=all.*'align'"),
        (told(attention(), state(mamba_cache_mode="none")), {}, "--enable-prefix-caching"),
        (
            told(window(), state()),
            {},
            "beside layers with windows.*only sliding ones beside full attention",
        ),
        (told(state()), {}, "without attention"),
        (told(attention(), type("Other", (MambaSpec,), {})(**vars(state()))), {}, "type Other"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(
    groups: KVCacheConfig, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(UnsupportedError, match=why):
        describe(vllm_config(**changes), groups, 16)


@pytest.mark.parametrize(
    "other", [{"shapes": ((4, 256),)}, {"dtypes": (torch.bfloat16,)}, {"mamba_type": "mamba2"}]
)
def test_other_states_are_another_namespace(other: dict[str, Any]) -> None:
    changed = describe(vllm_config(), told(attention(), state(), state(**other)), 16)
    assert changed.fingerprint != described().fingerprint


def on_ranks(ranks: int, *windows: Any, shape: tuple[int, ...] = (), **fields: Any) -> Any:
    """Describe the model on so many ranks, which share its two KV heads."""
    config = vllm_config(parallel_config__tensor_parallel_size=ranks)
    own = state(shapes=(shape or (2, 256 // ranks),), **fields)
    heads = max(2 // ranks, 1)
    return describe(config, told(attention(num_kv_heads=heads), own, own, *windows), 16)


@pytest.mark.parametrize("windows", [False, True])
def test_any_number_of_ranks_has_the_states_of_one_namespace(windows: bool) -> None:
    one, two = (
        on_ranks(ranks, *([window(num_kv_heads=2 // ranks)] if windows else [])) for ranks in (1, 2)
    )
    assert (one.fingerprint, one.shape) == (two.fingerprint, two.shape)
    assert two.world_size == 2
    assert one.point.rows(99) == two.point.rows(99)
    assert one.point.by_heads
    assert two.point.by_heads
    assert [each.sections for each in one.point.states] == [(1024, 1024)] * 2
    assert [each.sections for each in two.point.states] == [(512, 512)] * 2
    assert (one.point.heads, two.point.heads) == ((2, 8192), (1, 8192))
    assert one.behind("a server") == one


@pytest.mark.parametrize(
    ("ranks", "changes", "window_heads"),
    [
        (2, {"mamba_type": "linear"}, 0),
        (2, {"shape": (2, 256)}, 0),  # each rank has the whole state
        (2, {"shape": (4, 128)}, 0),  # with rows for drafts
        (4, {}, 0),  # two ranks have the same KV head, and states of their own
        (2, {}, 2),  # ranks share the heads of layers with windows otherwise
    ],
)
def test_where_states_are_not_cut_another_number_of_ranks_is_another_namespace(
    ranks: int, changes: dict[str, Any], window_heads: int
) -> None:
    """A point has a part for each rank, even where all of them keep the same states."""
    windows = [window(num_kv_heads=window_heads)] if window_heads else []
    apart = on_ranks(ranks, *windows, **changes)
    assert not apart.point.by_heads
    assert not any(each.sections for each in apart.point.states)
    assert len({apart.part(rank) for rank in range(ranks)}) == ranks
    one = on_ranks(1, *windows, **{name: n for name, n in changes.items() if name != "shape"})
    assert apart.fingerprint != one.fingerprint
    assert apart.behind("a server").fingerprint != apart.fingerprint


def test_the_order_of_a_convolutions_state_is_part_of_the_namespace() -> None:
    """vLLM keeps the tokens of a channel together, or the channels of a token."""
    other = on_ranks(2, shape=(128, 2))
    assert other.point.by_heads
    assert [each.sections for each in other.point.states] == [(1024,)] * 2
    assert other.fingerprint == on_ranks(1, shape=(256, 2)).fingerprint
    assert other.fingerprint != on_ranks(2).fingerprint


def test_another_version_of_vllm_is_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may arrange the numbers of a state otherwise."""
    before = described().fingerprint
    monkeypatch.setattr("vllm.__version__", "0.32.9")
    assert described().fingerprint != before


# -- the scheduler side --------------------------------------------------------------------------


class Rig:
    """A leader of such a model. Pages of KV are 100 and up, those of states as told."""

    def __init__(
        self,
        host: int = 256,
        points: PointPolicy | None = None,
        ahead: int = 0,
        model: ModelDescription | None = None,
        **settings: Any,
    ) -> None:
        self.model = model or described()
        assert self.model.point is not None
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
        config = load_config(None, settings)
        self.leader = Leader(config, self.model, parts, self.outbox, {}, lookahead=ahead)

    def ask(self, name: str = "r", computed: int = 0) -> tuple[int | None, bool]:
        self.request = request(name)
        return self.leader.get_num_new_matched_tokens(self.request, computed)

    def pages(self, states: tuple[list[int], list[int]] = ([], [])) -> list[list[int]]:
        return [[100, 101, 102, 103], *map(list, states)]

    def offer(self, *offered: tuple[int, int, int], pages: Any = None) -> list[TransferGraph]:
        """Save what vLLM offers in a step, and return the graphs."""
        states = SimpleNamespace(
            boundary_state_offloads={"r": list(offered)},
            get_block_ids=lambda name: self.pages() if pages is None else pages,
        )
        saves: list[TransferGraph] = []
        output = SimpleNamespace(kv_connector_block_state=states)
        self.leader._saves._states(output, saves.append)  # type: ignore[arg-type]
        return saves

    def end(self, graph: TransferGraph) -> None:
        for op in graph.ops:
            self.manager.complete(OpReport(graph.graph_id, op.op_id))
        self.index.check_integrity()

    def load(self, tokens: int, pages: list[list[int]]) -> list[TransferGraph]:
        """Take up the offer as vLLM does."""
        given: Any = SimpleNamespace(get_block_ids=lambda: pages)
        self.leader.update_state_after_alloc(self.request, given, tokens)
        return [graph for _, graph in self.leader._plan.async_loads]


def test_what_vllm_offers_is_saved_with_the_blocks_before_it() -> None:
    rig = Rig()
    assert rig.ask() == (0, False)
    [graph] = rig.offer((1, 7, 256), (2, 9, 256))
    chain = rig.leader._requests.get("r").chain.keys  # type: ignore[union-attr]
    assert graph.keys == (*chain[:16], *point_keys(chain[15], 1))
    assert graph.point == 16
    kv, one, other = (table.array() for table in graph.units)
    assert kv[:16].min() >= 0
    assert kv[16].max() < 0
    assert (one[16, 0], other[16, 0]) == (7, 9)
    assert one[:16].max() < 0
    rig.end(graph)
    rig.leader._requests.clear()
    assert rig.ask() == (256, True)


@pytest.mark.parametrize(
    "offered",
    [
        [(1, 7, 256)],
        [(1, 7, 256), (2, NULL_PAGE, 256)],
        [(1, 7, 256), (2, 9, 128)],
        [(1, 7, 250), (2, 9, 250)],
    ],
    ids=["a group is missing", "no page", "two boundaries", "inside a block"],
)
def test_half_a_point_is_not_saved(offered: list[tuple[int, int, int]]) -> None:
    rig = Rig()
    rig.ask()
    assert rig.offer(*offered) == []
    assert rig.index.check_integrity() is None


def test_each_boundary_is_saved_once_and_the_longest_is_found() -> None:
    rig = Rig()
    rig.ask()
    first, second = rig.offer((1, 7, 256), (2, 9, 256), (1, 6, 128), (2, 8, 128))
    assert (first.point, second.point) == (8, 8), "the second has the blocks behind the first"
    for graph in (first, second):
        rig.end(graph)
    assert rig.offer((1, 7, 256), (2, 9, 256)) == []
    rig.leader._requests.clear()
    assert rig.ask()[0] == 256
    assert rig.ask("later", computed=128)[0] == 128
    assert rig.ask("all of it", computed=256) == (0, False)


def test_states_behind_a_prompt_are_saved_as_vllm_save_decode_says() -> None:
    for decode in (True, False):
        rig = Rig(vllm={"save_decode": decode})
        rig.ask()
        rig.request.num_prompt_tokens = 200
        tracked = rig.leader._requests.get("r")
        assert tracked is not None
        assert bool(rig.offer((1, 7, 256), (2, 9, 256))) is decode


def sparse(ahead: int = 0) -> Rig:
    """A rig whose points are too large to be saved but at ends and junctions."""
    rig = Rig(points=SpacedPoints(share=1000), ahead=ahead)
    rig.ask()
    return rig


def test_the_end_of_a_piece_is_declined_and_its_blocks_come_with_the_end_of_the_prompt() -> None:
    rig = sparse()
    assert rig.offer((1, 7, 128), (2, 9, 128)) == []
    assert rig.offer((1, 7, 256), (2, 9, 256)) == []
    tracked = rig.leader._requests.get("r")
    assert tracked is not None
    assert tracked.saved_blocks == 0
    assert len(rig.index) == 0
    [graph] = rig.offer((1, 7, 384), (2, 9, 384))
    assert graph.keys == (*tracked.chain.keys[:24], *point_keys(tracked.chain.keys[23], 1))
    assert graph.point == 24
    rig.end(graph)
    rig.leader._requests.clear()
    assert rig.ask() == (384, True)


def test_where_a_draft_looks_ahead_the_end_of_a_prompt_is_a_page_before() -> None:
    """vLLM keeps these states then: of their last token it can use the draft's KV."""
    rig = sparse(ahead=1)
    assert rig.offer((1, 7, 128), (2, 9, 128)) == []
    [graph] = rig.offer((1, 7, 256), (2, 9, 256))
    assert graph.point == 16


def test_pieces_are_counted_from_the_last_point_of_the_prompt() -> None:
    """Points are as large as blocks of 16 tokens here: one in 16 times as many is 256."""
    rig = Rig(points=SpacedPoints(share=16, ends=False))
    rig.ask()
    [first] = rig.offer((1, 7, 128), (2, 9, 128), (1, 6, 256), (2, 8, 256))
    assert first.point == 16
    rig.end(first)
    assert rig.offer((1, 7, 384), (2, 9, 384)) == []
    rig.leader._requests.clear()
    assert rig.ask() == (256, True)
    assert rig.offer((1, 7, 384), (2, 9, 384)) == [], "the point that was found counts"


@pytest.mark.parametrize(
    ("boundary", "saved"), [(0, False), (127, False), (128, True), (200, True)]
)
def test_a_boundary_where_vllm_saw_prompts_part_is_saved(boundary: int, saved: bool) -> None:
    """vLLM stops at the last page before it."""
    rig = sparse()
    rig.request.shared_prefix_boundary = boundary
    assert bool(rig.offer((1, 7, 128), (2, 9, 128))) is saved


def test_a_boundary_where_stored_blocks_go_on_behind_the_last_point_is_saved() -> None:
    rig = sparse()
    [graph] = rig.offer((1, 7, 384), (2, 9, 384))
    rig.end(graph)
    chain = rig.leader._requests.get("r").chain.keys  # type: ignore[union-attr]
    rig.manager.invalidation.evict("host", [*chain[18:24], *point_keys(chain[23], 1)])
    rig.leader._requests.clear()
    assert rig.ask() == (0, False)
    assert rig.request.shared_prefix_boundary == 256, "vLLM's last page in 288 tokens"
    assert rig.offer((1, 7, 128), (2, 9, 128)) == [], "288 tokens are stored"
    [graph] = rig.offer((1, 7, 256), (2, 9, 256))
    rig.end(graph)
    rig.leader._requests.clear()
    assert rig.ask() == (256, True)
    assert not getattr(rig.request, "shared_prefix_boundary", 0), "the rest of the blocks is short"


@pytest.mark.parametrize(
    ("reached", "point", "seen", "most", "asked"),
    [
        (18, 0, 0, 400, 256),
        (18, 8, 0, 400, 256),
        (18, 16, 0, 400, 0),  # there is a point already
        (7, 0, 0, 400, 0),  # vLLM could keep none so early
        (18, 0, 128, 400, 256),
        (18, 0, 384, 400, 384),  # vLLM saw more
        (18, 0, 0, 200, 0),  # it may not be saved
    ],
)
def test_vllm_is_asked_for_states_where_stored_blocks_end(
    reached: int, point: int, seen: int, most: int, asked: int
) -> None:
    request = SimpleNamespace(shared_prefix_boundary=seen)
    hit = SimpleNamespace(reached=reached, blocks=point)
    ask_for_junction(request, hit, 16, 128, most)  # type: ignore[arg-type]
    assert request.shared_prefix_boundary == asked


@pytest.mark.parametrize("stored", ["not at all", "less"])
def test_vllm_is_not_asked_for_states_that_are_not_saved(stored: str) -> None:
    rig = sparse()
    [graph] = rig.offer((1, 7, 384), (2, 9, 384))
    rig.end(graph)
    chain = rig.leader._requests.get("r").chain.keys  # type: ignore[union-attr]
    rig.manager.invalidation.evict("host", point_keys(chain[23], 1))
    rig.leader._requests.clear()
    asked = {"save": False} if stored == "not at all" else {"save_tokens": 200}
    rig.request = request("r")
    rig.request.kv_transfer_params = {"kvcore": asked}
    assert rig.leader.get_num_new_matched_tokens(rig.request, 0) == (0, False)
    assert not getattr(rig.request, "shared_prefix_boundary", 0)
    rig.request = request("of other weights")
    assert rig.leader.get_num_new_matched_tokens(rig.request, 0) == (0, False)
    assert rig.request.shared_prefix_boundary == 384, "it is asked for where all may be saved"
    rig.request.shared_prefix_boundary = 0
    rig.leader._requests.get(rig.request.request_id).may_save = False  # type: ignore[union-attr]
    assert rig.leader.get_num_new_matched_tokens(rig.request, 0) == (0, False)
    assert rig.request.shared_prefix_boundary == 0


def test_a_policy_that_answers_what_was_not_offered_saves_what_was() -> None:
    class Eager(PointPolicy):
        def take(self, request: Any) -> list[int]:
            return [7, 256, 999_999]

    rig = Rig(points=Eager())
    rig.ask()
    [graph] = rig.offer((1, 7, 128), (2, 9, 128), (1, 6, 256), (2, 8, 256))
    assert graph.point == 16


def test_no_room_for_all_of_a_point_saves_nothing() -> None:
    rig = Rig(host=16)
    rig.ask()
    assert rig.offer((1, 7, 256), (2, 9, 256)) == []
    rig.index.check_integrity()
    assert not rig.index.held("host", rig.leader._requests.get("r").chain.keys)  # type: ignore[union-attr]
    [graph] = rig.offer((1, 7, 128), (2, 9, 128))
    rig.end(graph)


def loaded_rig(ahead: int = 0) -> Rig:
    rig = Rig(ahead=ahead)
    rig.ask()
    [graph] = rig.offer((1, 7, 256), (2, 9, 256))
    rig.end(graph)
    rig.leader._requests.clear()
    assert rig.ask() == (256, True)
    return rig


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_load_fills_the_pages_in_which_the_next_step_looks(ahead: int) -> None:
    """All of it, however far a draft looks ahead: the states are of that token."""
    [graph] = loaded_rig(ahead).load(256, [[100, 101], [NULL_PAGE, 5], [NULL_PAGE, 6]])
    kv, one, other = (table.array() for table in graph.units)
    assert graph.point == 16
    assert (one[-1, 0], other[-1, 0]) == (5, 6)
    assert np.array_equal(kv[:16].ravel(), np.arange(100 * 8, 102 * 8))


@pytest.mark.parametrize(
    ("tokens", "states"),
    [(128, [5, 6]), (256, [5]), (256, [5, NULL_PAGE])],
    ids=["fewer tokens than offered", "no page yet", "a null page"],
)
def test_a_load_that_would_end_without_states_is_told_as_failed(
    tokens: int, states: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    rig = loaded_rig()
    assert rig.load(tokens, [[100, 101], states, states]) == []
    assert rig.leader._plan.failed_loads == ["r"]
    assert "state" in caplog.text or "the resume point is at 256" in caplog.text
    rig.index.check_integrity()
    assert rig.manager.in_flight == 0


def test_a_lost_state_is_not_found_and_the_blocks_are() -> None:
    rig = loaded_rig()
    chain = rig.leader._requests.get("r").chain.keys  # type: ignore[union-attr]
    row = last_point_key(chain[15], 1)
    rig.manager.invalidation.evict("host", [*chain[:16], row][-1:])
    rig.leader._requests.clear()
    assert rig.ask() == (0, False)
    hit = rig.manager.get_match(chain, rig.leader.namespaces.of().digest)
    assert (hit.blocks, hit.held.depth) == (0, 16)


def test_nothing_is_saved_at_the_end_of_a_request() -> None:
    """vLLM names no page that has the states at the end of an answer."""
    rig = Rig()
    rig.ask()
    rig.request.num_computed_tokens = len(PROMPT)
    rig.request.get_finished_reason = lambda: None
    rig.leader.request_finished(rig.request, rig.pages(([7, 7], [9, 9])))
    assert not rig.leader._plan.early_saves


# -- one computes, another answers ---------------------------------------------------------------


def finished(rig: Rig, computed: int = len(PROMPT)) -> Any:
    """End the request, and return what is promised of its prompt."""
    rig.request.kv_transfer_params = {"do_remote_decode": True}
    rig.request.num_computed_tokens = computed
    rig.request.get_finished_reason = lambda: None
    told = rig.leader.request_finished(rig.request, rig.pages())
    return told and told["kvcore"]["promise"]


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_engines_of_all_roles_have_one_namespace(role: str) -> None:
    """A consumer finds what a producer saved."""
    assert described(kv_transfer_config=SimpleNamespace(kv_role=role)) == described()


def test_the_last_point_of_a_prompt_is_promised_while_it_is_saved() -> None:
    rig = Rig()
    rig.ask()
    assert len(rig.offer((1, 7, 256), (2, 9, 256))) == 1
    chain = rig.leader._requests.get("r").chain.keys  # type: ignore[union-attr]
    told = finished(rig)
    assert (told["blocks"], told["last"]) == (16, point_keys(chain[15], 1)[0].hex())


def test_blocks_without_a_point_are_not_promised() -> None:
    rig = Rig()
    rig.ask()
    rig.offer((1, 7, 256))  # states of one group: nobody could go on there
    assert finished(rig) is None


def test_a_save_that_failed_is_not_promised() -> None:
    rig = Rig()
    rig.ask()
    [graph] = rig.offer((1, 7, 256), (2, 9, 256))
    for op in graph.ops:
        report = OpReport(graph.graph_id, op.op_id, dict.fromkeys(range(*op.rows), RowError.IO))
        rig.manager.complete(report)
    assert finished(rig) is None


def test_what_another_request_saved_is_promised_too() -> None:
    """vLLM has the prompt in its own cache, and offers no states of it again."""
    rig = Rig()
    rig.ask()
    for graph in rig.offer((1, 7, 256), (2, 9, 256)):
        rig.end(graph)
    assert finished(rig)["blocks"] == 16
    rig.ask("again", computed=256)
    assert finished(rig)["blocks"] == 16
    rig.ask("asks for no save", computed=256)
    rig.leader._requests["asks for no save"].may_save = False
    assert finished(rig) is None


def test_a_point_at_the_very_end_of_a_prompt_is_not_promised() -> None:
    """The answering engine computes the last token, so it could not go on from those states."""
    rig = Rig()
    rig.ask()
    rig.request.num_prompt_tokens = 256
    rig.offer((1, 7, 256), (2, 9, 256))
    assert finished(rig) is None
    rig.ask()
    rig.request.num_prompt_tokens = 256
    rig.offer((1, 6, 128), (2, 8, 128))
    assert finished(rig)["blocks"] == 8


def test_a_promised_point_is_asked_for() -> None:
    rig = Rig()
    rig.ask()
    rig.offer((1, 7, 256), (2, 9, 256))
    told = finished(rig)
    asked: list[Any] = []
    ask_stores = rig.manager.ask_stores
    rig.manager.ask_stores = lambda *a: asked.append(a[2]) or ask_stores(*a)  # type: ignore[method-assign, func-returns-value]
    for params in ({"promise": told}, {"promise": {**told, "version": 1}}):
        rig.request = request("other")
        rig.request.kv_transfer_params = {"kvcore": params}
        rig.leader._requests.clear()
        rig.leader.get_num_new_matched_tokens(rig.request, 0)
        rig.leader.get_num_new_matched_tokens(rig.request, 0)
    assert [promise and promise.blocks for promise in asked] == [16, None, None, None]


# -- states beside windows -----------------------------------------------------------------------


def four(last: list[int], states: tuple[list[int], list[int]] = ([], [])) -> list[list[int]]:
    """Return page tables of which those of the window are ``last``."""
    return [[100, 101, 102, 103], *map(list, states), last]


def test_a_point_is_saved_with_its_states_and_its_windows() -> None:
    rig = Rig(model=with_windows(), points=EveryPoint())
    rig.ask()
    [graph] = rig.offer((1, 7, 256), (2, 9, 256), pages=four([NULL_PAGE, 200, 201]))
    kv, one, _, seen = (table.array() for table in graph.units)
    assert graph.point == 16
    assert kv[16:].max() < 0
    states = rig.model.point.state_rows  # type: ignore[union-attr]
    assert one[16 : 16 + states, 0].tolist() == [7] * states
    assert one[16 + states :].max() < 0
    assert seen[: 16 + states].max() < 0
    assert seen[16 + states :, 0].tolist() == [200 * 8 + 7 - row for row in range(7)]
    rig.end(graph)
    rig.leader._requests.clear()
    assert rig.ask() == (256, True)
    [load] = rig.load(256, four([NULL_PAGE, 300], ([NULL_PAGE, 5], [NULL_PAGE, 6])))
    _, one, _, seen = (table.array() for table in load.units)
    assert (one[one >= 0] == 5).all()
    assert seen[16 + states :, 0].tolist() == [300 * 8 + 7 - row for row in range(7)]


def test_states_are_not_saved_without_the_pages_of_windows_and_are_later() -> None:
    """Blocks that were not saved with a point are saved with the next one."""
    rig = Rig(model=with_windows(), points=EveryPoint())
    rig.ask()
    gone = four([NULL_PAGE, 201])
    assert rig.offer((1, 7, 128), (2, 9, 128), pages=gone) == []
    [graph] = rig.offer((1, 7, 256), (2, 9, 256), pages=gone)
    assert graph.point == 16
    rig.end(graph)


@pytest.mark.parametrize(
    "pages",
    [
        four([NULL_PAGE, NULL_PAGE], ([NULL_PAGE, 5], [NULL_PAGE, 6])),
        four([NULL_PAGE, 300], ([NULL_PAGE, 5], [NULL_PAGE, NULL_PAGE])),
    ],
    ids=["no window", "no state"],
)
def test_a_load_that_would_lack_one_of_both_is_told_as_failed(pages: list[list[int]]) -> None:
    rig = Rig(model=with_windows(), points=EveryPoint())
    rig.ask()
    [graph] = rig.offer((1, 7, 256), (2, 9, 256), pages=four([NULL_PAGE, 200]))
    rig.end(graph)
    rig.leader._requests.clear()
    assert rig.ask() == (256, True)
    assert rig.load(256, pages) == []
    assert rig.leader._plan.failed_loads == ["r"]
    assert rig.manager.in_flight == 0


# -- the policy of the settings ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "share"), [({"policy": "all"}, None), ({"policy_options": {"share": 3}}, 3)]
)
def test_the_leader_has_the_policy_of_the_settings(
    settings: dict[str, Any], share: float | None
) -> None:
    host = {"capacity": "8MiB", "huge_pages": False}
    config = load_config(None, {"points": settings, "host": host}, env={})
    both = SimpleNamespace(kv_role="kv_both", kv_connector="KVCoreConnector")
    side = build_scheduler_side(config, vllm_config(kv_transfer_config=both), described())
    policy = side._points
    if share is None:
        assert isinstance(policy, EveryPoint)
    else:
        assert isinstance(policy, SpacedPoints)
        assert policy._share == share
    side.close()
