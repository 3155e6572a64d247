"""Two engines on one store: the second engine answers with KV that the first one computed.

    pip install obstore
    python examples/two_engines_one_store.py MODEL [STORE_URL]

STORE_URL is whatever obstore reaches: `s3://BUCKET/PATH`, `gs://...`, or `file:///FOLDER` for a
folder that every host mounts. The engines run one after the other here, each in a process of its
own; on two hosts they may run at the same time.
"""

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; without it vLLM takes nearly all

DOCUMENT = " ".join(f"Rule {n}: the shelf numbered {n} holds {n * 7} books." for n in range(60))


def answer(model: str, url: str) -> tuple[str, dict]:
    """Start an engine, ask it, and return its text and the tokens it reused by tier."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        max_model_len=4096,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "KVCoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "tiers": {"shared": {"plugin": "objects", "options": {"url": url}}}
            },
        },
    )
    report = {"kv_transfer_params": {"kvcore": {"report": True}}}
    sampling = SamplingParams(temperature=0, max_tokens=8, extra_args=report)
    [output] = llm.generate([DOCUMENT], sampling, use_tqdm=False)
    time.sleep(2)  # the store is written in the background
    return output.outputs[0].text, output.kv_transfer_params["kvcore"]["tiers"]


def main() -> None:
    model = sys.argv[1]
    folder = Path("kvcore-shared").absolute()
    url = sys.argv[2] if len(sys.argv) > 2 else folder.as_uri()
    if url.startswith("file://"):
        Path(url.removeprefix("file://")).mkdir(parents=True, exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    for name in ("first engine", "second engine"):
        with ProcessPoolExecutor(1, mp_context=spawn) as process:
            text, tiers = process.submit(answer, model, url).result()
        print(f"{name}: reused by tier: {tiers}, {text!r}")


if __name__ == "__main__":
    main()
