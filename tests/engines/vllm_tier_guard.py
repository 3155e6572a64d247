"""kvcore fails in each call of vLLM's offloading: ``python vllm_tier_guard.py MODEL FOLDER``.

The engine core is in this process, so that each part of kvcore can be made to raise. After each
case kvcore starts anew over the same pages. Prints, by what failed, whether the answer was right,
how many tokens were not computed, and whether kvcore stopped, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import numpy as np
from vllm import LLM, SamplingParams

from kvcore.harness.prompts import windows
from kvcore.runtime.page_jobs import PageJobs
from kvcore_devtools.vllm_offloading import offloading

INSIDE = {
    "lookup": "find",
    "submit_store": "store",
    "submit_load": "load",
    "get_finished_jobs": "take_ended",
    "get_stats": "counts",
    "drain_jobs": "drain",
}
REQUESTS = ("on_new_request", "on_request_finished")


def boom(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a mistake of ours")


class NoSet(set):  # type: ignore[type-arg]
    add = discard = boom


class Case:
    """One engine, which is asked the same in every case."""

    def __init__(self, model: str, folder: Path) -> None:
        disk = {"path": str(folder / "kv"), "capacity": "256MiB"}
        tier = {"disk": disk, "namespace": {"weights_change": "never"}}
        self.llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=2048,
            kv_cache_memory_bytes=256 << 20,
            disable_log_stats=False,
            skip_tokenizer_init=True,
            kv_transfer_config=offloading(tier),
        )
        core: Any = self.llm.llm_engine.engine_core.engine_core
        self.manager = core.scheduler.connector.connector_scheduler.manager
        [self.tier] = self.manager.secondary_tiers
        [self.prompt, self.other] = windows(Path(model), 2, 600, 600, seed=34)
        self.right = self.ask(self.prompt)[0]
        self.ask(self.other)
        self.pages = self.tier._jobs._pages

    def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        [got] = self.llm.generate([{"prompt_token_ids": prompt}], plain, use_tqdm=False)
        return list(got.outputs[0].token_ids), got.num_cached_tokens or 0

    def empty(self) -> None:
        """Empty vLLM's own caches, the rows too. kvcore keeps its pages."""
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def run(self) -> dict[str, Any]:
        self.empty()
        answer, cached = self.ask(self.prompt)
        self.llm.llm_engine.do_log_stats()
        self.ask(self.other[:300])
        return {
            "right": answer == self.right,
            "cached": cached,
            "stopped": bool(self.tier._stopped),
        }

    def renew(self) -> None:
        """Let kvcore begin anew."""
        self.tier._jobs.stop()
        view = self.manager.primary_tier.get_kv_memoryview()
        self.manager.reset_cache()
        assert not self.manager.has_pending_work()
        self.tier._stopped = False
        self.tier._running, self.tier._outdated = set(), set()
        self.tier._jobs = PageJobs(self.pages, np.asarray(view).view(np.uint8), 30.0)


def main(model: str, folder: Path) -> None:
    case = Case(model, folder)
    found = {"nothing": case.run()}
    for name, inside in INSIDE.items():
        with mock.patch.object(PageJobs, inside, boom):
            if name == "submit_store":
                case.pages.clear()
            found[name] = case.run()
        case.renew()
        if name == "submit_store":
            case.ask(case.prompt)
            case.empty()
    for name in REQUESTS:
        running = NoSet()
        setattr(running, "add" if name == "on_request_finished" else "discard", lambda _: None)
        case.tier._running = running
        found[name] = case.run()
        case.renew()
    case.ask(case.prompt)
    [data] = folder.rglob("shard-0.data")
    with data.open("r+b") as file:
        size = data.stat().st_size
        for at in range(0, size, 512):
            file.seek(at)
            file.write(b"\xa5" * 8)
    found["corrupt"] = case.run()
    case.ask(case.prompt)
    case.pages.clear()
    found["missing"] = case.run()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
