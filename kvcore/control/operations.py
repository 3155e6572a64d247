"""The orders, carried out over one model's manager. See `kvcore.control.commands` for their words.

    begin ──▶ at once: list, pin, unpin, clear, quotas ──────────────────────▶ tell
          └─▶ a job: prompts wait ──step──▶ a few graphs at a time ──ends────▶ tell

A job goes on while requests are served, behind everything that they wait for. There is one at a
time.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcore.control.audit import AuditLog
from kvcore.control.commands import (
    CHANGES,
    ClearBlocks,
    ListBlocks,
    MoveBlocks,
    Order,
    PinBlocks,
    PrefetchBlocks,
    SetQuota,
    ShowQuotas,
    UnpinBlocks,
    Where,
    name_of,
)
from kvcore.control.tenants import Tenants
from kvcore.errors import CapacityError, ConfigError, KVCoreError, UnsupportedError
from kvcore.index import Pin
from kvcore.manager import HOST, KVManager
from kvcore.model.keys import KeyChain, Namespace
from kvcore.telemetry.metrics import Metrics

__all__ = ["Control", "Tell"]

Tell = Callable[["dict[str, Any] | KVCoreError"], object]
"""Takes what came of an order: plain data, or why it was not carried out."""

MAX_PINS = 65_536
GRAPHS = 4
"""Graphs of a job in flight: more would only wait for the same media."""
SWEEP_S = 1.0
"""How often pins are looked through."""
CHAINS_A_STEP = 16
"""Prompts of a job looked at in one step: it takes the leader's thread."""


class _Chosen(NamedTuple):
    """What `Where` means here. ``chains`` are a prompt's keys, one a namespace it may be of."""

    namespaces: frozenset[bytes] | None
    prefix: bytes
    chains: tuple[tuple[bytes, ...], ...] | None
    tiers: tuple[str, ...]

    def covers(self, tier: str, key: bytes, namespace: bytes) -> bool:
        """Whether a pin on ``key`` is one on what is chosen."""
        return (
            tier in self.tiers
            and (self.namespaces is None or namespace in self.namespaces)
            and key.startswith(self.prefix)
            and (self.chains is None or any(key in chain for chain in self.chains))
        )


class _Pinned(NamedTuple):
    pin: Pin
    namespace: bytes


@dataclass
class _Job:
    """An order that moves bytes. ``todo`` are ends of prompts; counts are blocks but ``prompts``
    and ``failed``."""

    order: MoveBlocks | PrefetchBlocks
    who: str
    tell: Tell
    source: str | None
    to: str
    todo: deque[bytes]
    prompts: int
    open: int = 0
    moved: int = 0
    kept: int = 0
    failed: int = 0


