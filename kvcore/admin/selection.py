"""Selects the blocks of an index that a command means."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvcore.admin.commands import BlockFilter
from kvcore.admin.tenants import Tenants
from kvcore.errors import ConfigError
from kvcore.index import BlockIndex
from kvcore.model.keys import KeyChain, Namespace

__all__ = ["Selection", "Selections"]


class Selection(NamedTuple):
    """What a `BlockFilter` means for one index.

    ``chains`` are the keys of a prompt, one chain for each namespace that it may belong to.
    """

    namespaces: frozenset[bytes] | None
    prefix: bytes
    chains: tuple[tuple[bytes, ...], ...] | None
    tiers: tuple[str, ...]

    def covers(self, tier: str, key: bytes, namespace: bytes) -> bool:
        """Return True if the block ``key`` of ``namespace`` in ``tier`` is selected."""
        return (
            tier in self.tiers
            and (self.namespaces is None or namespace in self.namespaces)
            and key.startswith(self.prefix)
            and (self.chains is None or any(key in chain for chain in self.chains))
        )


class Selections:
    """Resolves block filters over one model's index and tenants. The manager's thread only."""

    def __init__(self, index: BlockIndex, tenants: Tenants, block_tokens: int) -> None:
        self._index = index
        self._tenants = tenants
        self._block_tokens = block_tokens

    def resolve(self, where: BlockFilter) -> Selection:
        """Return what ``where`` selects.

        Raises ConfigError for an unknown tier or tenant, and for conditions that exclude each
        other.
        """
        tiers = self._index.tiers
        if where.tier is not None and where.tier not in tiers:
            raise ConfigError(f"no tier {where.tier!r}; there are {', '.join(tiers)}")
        if where.tokens is not None and (where.namespace or where.prefix):
            raise ConfigError(
                "given tokens with a namespace or a key; give tokens with a tenant or a salt"
            )
        spaces = self._spaces(where)
        chains = None
        if where.tokens is not None:
            if spaces is None:
                spaces = [self._tenants.space_of(None)]
            chains = tuple(self._hash(space, where.tokens) for space in spaces)
        digests = None if spaces is None else frozenset(space.digest for space in spaces)
        if where.namespace is not None:
            digests = frozenset([where.namespace]) & (digests or {where.namespace})
        selected = tiers if where.tier is None else (where.tier,)
        return Selection(digests, where.prefix, chains, selected)

    def check_held(self, selection: Selection, where: BlockFilter) -> None:
        """Raise ConfigError if no tier has a block of any selected namespace. O(index).

        A tenant of which nothing is held is most likely one whose salt or secret differs here.
        """
        if selection.namespaces is None:
            return
        held = {space for tier in self._index.tiers for space in self._index.admin.usage(tier)}
        if held & selection.namespaces:
            return
        whose = "that namespace" if where.namespace else "requests with that salt"
        if where.tenant is not None:
            whose = f"tenant {where.tenant!r}"
        elif not where.salt and not where.namespace:
            whose = "requests without a salt"
        raise ConfigError(
            f"nothing is held of {whose}, among {len(held)} namespaces; if that is wrong, give "
            "this process the namespace.secret, namespace.salt and salts that the engines have"
        )

    def _spaces(self, where: BlockFilter) -> Sequence[Namespace] | None:
        if where.tenant is not None and where.salt is not None:
            raise ConfigError("given a tenant and a salt; give one of them")
        if where.tenant is not None:
            return self._tenants.spaces(where.tenant)
        return None if where.salt is None else [self._tenants.space_of(where.salt)]

    def _hash(self, space: Namespace, packed: bytes) -> tuple[bytes, ...]:
        if len(packed) % 4 or len(packed) < 4 * self._block_tokens:
            raise ConfigError(
                f"{len(packed) // 4} tokens; a block, the least that is held, has "
                f"{self._block_tokens}"
            )
        tokens = struct.unpack(f"<{len(packed) // 4}I", packed)
        return tuple(KeyChain(space, self._block_tokens).extend(tokens))

    def ends(self, selection: Selection, tier: str) -> tuple[list[bytes], int]:
        """Return the last block of each selected prompt in ``tier``, and the count of all blocks.

        O(index) without ``chains``.
        """
        if selection.chains is None:
            return self._index.admin.leaves(tier, selection.namespaces, selection.prefix)
        ends, blocks = [], 0
        at = self._index.tiers.index(tier)
        for chain in selection.chains:
            if depth := self._index.match(chain).depths[at]:
                ends.append(chain[depth - 1])
                blocks += depth
        return ends, blocks
