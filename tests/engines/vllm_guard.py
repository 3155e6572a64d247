"""kvcore fails in each call of a real vLLM, run as ``python vllm_guard.py MODEL``.

Engine core and worker are in this process, so that each part of kvcore can be made to raise once.
After each error kvcore is told to go on. Prints, by where the load was and by the part that failed,
why kvcore stopped, and whether the answer was right, as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvcore.harness.compare import SMALL
from kvcore.harness.prompts import windows

SCHEDULER = (
    "get_num_new_matched_tokens",
    "_launch_load",
    "_fences",
    "_take_report",
    "_load_ended",
    "request_finished",
    "take_stats",
)
WORKER = ("begin", "_submit", "blend", "end_forward", "finished_loads", "take_report")


TOKEN_NBYTES = 4 * 2 * 2 * 64 * 4  # layers, key and value, heads, head size, float32
IN_STEP_TOKENS = 300
TEXTS = {"in the step": (200, 280), "between steps": (340, 400)}
"""Bounds of a text's tokens, by where its load is."""


def main(model: str) -> None:
    own = ("start_method", "forked", "asynchronous")
    llm = LLM(
        model,
        **{name: value for name, value in SMALL.items() if name not in own},
        disable_log_stats=False,
        async_scheduling=False,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "KVCoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "host": {"capacity": "256MiB"},
                "transfer": {"sync_load_max": IN_STEP_TOKENS * TOKEN_NBYTES},
            },
        },
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    core = llm.llm_engine.engine_core.engine_core
    side = core.scheduler.connector._scheduler
    guard = get_kv_transfer_group()._worker

    def ask(tokens: list[int]) -> list[int]:
        [output] = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def empty() -> None:
        limit = time.monotonic() + 30
        while not llm.reset_prefix_cache():
            assert time.monotonic() < limit, "pages are in use"
            core.step()

    def revive() -> None:
        """Have kvcore serve again, which no error of a real run is followed by."""
        worker = guard._worker
        worker._collect()
        for left in (worker._finished, worker._failed, worker._loads, worker._reports):
            left.clear()
        worker._bad_pages.clear()
        worker._todo.clear()
        worker._abandoned = False
        side.disabled = guard._rank.stopped = ""

    parts = [*((side, name) for name in SCHEDULER), *((guard._worker, name) for name in WORKER)]
    found: dict[str, dict[str, Any]] = {where: {} for where in TEXTS}
    for (owner, name), (where, bounds) in itertools.product(parts, TEXTS.items()):
        [text] = windows(Path(model), 1, *bounds, seed=sum(map(len, found.values())))
        right = ask(text)
        for _ in range(20):  # the save ends
            core.step()
            time.sleep(0.02)
        empty()
        method, raised = getattr(owner, name), []

        def fails(*args: Any, method: Any = method, raised: Any = raised, **kwargs: Any) -> Any:
            if not raised:
                raised.append(True)
                raise RuntimeError("planted")
            return method(*args, **kwargs)

        setattr(owner, name, fails)
        got = ask(text)
        why = side.disabled
        delattr(owner, name)
        empty()
        after = ask(text)  # kvcore stands aside
        revive()
        found[where][name] = {
            "raised": bool(raised),
            "why": why,
            "same": got == right,
            "after": after == right,
        }
        empty()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
