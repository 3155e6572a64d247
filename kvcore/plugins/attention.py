"""The seam around the attention of an engine's layers.

    q, k, v ──▶ before ──(no answer)──▶ the engine's attention ──▶ after ──▶ the layer goes on
                   └────── an answer, in its place ─────────────────┘

An adapter calls an `AttentionHook` around each layer's attention. Fusion is the first user: for its
own runs of a layer it answers in place of the engine's attention. Others register theirs as plugins
(`kvcore.plugins.AttentionPlugin`) and see every forward of the engine. Without any hook no adapter
patches anything.
"""

from __future__ import annotations

import logging
from abc import ABC
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvcore.errors import LayoutError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AttentionBatch", "AttentionCall", "AttentionHook", "Hooks"]

_log = logging.getLogger("kvcore.plugins.attention")


@dataclass(frozen=True)
class AttentionBatch:
    """The requests of one forward. Its tensors are on the device, so that nothing waits for them.

    Args:
        requests: ids, in the order of their rows.
        starts: [requests + 1] int, the first row of each request, then the number of rows.
        positions: [rows] int64, each row's position in its request.
        pages: [requests, most pages] int, where the engine keeps a request's KV: position p is in
            page ``pages[r, p // page_tokens]``. Values beyond a request's last page are undefined.
        page_tokens: tokens of one of the engine's pages.
    """

    requests: tuple[str, ...]
    starts: Tensor
    positions: Tensor
    pages: Tensor
    page_tokens: int


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention in one forward, on one rank.

    Args:
        layer: counted from 0.
        query: [rows, heads, dim], after RoPE.
        key: [rows, kv_heads, dim], of the same rows. The engine has written it to its pages, or is
            about to.
        value: as ``key``.
        batch: the requests that the rows belong to.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    batch: AttentionBatch


class AttentionHook(ABC):  # noqa: B024  # a hook may care for one side only
    """A plugin's code around attention. Called on the model's thread, which it may block.

    If a hook raises, the error is logged, the hook is not called again, and the engine's own
    attention answers.
    """

    name = "unnamed"

    def before(self, call: AttentionCall) -> Tensor | None:  # noqa: B027
        """Return an output [rows, heads, value dim] in the engine's place, or None."""

    def after(self, call: AttentionCall, output: Tensor) -> Tensor | None:  # noqa: B027
        """Return another output [rows, heads, value dim] to replace ``output``, or None."""


class Hooks:
    """Several hooks as one: the first answer wins, and outputs pass from hook to hook."""

    def __init__(self, hooks: Iterable[AttentionHook]) -> None:
        self._hooks = list(hooks)

    @property
    def active(self) -> Sequence[AttentionHook]:
        """Return the hooks that have not failed."""
        return tuple(self._hooks)

    def before(self, call: AttentionCall) -> Tensor | None:
        for hook in self.active:
            answer = self._asked(hook, call, hook.before, call.query)
            if answer is not None:
                return answer
        return None

    def after(self, call: AttentionCall, output: Tensor) -> Tensor:
        for hook in self.active:
            after = partial(hook.after, output=output)
            changed = self._asked(hook, call, after, output)
            output = output if changed is None else changed
        return output

    def give_up(self, why: str) -> None:
        """Stop calling the hooks, and log the exception that is being handled."""
        names = ", ".join(hook.name for hook in self._hooks)
        self._hooks.clear()
        _log.exception("attention hooks are not called again: %s: %s", names, why)

    def _asked(
        self,
        hook: AttentionHook,
        call: AttentionCall,
        side: Callable[[AttentionCall], Tensor | None],
        like: Tensor,
    ) -> Tensor | None:
        try:
            answer = side(call)
            if answer is None or answer.shape[:2] == like.shape[:2]:
                return answer
            raise LayoutError(
                f"the hook returned a tensor of shape {tuple(answer.shape)}; supported is "
                f"[{like.shape[0]} rows, {like.shape[1]} heads, dim]"
            )
        except Exception:  # noqa: BLE001 - others' code: the engine goes on without it
            self._hooks.remove(hook)
            _log.exception(
                "attention hook %r failed at layer %d and is not called again",
                hook.name,
                call.layer,
            )
        return None