class Control:
    """What operators may do with one model's KV. The manager's thread only; no call waits."""

    def __init__(
        self,
        manager: KVManager,
        tenants: Tenants,
        audit: AuditLog,
        metrics: Metrics,
        *,
        block_tokens: int,
        block_nbytes: int,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``deadline_s`` bounds one graph of a job."""
        self._clock = clock
        self._swept = clock()
        self.tenants = tenants
        self._manager = manager
        self._index = manager.index
        self._audit = audit
        self._metrics = metrics
        self._block_tokens = block_tokens
        self._block_nbytes = block_nbytes
        self._deadline_s = deadline_s
        self._pins: dict[tuple[str, bytes], _Pinned] = {}
        self._job: _Job | None = None
        self._at_once: dict[type, Callable[[Any], dict[str, Any]]] = {
            ListBlocks: self._list,
            PinBlocks: self._pin,
            UnpinBlocks: self._unpin,
            ClearBlocks: self._clear,
            SetQuota: self._set_quota,
            ShowQuotas: lambda _: {"quotas": self._quotas()},
        }

    def begin(self, order: Order, who: str, tell: Tell) -> None:
        """Carry an order out for ``who``, or begin to; ``tell`` hears once what came of it.

        Errors are told, never raised. O(index) for those that look at every block.
        """
        try:
            if isinstance(order, (MoveBlocks, PrefetchBlocks)):
                self._begin_job(order, who, tell)
            else:
                self._ended(order, who, tell, self._at_once[type(order)](order))
        except KVCoreError as error:
            self._count(order, "refused")
            tell(error)

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return self._job is not None

    def step(self) -> None:
        """Take a job on, a little, and give the metrics their counts. Call it often."""
        self._sweep()
        self.tenants.tick()
        job = self._job
        if job is None:
            return
        for _ in range(CHAINS_A_STEP):
            if not job.todo or job.open >= GRAPHS or self._manager.room.full:
                break
            self._take_on(job, job.todo.popleft())
        if not job.todo and not job.open:
            self._job = None
            told = self._size(job.moved) | {
                "prompts": job.prompts, "kept": job.kept, "failed": job.failed,
            }  # fmt: skip
            self._ended(job.order, job.who, job.tell, told)

    def _sweep(self) -> None:
        if self._pins and (now := self._clock()) - self._swept >= SWEEP_S:
            self._swept = now
            self._let_go_of_dropped()

    def _let_go_of_dropped(self) -> None:
        """Pins on blocks that were dropped keep slots of what nobody finds."""
        for at in [at for at, pinned in self._pins.items() if pinned.pin.doomed]:
            self._index.unpin(self._pins.pop(at).pin)

    def close(self) -> None:
        """The manager ends: an unfinished job is told so, and pins are let go."""
        job, self._job = self._job, None
        if job is not None:
            self._audit.write(job.who, name_of(job.order), ended=False, blocks=job.moved)
            job.tell(UnsupportedError("the process ends; a part of it was done"))
        for pinned in self._pins.values():
            self._index.unpin(pinned.pin)
        self._pins.clear()

    # -- which blocks ---------------------------------------------------------------------------

    def _choose(self, where: Where) -> _Chosen:
        tiers = self._index.tiers
        if where.tier is not None and where.tier not in tiers:
            raise ConfigError(f"no tier {where.tier!r}; there are {', '.join(tiers)}")
        if where.tokens is not None and (where.namespace or where.prefix):
            raise ConfigError("tokens with a namespace or a key; give tokens with a tenant or salt")
        spaces = self._spaces(where)
        chains = None
        if where.tokens is not None:
            if spaces is None:
                spaces = [self.tenants.space_of(None)]
            chains = tuple(self._hash(space, where.tokens) for space in spaces)
        digests = None if spaces is None else frozenset(space.digest for space in spaces)
        if where.namespace is not None:
            digests = frozenset([where.namespace]) & (digests or {where.namespace})
        chosen = tiers if where.tier is None else (where.tier,)
        return _Chosen(digests, where.prefix, chains, chosen)

    def _spaces(self, where: Where) -> Sequence[Namespace] | None:
        if where.tenant is not None and where.salt is not None:
            raise ConfigError("a tenant and a salt; give one of them")
        if where.tenant is not None:
            return self.tenants.spaces(where.tenant)
        return None if where.salt is None else [self.tenants.space_of(where.salt)]

    def _hash(self, space: Namespace, packed: bytes) -> tuple[bytes, ...]:
        if len(packed) % 4 or len(packed) < 4 * self._block_tokens:
            raise ConfigError(
                f"{len(packed) // 4} tokens; a block, the least that is held, has "
                f"{self._block_tokens}"
            )
        tokens = struct.unpack(f"<{len(packed) // 4}I", packed)
        return tuple(KeyChain(space, self._block_tokens).extend(tokens))

    def _ends(self, chosen: _Chosen, tier: str) -> tuple[list[bytes], int]:
        """The last blocks of the prompts that are chosen in a tier, and blocks in all."""
        if chosen.chains is None:
            return self._index.admin.leaves(tier, chosen.namespaces, chosen.prefix)
        ends, blocks = [], 0
        at = self._index.tiers.index(tier)
        for chain in chosen.chains:
            if depth := self._index.match(chain).depths[at]:
                ends.append(chain[depth - 1])
                blocks += depth
        return ends, blocks

    # -- at once --------------------------------------------------------------------------------

    def _list(self, order: ListBlocks) -> dict[str, Any]:
        chosen = self._choose(order.where)
        rows = sorted(self._rows(chosen), key=lambda row: -int(row["blocks"]))
        told: dict[str, Any] = {
            "block_tokens": self._block_tokens,
            "block_bytes": self._block_nbytes,
            "pins": len(self._pins),
            "rows": rows[: order.limit],
            "more": max(0, len(rows) - order.limit),
        }
        if order.prompts:
            told["prompts"] = self._prompts(chosen, order.limit)
        return told

    def _rows(self, chosen: _Chosen) -> Iterator[dict[str, Any]]:
        for tier in chosen.tiers:
            for namespace, blocks in self._index.admin.usage(tier).items():
                if chosen.namespaces is None or namespace in chosen.namespaces:
                    yield {
                        "tier": tier,
                        "tenant": self.tenants.name_of(namespace),
                        "namespace": namespace.hex(),
                        **self._size(blocks),
                    }

    def _prompts(self, chosen: _Chosen, limit: int) -> list[dict[str, Any]]:
        found: dict[bytes, dict[str, Any]] = {}
        for tier in chosen.tiers:
            for end in self._ends(chosen, tier)[0]:
                if end not in found and len(found) < limit:
                    found[end] = self._prompt(end)
        return list(found.values())

    def _prompt(self, end: bytes) -> dict[str, Any]:
        path = self._index.path(end)
        depths = zip(self._index.tiers, self._index.match(path).depths, strict=True)
        namespace = self._index.namespace_of(end)
        return {
            "key": end.hex(),
            "tenant": self.tenants.name_of(namespace),
            "namespace": namespace.hex(),
            "blocks": len(path),
            "tiers": {tier: depth for tier, depth in depths if depth},
            "pinned": [tier for tier in self._index.tiers if (tier, end) in self._pins],
        }

    def _pin(self, order: PinBlocks) -> dict[str, Any]:
        chosen = self._choose(order.where)
        wanted, blocks = [], 0
        for tier in chosen.tiers:
            ends, count = self._ends(chosen, tier)
            blocks += count
            wanted += [(tier, end) for end in ends if (tier, end) not in self._pins]
        if len(self._pins) + len(wanted) > MAX_PINS:
            raise CapacityError(
                f"{len(wanted)} prompts; {MAX_PINS} in all can be pinned: give less"
            )
        for tier, end in wanted:
            space = self._index.namespace_of(end)
            self._pins[tier, end] = _Pinned(self._index.pin(tier, end), space)
        return self._size(blocks) | {"prompts": len(wanted)}

    def _unpin(self, order: UnpinBlocks) -> dict[str, Any]:
        return {"prompts": self._let_go(self._choose(order.where))}

    def _let_go(self, chosen: _Chosen) -> int:
        """Undo pins on what is chosen; returns how many."""
        pins = [at for at, pinned in self._pins.items() if chosen.covers(*at, pinned.namespace)]
        for at in pins:
            self._index.unpin(self._pins.pop(at).pin)
        return len(pins)

    def _clear(self, order: ClearBlocks) -> dict[str, Any]:
        chosen = self._choose(order.where)
        pins = self._let_go(chosen)
        if chosen.chains is None and not chosen.prefix:
            spaces: list[bytes | None] = [None]
            if chosen.namespaces is not None:
                spaces = [*sorted(chosen.namespaces)]
            blocks = sum(self._manager.clear(s, order.where.tier) for s in spaces)
        else:
            blocks = sum(self._clear_some(chosen, tier) for tier in chosen.tiers)
        self._let_go_of_dropped()
        return self._size(blocks) | {"pins": pins}

    def _clear_some(self, chosen: _Chosen, tier: str) -> int:
        if chosen.chains is None:
            return self._manager.removals.drop(tier, self._tops(chosen, tier))
        ends = self._ends(chosen, tier)[0]
        blocks = self._manager.removals.drop(tier, ends)
        self._let_go_of_dropped()
        return blocks + sum(self._manager.removals.discard(tier, chain) for chain in chosen.chains)

    def _tops(self, chosen: _Chosen, tier: str) -> list[bytes]:
        """Every chosen block of a tier: ends alone would leave those that they stand on."""
        ends = self._ends(chosen, tier)[0]
        return [
            key for end in ends for key in self._index.path(end) if key.startswith(chosen.prefix)
        ]

    def _set_quota(self, order: SetQuota) -> dict[str, Any]:
        if order.tier not in self._index.tiers:
            there = ", ".join(self._index.tiers)
            raise ConfigError(f"no tier {order.tier!r}; there are {there}")
        blocks = self.tenants.blocks(order.tier, order.quota)
        if order.salt is not None:
            self.tenants.add(order.tenant, order.salt)
        spaces = [space.digest for space in self.tenants.spaces(order.tenant)]
        limit = self.tenants.limit(blocks)
        evicted = self._manager.removals.set_quota(order.tier, order.tenant, spaces, limit)
        return {"evicted": evicted, "quotas": self._quotas()}

    def _quotas(self) -> list[dict[str, Any]]:
        size = self._block_nbytes
        return [
            {
                "tenant": name,
                "tier": tier,
                **self._size(used),
                "quota": None if limit is None else limit * size,
            }
            for name, tier, used, limit in self.tenants.usage()
        ]

    # -- jobs -----------------------------------------------------------------------------------

    def _begin_job(self, order: MoveBlocks | PrefetchBlocks, who: str, tell: Tell) -> None:
        if self._job is not None:
            raise CapacityError("another move or prefetch is under way: ask again when it ended")
        chosen = self._choose(order.where)
        source, to = order.where.tier, HOST
        if isinstance(order, MoveBlocks):
            source, to = self._ways(order)
        elif source == HOST:
            raise ConfigError(
                "a prefetch from host memory; it is there: give a tier below, or none"
            )
        tiers = [tier for tier in chosen.tiers if tier != to]
        found = dict.fromkeys(end for tier in tiers for end in self._ends(chosen, tier)[0])
        self._job = _Job(order, who, tell, source, to, deque(found), len(found))

    def _ways(self, order: MoveBlocks) -> tuple[str, str]:
        """From where to where. Raises ConfigError for what cannot be."""
        tiers, source = self._index.tiers, order.where.tier
        if source is None or order.to not in tiers or source == order.to:
            raise ConfigError(
                f"a move from {source or 'every tier'} to {order.to!r}; give two of the tiers "
                f"{', '.join(tiers)}"
            )
        if HOST not in (source, order.to):
            raise UnsupportedError(
                f"a move from {source} to {order.to}; supported are moves to and from {HOST}: make "
                "two of it"
            )
        if source in self._manager.lookups:
            raise UnsupportedError(
                f"a move out of {source}, which other hosts read; prefetch it, or clear it"
            )
        return source, order.to

    def _take_on(self, job: _Job, end: bytes) -> None:
        """Begin with one prompt. What changed since it was chosen is left alone."""
        if end not in self._index:
            return
        path, namespace = self._index.path(end), self._index.namespace_of(end)
        if job.to == HOST and job.moved >= self._index.num_slots(HOST):
            job.kept += len(path)  # more would push out what this job brought
            return
        before = self._depth(job.to, path)

        def ended() -> None:
            job.open -= 1
            self._settle(job, path, before)

        job.open += 1
        if not self._launch(job, path, namespace, ended):
            ended()

    def _launch(
        self, job: _Job, path: list[bytes], namespace: bytes, ended: Callable[[], object]
    ) -> bool:
        if job.to != HOST:
            return self._manager.saves.write(job.to, path, namespace, on_end=ended)
        hit = self._manager.get_match(path, namespace)
        return self._manager.loads.fetch(hit, deadline_s=self._deadline_s, on_end=ended)

    def _settle(self, job: _Job, path: list[bytes], before: int) -> None:
        """What arrived is there; a move takes it out of where it was."""
        there = self._depth(job.to, path)
        job.moved += max(0, there - before)
        job.failed += there < len(path)
        if isinstance(job.order, MoveBlocks) and job.source is not None:
            held = self._depth(job.source, path)
            # Of a part nothing goes: what has not arrived stands on it.
            job.kept += held - self._manager.removals.discard(job.source, path[:there])

    def _depth(self, tier: str, path: Sequence[bytes]) -> int:
        """Leading blocks of a prompt that a tier holds, published."""
        return self._index.match(path).depths[self._index.tiers.index(tier)]

    # -- the record -----------------------------------------------------------------------------

    def _ended(self, order: Order, who: str, tell: Tell, told: dict[str, Any]) -> None:
        self._count(order, "done")
        if isinstance(order, CHANGES):
            counts = {name: value for name, value in told.items() if isinstance(value, int)}
            self._audit.write(who, name_of(order), **_asked(order), **counts)
        tell(told)

    def _count(self, order: Order, outcome: str) -> None:
        if isinstance(order, CHANGES):
            self._metrics.ordered(name_of(order), outcome)

    def _size(self, blocks: int) -> dict[str, int]:
        return {"blocks": blocks, "bytes": blocks * self._block_nbytes}


def _asked(order: Order) -> dict[str, Any]:
    """What an order was about. A salt, and a prompt, are left out: they are their owner's."""
    if isinstance(order, SetQuota):
        return {"tenant": order.tenant, "tier": order.tier, "quota": order.quota}
    said: dict[str, Any] = {"to": order.to} if isinstance(order, MoveBlocks) else {}
    where = getattr(order, "where", Where())
    for name in ("tenant", "tier"):
        if getattr(where, name) is not None:
            said[name] = getattr(where, name)
    if where.salt is not None:
        said["salted"] = True
    if where.namespace is not None:
        said["namespace"] = where.namespace.hex()
    if where.prefix:
        said["key"] = where.prefix.hex()
    if where.tokens is not None:
        said["tokens"] = len(where.tokens) // 4
    return said
