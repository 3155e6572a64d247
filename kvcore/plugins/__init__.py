"""Plugins: what third parties can add to kvcore, and how they register it."""

from __future__ import annotations

from kvcore.engines.spec import EngineSpec, ServeCommand
from kvcore.plugins.attention import AttentionBatch, AttentionCall, AttentionHook
from kvcore.plugins.hookspecs import (
    AttentionPlugin,
    OpsPlugin,
    PointPolicyPlugin,
    PolicyPlugin,
    SelectorPlugin,
    hookimpl,
    store_plugin,
)
from kvcore.plugins.manager import PluginManager
from kvcore.tiers.spec import PreparedTier, TierContext, TierPlugin

__all__ = [
    "AttentionBatch",
    "AttentionCall",
    "AttentionHook",
    "AttentionPlugin",
    "EngineSpec",
    "OpsPlugin",
    "PluginManager",
    "PointPolicyPlugin",
    "PolicyPlugin",
    "PreparedTier",
    "SelectorPlugin",
    "ServeCommand",
    "TierContext",
    "TierPlugin",
    "hookimpl",
    "store_plugin",
]
