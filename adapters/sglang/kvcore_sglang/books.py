"""The leader's state of requests that were looked up, and of nodes that the tree offered."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcore.connector.control import FREE, RequestControl
from kvcore.connector.fusion_messages import BlendPlan
from kvcore.connector.fusion_scheduler import FusionRequest
from kvcore.manager.load_advisor import PlanMemo
from kvcore.model.keys import KeyChain
from kvcore_sglang.fusion_scheduler import Asking
from kvcore_sglang.staging import Wait

__all__ = ["Asked", "Offer", "Tokens"]

Tokens = npt.NDArray[np.int64]


@dataclass
class Asked:
    """The lookups of one request.

    Attributes:
        chain: the keys of the prompt.
        device_tokens: the tokens that the tree held at the last lookup.
        tokens: the number of tokens that the engine would reuse.
        text: a digest of these tokens. Clients name requests, and may use a name again for another
            prompt.
        stop: the token up to which the last lookup's result reaches; 0 if nothing was found.
        resumed: some of the tokens are already the request's answer.
        counted: the miss is counted.
        sources: the blocks found at the first lookup, by tier.
        asking: the input of fusion; None without fusion.
        wanted: fusion's state of the request.
        plan: the blend in the last lookup's result; None without a blend.
        memo: the planner's decision; empty without a planner.
        wait: the blocks that the request waits for.
        held: the last lookup found that the request should stay in the queue.
        noted: (device tokens, blocks found) of the last lookup that was recorded.
        control: what the request asks of kvcore.
    """

    chain: KeyChain
    device_tokens: int
    tokens: int
    text: bytes
    stop: int = 0
    resumed: bool = False
    counted: bool = False
    sources: dict[str, int] = field(default_factory=dict)
    asking: Asking | None = None
    wanted: FusionRequest | None = None
    plan: BlendPlan | None = None
    memo: PlanMemo = field(default_factory=PlanMemo)
    wait: Wait = field(default_factory=Wait)
    held: bool = False
    noted: tuple[int, int] | None = None
    control: RequestControl = FREE

    def take(self, asking: Asking | None) -> None:
        """Set the input of fusion, and drop fusion's state if the input has changed.

        Clients name requests: another request with the same name and tokens may have other options.
        """
        before, self.asking = self.asking, asking
        if before is None or asking is None or not before.is_like(asking):
            self.wanted = None

    @property
    def exact(self) -> int:
        """The token up to which the last lookup's result is exact."""
        return self.stop if self.plan is None else self.plan.exact


@dataclass
class Offer:
    """Nodes of the tree whose pages stay locked until saves have read them.

    Attributes:
        graphs: the saves in flight.
        open: the saves have not been launched yet.
    """

    graphs: set[int] = field(default_factory=set)
    open: bool = True

    @property
    def done(self) -> bool:
        """True if all saves have read the pages."""
        return not self.open and not self.graphs
