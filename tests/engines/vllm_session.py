"""Two streaming sessions of vLLM, run as ``python vllm_session.py MODEL KVCORE PICTURE PICTURE``.

An engine without kvcore answers, and then one with it. Each session sends a text, and then a
picture with another text. The sessions differ in the picture only. The second one loses its pages
in the middle of its last answer. Prints its tokens, and the number of lookups that kvcore answered,
as a line of JSON for each engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from PIL import Image
from vllm import SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind

from kvcore.harness.compare import SMALL
from kvcore.harness.prompts import windows
from kvcore_vllm.testing.driver import Driver

IMAGE = 49153  # IMAGE_TOKEN of tiny_vision_model
ANSWER = 48


async def session(driver: Driver, name: str, turns: list[Any], reset_after: int) -> list[int]:
    """Return all tokens of a session's answers. The engine is reset after so many of the last."""
    engine = driver._engine
    sampling = SamplingParams(
        temperature=0.0, max_tokens=ANSWER, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    answered = asyncio.Event()

    async def send() -> AsyncIterator[StreamingInput]:
        for turn in turns:
            parsed = parse_model_prompt(engine.model_config, turn)
            params = engine.renderer.default_cmpl_tok_params
            [rendered] = engine.renderer.render_cmpl([parsed], params)
            answered.clear()
            yield StreamingInput(rendered)
            await answered.wait()

    found: list[int] = []
    async for output in engine.generate(send(), sampling, name):
        found += output.outputs[0].token_ids
        if reset_after and len(found) == (len(turns) - 1) * ANSWER + reset_after:
            await engine.reset_prefix_cache(reset_running_requests=True)
        if len(found) % ANSWER == 0:
            answered.set()
    return found


async def sessions(model: Path, kvcore: dict[str, Any] | None, pictures: list[Path]) -> None:
    driver = Driver()
    # The processor needs the tokenizer. With asynchronous scheduling and any connector, vLLM frees
    # pages late, and refuses to reset the cache of running requests.
    own = ("forked", "skip_tokenizer_init", "asynchronous")
    await driver.start(str(model), kvcore, **{k: v for k, v in SMALL.items() if k not in own})
    text = [token for token in windows(model, 1, 700, 700, seed=5)[0] if token < IMAGE - 1]
    found: list[int] = []
    for number, picture in enumerate(pictures):
        seen = {"image": Image.open(picture)}
        turns = [
            {"prompt_token_ids": text[:200]},
            {"prompt_token_ids": [IMAGE, *text[200:]], "multi_modal_data": seen},
        ]
        found = await session(driver, f"session-{number}", turns, reset_after=20 * number)
        await driver.settle(2.0)
        await driver.reset_prefix_cache(False, 60.0)
    samples = await driver.metrics()
    hits = sum(value for name, value in samples.items() if name.startswith("kvcore_hits_total"))
    print(json.dumps({"tokens": found, "hits": hits}), flush=True)
    await driver.shutdown()


async def main(model: Path, kvcore: dict[str, Any], pictures: list[Path]) -> None:
    for given in (None, kvcore):
        await sessions(model, given, pictures)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), json.loads(sys.argv[2]), [*map(Path, sys.argv[3:])]))
