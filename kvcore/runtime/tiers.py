"""Backing tiers, from their settings to the objects that serve them. No engine is involved.

    leader   prepare_backings()   once: capacity, blocks held already, locks
    worker   BackingOpener        in each rank, with the options from the leader's part

On several machines hold_backings() does the leader's part for the disks of another machine, in one
of its ranks, before the leader. The leader uses what all machines hold (`kvcore.tiers.held`).

The disk tier of ``[disk]`` and each ``[tiers.NAME]`` go the same way, through the plugin hook.
"""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvcore.config import BackingConfig, Config, read_key
from kvcore.config.paths import folder_of
from kvcore.config.schema_tiers import DiskConfig
from kvcore.errors import TierError, TierUnavailable, UnsupportedError
from kvcore.index import TierSpec
from kvcore.index.policy.admission import Always, OnNthUse
from kvcore.manager import Backing, WritePolicy
from kvcore.plugins import PluginManager, PreparedTier, TierContext, TierPlugin
from kvcore.tiers.base import Tier
from kvcore.tiers.geometry import Geometry
from kvcore.tiers.guard import BlockCipher, BlockGuard, BlockMac, key_of_secret
from kvcore.tiers.held import Held, agree
from kvcore.transfer.graph import Path

_log = logging.getLogger("kvcore.runtime.tiers")

DISK = "disk"
_MODEL = "kvcore.model"
"""The rank option with the model's fingerprint."""
_ELSEWHERE = "kvcore.elsewhere"
"""The rank option with those of the other machines, in order."""


class _TierSettings(NamedTuple):
    plugin: str
    common: BackingConfig
    options: Mapping[str, Any]
    mac_key: bytes


def _settings(config: Config) -> Iterator[tuple[str, _TierSettings]]:
    """Yield the name and settings of every backing tier, nearest first."""
    disk, secret = config.disk, config.namespace.secret
    mac_key = key_of_secret(secret, "mac") if secret else b""
    if disk.path is not None:
        options = {
            "path": disk.path,
            "direct_io": disk.direct_io,
            "io_threads": disk.io_threads,
            "sync_interval_s": disk.sync_interval_s,
            "key_env": disk.key_env,
            "key_file": disk.key_file,
            "device_sums": disk.to_device == "on",
        }
        yield DISK, _TierSettings(DISK, disk, options, mac_key if disk.authenticate else b"")
    for name, tier in sorted(config.tiers.items()):
        yield name, _TierSettings(tier.plugin, tier, tier.options, mac_key)


def disk_guards(config: Config) -> list[BlockGuard]:
    """Return what the disk tier of these settings protects blocks with, and has protected them.

    Raises ConfigError, UnsupportedError.
    """
    disk, secret = config.disk, config.namespace.secret
    found: list[BlockGuard] = []
    if disk.encrypted:
        found.append(BlockCipher(read_key(disk.key_env, disk.key_file)))
    if secret:
        found.append(BlockMac(key_of_secret(secret, "mac")))
    return found


@dataclass(frozen=True)
class PreparedBacking:
    """A tier as the leader sees it: its spec for the index, its binding for the manager.

    ``model`` is the fingerprint of the model whose blocks it holds. ``elsewhere`` is what other
    machines hold of it.
    """

    spec: TierSpec
    backing: Backing
    prepared: PreparedTier
    model: bytes
    elsewhere: Sequence[Held] = ()

    @property
    def rank_options(self) -> dict[str, Any]:
        """Plain data for `BackingOpener` in every rank.

        The fingerprint is the leader's. That of a rank may differ: some models change their config
        while their weights load, which happens in the workers' processes alone.
        """
        own = _rank_options(self.prepared, self.model)
        if not self.elsewhere:
            return own
        return {**own, _ELSEWHERE: [dict(other.rank_options) for other in self.elsewhere]}


def _rank_options(prepared: PreparedTier, model: bytes) -> dict[str, Any]:
    return {**prepared.rank_options, _MODEL: model.hex()}


def prepare_backings(
    config: Config,
    geometry: Geometry,
    plugins: PluginManager,
    share: int = 1,
    elsewhere: Sequence[Mapping[str, Held]] = (),
) -> list[PreparedBacking]:
    """Return every backing tier that can be used; one that cannot is logged and left out.

    ``share`` leaders, each with blocks of its own, divide the capacities among them. ``elsewhere``
    is what `hold_backings` found on each machine but this one. Does I/O: a disk tier scans its
    records. Raises ConfigError for options that do not fit.
    """
    found = []
    for name, settings in _settings(config):
        plugin = plugins.tier(settings.plugin)
        common = settings.common
        context = _context(name, settings, config, geometry, share)
        others: list[Held] = []
        try:
            if plugin.medium == "disk":
                others = _on_others(name, elsewhere)
            prepared = agree(_prepare(plugin, context), others)
        except (TierError, UnsupportedError) as error:
            _log.error("the tier %s is off: %s", name, error)
            continue
        found.append(
            PreparedBacking(
                _spec(name, common, prepared, plugins),
                _backing(name, common, plugin, prepared),
                prepared,
                geometry.model,
                others,
            )
        )
    return found


