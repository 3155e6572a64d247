"""Plugins: what others may add to kvcore, and how they say so."""

from __future__ import annotations

from kvcore.plugins.hookspecs import (
    AttentionPlugin,
    EngineSpec,
    OpsPlugin,
    PolicyPlugin,
    SelectorPlugin,
    ServeCommand,
    hookimpl,
    store_plugin,
)
from kvcore.plugins.manager import PluginManager
from kvcore.tiers.spec import PreparedTier, TierContext, TierPlugin

__all__ = [
    "AttentionPlugin",
    "EngineSpec",
    "OpsPlugin",
    "PluginManager",
    "PolicyPlugin",
    "PreparedTier",
    "SelectorPlugin",
    "ServeCommand",
    "TierContext",
    "TierPlugin",
    "hookimpl",
    "store_plugin",
]
