"""Resume points: which of those that an engine offers are worth their bytes.

A point (`kvcore.model.points`) takes as many bytes as the blocks of ``point_tokens`` tokens, often
of thousands. A hit can end at a saved point only, so too few of them waste blocks that are held,
and too many push out the blocks of others.

    tokens   0     1000    2000    3000    4000    5000
    stored   ████████████████████                          blocks of an earlier prompt
    offered  ·     o       o       o       o      o        where the engine has the states now
    taken                  x                      x        a junction, and the end of the prompt

Some boundaries are worth more than others:

- The *end* of a prompt: the next turn of its conversation begins there.
- A *junction*, at which the prompt parts from stored blocks that go on behind the last point: where
  two prompts parted, others will.
- Between them, one in so many tokens bounds what a prompt has to compute that parts elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar, NamedTuple

from kvcore.errors import ConfigError

__all__ = ["EveryPoint", "PointPolicy", "PointRequest", "SpacedPoints"]


class PointRequest(NamedTuple):
    """The resume points that an engine can save of one prompt now. Counts are of tokens.

    Attributes:
        offered: the boundaries at which the engine has the states, ascending.
        ends: those of ``offered`` that end the prompt.
        junctions: those of ``offered`` at which the prompt parts from stored blocks.
        kept: the last boundary before which a point of this prompt is saved; 0 if none is.
        point_tokens: the tokens whose blocks take as many bytes as one point.
    """

    offered: Sequence[int]
    ends: Collection[int]
    junctions: Collection[int]
    kept: int
    point_tokens: int


class PointPolicy(ABC):
    """Chooses the resume points to save. The leader's thread only; no I/O."""

    name: ClassVar[str]

    @abstractmethod
    def take(self, request: PointRequest) -> Sequence[int]:
        """Return which of ``request.offered`` are saved; other numbers are ignored.

        Called once for the points that an engine offers of a request in one step. Of a long prompt
        these are often one at a time, so a policy does not know what will be offered later.
        """


class EveryPoint(PointPolicy):
    """Saves each point that the engine offers."""

    name = "all"

    def take(self, request: PointRequest) -> Sequence[int]:
        return request.offered


class SpacedPoints(PointPolicy):
    """Saves the points at ends and junctions, and between them one in so many tokens.

    Args:
        ends, junctions: save the points there.
        every: the fewest tokens from the last saved point to one that is at neither; 0 saves none.
            By default, points may then take one byte to each ``share`` bytes of blocks.
        share: bytes of blocks for each byte of a point.
    """

    name = "spaced"

    def __init__(
        self,
        *,
        ends: bool = True,
        junctions: bool = True,
        every: int | None = None,
        share: float = 8,
    ) -> None:
        if (every is not None and every < 0) or not share > 0:
            raise ConfigError(
                f"given every = {every} and share = {share}; supported are 0 tokens or more, and a "
                "share above 0"
            )
        self._ends = ends
        self._junctions = junctions
        self._every = every
        self._share = share

    def take(self, request: PointRequest) -> Sequence[int]:
        every, kept, taken = self._every, request.kept, []
        if every is None:
            every = int(self._share * request.point_tokens)
        for boundary in request.offered:
            if (
                (self._ends and boundary in request.ends)
                or (self._junctions and boundary in request.junctions)
                or (every and boundary - kept >= every)
            ):
                taken.append(boundary)
                kept = max(kept, boundary)
        return taken
