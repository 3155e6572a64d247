"""KV written by one engine is read by another, and KV of another model never is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from kvcore.testing.conformance.cases.equality import prompts
from kvcore.testing.conformance.driver import Ask, Capability, Driver
from kvcore.testing.conformance.kit import Kit, case
from kvcore.testing.models import tiny_model


def cross(kit: Kit, writer: Driver, reader: Driver, seed: int) -> None:
    """The writer on two ranks where it can; all that it stored is reused, and rightly."""
    asks, config = prompts(kit, seed, (97, 150, 201)), kit.config(disk=kit.disk())
    ranks = 2 if Capability.RANKS in writer.capabilities else 1
    with kit.fresh(config, writer, ranks=ranks) as engine:
        kit.stored(engine, asks)
    with kit.fresh(config, reader) as engine:
        for ask in asks:
            got = engine.ask([ask])
            kit.same(got, [ask])
            assert got[0].reused_tokens == kit.reusable(ask), (
                f"{reader.name} reused {got[0].reused} of what {writer.name} wrote"
            )


@case("crossing", pairs=True)
def reads_what_others_wrote(kit: Kit) -> None:
    """Through disk, from two ranks to one; tokens reused are counted."""
    for number, partner in enumerate(kit.partners):
        cross(kit, partner, kit.driver, 6000 + 100 * number)


@case("crossing", pairs=True)
def others_read_what_it_wrote(kit: Kit) -> None:
    """And the way back."""
    for number, partner in enumerate(kit.partners):
        cross(kit, kit.driver, partner, 6500 + 100 * number)


def apart(kit: Kit, other: Path, seed: int) -> None:
    """What the kit's model stored is not found by the ``other``."""
    ask, config = Ask(kit.words(seed, 150)), kit.config(disk=kit.disk())
    with kit.fresh(config) as engine:
        kit.stored(engine, [ask])
    with kit.fresh(config, model=other) as engine:
        [got] = engine.ask([ask])
        assert not got.reused, f"KV of another model was reused: {got.reused}"
    with kit.fresh(config) as engine:
        assert engine.ask([ask])[0].reused, "its own KV was not found again"


@case("crossing")
def another_revision_is_apart(kit: Kit) -> None:
    """Other weights of the same shape."""
    apart(kit, tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64, seed=1), 7000)


@case("crossing")
def another_rope_is_apart(kit: Kit) -> None:
    """The same weights, rotated at another speed."""
    folder = kit.new_folder() / "model"
    shutil.copytree(kit.model, folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or config
    rope["rope_theta"] = 2 * rope["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))
    apart(kit, folder, 7100)
