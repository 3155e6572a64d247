"""SGLang's sources, and what the probes miss when a name in them changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.plugins.probes import Standing, judge
from kvcore.plugins.sources import Sources
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

    found = judge(ENGINE)
    linker = next(probe for probe in ENGINE.probes() if probe.name == plugin.LINKER_PROBE)
    lost = found._replace(lost=((linker, "no such module"),))
    monkeypatch.setattr(plugin, "require", lambda engine: lost)
    verdict.cache_clear()
    with pytest.raises(UnsupportedError, match="no such module"):
        plugin.linker_base()
    plugin.storage_base()
    verdict.cache_clear()
