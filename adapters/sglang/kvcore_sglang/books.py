"""What the leader writes down of a request that asked, and of nodes that the tree offered."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcore.connector.fusion_messages import BlendPlan
from kvcore.connector.fusion_scheduler import FusionRequest
from kvcore.model.keys import KeyChain
from kvcore_sglang.fusion_scheduler import Asking
from kvcore_sglang.staging import Wait

__all__ = ["Asked", "Offer", "Tokens"]

Tokens = npt.NDArray[np.int64]


@dataclass
class Asked:
    """A lookup: the prompt's chain, what the tree held, what was answered, and where it lay when
    the request first asked.

    ``text`` is a digest of all its tokens: requests are named by clients, who may use a name again
    for another prompt. ``resumed``: some of them were its answer already. ``plan`` is the blend
    that was answered, of the request in ``asking``; ``wanted`` is what fusion knows of it. ``wait``
    is what it waits for, and ``held`` says that the last lookup found it better held back.
    ``told``: of the device's tokens and blocks found, what was written down last.
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
    wait: Wait = field(default_factory=Wait)
    held: bool = False
    told: tuple[int, int] | None = None

    def take(self, asking: Asking | None) -> None:
        """Who asks now. Clients name requests: one of the same name and tokens may wish for other
        things, and what fusion knew of the one before is then forgotten."""
        before, self.asking = self.asking, asking
        if before is None or asking is None or not before.is_like(asking):
            self.wanted = None

    @property
    def exact(self) -> int:
        """Tokens of what was answered that are exact."""
        return self.stop if self.plan is None else self.plan.exact


@dataclass
class Offer:
    """Nodes whose pages stay locked until saves have read them; ``graphs`` are those under way."""

    graphs: set[int] = field(default_factory=set)
    open: bool = True

    @property
    def done(self) -> bool:
        return not self.open and not self.graphs
