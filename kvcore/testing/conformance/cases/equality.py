"""Equality: an engine with kvcore gives the same answers as without, and reuses what was stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvcore.harness.models import tiny_lora
from kvcore.testing.conformance.driver import Ask, Capability, Engine
from kvcore.testing.conformance.kit import BLOCK, Kit, case

LENGTHS = (5, 40, 97, 150, 201, 260)


def prompts(kit: Kit, seed: int = 0, lengths: Sequence[int] = LENGTHS) -> list[Ask]:
    """Return requests for random prompts of the given ``lengths`` in tokens."""
    return [Ask(kit.tokens(seed + i, count)) for i, count in enumerate(lengths)]


def hits(kit: Kit, engine: Engine, asks: Sequence[Ask], block: int = BLOCK, ranks: int = 1) -> None:
    """Assert that the engine reuses every stored token of ``asks`` and gives the right answers."""
    engine.forget()
    for ask in asks:
        got = engine.ask([ask])
        kit.assert_same(got, [ask], ranks=ranks)
        assert got[0].reused_tokens == kit.reusable(ask, block), (
            f"reused {got[0].reused} of {len(ask.tokens)} tokens; "
            f"{kit.reusable(ask, block)} were stored"
        )


@case("equality")
def miss(kit: Kit) -> None:
    """Nothing is stored: the engine gives its own answers, and nothing is reused."""
    asks = prompts(kit, 100)
    assert len({tuple(answer) for answer in kit.expected(asks)}) > 3, (
        "different prompts get equal answers"
    )
    with kit.engine() as engine:
        got = [engine.ask([ask])[0] for ask in asks]
        kit.assert_same(got, asks)
        assert not any(answer.reused for answer in got), [answer.reused for answer in got]


@case("equality")
def host_hit(kit: Kit) -> None:
    """The KV of a prompt that was asked before is loaded from host memory."""
    asks = prompts(kit, 200)
    with kit.engine() as engine:
        kit.stored(engine, asks)
        hits(kit, engine, asks)


@case("equality")
def partial_hit(kit: Kit) -> None:
    """A prompt differs from a stored one in the middle of a block and a page."""
    base = kit.tokens(300, 250)
    asks = [Ask(base[:cut] + kit.tokens(301 + cut, 37)) for cut in (17, 60, 95, 130, 199)]
    with kit.engine() as engine:
        kit.stored(engine, [Ask(base)])
        for ask in asks:
            got = engine.ask([ask])
            kit.assert_same(got, [ask])
            cut = len(ask.tokens) - 37
            assert got[0].reused_tokens == kit.reusable(ask, shared=cut), (got[0].reused, cut)
            engine.forget()


@case("equality")
def page_borders(kit: Kit) -> None:
    """Prompts end on a block or page boundary, and one token before and after it."""
    asks = prompts(kit, 400, [n + d for n in (64, 96, 128, 256) for d in (-1, 0, 1)])
    with kit.engine() as engine:
        kit.stored(engine, asks)
        hits(kit, engine, asks)


@case("equality")
def next_turn(kit: Kit) -> None:
    """The next turn of a conversation finds the KV of the answer before it."""
    first = Ask(kit.tokens(500, 100), max_tokens=40)
    with kit.engine() as engine:
        [answer] = engine.ask([first])
        kit.assert_same([answer], [first])
        engine.settle()
        engine.forget()
        follow = Ask([*first.tokens, *answer.tokens, *kit.tokens(501, 20)])
        got = engine.ask([follow])
        kit.assert_same(got, [follow])
        assert got[0].reused_tokens >= (100 + 39) // BLOCK * BLOCK - BLOCK, got[0].reused


@case("equality")
def many_at_once(kit: Kit) -> None:
    """Requests run in one batch, cold and warm."""
    asks = prompts(kit, 600, range(40, 280, 30))
    with kit.engine() as engine:
        for _ in range(2):
            got = engine.ask(asks)
            kit.assert_same(got, asks)
            engine.settle()
            engine.forget()
        assert all(answer.reused for answer in got), [answer.reused for answer in got]


@case("equality")
def shared_prefixes(kit: Kit) -> None:
    """Requests with a common prefix run in one batch, cold and warm."""
    shared = kit.tokens(700, 120)
    asks = [Ask([*shared, *kit.tokens(701 + i, 10 + 7 * i)]) for i in range(8)]
    with kit.engine() as engine:
        for _ in range(2):
            kit.assert_same(engine.ask(asks), asks)
            engine.settle()
        engine.forget()
        got = engine.ask(asks)
        kit.assert_same(got, asks)
        assert max(answer.reused_tokens for answer in got) >= 112


@case("equality")
def asked_again_at_once(kit: Kit) -> None:
    """A prompt is asked again while its KV is still being saved, and the answer is right."""
    asks = prompts(kit, 800, (250, 260, 270))
    with kit.engine() as engine:
        for ask in asks:
            kit.assert_same(engine.ask([ask]), [ask])
            engine.forget()
            kit.assert_same(engine.ask([ask]), [ask])


@case("equality", Capability.SALT)
def salts_kept_apart(kit: Kit) -> None:
    """A tenant reuses its own KV and no other tenant's."""
    tokens = kit.tokens(900, 100)
    with kit.engine() as engine:
        found = {}
        for number, salt in enumerate(["a", "a", "b", None, None]):
            ask = Ask(tokens, salt=salt)
            [got] = engine.ask([ask])
            kit.assert_same([got], [ask])
            found[number] = got.reused_tokens
            engine.settle()
            engine.forget()
        own = kit.reusable(Ask(tokens))
        assert found == {0: 0, 1: own, 2: 0, 3: 0, 4: own}, found