def hold_backings(
    config: Config, geometry: Geometry, plugins: PluginManager
) -> tuple[dict[str, Held], ExitStack]:
    """Prepare the tiers on this machine's disks, whose leader is on another one. Does I/O.

    Returns what they hold, by name, and what releases them: close it after the ranks of this
    machine have closed their tiers. Raises ConfigError for options that do not fit.
    """
    found: dict[str, Held] = {}
    with ExitStack() as releases:
        for name, settings in _settings(config):
            plugin = plugins.tier(settings.plugin)
            if plugin.medium != "disk":
                continue
            try:
                prepared = _prepare(plugin, _context(name, settings, config, geometry))
            except (TierError, UnsupportedError) as error:
                found[name] = Held(why=str(error))
                continue
            releases.callback(prepared.release)
            found[name] = Held.of(prepared, _rank_options(prepared, geometry.model))
        return found, releases.pop_all()


def _on_others(name: str, elsewhere: Sequence[Mapping[str, Held]]) -> list[Held]:
    """Return what each other machine holds of a tier.

    Raises TierUnavailable if one of them cannot use it.
    """
    found = [held.get(name, Held(why="its ranks said nothing of it")) for held in elsewhere]
    for number, held in enumerate(found, start=1):
        if held.why:
            raise TierUnavailable(f"on machine {number} of 0 to {len(found)}: {held.why}")
    return found


def _context(
    name: str, settings: _TierSettings, config: Config, geometry: Geometry, share: int = 1
) -> TierContext:
    """Return what the leader's part of a tier is made from."""
    return TierContext(
        name,
        geometry,
        settings.common.capacity,
        settings.options,
        share=share,
        cluster=config.cluster,
        state_folders=_state_folders(config),
        mac_key=settings.mac_key,
    )


def _state_folders(config: Config) -> list[pathlib.Path]:
    """Return the folders for pending deletes: the disk tier's, if any, and one on tmpfs.

    The disk tier's folder survives a reboot.
    """
    disk = [] if config.disk.path is None else [config.disk.path]
    return [*disk, folder_of(config.server)]


def _prepare(plugin: TierPlugin, context: TierContext) -> PreparedTier:
    if plugin.prepare is not None:
        return plugin.prepare(context)
    return PreparedTier(max(context.num_slots, 1))


def _spec(
    name: str, common: BackingConfig, prepared: PreparedTier, plugins: PluginManager
) -> TierSpec:
    policy = plugins.policy(common.policy)
    return TierSpec(
        name, prepared.num_slots, policy, common.policy_options, foreign=prepared.foreign
    )


def _backing(
    name: str, common: BackingConfig, plugin: TierPlugin, prepared: PreparedTier
) -> Backing:
    remote = plugin.medium == "remote"
    write = WritePolicy(common.write)
    selective = write is WritePolicy.SELECTIVE
    return Backing(
        name,
        Path.REMOTE2H if remote else Path.DISK2H,
        Path.H2REMOTE if remote else Path.H2DISK,
        write,
        OnNthUse(common.admit_after) if selective else Always(),
        prepared.finder,
        prepared.node,
        prepared.clears,
        isinstance(common, DiskConfig) and common.to_device == "on",
    )


class BackingOpener:
    """Opens, in one rank, the tiers that the leader names."""

    def __init__(
        self,
        config: Config,
        geometry: Geometry,
        rank: int,
        plugins: PluginManager,
        share: int = 1,
    ) -> None:
        self._settings = dict(_settings(config))
        self._geometry = geometry
        self._rank = rank
        self._plugins = plugins
        self._share = share
        self._cluster = config.cluster

    def __call__(self, name: str, options: Mapping[str, Any]) -> Tier:
        """Open a tier with its `PreparedBacking.rank_options` of the leader.

        Raises TierError if the medium cannot be used.
        """
        settings = self._settings[name]
        machine = self._geometry.held[0] // len(self._geometry.shards)
        if machine and _ELSEWHERE in options:
            options = options[_ELSEWHERE][machine - 1]
        own = {
            option: value for option, value in options.items() if option not in (_MODEL, _ELSEWHERE)
        }
        context = TierContext(
            name,
            replace(self._geometry, model=bytes.fromhex(options[_MODEL])),
            settings.common.capacity,
            settings.options,
            rank=self._rank,
            rank_options=own,
            share=self._share,
            cluster=self._cluster,
            mac_key=settings.mac_key,
        )
        return self._plugins.tier(settings.plugin).factory(context)
