"""Carries out the commands of `kvcore.admin.commands` over one model's manager.

    begin ──▶ at once: list, pin, unpin, clear, quotas ──────────────▶ reply
          └─▶ a job: move, prefetch ──step, step, ... ──finished─────▶ reply

Every command that changes something is counted, and leaves lines in the audit log: one before it is
carried out, one after.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvcore.admin.audit import AuditLog
from kvcore.admin.commands import (
    CHANGES,
    BlockFilter,
    ClearBlocks,
    Command,
    ListBlocks,
    MoveBlocks,
    PinBlocks,
    PrefetchBlocks,
    SetQuota,
    ShowQuotas,
    UnpinBlocks,
    command_name,
)
from kvcore.admin.jobs import Job, Jobs
from kvcore.admin.pins import Pins
from kvcore.admin.queries import Queries
from kvcore.admin.selection import Selection, Selections
from kvcore.admin.tenants import Tenants
from kvcore.errors import ConfigError, KVCoreError
from kvcore.manager import KVManager
from kvcore.telemetry.metrics import Metrics

__all__ = ["Admin", "ReplyTo", "record_refusal"]

ReplyTo = Callable[["dict[str, Any] | KVCoreError"], object]
"""Takes the result of a command as plain data, or the error because of which it was refused."""

MAX_REASON = 200
"""Characters of a refusal's reason in the audit log."""
SWEEP_S = 1.0
"""Seconds between two looks for pins on dropped blocks, and for pins whose time is over."""


