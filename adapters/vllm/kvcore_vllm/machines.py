"""What an engine needs whose ranks are on several machines (vLLM's ``--nnodes``).

On one machine vLLM hands its settings to every rank. On several, each machine has a command line
and an environment of its own. It may have other settings, another kvcore, or none. A rank without
kvcore would never end a load, and one with other blocks would read another slot's bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import kvcore
from kvcore.config import Config
from kvcore.errors import UnsupportedError
from kvcore.model.spec import ModelDescription
from kvcore.runtime.build import hold_tiers, load_plugins
from kvcore.tiers.held import Held

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["HeldDisks", "Terms", "check_terms", "machines", "terms_of", "usable"]

_log = logging.getLogger("kvcore.vllm")

_SECTIONS = ("block", "namespace", "host", "points", "transfer", "fusion", "vllm")
"""The tables of settings by which ranks and leader must go alike.

Of ``[tiers]`` these are the names, plugins and capacities, and whether a tier is encrypted. Options
may name a machine's own addresses: what one rank does not find where another has stored it is a
miss. Of ``[disk]`` it is all but `_OF_A_MACHINE`.
"""
_KEYS = {"key_env", "key_file"}
"""Places of a key. Each machine has its own; whether there is one is the same on all."""
_OF_A_MACHINE = {"path", *_KEYS}
"""Settings of a disk that each machine has for itself. Whether there is a disk is the same on all.
"""


@dataclass(frozen=True)
class Terms:
    """What a rank goes by, as a digest for each part."""

    parts: Mapping[str, str] = field(default_factory=dict)


class HeldDisks:
    """The disks of a machine without the leader, which the first rank there prepares for it."""

    def __init__(self) -> None:
        self._release: Callable[[], None] | None = None

    def prepare(
        self, config: Config, model: ModelDescription, rank: int
    ) -> Mapping[str, Held] | None:
        """Prepare the disks, and return what the leader has to know of them, by tier.

        Does I/O, and blocks for some seconds if an engine still uses a disk. Returns None on a rank
        that has no disks to prepare, and if they are prepared: vLLM asks again when it wakes up.
        Raises ConfigError for options that do not fit.
        """
        if rank not in model.firsts[1:] or self._release is not None:
            return None
        held, self._release = hold_tiers(config, model, rank)
        return held

    def close(self) -> None:
        """Release the disks, after this rank has closed its tiers."""
        release, self._release = self._release, None
        if release is not None:
            release()


def machines(vllm_config: VllmConfig) -> int:
    """Return how many machines hold the ranks of one replica of the model."""
    return int(vllm_config.parallel_config.nnodes_within_dp)


def usable(config: Config, vllm_config: VllmConfig, *, tell: bool) -> Config:
    """Return the settings that can be followed where the ranks are.

    On several machines a plugin's own tiers on a disk are off; ``tell`` says whether to log that.
    Raises UnsupportedError if a server is to hold the KV of ranks on several machines, and
    ConfigError for a tier whose plugin there is not.
    """
    count = machines(vllm_config)
    if count == 1:
        return config
    if config.server.address is not None:
        raise UnsupportedError(
            f"ranks on {count} machines behind a server (server.address): a server shares its "
            "memory with ranks of its own machine only, and servers do not agree on their slots. "
            "Leave the address away: each rank then has host memory of its own"
        )
    plugins = load_plugins(config)
    kinds = {name: plugins.tier(tier.plugin) for name, tier in config.tiers.items()}
    off = sorted(n for n, kind in kinds.items() if kind.medium == "disk" and kind.name != "disk")
    if not off:
        return config
    if tell:
        _log.warning(
            "the tier %s is off: its plugin's leader cannot reach the files of ranks on other "
            "machines (there are %d machines); use kvcore's own disk (plugin disk), or a remote "
            "store",
            ", ".join(off),
            count,
        )
    tiers = {name: tier for name, tier in config.tiers.items() if name not in off}
    return config.model_copy(update={"tiers": tiers})


def terms_of(
    config: Config,
    model: ModelDescription,
    hooks: Iterable[str] = (),
    context: Mapping[str, int] | None = None,
) -> Terms:
    """Return what leader and ranks must have in common.

    ``hooks`` are the identities of the plugins that change attention, and ``context`` says which
    tokens a rank has of a page (`kvcore_vllm.context.context_sizes`). The fingerprint of the model
    is left out: it is the leader's that counts, and a rank's may differ.
    """
    tiers = {
        name: (tier.plugin, tier.capacity, any(tier.options.get(key) for key in _KEYS))
        for name, tier in config.tiers.items()
    }
    parts: dict[str, Any] = {name: getattr(config, name).model_dump() for name in _SECTIONS}
    disk = config.disk
    parts |= {
        "disk": [disk.model_dump(exclude=_OF_A_MACHINE), disk.path is not None, disk.encrypted],
        "tiers": sorted(tiers.items()),
        "attention plugins": sorted(hooks),
        "context parallelism": context,
        "the model's cache": repr(replace(model, fingerprint=b"", alone=())),
        "kvcore's version": kvcore.__version__,
    }
    return Terms({name: _digest(part) for name, part in parts.items()})


def _digest(part: Any) -> str:
    text = json.dumps(part, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def check_terms(
    own: Terms, found: Mapping[tuple[int, int], object], stages: int, tensor_ranks: int
) -> None:
    """Raise UnsupportedError unless every rank has the terms ``own``.

    ``found`` has what vLLM was told by each rank, by (stage, tensor-parallel rank).
    """
    for stage, rank in product(range(stages), range(tensor_ranks)):
        told = found.get((stage, rank))
        which = f"rank {stage * tensor_ranks + rank} of {stages * tensor_ranks}"
        if not isinstance(told, Terms):
            raise UnsupportedError(
                f"{which} does not serve kvcore, on an engine over several machines: start vLLM "
                "with the same --kv-transfer-config on every machine, and with KVCoreConnector "
                "alone, not in a MultiConnector; the log of its machine may say more"
            )
        parts = own.parts.keys() | told.parts.keys()
        other = sorted(name for name in parts if own.parts.get(name) != told.parts.get(name))
        if other:
            raise UnsupportedError(
                f"{which} goes by other settings than the leader, on an engine over several "
                f"machines: {', '.join(other)}. Give every machine the same ones; only disk.path, "
                "the place of its key, and [tiers.NAME.options] may differ"
            )
