"""The table of keys against a dict."""

from __future__ import annotations

import random

import pytest

from kvcore.model.key_table import KeyTable


def places(table: KeyTable) -> int:
    """Return how many ids there is room for."""
    return table._ids.nbytes // 4


@pytest.mark.parametrize("expected", [100, 127, 128, 170, 171, 1000])
def test_it_is_allocated_for_as_many_keys_as_are_expected(expected: int) -> None:
    table = KeyTable(expected)
    table.grow(expected)
    before = places(table)
    assert before <= 3 * expected, "no more memory than the module says"
    for node in range(expected):
        table.put(node.to_bytes(16, "big"), node)
    assert places(table) == before


@pytest.mark.parametrize("seed", range(20))
def test_key_table_against_a_dict(seed: int) -> None:
    rng = random.Random(seed)
    table, twin = KeyTable(4), dict[bytes, int]()
    table.grow(64)
    universe = [rng.randbytes(16) for _ in range(48)]  # the table has 16 places at first
    free = list(range(64))
    for _ in range(400):
        key = rng.choice(universe)
        assert table.get(key) == twin.get(key)
        if key in twin:
            assert table.key(twin[key]) == key
            table.remove(twin[key])
            free.append(twin.pop(key))
        elif len(twin) < rng.choice((8, 40)):
            twin[key] = free.pop()
            table.put(key, twin[key])
        elif len(twin) < 24:
            many = rng.sample([k for k in universe if k not in twin], rng.randrange(20))
            nodes = [free.pop() for _ in many]
            table.put_all(many, nodes)
            twin.update(zip(many, nodes, strict=True))
        assert len(table) == len(twin)
        assert 3 * len(table) <= 2 * places(table)
        assert all(table.get(k) == twin.get(k) for k in universe)
        assert sorted(table.nodes()) == sorted(twin.values())
    with pytest.raises(KeyError):
        table[b"absent".ljust(16)]
