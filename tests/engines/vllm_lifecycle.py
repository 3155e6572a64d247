"""vLLM pauses and changes its weights, run as ``python vllm_lifecycle.py MODEL OTHER DISK FAULTS``.

One engine, with a disk tier in the folder DISK. OTHER is a model of the same shape with other
weights. FAULTS is the folder of `kvcore.testing.faults.process`, on PYTHONPATH too. Prints what
each part of the history found, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from kvcore.harness.compare import SMALL
from kvcore.harness.driver import Prompt
from kvcore.harness.prompts import windows
from kvcore.testing.faults import Fault, Rule, Seam, write_rules
from kvcore_vllm.testing.driver import Driver

ANSWER = 12


class History:
    """Requests to one engine, whose own prefix cache is emptied before each unless it is kept."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.engine = driver, driver._engine
        self._count = 0

    async def ask(
        self, tokens: list[int], salt: str | None = None, *, keep: bool = False
    ) -> dict[str, Any]:
        """Return the answer's tokens, and how many tokens of the prompt came from kvcore."""
        await self.driver.settle(1.0)
        if not keep:
            await self.driver.reset_prefix_cache(False, 30.0)
        self._count += 1
        prompt = Prompt(tokens, ANSWER, f"r{self._count}", None, True, salt, False, *(None,) * 4)
        reply = await self.driver.answer(prompt)
        reused = reply["kvcore"].get("reused_tokens", 0)
        return {"tokens": reply["token_ids"], "reused": reused}

    async def used(self) -> float:
        """Return the bytes in use on disk."""
        await self.driver.settle(1.0)
        samples = await self.driver.metrics()
        names = [n for n in samples if "kvcore_tier_used_bytes" in n and "disk" in n]
        return sum(samples[name] for name in names)


async def pauses(history: History, text: list[int]) -> dict[str, Any]:
    """A pause renews the namespace and leaves the disk alone."""
    first = await history.ask(text)
    again = await history.ask(text)
    before = await history.used()
    await history.engine.pause_generation(mode="abort")
    await history.engine.resume_generation()
    paused = await history.ask(text)
    kept = await history.used()
    return {"first": first, "again": again, "paused": paused, "before": before, "kept": kept}


async def updates(history: History, text: list[int], other: str, how: str) -> dict[str, Any]:
    """Weights are changed in place, and no cache is reset.

    Then a request goes on from KV of the old weights, in vLLM's own prefix cache.
    """
    start = text[: len(text) // 2]
    first = await history.ask(text)
    again = await history.ask(text)
    await history.ask(start)
    await history.engine.pause_generation(mode="keep", clear_cache=False)
    if how == "reload_weights":
        await history.engine.collective_rpc("reload_weights", kwargs={"weights_path": other})
    else:
        await history.engine.collective_rpc("kvcore_load", args=(other,))
    await history.engine.resume_generation()
    await history.ask(text[-20:], keep=True)  # the leader learns of the change
    await history.ask(text, keep=True)
    changed = await history.ask(text)
    right = await history.ask(text, salt=f"fresh {how}")
    later = await history.ask(text)
    return {"first": first, "again": again, "changed": changed, "right": right, "later": later}


async def hangs(history: History, texts: list[list[int]], faults: Path) -> dict[str, Any]:
    """A read from the disk hangs; the request is computed, and vLLM pauses."""
    text = texts[0]
    first = await history.ask(text)
    for other in texts[1:]:  # host memory has no room for all of them
        await history.ask(other)
    await history.driver.settle(2.0)
    write_rules(faults / "rules", Rule(Fault.HANG, Seam.TIER_READ, seconds=100))
    await asyncio.sleep(0.5)
    since = time.monotonic()
    hung = await history.ask(text)
    waited = time.monotonic() - since
    since = time.monotonic()
    try:
        await asyncio.wait_for(history.engine.pause_generation(mode="wait"), 20)
        took = time.monotonic() - since
        await history.engine.resume_generation()
    except asyncio.TimeoutError:
        took = 1e9
    write_rules(faults / "rules")
    return {"first": first, "hung": hung, "waited": waited, "took": took}


async def main(model: str, other: str, disk: str, faults: str) -> None:
    driver = Driver()
    kvcore: dict[str, Any] = {
        "host": {"capacity": "3MiB"},  # for one text, so that another one is read from the disk
        "disk": {"path": disk, "capacity": "256MiB"},
        "transfer": {"load_deadline_s": 1.0},
    }
    arguments = {**SMALL, "worker_extension_cls": "vllm_lifecycle.Loads"}
    await driver.start(model, kvcore, **{k: v for k, v in arguments.items() if k != "forked"})
    history = History(driver)
    texts = windows(Path(model), 8, 300, 500, seed=8)
    found = {"pauses": await pauses(history, texts[0])}
    found["reload_weights"] = await updates(history, texts[1], other, "reload_weights")
    found["load_weights"] = await updates(history, texts[2], model, "load_weights")
    found["hangs"] = await hangs(history, texts[3:], Path(faults))
    print(json.dumps(found), flush=True)
    await driver.shutdown()


class Loads:
    """A worker's method as RL frameworks have it, which loads weights into the model by itself.

    It loads norms alone: vLLM's CPU build packs the matrices, which cannot be loaded again.
    """

    model_runner: Any

    def kvcore_runner(self) -> str:
        return type(self.model_runner).__name__

    def kvcore_pieces(self) -> int:
        return 0

    def kvcore_load(self, folder: str) -> None:
        from safetensors.torch import load_file

        for file in Path(folder).glob("*.safetensors"):
            found = load_file(file).items()
            norms = [(name, 3 * weight) for name, weight in found if "layernorm" in name]
            self.model_runner.get_model().load_weights(norms)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