@case("equality")
def abort_while_saving(kit: Kit) -> None:
    """Requests are aborted after their first token, and then asked again."""
    asks = prompts(kit, 1000, (150, 200, 250))
    with kit.engine() as engine:
        engine.ask([Ask(ask.tokens, 40, abort_after=1) for ask in asks])
        kit.assert_same(engine.ask(asks), asks)
        engine.settle()
        engine.check()


@case("equality")
def abort_while_loading(kit: Kit) -> None:
    """Requests are aborted while their KV is loaded, and others get their pages."""
    asks, others = prompts(kit, 1100, (150, 200, 250)), prompts(kit, 1200, (150, 200, 250))
    with kit.engine(kit.config(transfer={"sync_load_max": 0})) as engine:
        kit.stored(engine, asks)
        engine.ask([Ask(ask.tokens, 40, abort_after=0) for ask in asks])
        kit.assert_same(engine.ask(others), others)
        engine.forget()
        got = engine.ask(asks)
        kit.assert_same(got, asks)
        assert all(answer.reused for answer in got), [answer.reused for answer in got]
        engine.settle()
        engine.check()


@case("equality")
def large_loads(kit: Kit) -> None:
    """Loads are too large for one step, so their requests wait while others run."""
    asks = prompts(kit, 1300, (100, 180, 260))
    with kit.engine(kit.config(transfer={"sync_load_max": 0})) as engine:
        kit.stored(engine, asks)
        got = engine.ask([*asks, Ask(kit.tokens(1310, 90))])
        kit.assert_same(got, [*asks, Ask(kit.tokens(1310, 90))])
        assert [a.reused_tokens for a in got[:3]] == [kit.reusable(ask) for ask in asks]


@case("equality", Capability.CHUNKED_PREFILL)
def chunked_prefill(kit: Kit) -> None:
    """Prompts are prefilled over many steps. Every piece is stored, and a hit may end in any."""
    asks = prompts(kit, 1400, (150, 260, 333))
    with kit.engine(step_tokens=64) as engine:
        kit.assert_same(engine.ask(asks), asks)
        engine.settle()
        hits(kit, engine, asks)


@case("equality")
def eviction_under_pressure(kit: Kit) -> None:
    """Host memory holds a fraction of many concurrent prompts, which are asked twice."""
    asks = prompts(kit, 1500, range(60, 300, 30))
    with kit.engine(kit.config(host={"capacity": "4MiB"})) as engine:
        for _ in range(2):
            kit.assert_same(engine.ask(asks), asks)
            engine.settle()
            engine.forget()
        assert engine.counted("kvcore_evictions_total", tier="host") > 0, "nothing was evicted"
        engine.check()


@case("equality", Capability.PREEMPTION)
def preemption(kit: Kit) -> None:
    """Engine memory holds a fraction of the requests, so some are preempted and start over."""
    asks = [Ask(kit.tokens(1600 + i, 100), max_tokens=64) for i in range(6)]
    with kit.engine(memory_tokens=640) as engine:
        kit.assert_same(engine.ask(asks), asks)
        assert engine.preemptions > 0, "nothing was preempted"
        engine.settle()
        engine.check()


@case("equality")
def small_blocks(kit: Kit) -> None:
    """Token blocks are smaller than a page."""
    asks = prompts(kit, 1700)
    with kit.engine(kit.config(block={"tokens": 8})) as engine:
        kit.stored(engine, asks)
        hits(kit, engine, asks, block=8)


@case("equality")
def large_blocks(kit: Kit) -> None:
    """Token blocks are larger than a page, in an arena ordered by layer."""
    asks = prompts(kit, 1800)
    layerwise = {"arrangement": "layerwise"}
    with kit.engine(kit.config(block={"tokens": 64}, host=layerwise)) as engine:
        kit.stored(engine, asks)
        hits(kit, engine, asks, block=64)


@case("equality", Capability.LORA)
def lora_kept_apart(kit: Kit) -> None:
    """KV computed with LoRA weights is reused only with the same weights."""
    weights: Path = tiny_lora(kit.new_folder() / "lora", kit.model, seed=3)
    plain = Ask(kit.tokens(1900, 100))
    adapted = Ask(plain.tokens, lora=weights)
    with kit.engine(lora=True) as engine:
        for ask in (plain, adapted):
            got = engine.ask([ask])
            kit.assert_same(got, [ask])
            assert not got[0].reused, got[0].reused
            engine.settle()
            engine.forget()
        hits(kit, engine, [plain, adapted])


@case("equality", Capability.RANKS)
def two_ranks(kit: Kit) -> None:
    """Each rank stores and loads its own heads."""
    asks = prompts(kit, 2000)
    with kit.engine(ranks=2) as engine:
        for ask in asks:
            kit.assert_same(engine.ask([ask]), [ask], ranks=2)
        engine.settle()
        hits(kit, engine, asks, ranks=2)


@case("equality")
def disk_hit_after_restart(kit: Kit) -> None:
    """The next engine to start reads what was written to disk."""
    asks = prompts(kit, 2100)
    config = kit.config(disk=kit.disk())
    with kit.fresh(config) as engine:
        kit.stored(engine, asks)
    with kit.fresh(config) as engine:
        for ask in asks:
            got = engine.ask([ask])
            kit.assert_same(got, [ask])
            assert got[0].reused_tokens == kit.reusable(ask), (got[0].reused, len(ask.tokens))
        engine.settle()
        hits(kit, engine, asks)
