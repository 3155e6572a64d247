"""The fast blend against the reference, and its attention against its naive twin."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

transformers: Any = pytest.importorskip("transformers")

from kvcore.errors import ConfigError, KVCoreError, LayoutError  # noqa: E402  # after the skip
from kvcore.fusion import attend  # noqa: E402
from kvcore.fusion.attend import (  # noqa: E402
    Attention,
    attend_rows,
    look_of,
    look_rows,
    naive_attend_rows,
)
from kvcore.fusion.decoder import Attend, HiddenState  # noqa: E402
from kvcore.fusion.fusor import BlendJob, Fusor  # noqa: E402
from kvcore.fusion.gate import Gate  # noqa: E402
from kvcore.fusion.ops import TorchFusion  # noqa: E402
from kvcore.fusion.plan import Cached, Fresh, Prefix, PromptPlan  # noqa: E402
from kvcore.fusion.reference import Decoder, prefill, question_mass  # noqa: E402
from kvcore.fusion.rows import LOOK_ROWS, split_look  # noqa: E402
from kvcore.fusion.select import (  # noqa: E402
    BUILTIN_SELECTORS,
    Ratio,
    RelativeDeviation,
    Threshold,
    attention_mass,
)
from kvcore_devtools.fusion import (  # noqa: E402
    ARCHITECTURES,
    ReferenceLayers,
    ReferencePlaced,
    World,
    close,
    job_of,
    make_model,
    words,
)
from support.budget import examples  # noqa: E402

# --- attention of scattered rows ----------------------------------------------------------------


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ATTENTION = st.builds(
    Attention,
    scale=st.sampled_from([0.125, 0.3]),
    window=st.one_of(st.none(), st.integers(1, 40)),
    soft_cap=st.sampled_from([0.0, 2.0]),
)


@settings(max_examples=examples(60), deadline=None)
@given(
    attention=ATTENTION,
    tokens=st.integers(1, 70),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dim=st.sampled_from([4, 16]),
    scores=st.sampled_from([1, 100, 1 << 20]),
    data=st.data(),
)
def test_scattered_rows_against_the_twin(
    attention: Attention,
    tokens: int,
    kv_heads: int,
    group: int,
    dim: int,
    scores: int,
    data: st.DataObject,
) -> None:
    chosen = data.draw(st.sets(st.integers(0, tokens - 1)))
    positions = torch.tensor(sorted(chosen), dtype=torch.int64)
    queries = drawn(1, len(positions), kv_heads * group, dim)
    keys, values = drawn(2, tokens, kv_heads, dim), drawn(3, tokens, kv_heads, dim)
    first = data.draw(st.integers(0, len(positions)))
    asking = torch.arange(len(positions)) >= first
    holes = sorted(data.draw(st.sets(st.integers(0, tokens - 1))) - chosen)
    unseen = torch.tensor(holes, dtype=torch.int64)
    unlike, finite = keys.clone(), values.clone()
    unlike[unseen], finite[unseen] = torch.nan, 1e4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "TILE_SCORES", scores)
        got = attend_rows(queries, positions, keys, values, attention)
        interest = torch.zeros(kv_heads * group, tokens)
        cut = len(positions) // 2
        also = torch.cat(
            [
                look_rows(
                    queries[part],
                    look_of(
                        positions[part],
                        positions[part].tolist(),
                        max(first - at, 0),
                        unseen,
                        holes,
                    ),
                    unlike,
                    finite,
                    attention,
                    interest,
                )
                for at, part in ((0, slice(0, cut)), (cut, slice(cut, None)))
            ]
        )
        looked = interest.square().sum(dim=0)
    expected = naive_attend_rows(queries, positions, keys, values, attention)
    close(got, expected, 1e-5)
    weights = probabilities(queries, positions, keys, holes, attention)
    each = values.repeat_interleave(group, dim=1)
    close(also, torch.einsum("rhk,khd->rhd", weights, each), 1e-4)
    mass = attention_mass(weights[asking].transpose(0, 1), 2.0) if asking.any() else 0 * looked
    close(looked, mass, 1e-5)


def probabilities(
    queries: Tensor, positions: Tensor, keys: Tensor, holes: list[int], attention: Attention
) -> Tensor:
    """Probabilities are what attention makes of values that tell the keys apart, by row and head.

    Those of keys that no row sees are shared out among the others.
    """
    each = torch.eye(len(keys))[:, None].expand(-1, keys.shape[1], -1)
    if not len(positions):
        return torch.zeros(0, queries.shape[1], len(keys))
    weights = naive_attend_rows(queries, positions, keys, each, attention)
    assert weights.shape == (len(positions), queries.shape[1], len(keys))
    weights[:, :, holes] = 0
    return weights / weights.sum(dim=-1, keepdim=True)


@given(
    fresh=st.sets(st.integers(0, 40), min_size=1),
    most=st.integers(1, 45),
)
def test_the_last_rows_look_and_the_first_of_all(fresh: set[int], most: int) -> None:
    rows = np.array(sorted(fresh), dtype=np.int64)
    look, unseen = split_look(rows, most)
    assert sorted([*look, *unseen]) == sorted(fresh), "each row is in one of the two"
    assert list(look) == sorted(look)
    assert len(look) == min(most, len(fresh))
    assert look[-1] == max(fresh)
    if most > 1:
        assert (0 in look) == (0 in fresh)
    assert all(row > max(unseen) for row in look if row and len(unseen))


@pytest.mark.parametrize("scores", [1, 1 << 20])
def test_a_future_token_changes_no_earlier_row(scores: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(attend, "TILE_SCORES", scores)
    positions = torch.tensor([0, 3, 4, 9])
    queries, keys, values = drawn(1, 4, 4, 8), drawn(2, 10, 2, 8), drawn(3, 10, 2, 8)
    before = attend_rows(queries, positions, keys, values, Attention(0.3))
    for future in range(1, 10):
        k, v = keys.clone(), values.clone()
        blind = positions < future
        k[future:], v[future:] = 1e4, -1e4
        after = attend_rows(queries, positions, k, v, Attention(0.3))
        assert torch.equal(after[blind], before[blind])
        assert not torch.equal(after[~blind], before[~blind])


def test_rows_that_do_not_fit_are_refused() -> None:
    queries, keys = drawn(1, 2, 4, 8), drawn(2, 5, 2, 8)
    with pytest.raises(LayoutError, match="position 5 needs 6 keys; got 5"):
        attend_rows(queries, torch.tensor([0, 5]), keys, keys, Attention(1.0))
    with pytest.raises(LayoutError, match="2 queries for 1"):
        attend_rows(queries, torch.tensor([0]), keys, keys, Attention(1.0))
    odd = drawn(3, 5, 3, 8)
    with pytest.raises(LayoutError, match="4 query heads over 3"):
        attend_rows(queries, torch.tensor([0, 1]), odd, odd, Attention(1.0))


# --- the blend ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def world(request: pytest.FixtureRequest) -> World:
    settings_of = {"sliding_window": 32} if request.param == "mistral" else {}
    return World(Decoder(make_model(request.param, **settings_of)))


RATIOS = [
    Ratio(0.0),
    Ratio(0.05),
    Ratio(0.15, spread=0.5),
    Ratio(0.3, spread=0.9),
    Ratio(0.8),
    Ratio(1.0),
    Ratio(0.2, full_layers=3),
]
BOUND = Threshold(0.05, floor=0.1)


@pytest.mark.parametrize("number", range(len(BUILTIN_SELECTORS)))
@pytest.mark.parametrize("apart", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_the_fast_blend_is_the_reference(world: World, number: int, apart: bool) -> None:
    """Daily each kind of model has each selector and each ratio, and a selector other ratios with
    each kind."""
    name, plan = sorted(BUILTIN_SELECTORS)[number], world.plan()
    kind = sorted(ARCHITECTURES).index(world.decoder.model.config.model_type)
    first, every = (number + kind) % len(BUILTIN_SELECTORS), len(BUILTIN_SELECTORS)
    for budget in RATIOS[first::every] if apart else RATIOS:
        agree(world, plan, BUILTIN_SELECTORS[name](), budget)


def test_the_fast_blend_is_the_reference_up_to_a_bound(world: World) -> None:
    agree(world, world.plan(), RelativeDeviation(), BOUND)


@settings(max_examples=examples(25), deadline=None)
@given(
    sizes=st.lists(st.tuples(st.booleans(), st.integers(1, 25)), min_size=1, max_size=5),
    prefix=st.integers(0, 9),
    question=st.integers(1, 6),
    ratio=st.floats(0, 1),
    name=st.sampled_from(sorted(BUILTIN_SELECTORS)),
    look_rows=st.sampled_from([1, 2, 5, 20, LOOK_ROWS]),
)
def test_any_plan(
    sizes: list[tuple[bool, int]],
    prefix: int,
    question: int,
    ratio: float,
    name: str,
    look_rows: int,
) -> None:
    # A chunk at the very start deviates by rounding alone: which of its rows do most is no one's.
    assume(prefix or not sizes[0][0])
    world = LLAMA
    segments: list[Any] = [Prefix(world.chunk(9, prefix))] if prefix else []
    for seed, (cached, count) in enumerate(sizes):
        segments.append(
            Cached(world.chunk(seed, count)) if cached else Fresh(words(count, 30 + seed))
        )
    plan = PromptPlan([*segments, Fresh(words(question, 99))])
    agree(world, plan, BUILTIN_SELECTORS[name](), Ratio(ratio, spread=0.5), look_rows=look_rows)


LLAMA = World(Decoder(make_model("llama")))


def agree(
    world: World,
    plan: PromptPlan,
    selector: Any,
    budget: Any,
    gate: Gate | None = None,
    layers: type[ReferenceLayers] = ReferenceLayers,
    look_rows: int = LOOK_ROWS,
) -> None:
    """The same rows computed at every layer, and the same KV left."""
    blender, job = world.make(plan), job_of(plan, look_rows)
    placed = ReferencePlaced(blender)
    question = None
    if selector.needs_question and not budget.is_reuse:
        pool = partial(attention_mass, sharpness=selector.sharpness)
        question = question_mass(blender, pool, look_rows)
        look = Fusor(layers(world.decoder)).look(job, placed, selector.sharpness)
        close(look, question, 1e-4)
    expected = blender.blend(selector, budget, question, gate)
    outcome = Fusor(layers(world.decoder)).blend(job, placed, selector, budget, gate)
    assert [v[:2] for v in outcome.verdicts] == [v[:2] for v in expected.verdicts]
    made = slice(job.exact, job.stop)
    for layer, rows in enumerate(expected.computed):
        context = rows[rows < job.stop]
        assert outcome.layers[layer].rows == len(context)
        close(placed.written[layer].keys[made], expected.context.layers[layer].keys[made], 2e-4)
        close(placed.written[layer].values[made], expected.context.layers[layer].values[made], 2e-4)
    last = expected.computed[-1]
    assert outcome.chosen.tolist() == last[torch.isin(last, job.chunks)].tolist()
    if outcome.abandoned:
        return
    share = sum(len(rows[rows < job.stop]) for rows in expected.computed)
    assert outcome.share(job) == share / (len(expected.computed) * (job.stop - job.exact))


@pytest.mark.parametrize("bound", [0.0, 1e-3, 1e-2, 0.1, 0.5, 1e6])
@pytest.mark.parametrize("depth", [0.5, 0.8])
def test_the_gate_is_heeded_as_in_the_reference(bound: float, depth: float) -> None:
    """The same verdicts, and the same KV in the end, whichever way a walk started over."""
    plan = LLAMA.plan()
    gate = Gate(bound, larger=(0.3, 0.6), depth=depth)
    agree(LLAMA, plan, BUILTIN_SELECTORS["runs"](), Ratio(0.15, spread=0.5), gate)


def test_a_prompt_of_nothing_cached_is_a_prefill(world: World) -> None:
    tokens = torch.tensor(words(40, 5))
    state = Fusor(ReferenceLayers(world.decoder)).compute(tokens)
    assert state.residual is None
    close(state.hidden, prefill(world.decoder, tokens.tolist())[1], 2e-4)


class Overwriting(ReferenceLayers):
    """As engines do it: what a layer is given is spoilt by the time it asks for attention."""

    def run(self, layer: int, positions: Tensor, state: HiddenState, attend: Attend) -> HiddenState:
        own = state.copy()
        for given_state in state:
            if given_state is not None:
                given_state.fill_(torch.nan)
        return super().run(layer, positions, own, attend)


FEW = [(most, budget) for budget in (Ratio(0.15, spread=0.5), BOUND) for most in (1, 7, 16)]
FEW += [
    (7, Ratio(0.0)),
    (7, Ratio(0.9, spread=0.1)),
    (7, Ratio(1.0)),
    (16, Ratio(0.2, full_layers=3)),
]
FEWER = [(most, budget) for most in (1, 7, 16) for budget in [*RATIOS, Ratio(0.9, spread=0.1)]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "budget"),
    [
        *FEW,
        *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in FEWER if row not in FEW),
    ],
    ids=str,
)
def test_layers_that_take_few_rows_at_once(most: int, budget: Any) -> None:
    """The same blend in pieces, and no call of more rows than may be."""
    plan, small = LLAMA.plan(), of_few_rows(most)
    threshold = isinstance(budget, Threshold)
    selector = RelativeDeviation() if threshold else BUILTIN_SELECTORS["runs"]()
    agree(LLAMA, plan, selector, budget, layers=small)
    if not threshold and not budget.is_reuse:
        agree(LLAMA, plan, selector, budget, Gate(0.05, larger=(0.95,)), layers=small)


@pytest.mark.parametrize("most", [1, 7, 16])
def test_a_prefill_by_layers_that_take_few_rows_at_once(most: int) -> None:
    tokens = torch.tensor(words(40, 5))
    got = Fusor(of_few_rows(most)(LLAMA.decoder)).compute(tokens).hidden
    close(got, prefill(LLAMA.decoder, tokens.tolist())[1], 2e-4)


def of_few_rows(most: int) -> type[ReferenceLayers]:
    """Layers that refuse more than ``most`` rows in a call."""

    class Small(Overwriting):
        max_rows = most

        def embed(self, tokens: Tensor) -> Tensor:
            assert len(tokens) <= most
            return super().embed(tokens)

        def run(
            self, layer: int, positions: Tensor, state: HiddenState, attend: Attend
        ) -> HiddenState:
            assert len(positions) == len(state.hidden) <= most
            return super().run(layer, positions, state, attend)

    return Small


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.8, 1.0])
def test_layers_may_overwrite_the_state(ratio: float) -> None:
    budget = Ratio(ratio, spread=0.5)
    agree(LLAMA, LLAMA.plan(), BUILTIN_SELECTORS["runs"](), budget, layers=Overwriting)


def test_ranks_choose_by_the_sum_of_their_scores() -> None:
    """`reduce` is asked on every rank alike, and what it gives decides."""
    plan = LLAMA.plan()
    asked: list[int] = []

    class Reversed(ReferenceLayers):
        def reduce(self, scores: Tensor) -> Tensor:
            asked.append(len(scores))
            return -scores

    placed = ReferencePlaced(LLAMA.make(plan))
    job, selector = job_of(plan), BUILTIN_SELECTORS["key"]()
    alone = Fusor(ReferenceLayers(LLAMA.decoder)).blend(job, placed, selector, Ratio(0.2))
    other = Fusor(Reversed(LLAMA.decoder)).blend(job, placed, selector, Ratio(0.2))
    assert not set(alone.chosen.tolist()) & set(other.chosen.tolist())
    assert len(asked) == 1  # a constant ratio chooses once


class Ranks:
    """Two of them; a collective ends when both have called it."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.ill = [False, False]

    def layers(self, rank: int) -> ReferenceLayers:
        ranks = self

        class Rank(ReferenceLayers):
            def run(
                self, layer: int, positions: Tensor, state: HiddenState, attend: Attend
            ) -> HiddenState:
                try:
                    return super().run(layer, positions, state, attend)
                finally:
                    ranks.barrier.wait(20)

            def reduce(self, scores: Tensor) -> Tensor:
                ranks.barrier.wait(20)
                return scores

            def agree(self, well: bool) -> bool:
                ranks.ill[rank] = not well
                ranks.barrier.wait(20)
                together = not any(ranks.ill)
                ranks.barrier.wait(20)
                return together

        return Rank(LLAMA.decoder)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["layer", "write", "merge", "attend"])
