"""Faults: media corrupt, lose, hang and fail, but answers stay right and requests end in time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvcore.testing.conformance.cases.equality import prompts
from kvcore.testing.conformance.cases.fusion import FUSED, chunks_of, mixed
from kvcore.testing.conformance.driver import Ask, Capability, Engine
from kvcore.testing.conformance.kit import Kit, case
from kvcore.testing.faults import Fault, Rule, Seam, write_rules
from kvcore.testing.faults.plugin import (
    FAILED_BLENDS,
    FAULTY_MEMORY,
    FAULTY_SELECTOR,
    write_plugin,
)

IN_TIME_S = 60.0
"""Seconds that a request may take after a load failed.

The deadline of a load is 1 s. This limit leaves room for a busy machine, and still ends the case.
"""


def data_files(folder: str) -> list[Path]:
    """Return the data files of the disk tiers under ``folder``."""
    return sorted(Path(folder).rglob("*.data"))


def after(kit: Kit, damage: Callable[[list[Path]], None], seed: int) -> None:
    """Store prompts on disk, damage the files between two engines, and ask again twice."""
    asks, config = prompts(kit, seed), kit.config(disk=kit.disk())
    with kit.fresh(config) as engine:
        kit.stored(engine, asks)
    damage(data_files(config["disk"]["path"]))
    with kit.fresh(config) as engine:
        for _ in range(2):
            for ask in asks:
                kit.assert_same(engine.ask([ask], IN_TIME_S), [ask])
            engine.settle()
            engine.forget()
        assert all(engine.ask([ask])[0].reused for ask in asks[1:]), (
            "damaged blocks were not stored again"
        )
        engine.check()


@case("faults")
def corrupt_block(kit: Kit) -> None:
    """Blocks whose bytes changed on disk are detected and computed again."""

    def rot(files: list[Path]) -> None:
        picks = random.Random(5)
        for path in files:
            size = path.stat().st_size
            with path.open("r+b") as file:
                for _ in range(40):
                    file.seek(picks.randrange(size))
                    file.write(b"\xa5" * 64)

    after(kit, rot, 4000)


@case("faults")
def vanished_block(kit: Kit) -> None:
    """If a file loses its second half, only the blocks in it are lost."""

    def cut(files: list[Path]) -> None:
        for path in files:
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2 // 4096 * 4096)

    after(kit, cut, 4100)


CALLS = (Seam.TIER_READ, Seam.TIER_WRITE)
HANGS = tuple(Rule(Fault.HANG, seam, seconds=IN_TIME_S) for seam in CALLS)
FAILS = (Rule(Fault.ERROR, Seam.TIER_READ),)
DOWN = tuple(Rule(Fault.ERROR, seam) for seam in CALLS)


@contextmanager
def troubled(kit: Kit, asks: list[Ask]) -> Iterator[tuple[Engine, Callable[..., None]]]:
    """Yield an engine that has stored ``asks``, and a function that sets the faults of a tier.

    The tier is below host memory and follows the rules that the function was last called with. Only
    this tier holds the first of ``asks``, because host memory is too small.
    """
    folder = write_plugin(kit.folder / "plugin")  # one for all: an engine may keep its process
    rules = kit.new_folder() / "rules"

    def say(*now: Rule) -> None:
        write_rules(rules, *now)

    config = kit.config(
        host={"capacity": "2MiB"},
        tiers={
            "faulty": {
                "plugin": FAULTY_MEMORY,
                "capacity": "64MiB",
                "options": {"rules": str(rules)},
            }
        },
        transfer={"load_deadline_s": 1.0},
    )
    try:
        with kit.fresh(config, path=(folder,)) as engine:
            kit.stored(engine, asks)
            try:
                yield engine, say
            finally:
                say()  # end the faults before the engine stops
    finally:
        say()


def troubles(kit: Kit, rules: Sequence[Rule], seed: int) -> None:
    """Assert that answers stay right under ``rules``, and that blocks are reused once they end."""
    asks = prompts(kit, seed, (150, 170, 190, 210))
    with troubled(kit, asks) as (engine, say):
        say(*rules)
        for ask in asks:
            kit.assert_same(engine.ask([ask], IN_TIME_S), [ask])
            engine.forget()
        say()
        for ask in asks:
            kit.assert_same(engine.ask([ask], IN_TIME_S), [ask])
        engine.settle()
        engine.forget()
        got = engine.ask(asks[-1:])
        kit.assert_same(got, asks[-1:])
        assert got[0].reused, "nothing is reused after the faults ended"
        engine.settle()
        engine.check()


@case("faults")
def a_load_that_hangs(kit: Kit) -> None:
    """A read that hangs is abandoned at its deadline."""
    troubles(kit, HANGS, 4200)


@case("faults")
def a_read_that_fails(kit: Kit) -> None:
    """A block that cannot be read is computed."""
    troubles(kit, FAILS, 4300)


@case("faults")
def a_tier_that_is_down(kit: Kit) -> None:
    """The engine works without a tier that fails reads and writes."""
    troubles(kit, DOWN, 4400)


@case("faults")
def a_tier_brings_back(kit: Kit) -> None:
    """The same tier, without faults, returns blocks that host memory has evicted."""
    asks = prompts(kit, 4500, (150, 170, 190, 210))
    with troubled(kit, asks) as (engine, _):
        got = engine.ask(asks[:1])
        engine.settle()
        engine.forget()
        got += engine.ask(asks[:1])  # an engine that cannot wait for a load reuses it now
        kit.assert_same(got, asks[:1] * 2)
        assert got[1].reused, "nothing was loaded from the tier below host memory"
        assert engine.counted("kvcore_transfer_bytes_total", path="remote2h") > 0


@case("faults", Capability.FUSION)
def a_blend_that_fails(kit: Kit) -> None:
    """Prompts whose blends fail on the worker are computed: alone, and in one batch."""
    folder = write_plugin(kit.folder / "plugin")
    config = kit.config(fusion={**FUSED, "selector": FAULTY_SELECTOR})
    chunks = chunks_of(kit, 4600)
    asks = [prompt.ask(0.15) for prompt in mixed(kit, chunks, 4700)]
    with kit.fresh(config, path=(folder,)) as engine:
        kit.stored(engine, [Ask(chunk, 1) for chunk in chunks])
        got = [engine.ask([ask], IN_TIME_S)[0] for ask in asks[:2]]
        got += engine.ask(asks[2:], IN_TIME_S)
        kit.assert_same(got, asks)
        assert not any(answer.reused.get("blend") for answer in got), [a.reused for a in got]
        assert (folder / FAILED_BLENDS).stat().st_size >= 3, "blends were not tried"
        engine.settle()
        engine.check()
