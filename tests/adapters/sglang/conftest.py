"""What tests of SGLang's adapter share."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

from kvcore_sglang import plugin

BASE = "sglang.srt.mem_cache.unified_cache.unified_cache_linker"


@pytest.fixture
def linker_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`KVCoreLinker` over a stand-in for SGLang's base class, which it takes nothing from."""
    base: Any = ModuleType(BASE)
    base.UnifiedCacheLinker = object
    names = [BASE.rsplit(".", depth)[0] for depth in range(1, BASE.count(".") + 1)]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, BASE, base)
    monkeypatch.setattr(plugin, "_enter", lambda entrance: None)  # the probes would miss the rest
    monkeypatch.delitem(sys.modules, "kvcore_sglang.linker", raising=False)
    found = importlib.import_module("kvcore_sglang.linker").KVCoreLinker
    monkeypatch.delitem(sys.modules, "kvcore_sglang.linker")
    return found
