"""The resume points that a request can have saved in a step, and which of them stand out.

States are saved where vLLM says that a page has them. The end of a window can be saved at any block
that the step computes: its pages are dropped after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvcore.model.spec import LayerGroup

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvcore.manager import Hit

__all__ = [
    "NULL_PAGE",
    "Candidates",
    "ask_for_junction",
    "of_states",
    "of_windows",
    "states_page_tokens",
    "whole_points",
]

NULL_PAGE = 0
"""vLLM's number for a page that a group has dropped, or never had."""


class Candidates(NamedTuple):
    """Boundaries at which a point can be saved now, ascending, in tokens.

    Among them, ``ends`` end the prompt, and at ``junctions`` it parts from an earlier one.
    """

    offered: Sequence[int]
    ends: Collection[int] = ()
    junctions: Collection[int] = ()


def whole_points(
    offered: Iterable[tuple[int, int, int]], groups: Sequence[LayerGroup], block: int
) -> dict[int, dict[int, int]]:
    """Return the boundaries at which vLLM offers the states of all groups, and their pages.

    ``offered`` has a group, a page and a boundary in each item. Boundaries inside a block of
    ``block`` tokens are left out.
    """
    by_boundary: dict[int, dict[int, int]] = {}
    for group, page, boundary in offered:
        by_boundary.setdefault(boundary, {})[group] = page
    wanted = [group.index for group in groups if group.of == "states"]
    return {
        boundary: pages
        for boundary, pages in by_boundary.items()
        if boundary % block == 0
        and all(pages.get(group, NULL_PAGE) != NULL_PAGE for group in wanted)
    }


def states_page_tokens(groups: Sequence[LayerGroup]) -> int:
    """Return how many tokens apart vLLM can keep states, or 0 for a model without states."""
    return max((group.page_tokens for group in groups if group.of == "states"), default=0)


def ask_for_junction(request: Request, hit: Hit, block: int, page: int, most: int) -> None:
    """Have vLLM keep the states where stored blocks end that go on behind the last point.

    vLLM ends a piece of the prompt there, and offers the states, as it does where its own cache
    sees that prompts part. It does not see that of a prompt that has left its cache.

    Args:
        page: tokens from one boundary at which vLLM can keep states to the next, or 0.
        most: tokens of the request that may be saved.
    """
    held = hit.reached * block // page * page if page else 0
    seen = getattr(request, "shared_prefix_boundary", 0)
    if max(hit.blocks * block, seen) < held <= most:
        request.shared_prefix_boundary = held


def of_states(
    offered: Sequence[int], request: Request, hit: Hit | None, back: int, block: int
) -> Candidates:
    """Return the boundaries ``offered`` at which vLLM has states, and which of them stand out.

    vLLM has states at the ends of pages, so the boundary for the end of a prompt, or for a
    junction, is up to ``back`` tokens before it.
    """
    prompt = request.num_prompt_tokens
    # Where vLLM found that the prompt parts from another (0: nowhere), and where kvcore did.
    parts = [getattr(request, "shared_prefix_boundary", 0)]
    if hit is not None and hit.reached > hit.blocks:
        parts.append(hit.reached * block)
    return Candidates(
        offered,
        [b for b in offered if b <= prompt <= b + back],
        [b for b in offered if any(b <= at < b + back for at in parts)],
    )


def of_windows(
    span: range, prompt: int, hit: Hit | None, step: int, block: int, sees: Callable[[int], bool]
) -> Candidates:
    """Return the boundaries at which the ends of windows can be saved.

    ``span`` are the blocks that the request has reached and that are not saved, and ``prompt`` the
    number of those of its prompt. Every ``step`` blocks there is a candidate beside its end and
    the junction. ``sees`` says of a number of blocks if the windows before it have their pages.
    """
    parts = 0 if hit is None else hit.reached
    found = {prompt, parts, *range(span.start // step * step, span.stop, step)}
    offered = [blocks * block for blocks in sorted(found) if blocks in span and sees(blocks)]
    return Candidates(offered, [prompt * block], [parts * block])
