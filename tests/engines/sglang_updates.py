"""One SGLang whose weights are updated in place; run as a process of its own by its test.

    python sglang_updates.py MODEL OTHER KVCORE PROMPTS

MODEL and OTHER are folders of one architecture, KVCORE is kvcore's config and PROMPTS are lists of
token ids, both in JSON. Prints the answers with MODEL's weights, and then twice with OTHER's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from kvcore.harness.compare import ANSWER, ONE_THREAD, SETTLE_S, SMALL_SGLANG
from kvcore.harness.driver import Prompt
from kvcore_sglang.testing.driver import Driver


def prompt(name: str, tokens: list[int]) -> Prompt:
    return Prompt(
        prompt=tokens,
        max_tokens=ANSWER,
        request_id=name,
        abort_after=None,
        ignore_eos=True,
        cache_salt=None,
        logprobs=False,
        lora=None,
        image=None,
        fusion=None,
        traceparent=None,
    )


async def main(model: str, other: str, kvcore: dict[str, Any], prompts: list[list[int]]) -> None:
    args = {name: value for name, value in SMALL_SGLANG.items() if name != "forked"}
    driver = Driver()
    await driver.start(model, kvcore, **args)
    rounds = 0

    async def ask() -> list[dict[str, Any]]:
        nonlocal rounds
        rounds += 1
        made = [prompt(f"{rounds}-{i}", tokens) for i, tokens in enumerate(prompts)]
        found = [await driver.answer(each) for each in made]
        await driver.settle(SETTLE_S)
        return found

    found = [await ask()]
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput  # after the start

    manager = driver._engine.tokenizer_manager
    success, message, *_ = await manager.update_weights_from_disk(
        UpdateWeightFromDiskReqInput(model_path=other), None
    )
    assert success, message
    for _ in range(2):
        found.append(await ask())
        await driver.reset_prefix_cache(connector=False, timeout_s=SETTLE_S)
    print(json.dumps({"answers": found}), flush=True)
    await driver.shutdown()


if __name__ == "__main__":
    os.environ.update(ONE_THREAD)
    asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])))
