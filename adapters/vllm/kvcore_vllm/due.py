"""Finds the requests that may complete a block in a step, without looking at every running one.

A request that decodes gets one token a step. It completes its next block no earlier than as many
steps from now as the block lacks tokens, and is not looked at before. A request that gets more
tokens in a step is always looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["RUN_TOKENS", "DueRequests", "decode_run"]

RUN_TOKENS = 256
"""Generated tokens of a request that are saved together. Each save costs the leader some 0.1 ms."""


def decode_run(block_tokens: int, single_group: bool) -> int:
    """Return the number of blocks of generated tokens that are saved together.

    It is 1 where pages may leave a window: a block is then saved at once.
    """
    return max(RUN_TOKENS // block_tokens, 1) if single_group else 1


class DueRequests:
    """The requests to look at, by the step in which they are due. Owned by the leader."""

    def __init__(self) -> None:
        self._step = 0  # counts the steps that compute something
        self._due: dict[int, list[str]] = {}  # step -> requests, some of which are due later now
        self._step_of: dict[str, int] = {}

    def take(self, output: SchedulerOutput) -> list[str]:
        """Return the scheduled requests that may complete a block in this step.

        Each is taken off: call `again` to have it returned in a later step.
        """
        tokens = output.num_scheduled_tokens
        if not tokens:
            return []
        self._step += 1
        found: dict[str, None] = {}
        for name in self._due.pop(self._step, ()):
            if self._step_of.get(name) != self._step:
                continue  # it was looked at since, or has ended
            if name in tokens:
                found[name] = None
            else:
                self.again(name, 1)
        found.update(dict.fromkeys(new.req_id for new in output.scheduled_new_reqs))
        found.update(dict.fromkeys(sorted(output.scheduled_cached_reqs.resumed_req_ids)))
        if output.total_num_scheduled_tokens > len(tokens):
            found.update(dict.fromkeys(name for name, count in tokens.items() if count > 1))
        for name in found:
            self._step_of.pop(name, None)
        return list(found)

    def again(self, request_id: str, steps: int) -> None:
        """Make a request due in as many steps from now, instead of when it was due before."""
        due = self._step + steps
        self._step_of[request_id] = due
        self._due.setdefault(due, []).append(request_id)

    def forget(self, request_id: str) -> None:
        """Take off a request. An unknown one is ignored."""
        self._step_of.pop(request_id, None)
