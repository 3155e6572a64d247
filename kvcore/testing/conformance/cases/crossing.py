"""Sharing: an engine reads KV that another engine wrote, but never KV of another model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

from kvcore.testing.conformance.cases.equality import hits, prompts
from kvcore.testing.conformance.driver import Ask, Capability, Driver
from kvcore.testing.conformance.kit import Kit, case


def cross(
    kit: Kit, writer: Driver, reader: Driver, seed: int, config: dict[str, Any], ranks: int = 1
) -> None:
    """Store prompts with ``writer`` on ``ranks`` ranks, then ask ``reader`` on one rank.

    All stored tokens must be reused, and every answer must be right.
    """
    asks = prompts(kit, seed, (97, 150, 201))
    with kit.fresh(config, writer, ranks=ranks) as engine:
        kit.stored(engine, asks)
    with kit.fresh(config, reader) as engine:
        for ask in asks:
            got = engine.ask([ask])
            kit.assert_same(got, [ask])
            expected = kit.reusable(ask, writer=writer, reader=reader)
            assert got[0].reused_tokens == expected, (
                f"{reader.name} reused {got[0].reused} of the {expected} tokens that "
                f"{writer.name} stored of a prompt of {len(ask.tokens)}"
            )


def through_disk(kit: Kit, writer: Driver, reader: Driver, seed: int) -> None:
    """Run `cross` over a disk, with the writer on two ranks if it supports them."""
    cross(kit, writer, reader, seed, kit.config(disk=kit.disk()), ranks_of(writer))


def ranks_of(driver: Driver) -> int:
    """Return 2 if the engine supports several ranks, else 1."""
    return 2 if Capability.RANKS in driver.capabilities else 1


@case("crossing", pairs=True)
def reads_what_others_wrote(kit: Kit) -> None:
    """The engine, with one rank, reuses from disk all that others stored with two ranks."""
    for number, partner in enumerate(kit.partners):
        through_disk(kit, partner, kit.driver, 6000 + 100 * number)


@case("crossing", pairs=True)
def others_read_what_it_wrote(kit: Kit) -> None:
    """Other engines, with one rank, reuse from disk all that the engine stored with two."""
    for number, partner in enumerate(kit.partners):
        through_disk(kit, kit.driver, partner, 6500 + 100 * number)


@case("crossing", pairs=True, store=True)
def both_ways_through_a_store(kit: Kit) -> None:
    """Both ways through a remote store, one rank reuses all that two ranks stored."""
    for number, partner in enumerate(kit.partners):
        for way, pair in enumerate([(partner, kit.driver), (kit.driver, partner)]):
            seed = 7300 + 100 * number + 50 * way
            cross(kit, *pair, seed, kit.config(tiers={"far": kit.store_tier()}), ranks_of(pair[0]))


@case("crossing", Capability.RANKS)
def another_number_of_ranks(kit: Kit) -> None:
    """One rank reads from disk what two ranks wrote, and two ranks what one wrote."""
    for wrote, reads in ((2, 1), (1, 2)):
        asks, config = prompts(kit, 6800 + wrote, (97, 150, 201)), kit.config(disk=kit.disk())
        with kit.fresh(config, ranks=wrote) as engine:
            kit.stored(engine, asks)
        with kit.fresh(config, ranks=reads) as engine:
            for ask in asks:
                kit.assert_same(engine.ask([ask]), [ask], ranks=reads)
            engine.settle()
            assert engine.counted("kvcore_transfer_bytes_total", path="disk2h") > 0
            hits(kit, engine, asks, ranks=reads)


SIZES: tuple[tuple[dict[str, Any], tuple[dict[str, Any], ...]], ...] = (
    ({"stages": 2}, ({}, {"ranks": 2})),
    ({"ranks": 2}, ({"stages": 2},)),
    ({}, ({"stages": 2},)),
)
"""Pairs of the engine size that writes, and the sizes that read what it wrote."""


def through(kit: Kit, seed: int, config: Callable[[], dict[str, Any]]) -> None:
    """Store prompts at each of `SIZES` and read them at the others. All tokens must be reused."""
    for number, (wrote, readers) in enumerate(SIZES):
        asks, shared = prompts(kit, seed + 10 * number, (97, 150, 201)), config()
        with kit.fresh(shared, **wrote) as engine:
            kit.stored(engine, asks)
        for reads in readers:
            with kit.fresh(shared, **reads) as engine:
                for ask in asks:
                    got = engine.ask([ask])
                    kit.assert_same(got, [ask], **reads)
                    assert got[0].reused_tokens == kit.reusable(ask), (
                        f"{reads or 'one rank'} reused {got[0].reused} of the "
                        f"{kit.reusable(ask)} tokens that {wrote or 'one rank'} stored"
                    )


@case("crossing", Capability.RANKS, Capability.STAGES)
def another_number_of_stages(kit: Kit) -> None:
    """KV moves through disk between different numbers of ranks and pipeline stages."""
    through(kit, 7600, lambda: kit.config(disk=kit.disk()))


@case("crossing", Capability.RANKS, Capability.STAGES, store=True)
def any_size_through_a_store(kit: Kit) -> None:
    """KV moves through a store between different numbers of ranks and pipeline stages."""
    through(kit, 7700, lambda: kit.config(tiers={"far": kit.store_tier()}))


def apart(kit: Kit, seed: int, **other: Any) -> None:
    """Assert that an engine with setup ``other`` finds nothing that the kit's model stored."""
    ask, config = Ask(kit.tokens(seed, 150)), kit.config(disk=kit.disk())
    with kit.fresh(config) as engine:
        kit.stored(engine, [ask])
    with kit.fresh(config, **other) as engine:
        got = engine.ask([ask])
        assert not got[0].reused, f"KV of another model was reused: {got[0].reused}"
        kit.assert_same(got, [ask], **other)
    with kit.fresh(config) as engine:
        assert engine.ask([ask])[0].reused, "its own KV was not found again"


@case("crossing")
def another_model_is_apart(kit: Kit) -> None:
    """An engine with a model of another shape finds nothing."""
    apart(kit, 6900, model=kit.tiny_model(layers=2))


@case("crossing")
def another_revision_is_apart(kit: Kit) -> None:
    """An engine with other weights of the same shape finds nothing."""
    apart(kit, 7000, model=kit.tiny_model(seed=1))


@case("crossing")
def another_rope_is_apart(kit: Kit) -> None:
    """An engine with the same weights and another rope base finds nothing."""
    folder = kit.new_folder() / "model"
    shutil.copytree(kit.model, folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or config
    rope["rope_theta"] = 2 * rope["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))
    apart(kit, 7100, model=folder)


@case("crossing")
def another_dtype_is_apart(kit: Kit) -> None:
    """An engine with the same weights, computed in bfloat16, finds nothing."""
    apart(kit, 7200, dtype="bfloat16")
