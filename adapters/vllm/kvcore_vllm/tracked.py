"""The state that the leader in vLLM's scheduler keeps for a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcore.manager import Hit
from kvcore.manager.load_advisor import PlanMemo
from kvcore.model.keys import Extra, KeyChain
from kvcore_vllm.fusion_scheduler import VllmFusionRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["Tracked"]


@dataclass
class Tracked:
    """The leader's state of one request.

    Attributes:
        extras: digests of its images and the like, which are part of its keys.
        hit: the last lookup, valid until the next one.
        matched_tokens: the token up to which the last lookup can load.
        load: the graph of an asynchronous load in flight.
        load_attempts: the number of loads that were planned.
        load_tokens: the tokens of the last load.
        reused: the tokens of the last load or blend, by tier.
        saved_blocks: the blocks at its start that need no further save.
        new: the request has not been looked up yet.
        join_until: the monotonic time until which it waits for another request's load.
    """

    request: Request
    chain: KeyChain
    extras: tuple[Extra, ...]
    hit: Hit | None = None
    matched_tokens: int = 0
    load: int | None = None
    load_attempts: int = 0
    load_tokens: int = 0
    may_load: bool = True
    may_save: bool = True
    reused: dict[str, int] = field(default_factory=dict)
    saved_blocks: int = 0
    fusing: VllmFusionRequest | None = None
    memo: PlanMemo = field(default_factory=PlanMemo)
    new: bool = True
    join_until: float | None = None

    def exact_blocks(self, tokens: int, block_tokens: int) -> int:
        """Return how many whole blocks of the first ``tokens`` have exact KV and may be saved."""
        exact = tokens if self.fusing is None else self.fusing.exact_tokens(tokens)
        return exact // block_tokens
