"""The index, case by case."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from kvcore.errors import ConfigError, FormatError, KVCoreError
from kvcore.index import BlockIndex, TierSpec
from kvcore.index.policy import BUILTIN_POLICIES, LRU
from kvcore.model.keys import ROOT_PARENT
from support.index_paths import NAMESPACES, Path, key_of, keys_of, path_of, space_of

# -- examples ---------------------------------------------------------------------------------


def store(index: BlockIndex, tier: str, path: Path) -> Any:
    reservation = index.lifecycle.reserve(tier, keys_of(path), 0, len(path), space_of(path))
    index.lifecycle.commit(reservation)
    return reservation


def make(capacity: int = 8, policy: str = "lru", **options: object) -> BlockIndex:
    return BlockIndex([TierSpec("host", capacity, policy, options)])


def test_unpublished_is_never_matched_and_children_wait() -> None:
    index = make()
    first = index.lifecycle.reserve("host", keys_of((0, 1)), 0, 2, NAMESPACES[0])
    second = index.lifecycle.reserve("host", keys_of((0, 1, 0, 1)), 2, 4, NAMESPACES[0])
    index.lifecycle.commit(second)
    assert index.match(keys_of((0, 1, 0, 1))).depth == 0
    assert index.held("host", keys_of((0, 1, 0, 1))) == 4
    index.lifecycle.commit(first)
    assert index.match(keys_of((0, 1, 0, 1))).depth == 4


def test_abort_cascades_to_what_was_stored_on_top() -> None:
    index = make()
    first = index.lifecycle.reserve("host", keys_of((0, 1)), 0, 2, NAMESPACES[0])
    second = index.lifecycle.reserve("host", keys_of((0, 1, 0)), 2, 3, NAMESPACES[0])
    third = index.lifecycle.reserve("host", keys_of((0, 1, 0, 1)), 3, 4, NAMESPACES[0])
    index.lifecycle.commit(third)
    index.lifecycle.commit(first, failed_from=1)
    assert index.match(keys_of((0, 1, 0, 1))).depth == 1
    assert index.num_used("host") == 2, "the slot in flight is kept for its writer"
    index.lifecycle.commit(second)
    assert index.num_used("host") == 1
    assert len(index) == 1
    index.check_integrity()


def test_stored_once() -> None:
    index = make()
    store(index, "host", (0, 1, 0))
    again = index.lifecycle.reserve("host", keys_of((0, 1, 0)), 0, 3, NAMESPACES[0])
    assert len(again) == 0
    index.lifecycle.commit(again)
    longer = index.lifecycle.reserve("host", keys_of((0, 1, 0, 1)), 0, 4, NAMESPACES[0])
    assert (longer.start, len(longer)) == (3, 1)
    index.lifecycle.abort(longer)


def test_reserve_refuses_a_gap() -> None:
    with pytest.raises(KVCoreError, match="holds only 0 blocks"):
        make().lifecycle.reserve("host", keys_of((0, 1)), 1, 2, NAMESPACES[0])


def test_a_prefix_used_by_a_long_prompt_outlives_its_last_child() -> None:
    index = make(4)
    store(index, "host", (0, 0))
    store(index, "host", (1, 1))
    index.touch(index.match(keys_of((0, 0))))
    assert [path_of(block.key) for block in index.evictions.evict("host", 4)] == [
        (1, 1),
        (1,),
        (0, 0),
        (0,),
    ]


def test_a_parent_is_as_recent_as_the_child_that_left_it() -> None:
    index = make()
    store(index, "host", (1,))
    store(index, "host", (0, 0))
    pin = index.pin("host", key_of((1,)))
    assert [path_of(block.key) for block in index.evictions.evict("host", 1)] == [(0, 0)]
    index.unpin(pin)
    assert [path_of(block.key) for block in index.evictions.evict("host", 1)] == [(1,)]


def test_a_parent_inherits_from_a_dropped_child() -> None:
    index = make()
    store(index, "host", (0,))
    store(index, "host", (1,))
    store(index, "host", (0, 0))
    index.removal.invalidate("host", key_of((0, 0)))
    assert [path_of(block.key) for block in index.evictions.evict("host", 1)] == [(1,)]


def test_keys_of_another_length_are_refused() -> None:
    with pytest.raises(FormatError, match="16 bytes long"):
        make().lifecycle.reserve("host", [b"short"], 0, 1, NAMESPACES[0])


def test_slots_are_those_of_the_blocks_that_are_asked_for() -> None:
    """Whoever reads a slot gets the KV that is in it, right or wrong."""
    index = make()
    slots = store(index, "host", (0, 1, 0, 1)).slots.tolist()
    branch = store(index, "host", (0, 1, 1)).slots.tolist()
    for start, stop in itertools.combinations_with_replacement(range(5), 2):
        found = index.slots("host", keys_of((0, 1, 0, 1)), start, stop)
        assert found.tolist() == slots[start:stop]
    assert index.slots("host", keys_of((0, 1, 1)), 0, 3).tolist() == [*slots[:2], *branch]


def test_a_reservation_that_found_no_room_leaves_its_parent_evictable() -> None:
    index = make(2)
    store(index, "host", (0, 1))
    assert len(index.lifecycle.reserve("host", keys_of((0, 1, 0)), 2, 3, NAMESPACES[0])) == 0
    index.check_integrity()
    assert [path_of(block.key) for block in index.evictions.evict("host", 2)] == [(0, 1), (0,)]


def test_reserving_never_evicts_its_own_ancestors() -> None:
    index = make(2)
    store(index, "host", (0,))
    grown = index.lifecycle.reserve("host", keys_of((0, 1, 0, 1)), 0, 4, NAMESPACES[0])
    assert (grown.start, len(grown), grown.evicted) == (1, 1, [])


def test_evicting_block_is_rescued_not_stored_twice() -> None:
    index = make()
    store(index, "host", (0, 1))
    eviction = index.evictions.begin("host", 2)
    assert [path_of(b.key) for b in eviction.blocks] == [(0, 1), (0,)]
    assert index.match(keys_of((0, 1))).depth == 0
    again = index.lifecycle.reserve("host", keys_of((0, 1)), 0, 2, NAMESPACES[0])
    assert len(again) == 0
    assert index.match(keys_of((0, 1))).depth == 2
    assert index.evictions.finish(eviction) == []
    assert index.match(keys_of((0, 1))).depth == 2
    index.check_integrity()


def test_a_rescued_block_belongs_to_its_new_eviction_only() -> None:
    index = make()
    store(index, "host", (0,))
    first = index.evictions.begin("host", 1)
    index.lifecycle.reserve("host", keys_of((0,)), 0, 1, NAMESPACES[0])
    second = index.evictions.begin("host", 1)
    assert index.evictions.finish(first) == []
    assert index.num_used("host") == 1, "the second copy still reads the slot"
    assert len(index.evictions.finish(second)) == 1
    assert index.num_used("host") == 0


def test_clear_leaves_the_slots_of_a_demotion_alone() -> None:
    index = make()
    store(index, "host", (0,))
    eviction = index.evictions.begin("host", 1)
    index.removal.clear()
    assert len(index) == 0
    assert index.num_used("host") == 1, "the copy still reads the slot"
    index.lifecycle.reserve("host", keys_of((0,)), 0, 1, NAMESPACES[0])
    assert index.evictions.finish(eviction) == []
    assert index.num_used("host") == 1


def test_a_reservation_stops_before_a_block_that_is_leaving_alone() -> None:
    index = make()
    store(index, "host", (0, 0))
    leaf = index.evictions.begin("host", 1)
    root = index.evictions.begin("host", 1)
    index.evictions.finish(root)
    again = index.lifecycle.reserve("host", keys_of((0, 0)), 0, 2, NAMESPACES[0])
    assert (again.start, again.stop) == (0, 1)
    index.evictions.finish(leaf)
    index.lifecycle.commit(again)
    index.check_integrity()


def test_a_leaving_block_is_not_rescued_under_an_unpublished_parent() -> None:
    index = make()
    store(index, "host", (0, 0))
    index.evictions.begin("host", 1)
    index.evictions.finish(index.evictions.begin("host", 1))
    root = index.lifecycle.reserve("host", keys_of((0,)), 0, 1, NAMESPACES[0])
    assert len(index.lifecycle.reserve("host", keys_of((0, 0)), 1, 2, NAMESPACES[0])) == 0
    assert index.held("host", keys_of((0, 0))) == 1
    index.lifecycle.commit(root)
    assert index.match(keys_of((0, 0))).depth == 1
    assert len(index.lifecycle.reserve("host", keys_of((0, 0)), 1, 2, NAMESPACES[0])) == 0
    assert index.match(keys_of((0, 0))).depth == 2, "rescued now"
    index.check_integrity()


def test_a_dropped_block_keeps_its_slots_while_it_is_pinned() -> None:
    index = make(3)
    store(index, "host", (0, 0, 0))
    deep, shallow = index.pin("host", key_of((0, 0, 0))), index.pin("host", key_of((0, 0)))
    assert len(index.removal.invalidate("host", key_of((0, 0)))) == 2
    assert index.match(keys_of((0, 0, 0))).depth == 1
    assert index.num_free("host") == 0
    index.unpin(deep)
    assert index.num_free("host") == 1
    index.unpin(shallow)
    assert index.num_free("host") == 2
    index.check_integrity()


def test_a_pin_on_a_dropped_block_still_protects_its_ancestors() -> None:
    index = make(2)
    store(index, "host", (0, 0))
    pin = index.pin("host", key_of((0, 0)))
    index.removal.invalidate("host", key_of((0, 0)))
    assert index.evictions.evict("host", 1) == []
    index.removal.invalidate("host", key_of((0,)))
    assert index.num_free("host") == 0
    index.unpin(pin)
    assert index.num_free("host") == 2
    index.check_integrity()


def test_path_and_namespace() -> None:
    index = make()
    store(index, "host", (1, 0, 1))
    assert index.path(key_of((1, 0, 1))) == keys_of((1, 0, 1))
    assert index.namespace_of(key_of((1, 0))) == NAMESPACES[1]
    assert key_of((1, 0)) in index
    with pytest.raises(KVCoreError, match="in no tier"):
        index.path(key_of((0,)))


def test_priority_through_the_index() -> None:
    index = make(4, "priority")
    store(index, "host", (0,))
    store(index, "host", (1,))
    index.set_priority("host", key_of((0,)), 90)
    assert [path_of(b.key) for b in index.evictions.evict("host", 2)] == [(1,), (0,)]
    other = make()
    store(other, "host", (0,))
    with pytest.raises(ConfigError, match="knows no priorities"):
        other.set_priority("host", key_of((0,)), 90)


def test_bad_specs_are_named() -> None:
    with pytest.raises(ConfigError, match="no eviction policy 'mru'"):
        make(policy="mru")
    with pytest.raises(ConfigError, match="options of policy"):
        make(policy="lru", colour=3)
    with pytest.raises(ConfigError, match="different names"):
        BlockIndex([TierSpec("a", 1), TierSpec("a", 1)])
    with pytest.raises(ConfigError, match="no tier 'disk'"):
        make().evictions.evict("disk", 1)
    assert isinstance(BlockIndex([TierSpec("a", 1, LRU)]).policy("a"), LRU)


# -- restore ------------------------------------------------------------------------------------


class Record:
    def __init__(self, slot: int, path: Path, stamp: int, parent: bytes | None = None) -> None:
        self.slot, self.key, self.stamp = slot, key_of(path), stamp
        self.parent = parent or (key_of(path[:-1]) if len(path) > 1 else ROOT_PARENT)
        self.namespace = space_of(path)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("policy", BUILTIN_POLICIES)
def test_restore_in_any_order(seed: int, policy: str) -> None:
    rng = random.Random(seed)
    tree = [p for n in range(1, 6) for p in itertools.product((0, 1), repeat=n)]
    kept = set(rng.sample(tree, 30))
    slots = rng.sample(range(64), 30)
    records = [Record(slot, path, rng.randrange(9)) for slot, path in zip(slots, kept, strict=True)]
    index = make(64, policy)
    store(index, "host", (0, 0))
    before = set(keys_of((0, 0)))
    dropped = index.admin.restore("host", records)
    index.check_integrity()
    taken = set(index.slots("host", keys_of((0, 0)), 0, 2).tolist())
    for record in records:
        path = path_of(record.key)
        complete = all(
            p in kept or key_of(p) in before for p in (path[: i + 1] for i in range(len(path)))
        )
        clash = record.key in before or record.slot in taken
        if not complete or clash:
            assert record in dropped
    restored = {r.key for r in records if r not in dropped}
    assert restored | before == {info.key for info in index.admin.list_blocks()}


def test_restore_keeps_the_order_of_use_and_the_latest_copy() -> None:
    index = make(8)
    records = [Record(0, (0,), 5), Record(1, (1,), 3), Record(2, (0,), 9), Record(3, (0, 1), 9)]
    dropped = index.admin.restore("host", records)
    assert [r.slot for r in dropped] == [0]
    assert [path_of(b.key) for b in index.evictions.evict("host", 3)] == [(1,), (0, 1), (0,)]
    assert len(index) == index.num_used("host") == 0


def test_restore_finds_the_blocks_that_another_tier_has() -> None:
    index = BlockIndex([TierSpec("host", 4), TierSpec("disk", 4)])
    store(index, "host", (1, 0))
    records = [
        Record(0, (1,), 1),
        Record(1, (1, 0), 2),
        Record(2, (1, 0, 1), 3),
        Record(3, (0,), 4),
    ]
    assert index.admin.restore("disk", records) == []
    index.check_integrity()
    assert len(index) == 4
    assert {tuple(info.slots) for info in index.admin.list_blocks()} == {
        ("host", "disk"),
        ("disk",),
    }
    assert index.match(keys_of((1, 0, 1))).depths == (2, 3)
    assert {index.namespace_of(r.key) for r in records[:3]} == {NAMESPACES[1]}
    assert index.namespace_of(key_of((0,))) == NAMESPACES[0]


def test_restore_refuses_cycles_and_bad_slots() -> None:
    index = make(2)
    cycle = [Record(0, (0,), 1, key_of((1,))), Record(1, (1,), 1, key_of((0,)))]
    assert len(index.admin.restore("host", [*cycle, Record(7, (0,), 2), Record(-1, (1,), 2)])) == 4
    assert len(index) == 0
    index.check_integrity()


def test_foreign_slots_are_read_and_dropped_but_never_given_out() -> None:
    far = (3 << 40) | 17
    index = BlockIndex([TierSpec("disk", 2, foreign=True)])
    assert index.admin.restore("disk", [Record(far, (0,), 1), Record(0, (1,), 2)]) == []
    assert index.slots("disk", keys_of((0,)), 0, 1).tolist() == [far]
    grown = index.lifecycle.reserve("disk", keys_of((0, 1, 0)), 0, 3, NAMESPACES[0])
    assert sorted(grown.slots.tolist()) == [0, 1]
    index.lifecycle.abort(grown)
    assert [block.slot for block in index.evictions.evict("disk", 5)] == [far]
    index.check_integrity()