class Admin:
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
        """``deadline_s`` bounds each load of a job."""
        self.tenants = tenants
        self._clock = clock
        self._swept = clock()
        self._manager = manager
        self._index = manager.index
        self._audit = audit
        self._metrics = metrics
        self._selections = Selections(manager.index, tenants, block_tokens)
        self._pins = Pins(manager.index, self._selections, lambda: self._clock())
        self._jobs = Jobs(manager, self._selections, deadline_s)
        self._queries = Queries(
            manager.index, tenants, self._selections, self._pins, block_tokens, block_nbytes
        )
        self._at_once: dict[type, Callable[[Any], dict[str, Any]]] = {
            ListBlocks: self._queries.list_blocks,
            PinBlocks: self._pin,
            UnpinBlocks: self._unpin,
            ClearBlocks: self._clear,
            SetQuota: self._set_quota,
            ShowQuotas: lambda _: self._queries.quotas(),
        }

    def begin(self, command: Command, who: str, reply: ReplyTo) -> None:
        """Carry a command out for ``who``, or begin to.

        A command that changes something is refused if the audit log cannot be written. ``reply`` is
        called exactly once, with the result or the error; nothing is raised. Commands that look at
        every block take O(index).
        """
        try:
            self._pins.release_ended()
            if isinstance(command, CHANGES):
                self._audit.begin(who, command_name(command), **_subject(command))
            if isinstance(command, (MoveBlocks, PrefetchBlocks)):
                self._begin_job(command, who, reply)
            else:
                result = self._at_once[type(command)](command)
                self._finish(command, who, reply, result)
        except KVCoreError as error:
            self._count(command, "refused")
            self.record_refusal(command, who, error)
            reply(error)

    def record_refusal(self, command: Command, who: str, why: Exception) -> None:
        """Write to the audit log that a command was not carried out. Any thread may call it."""
        record_refusal(self._audit, command, who, why)

    @property
    def busy(self) -> bool:
        """Return True if `step` has a job to go on with."""
        return self._jobs.busy

    def step(self) -> None:
        """Go on with the job, and update the tenants' metrics. Call it often."""
        self._sweep()
        self.tenants.tick()
        self._jobs.step()

    def _sweep(self) -> None:
        if len(self._pins) and (now := self._clock()) - self._swept >= SWEEP_S:
            self._swept = now
            self._pins.release_ended()
            self._pins.release_dropped()

    def close(self) -> None:
        """Refuse an unfinished job with an error, and undo the pins. Idempotent."""
        self._jobs.close()
        self._pins.close()

    # -- at once --------------------------------------------------------------------------------

    def _pin(self, command: PinBlocks) -> dict[str, Any]:
        selection = self._selections.resolve(command.where)
        prompts, blocks = self._pins.add(selection, command.ttl_s)
        pinned = self._queries.size(blocks) | {"prompts": prompts}
        return pinned if command.ttl_s is None else {**pinned, "ttl_s": command.ttl_s}

    def _unpin(self, command: UnpinBlocks) -> dict[str, Any]:
        return {"prompts": self._pins.release(self._selections.resolve(command.where))}

    def _clear(self, command: ClearBlocks) -> dict[str, Any]:
        selection = self._selections.resolve(command.where)
        self._selections.check_held(selection, command.where)
        pins = self._pins.release(selection)
        if selection.chains is None and not selection.prefix:
            spaces: list[bytes | None] = [None]
            if selection.namespaces is not None:
                spaces = [*sorted(selection.namespaces)]
            blocks = sum(self._manager.clear(s, command.where.tier) for s in spaces)
        else:
            blocks = sum(self._clear_some(selection, tier) for tier in selection.tiers)
        self._pins.release_dropped()
        return self._queries.size(blocks) | {"pins": pins}

    def _clear_some(self, selection: Selection, tier: str) -> int:
        if selection.chains is None:
            return self._manager.invalidation.delete(tier, self._every_block(selection, tier))
        ends = self._selections.ends(selection, tier)[0]
        blocks = self._manager.invalidation.delete(tier, ends)
        self._pins.release_dropped()
        return blocks + sum(
            self._manager.invalidation.evict(tier, chain) for chain in selection.chains
        )

    def _every_block(self, selection: Selection, tier: str) -> list[bytes]:
        """Return every selected block of a tier.

        Dropping the last blocks of prompts alone would leave the blocks before them.
        """
        ends = self._selections.ends(selection, tier)[0]
        return [
            key for end in ends for key in self._index.path(end) if key.startswith(selection.prefix)
        ]

    def _set_quota(self, command: SetQuota) -> dict[str, Any]:
        if command.tier not in self._index.tiers:
            there = ", ".join(self._index.tiers)
            raise ConfigError(f"no tier {command.tier!r}; there are {there}")
        blocks = self.tenants.blocks(command.tier, command.quota)
        if command.salt is not None:
            self.tenants.add(command.tenant, command.salt)
        spaces = self.tenants.digests(command.tenant)
        limit = self.tenants.limit(blocks)
        evicted = self._manager.invalidation.set_quota(command.tier, command.tenant, spaces, limit)
        return {"evicted": evicted, **self._queries.quotas()}

    # -- jobs -----------------------------------------------------------------------------------

    def _begin_job(self, command: MoveBlocks | PrefetchBlocks, who: str, reply: ReplyTo) -> None:
        def on_end(job: Job) -> None:
            counts = {"prompts": job.prompts, "kept": job.kept, "failed": job.failed}
            self._finish(command, who, reply, self._queries.size(job.moved) | counts)

        def on_abandon(job: Job, why: KVCoreError) -> None:
            self._count(command, "abandoned")
            self._audit.end(
                who, command_name(command), "abandoned", blocks=job.moved, why=str(why)[:MAX_REASON]
            )
            reply(why)

        self._jobs.begin(command, on_end, on_abandon)

    # -- the record -----------------------------------------------------------------------------

    def _finish(self, command: Command, who: str, reply: ReplyTo, result: dict[str, Any]) -> None:
        self._count(command, "done")
        if isinstance(command, CHANGES):
            counts = {name: value for name, value in result.items() if isinstance(value, int)}
            self._audit.end(who, command_name(command), "done", **_subject(command), **counts)
        reply(result)

    def _count(self, command: Command, outcome: str) -> None:
        if isinstance(command, CHANGES):
            self._metrics.ordered(command_name(command), outcome)


def record_refusal(audit: AuditLog, command: Command, who: str, why: Exception) -> None:
    """Write to the audit log that a command was not carried out, if it would change something."""
    if isinstance(command, CHANGES):
        reason = str(why)[:MAX_REASON]
        audit.end(who, command_name(command), "refused", **_subject(command), why=reason)


def _subject(command: Command) -> dict[str, Any]:
    """Return what a command was about, for the audit log.

    A salt and the tokens of a prompt belong to their owner, so they are left out.
    """
    if isinstance(command, SetQuota):
        return {"tenant": command.tenant, "tier": command.tier, "quota": command.quota}
    subject: dict[str, Any] = {"to": command.to} if isinstance(command, MoveBlocks) else {}
    if isinstance(command, PinBlocks) and command.ttl_s is not None:
        subject["ttl_s"] = command.ttl_s
    where = getattr(command, "where", BlockFilter())
    for name in ("tenant", "tier"):
        if getattr(where, name) is not None:
            subject[name] = getattr(where, name)
    if where.salt is not None:
        subject["salted"] = True
    if where.namespace is not None:
        subject["namespace"] = where.namespace.hex()
    if where.prefix:
        subject["key"] = where.prefix.hex()
    if where.tokens is not None:
        subject["tokens"] = len(where.tokens) // 4
    return subject