@pytest.mark.parametrize("call", [0, 2, 3])
@pytest.mark.parametrize("selector", ["key", "runs"])
def test_what_fails_on_one_rank_stops_all(where: str, call: int, selector: str) -> None:
    """No rank waits in a collective for one that has stopped."""
    plan, ranks = LLAMA.plan(), Ranks()

    def blend(rank: int) -> None:
        placed, ops = ReferencePlaced(LLAMA.make(plan)), TorchFusion()
        if rank == 1:
            owner: Any = placed if where in ("layer", "write") else ops
            calls = itertools.count()
            real = getattr(owner, where)

            def failing(*args: Any) -> Any:
                if next(calls) == call:
                    raise RuntimeError("no memory on this rank")
                return real(*args)

            setattr(owner, where, failing)
        budget = Ratio(0.3, spread=0.5)
        chosen = BUILTIN_SELECTORS[selector]()
        Fusor(ranks.layers(rank), ops=ops).blend(job_of(plan), placed, chosen, budget)

    with ThreadPoolExecutor(2) as pool:
        well, ill = [pool.submit(blend, rank) for rank in range(2)]
        with pytest.raises(RuntimeError, match="no memory on this rank"):
            ill.result(60)
        with pytest.raises(KVCoreError, match="another rank"):
            well.result(60)


def test_what_a_layer_raises_reaches_the_caller() -> None:
    class Broken(ReferenceLayers):
        def run(
            self, layer: int, positions: Tensor, state: HiddenState, attend: Attend
        ) -> HiddenState:
            if layer == 3:
                raise RuntimeError("out of memory")
            return super().run(layer, positions, state, attend)

    plan = LLAMA.plan()
    placed = ReferencePlaced(LLAMA.make(plan))
    with pytest.raises(RuntimeError, match="out of memory"):
        Fusor(Broken(LLAMA.decoder)).blend(
            job_of(plan), placed, BUILTIN_SELECTORS["key"](), Ratio(0.2)
        )


@pytest.mark.parametrize(
    ("exact", "stop", "chunks", "words"),
    [
        (3, 3, [], "KV for"),
        (0, 11, [], "KV for"),
        (2, 8, [1], "1 of them outside"),
        (2, 8, [8], "1 of them outside"),
    ],
)
def test_jobs_that_cannot_be(exact: int, stop: int, chunks: list[int], words: str) -> None:
    rows = torch.tensor(chunks, dtype=torch.int64)
    with pytest.raises(ConfigError, match=words):
        BlendJob(torch.arange(10), exact, stop, rows, torch.zeros_like(rows))
