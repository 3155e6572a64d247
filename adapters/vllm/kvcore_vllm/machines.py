"""What an engine needs whose ranks are on several machines (vLLM's ``--nnodes``).

On one machine vLLM hands its settings to every rank. On several, each machine has a command line
and an environment of its own. It may have other settings, another kvcore, or none. A rank without
kvcore would never end a load, and one with other blocks would read another slot's bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING

from kvcore.config import Config
from kvcore.errors import UnsupportedError
from kvcore.model.spec import ModelDescription
from kvcore.runtime import machines as runtime
from kvcore.runtime.build import hold_tiers
from kvcore.tiers.held import Held

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["HeldDisks", "Terms", "check_terms", "machines", "terms_of", "usable"]

_log = logging.getLogger("kvcore.vllm")

_SECTIONS = ("block", "namespace", "host", "points", "transfer", "fusion", "vllm")
"""The tables of settings by which ranks and leader must go alike.

Of ``[tiers]`` these are the names, plugins and capacities, and whether a tier is encrypted. Options
may name a machine's own addresses: what one rank does not find where another has stored it is a
miss. Of ``[disk]`` it is all but `kvcore.runtime.machines.OF_A_MACHINE`.
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
        that has no disks to prepare, behind a server, which has them, and if they are prepared:
        vLLM asks again when it wakes up. Raises ConfigError for options that do not fit.
        """
        if config.server.address is not None:
            return None
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
    Raises UnsupportedError for a server that ranks on other machines cannot reach, and ConfigError
    for a tier whose plugin there is not.
    """
    count = machines(vllm_config)
    if count == 1:
        return config
    address = config.server.address
    if address is not None and not address.startswith("tcp://"):
        raise UnsupportedError(
            f"ranks on {count} machines behind a server at {address!r} (server.address), which is "
            "on each machine another one: give all machines the first one's "
            '"tcp://HOST:PORT", and start `kvcore server --machine NUMBER` on each other one'
        )
    if address is not None:
        return config  # the tiers are the servers'
    config, off = runtime.without_plugin_disks(config)
    if off and tell:
        _log.warning(
            "the tier %s is off: its plugin's leader cannot reach the files of ranks on other "
            "machines (there are %d machines); use kvcore's own disk (plugin disk), or a remote "
            "store",
            ", ".join(off),
            count,
        )
    return config


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
    more = {
        "attention plugins": sorted(hooks),
        "context parallelism": context,
        "the model's cache": repr(replace(model, fingerprint=b"", alone=())),
        "server.address": config.server.address,
    }
    return Terms(runtime.terms_of(config, _SECTIONS, more))


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
        if other := runtime.differing(own.parts, told.parts):
            raise UnsupportedError(
                f"{which} goes by other settings than the leader, on an engine over several "
                f"machines: {', '.join(other)}. Give every machine the same ones; only disk.path, "
                "the place of its key, and [tiers.NAME.options] may differ"
            )
