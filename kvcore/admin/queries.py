"""Answers to the commands that change nothing: what each tier holds, of whom, under which quota."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcore.admin.commands import ListBlocks
from kvcore.admin.pins import Pins
from kvcore.admin.selection import Selection, Selections
from kvcore.admin.tenants import Tenants
from kvcore.index import BlockIndex

__all__ = ["Queries"]


class Queries:
    """Reports over one model's index as plain data. The manager's thread only."""

    def __init__(
        self,
        index: BlockIndex,
        tenants: Tenants,
        selections: Selections,
        pins: Pins,
        block_tokens: int,
        block_nbytes: int,
    ) -> None:
        self._index = index
        self._tenants = tenants
        self._selections = selections
        self._pins = pins
        self._block_tokens = block_tokens
        self._block_nbytes = block_nbytes

    def size(self, blocks: int) -> dict[str, int]:
        """Return a number of blocks with its bytes."""
        return {"blocks": blocks, "bytes": blocks * self._block_nbytes}

    def list_blocks(self, command: ListBlocks) -> dict[str, Any]:
        """Return the selected blocks by tier and namespace, the largest first."""
        selection = self._selections.resolve(command.where)
        rows = sorted(self._rows(selection), key=lambda row: -int(row["blocks"]))
        result: dict[str, Any] = {
            "block_tokens": self._block_tokens,
            "block_bytes": self._block_nbytes,
            "pins": len(self._pins),
            "rows": rows[: command.limit],
            "more": max(0, len(rows) - command.limit),
        }
        if command.prompts:
            result["prompts"] = self._prompts(selection, command.limit)
        return result

    def _rows(self, selection: Selection) -> Iterator[dict[str, Any]]:
        for tier in selection.tiers:
            for namespace, blocks in self._index.admin.usage(tier).items():
                if selection.namespaces is None or namespace in selection.namespaces:
                    yield {
                        "tier": tier,
                        "tenant": self._tenants.name_of(namespace),
                        "namespace": namespace.hex(),
                        **self.size(blocks),
                    }

    def _prompts(self, selection: Selection, limit: int) -> list[dict[str, Any]]:
        found: dict[bytes, dict[str, Any]] = {}
        for tier in selection.tiers:
            for end in self._selections.ends(selection, tier)[0]:
                if end not in found and len(found) < limit:
                    found[end] = self._prompt(end)
        return [*found.values()]

    def _prompt(self, end: bytes) -> dict[str, Any]:
        path = self._index.path(end)
        depths = zip(self._index.tiers, self._index.match(path).depths, strict=True)
        namespace = self._index.namespace_of(end)
        pinned = [tier for tier in self._index.tiers if (tier, end) in self._pins]
        left = {tier: self._pins.left_s((tier, end)) for tier in pinned}
        return {
            "key": end.hex(),
            "tenant": self._tenants.name_of(namespace),
            "namespace": namespace.hex(),
            "blocks": len(path),
            "tiers": {tier: depth for tier, depth in depths if depth},
            "pinned": pinned,
            "left_s": {tier: round(s, 1) for tier, s in left.items() if s is not None},
        }

    def quotas(self) -> dict[str, Any]:
        """Return what each tenant uses of each tier, and its quota in bytes."""
        size = self._block_nbytes
        return {
            "quotas": [
                {
                    "tenant": name,
                    "tier": tier,
                    **self.size(used),
                    "quota": None if limit is None else limit * size,
                }
                for name, tier, used, limit in self._tenants.usage()
            ]
        }
