"""SGLang's sources, and what the probes miss when a name in them changes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcore.engines.sources import Sources
from kvcore.engines.verdict import Standing, judge
from kvcore_sglang.gate import LayerGate
from kvcore_sglang.plugin import ENGINE, verdict
from tests.support.probes import unnoticed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_every_interface_is_missed_when_it_is_renamed(tmp_path: Path) -> None:
    verdict = judge(ENGINE)
    assert verdict.standing is Standing.TRIED
    assert not verdict.lost
    assert unnoticed(Sources("sglang"), ENGINE.probes(), tmp_path) == []


def test_an_entrance_that_this_version_lacks_stops_its_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvcore.errors import UnsupportedError
    from kvcore_sglang import plugin
    from kvcore_sglang.probes import LINKER_PROBE

    found = judge(ENGINE)
    linker = next(probe for probe in ENGINE.probes() if probe.name == LINKER_PROBE)
    lost = found._replace(lost=((linker, "no such module"),))
    monkeypatch.setattr(plugin, "require", lambda engine: lost)
    verdict.cache_clear()
    with pytest.raises(UnsupportedError, match="no such module"):
        plugin.linker_base()
    plugin.storage_base()
    verdict.cache_clear()


# -- the gate in the place of SGLang's counter ----------------------------------------------------

COUNTERS = {"layer_transfer_counter", "hicache_layer_transfer_counter"}
"""What pools and workers call the linker's ``layer_done_counter``."""


def asked_of_counters(function: ast.AST) -> Iterator[str]:
    """Yield the attributes that a function reads of a counter, also under a name of its own."""

    def is_counter(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr in COUNTERS

    nodes = list(ast.walk(function))
    names = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and is_counter(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes:
        if isinstance(node, ast.Attribute):
            of = node.value
            if is_counter(of) or (isinstance(of, ast.Name) and of.id in names):
                yield node.attr


def test_the_gate_has_all_that_sglang_asks_of_its_counter() -> None:
    found: dict[str, str] = {}
    for root in Sources("sglang").roots:
        for file in root.rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            if any(name in text for name in COUNTERS):
                for node in ast.walk(ast.parse(text)):
                    if isinstance(node, ast.FunctionDef):
                        found.update(dict.fromkeys(asked_of_counters(node), file.name))
    assert {"consumer_index", "num_layers", "set_consumer", "wait_until"} <= set(found)
    gate = LayerGate(None, layers=2, layerwise=True)
    missing = {name: file for name, file in found.items() if not hasattr(gate, name)}
    # Speculative decoding, for batches that load only; kvcore stands aside where it is in use.
    assert missing == {"events": "base_spec_worker.py"}
