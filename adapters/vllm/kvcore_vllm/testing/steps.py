"""vLLM's schedulers with a record of their calls, for ``scheduler_cls``.

A file gets one line for each call that concerns a step with tokens, in the order of the calls:
"scheduled" when the step was made, "read" when its output was read. `rig.overlap` reads the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kvcore_vllm.testing.rig import STEPS

__all__ = ["Asynchronous", "Synchronous"]


class _Recorded:
    """Records the calls of the scheduler class that follows it."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._note("scheduled", output)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._note("read", scheduler_output)
        return super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _note(self, what: str, output: Any) -> None:
        if output.total_num_scheduled_tokens:
            path = Path(self.vllm_config.additional_config[STEPS])  # type: ignore[attr-defined]
            with path.open("a") as file:
                print(what, file=file)


class Synchronous(_Recorded, Scheduler):
    """vLLM's scheduler for one step at a time."""


class Asynchronous(_Recorded, AsyncScheduler):
    """vLLM's scheduler for steps that overlap."""
