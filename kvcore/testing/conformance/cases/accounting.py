"""Accounting: nothing leaks, no budget is exceeded, and the metrics add up."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcore.connector.control import CONTROLS
from kvcore.testing.conformance.cases.equality import prompts
from kvcore.testing.conformance.driver import Ask, Capability
from kvcore.testing.conformance.kit import BLOCK, Kit, case

LOOKED_UP = "kvcore_lookup_tokens_total"


@case("accounting")
def nothing_left_over(kit: Kit) -> None:
    """No page, slot, pin or transfer is held after a run with hits, misses and aborts."""
    asks = prompts(kit, 3000)
    with kit.engine() as engine:
        kit.stored(engine, asks)
        aborted = [Ask(ask.tokens, 30, abort_after=i % 3) for i, ask in enumerate(asks)]
        engine.ask([*aborted, *asks])
        engine.settle()
        engine.check()


@case("accounting")
def clear_forgets(kit: Kit) -> None:
    """What was stored is not found after a clear, and what is stored later is."""
    ask = Ask(kit.tokens(3300, 150))
    with kit.engine() as engine:
        kit.stored(engine, [ask])
        [found] = engine.ask([ask])
        engine.clear()
        [computed] = engine.ask([ask])
        engine.settle()
        engine.forget()
        [again] = engine.ask([ask])
        kit.assert_same([found, computed, again], [ask] * 3)
        reused = [answer.reused_tokens for answer in (found, computed, again)]
        assert reused == [kit.reusable(ask), 0, kit.reusable(ask)], reused


@case("accounting")
def metrics_add_up(kit: Kit) -> None:
    """Metrics count each token that was looked up, and each reused token as a hit."""
    asks = prompts(kit, 3100, (40, 97, 150, 201))

    def counted(result: str) -> float:
        return engine.counted(LOOKED_UP, result=result)

    with kit.engine() as engine:
        before = {result: counted(result) for result in ("hit", "miss")}
        kit.stored(engine, asks)
        reused = 0
        for ask in asks:
            [answer] = engine.ask([ask])
            reused += answer.reused_tokens
        engine.settle()
        hit, miss = counted("hit") - before["hit"], counted("miss") - before["miss"]
        assert hit == reused > 0, f"{hit} tokens counted as hits, {reused} reused"
        asked = 2 * sum(kit.driver.looks_up(len(ask.tokens)) for ask in asks)
        assert hit + miss == asked, f"{hit} + {miss} tokens counted, {asked} looked up"


@case("accounting")
def held_is_no_miss(kit: Kit) -> None:
    """What the engine held itself is neither a hit nor a miss; all behind it is one of the two."""
    driver, long = kit.driver, kit.tokens(3400, 300)
    steps = (
        (long[:200], 0, 0),  # nobody holds anything
        (long, 200, 0),  # the engine holds the beginning, and a tier no more than that
        (long, 300, 0),  # the engine holds all that can be reused
        (None, 0, 0),
        (long[:90], 0, 90),  # a tier holds all of it
        (long, 90, 300),  # the engine holds the beginning, and a tier more
    )
    with kit.engine() as engine:
        for tokens, held, stored in steps:
            if tokens is None:
                engine.forget()
                continue
            before = [engine.counted(LOOKED_UP, result=result) for result in ("hit", "miss")]
            [answer] = engine.ask([Ask(tokens)])
            engine.settle()
            after = [engine.counted(LOOKED_UP, result=result) for result in ("hit", "miss")]
            hit, miss = (now - then for now, then in zip(after, before, strict=True))
            prompt = len(tokens)
            asked, own = driver.looks_up(prompt, held), driver.holds(prompt, held)
            reused = max(driver.reuses(prompt, stored, BLOCK) - own, 0)
            counts = f"{hit} + {miss} tokens counted of {asked}; the engine held {own} of {prompt}"
            assert answer.reused_tokens == hit == reused, f"{counts}, {reused} can be reused"
            assert hit + miss == asked, counts


@case("accounting", Capability.CONTROL)
def as_the_request_asks(kit: Kit) -> None:
    """A request that asks for no load or save gets none; one that cannot be read gets neither."""
    asked = "kvcore_request_controls_total"
    seed = itertools.count(3500)

    def followed(**labels: str) -> float:
        return engine.counted(asked, **labels)

    def reused_after(tokens: Sequence[int], **options: Any) -> int:
        """Return the tokens that are reused of a text that was asked once with ``options``."""
        first, second = Ask(tokens, asked=options or None), Ask(tokens)
        kit.assert_same(engine.ask([first]), [second])
        engine.settle()
        engine.forget()
        [answer] = engine.ask([second])
        kit.assert_same([answer], [second])
        engine.settle()
        engine.forget()
        return answer.reused_tokens

    with kit.engine() as engine:
        before = {name: followed(option=name) for name in CONTROLS}
        text = kit.tokens(next(seed), 200)
        whole = kit.reusable(Ask(text))
        assert reused_after(text) == whole
        plain = Ask(text, asked={"load": False})
        [answer] = engine.ask([plain])
        kit.assert_same([answer], [Ask(text)])
        assert answer.reused_tokens == 0, "it asked to be computed"
        engine.settle()
        engine.forget()
        assert reused_after(kit.tokens(next(seed), 200), load=False) == whole, "it may be saved"
        assert reused_after(kit.tokens(next(seed), 200), save=False) == 0, "it was saved"
        few = reused_after(kit.tokens(next(seed), 200), save_tokens=100)
        assert few == kit.driver.reuses(200, 100, BLOCK), f"{few} of its first 100 tokens"
        assert reused_after(kit.tokens(next(seed), 200), save_tokens=-1) == 0
        assert reused_after(kit.tokens(next(seed), 200), save="no", load=True) == 0
        assert engine.counted("kvcore_misses_total", reason="asked") >= 1
        assert followed(option="save_tokens", outcome="unreadable") >= 1
        for name in CONTROLS:
            assert followed(option=name) > before[name], f"{name} was not counted"
        engine.check()


@case("accounting")
def budgets_held(kit: Kit) -> None:
    """Host memory and disk never hold more than their capacity."""
    disk = {**kit.disk(), "capacity": "8MiB"}
    asks = prompts(kit, 3200, range(60, 300, 20))
    with kit.fresh(kit.config(host={"capacity": "4MiB"}, disk=disk)) as engine:
        for _ in range(2):
            kit.assert_same(engine.ask(asks), asks)
            engine.settle()
            engine.forget()
        engine.check()
    used = sum(file.stat().st_size for file in Path(disk["path"]).rglob("*") if file.is_file())
    assert 1 << 20 < used <= 8 << 20, f"{used} bytes on disk, 8 MiB allowed"
