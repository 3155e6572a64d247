"""What processes on several machines must agree on before they share one index.

Each machine has settings of its own. Where slots, keys or the bytes of a block would differ, one
would read what another never wrote there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

import kvcore
from kvcore.config import Config
from kvcore.runtime.build import load_plugins

__all__ = ["OF_A_MACHINE", "differing", "terms_of", "without_plugin_disks"]

_KEYS = {"key_env", "key_file"}
"""Places of a key. Each machine has its own; whether there is one is the same on all."""
OF_A_MACHINE = {"path", *_KEYS}
"""Settings of a disk that each machine has for itself. Whether there is a disk is the same on all.
"""


def terms_of(config: Config, sections: Collection[str], more: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest for each part of the settings that must be the same on all machines.

    These are the tables ``sections``, the disk but for `OF_A_MACHINE`, of each tier its plugin,
    its capacity and whether it is encrypted, kvcore's version, and ``more``.
    """
    tiers = {
        name: (tier.plugin, tier.capacity, any(tier.options.get(key) for key in _KEYS))
        for name, tier in config.tiers.items()
    }
    disk = config.disk
    parts: dict[str, Any] = {name: getattr(config, name).model_dump() for name in sections}
    parts |= {
        "disk": [disk.model_dump(exclude=OF_A_MACHINE), disk.path is not None, disk.encrypted],
        "tiers": sorted(tiers.items()),
        "kvcore's version": kvcore.__version__,
        **more,
    }
    return {name: _digest(part) for name, part in parts.items()}


def differing(own: Mapping[str, str], told: Mapping[str, str]) -> list[str]:
    """Return the parts in which two machines differ."""
    return sorted(name for name in own.keys() | told.keys() if own.get(name) != told.get(name))


def without_plugin_disks(config: Config) -> tuple[Config, list[str]]:
    """Return the settings without plugins' own tiers on a disk, and the names of those tiers.

    The leader's part of such a tier cannot reach the files of ranks on other machines. Raises
    ConfigError for a tier whose plugin there is not.
    """
    plugins = load_plugins(config)
    kinds = {name: plugins.tier(tier.plugin) for name, tier in config.tiers.items()}
    off = sorted(n for n, kind in kinds.items() if kind.medium == "disk" and kind.name != "disk")
    if not off:
        return config, []
    tiers = {name: tier for name, tier in config.tiers.items() if name not in off}
    return config.model_copy(update={"tiers": tiers}), off


def _digest(part: Any) -> str:
    text = json.dumps(part, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
