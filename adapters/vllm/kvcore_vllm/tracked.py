"""The state that the leader in vLLM's scheduler keeps for a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcore.connector.control import FREE, RequestControl
from kvcore.connector.fusion_messages import BlendPlan
from kvcore.connector.patience import Patience
from kvcore.manager import Hit
from kvcore.manager.load_advisor import PlanMemo
from kvcore.model.keys import Extra, KeyChain
from kvcore_vllm.fusion_scheduler import VllmFusionRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["Offer", "Tracked"]


@dataclass(frozen=True)
class Offer:
    """The tokens [start, stop) of a request that the last answer to vLLM offered to load.

    Attributes:
        exact: the token up to which the hit is loaded. A blend makes what follows.
        in_step: the load is part of the step.
        blend: the plan of the blend, if there is one.
    """

    start: int
    stop: int
    exact: int
    in_step: bool = False
    blend: BlendPlan | None = None


@dataclass
class Tracked:
    """The leader's state of one request.

    Attributes:
        extras: digests of its images and the like, which are part of its keys.
        patience: how long it has waited in kvcore, and still may.
        hit: the last lookup, valid until the next one.
        offer: what the last lookup offered to load; None once vLLM has taken it up.
        count_miss: counts the last lookup as a miss. Called when vLLM schedules the request: until
            then it looks the request up again in every step.
        waits: the request waits for an asynchronous load or a blend: its pages hold no KV yet.
        load: the graph of that load.
        load_attempts: the number of asynchronous loads that were planned since one has come.
        load_tokens: the tokens of the last load; of one that was refused, all that vLLM lacked.
        reused: the tokens of the last load or blend, by tier.
        saved_blocks: the blocks at its start that need no further save.
        last_point: the token before which its last resume point was saved.
        new: the request has not been looked up yet.
        control: what it asks of kvcore.
    """

    request: Request
    chain: KeyChain
    extras: tuple[Extra, ...]
    patience: Patience
    hit: Hit | None = None
    offer: Offer | None = None
    count_miss: Callable[[], None] | None = None
    waits: bool = False
    load: int | None = None
    load_attempts: int = 0
    load_tokens: int = 0
    may_load: bool = True
    may_save: bool = True
    reused: dict[str, int] = field(default_factory=dict)
    saved_blocks: int = 0
    last_point: int = 0
    fusing: VllmFusionRequest | None = None
    memo: PlanMemo = field(default_factory=PlanMemo)
    new: bool = True
    control: RequestControl = FREE

    def exact_blocks(self, tokens: int, block_tokens: int) -> int:
        """Return how many whole blocks of the first ``tokens`` have exact KV and may be saved."""
        exact = tokens if self.fusing is None else self.fusing.exact_tokens(tokens)
        return self.control.savable(exact) // block_tokens

    def make_keys(self) -> None:
        """Hash the tokens that the request has got since the last call into its keys."""
        done = self.chain.num_tokens
        if self.request.num_tokens > done:
            extras = self.extras if done == 0 else ()
            tokens = self.request._all_token_ids
            self.chain.extend(tokens[done:] if done else tokens, extras)
