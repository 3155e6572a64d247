"""Backing tiers: prepared by the leader, opened by each rank, all through the plugin hook."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest

from kvcore.config import load_config
from kvcore.errors import ConfigError
from kvcore.manager import WritePolicy
from kvcore.model.shape import BlockShape
from kvcore.plugins import PluginManager
from kvcore.runtime.tiers import BackingOpener, prepare_backings
from kvcore.tiers.base import BlockRead, BlockWrite
from kvcore.tiers.disk import Geometry
from kvcore.transfer.graph import Path

MakePlugin = Callable[[str, str], EntryPoint]
GEOMETRY = Geometry(BlockShape(2, 2, 8, 4, "bfloat16"), b"model", ((0, 1), (1, 2)))

SHELF_TIER = """
    from kvcore.errors import TierUnavailable
    from kvcore.plugins import PreparedTier, TierPlugin, hookimpl
    from kvcore.tiers.base import BlockRecord

    KEPT = BlockRecord(3, b"k" * 16, bytes(16), b"n" * 16, 1)

    def prepare(context):
        if context.options.get("broken"):
            raise TierUnavailable("nobody home")
        return PreparedTier(context.num_slots // 2, [KEPT], {"door": context.name})

    def shelf(context):
        return ("tier", context.rank, dict(context.rank_options), context.slot_nbytes)

    @hookimpl
    def kvcore_tiers():
        return [TierPlugin("shelf", "remote", shelf, prepare)]
"""


def test_a_tier_is_prepared_by_the_leader_and_opened_by_each_rank(plugin: MakePlugin) -> None:
    manager = PluginManager(entry_points=[plugin("shelf", SHELF_TIER)])
    table = {"plugin": "shelf", "capacity": 8 * 2 * 4096, "policy": "lfu", "write": "selective"}
    config = load_config(None, {"tiers": {"books": table}})
    (found,) = prepare_backings(config, GEOMETRY, manager)
    assert found.spec.num_slots == 4
    assert found.spec.policy is manager.policy("lfu")
    assert [record.slot for record in found.prepared.records] == [3]
    assert (found.backing.read_path, found.backing.write_path) == (Path.REMOTE2H, Path.H2REMOTE)
    assert found.backing.write is WritePolicy.SELECTIVE
    opened = [
        BackingOpener(config, GEOMETRY, rank, manager)("books", found.rank_options)
        for rank in range(2)
    ]
    assert opened == [("tier", rank, {"door": "books"}, 4096) for rank in range(2)]


def test_leaders_that_share_a_tier_divide_its_capacity(plugin: MakePlugin) -> None:
    manager = PluginManager(entry_points=[plugin("shelf", SHELF_TIER)])
    table = {"plugin": "shelf", "capacity": 24 * 2 * 4096}
    config = load_config(None, {"tiers": {"books": table}})
    slots = [
        prepare_backings(config, GEOMETRY, manager, share=share)[0].spec.num_slots
        for share in (1, 2, 3)
    ]
    assert slots == [12, 6, 4]  # the shelf takes half of what it may


def test_a_tier_that_cannot_be_used_is_left_out_by_name(
    plugin: MakePlugin, caplog: pytest.LogCaptureFixture
) -> None:
    manager = PluginManager(entry_points=[plugin("shelf", SHELF_TIER)])
    tiers = {
        "attic": {"plugin": "shelf", "options": {"broken": True}},
        "books": {"plugin": "shelf"},
    }
    found = prepare_backings(load_config(None, {"tiers": tiers}), GEOMETRY, manager)
    assert [one.spec.name for one in found] == ["books"]
    assert "the tier attic is off: nobody home" in caplog.text


def test_the_disk_tier_takes_the_same_way(tmp_path: pathlib.Path) -> None:
    """`[disk]` and a tier of the disk plugin both keep blocks over a restart.

    The model is the leader's, whatever an engine has made of its config in the ranks meanwhile.
    """
    changed = replace(GEOMETRY, model=b"changed while it was loaded")
    manager = PluginManager(entry_points=[])
    folder, other = tmp_path / "a", tmp_path / "b"
    config = load_config(
        None,
        {
            "disk": {"path": str(folder), "capacity": "1MiB"},
            "tiers": {"more": {"plugin": "disk", "capacity": "1MiB", "options": {"path": other}}},
        },
    )
    key = b"k" * 16
    for turn in range(2):
        found = prepare_backings(config, GEOMETRY, manager)
        assert [one.spec.name for one in found] == ["disk", "more"]
        assert [len(one.prepared.records) for one in found] == [turn, turn]
        for one in found:
            for rank in range(2):
                opener = BackingOpener(config, changed, rank, manager)
                tier = opener(one.spec.name, one.rank_options)
                block = memoryview(bytearray(b"x" * tier.slot_nbytes))
                if turn == 0:
                    write = BlockWrite(2, key, bytes(16), b"n" * 16, [block])
                    assert tier.write([write]) == [None]
                else:
                    got = memoryview(bytearray(tier.slot_nbytes))
                    assert tier.read([BlockRead(2, key, [got])]) == [None]
                tier.close()
            one.prepared.release()


def test_options_that_the_disk_tier_does_not_know_are_refused(tmp_path: pathlib.Path) -> None:
    manager = PluginManager(entry_points=[])
    for options in ({}, {"path": str(tmp_path), "thread": 3}):
        config = load_config(None, {"tiers": {"more": {"plugin": "disk", "options": options}}})
        with pytest.raises(ConfigError, match="direct_io, io_threads and sync_interval_s"):
            prepare_backings(config, GEOMETRY, manager)
