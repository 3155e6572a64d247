"""The values that the calls of the index take and return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvcore.errors import ConfigError
from kvcore.index.policy import BUILTIN_POLICIES
from kvcore.index.policy.base import EvictionPolicy, Recency
from kvcore.model.keys import ROOT_PARENT

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TierSpec:
    """A tier as the index sees it: its number of slots and its eviction policy.

    ``policy`` is a name in `BUILTIN_POLICIES` or a class. ``foreign`` allows slots beyond
    ``num_slots`` (with a store id in the high bits): `Admin.restore` accepts them, and
    `Lifecycle.reserve` never allocates them.
    """

    name: str
    num_slots: int
    policy: str | type[EvictionPolicy] = "lru"
    policy_options: Mapping[str, object] = field(default_factory=dict)
    foreign: bool = False

    def make_policy(self, recency: Recency) -> EvictionPolicy:
        """Make a new policy; `ConfigError` if the name or an option is not known."""
        policy = BUILTIN_POLICIES.get(self.policy) if isinstance(self.policy, str) else self.policy
        if policy is None:
            raise ConfigError(
                f"tier {self.name!r}: there is no eviction policy {self.policy!r}; "
                f"use one of {', '.join(sorted(BUILTIN_POLICIES))}"
            )
        try:
            return policy(self.num_slots, recency, **self.policy_options)
        except TypeError as error:
            raise ConfigError(
                f"tier {self.name!r}: options of policy {self.policy!r}: {error}"
            ) from error


class Match(NamedTuple):
    """How much of a prompt each tier has published: tier ``t`` holds blocks [0, depths[t])."""

    keys: Sequence[bytes]
    depths: tuple[int, ...]

    @property
    def depth(self) -> int:
        """The number of leading blocks that at least one tier holds."""
        return max(self.depths)


class Evicted(NamedTuple):
    """A block that was or is being evicted. ``parent`` is `ROOT_PARENT` at a prompt's start."""

    key: bytes
    slot: int
    parent: bytes
    namespace: bytes


class Event(NamedTuple):
    """Blocks that a tier has published (``stored``) or no longer publishes.

    Published blocks are consecutive blocks of one chain, and ``parent`` is the parent of the
    first. Removed blocks are in no order, and their ``parent`` has no meaning.
    """

    stored: bool
    tier: str
    keys: tuple[bytes, ...]
    parent: bytes = ROOT_PARENT


class BlockInfo(NamedTuple):
    """A published block and its slot in each tier that holds it."""

    key: bytes
    parent: bytes
    namespace: bytes
    slots: dict[str, int]


class ScannedBlock(Protocol):
    """A block found by a tier's scan, for `Admin.restore`: `kvcore.tiers.base.BlockRecord` fits."""

    @property
    def slot(self) -> int: ...
    @property
    def key(self) -> bytes: ...
    @property
    def parent(self) -> bytes: ...
    @property
    def namespace(self) -> bytes: ...
    @property
    def stamp(self) -> int: ...


class Pin:
    """A hold on a published block and its ancestors in one tier, until `BlockIndex.unpin`."""

    __slots__ = ("doomed", "node", "tier")

    def __init__(self, tier: str, node: int) -> None:
        self.tier = tier
        self.node = node
        self.doomed: tuple[int, ...] = ()  # slots of dropped blocks that are still read


class Reservation:
    """Slots for blocks [start, stop) of a prompt, to be filled and then committed or aborted.

    ``evicted`` lists the blocks that were evicted to make room. Their slots may be among ``slots``.
    """

    __slots__ = (
        "evicted",
        "filled",
        "held",
        "keys",
        "live",
        "nodes",
        "parent",
        "parked",
        "pin",
        "revoked",
        "slots",
        "start",
        "tier",
    )

    def __init__(self, tier: str, start: int, parent: int) -> None:
        self.tier = tier
        self.start = start
        self.keys: list[bytes] = []
        self.parent = parent
        self.nodes: list[int] = []
        self.slots: Slots = np.empty(0, dtype=np.int64)
        self.evicted: list[Evicted] = []
        self.live = 0  # nodes[:live] are still in the index
        self.filled = False  # committed, waiting for the parent
        self.revoked = False  # blocks were cleared before the commit
        self.held = False  # slots stay allocated until `Lifecycle.release`
        self.parked: list[int] = []  # slots of blocks removed while it was held
        self.pin: Pin | None = None  # on its published blocks while it is held

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def stop(self) -> int:
        """The index in the prompt after the last reserved block."""
        return self.start + len(self.keys)


class Eviction:
    """Blocks being demoted: no longer matched, with their slots kept until the demotion ends."""

    __slots__ = ("blocks", "nodes", "parked", "tier")

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self.blocks: list[Evicted] = []
        self.nodes: list[int] = []
        self.parked: list[int] = []  # slots of blocks dropped meanwhile
