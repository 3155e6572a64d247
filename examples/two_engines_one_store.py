"""Two engines on one store: the second engine answers with KV that the first one computed.

    pip install obstore
    python examples/two_engines_one_store.py MODEL STORE_URL     # on one host
    python examples/two_engines_one_store.py MODEL STORE_URL     # on another, or later

STORE_URL is whatever obstore reaches: `s3://BUCKET/PATH`, `gs://...`, or `file:///FOLDER` for a
folder that every host mounts. Each engine has host memory of its own and keeps nothing on disk.
"""

import os
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; without it vLLM takes nearly all

from vllm import LLM, SamplingParams

DOCUMENT = " ".join(f"Rule {n}: the shelf numbered {n} holds {n * 7} books." for n in range(60))
REPORT = {"kv_transfer_params": {"kvcore": {"report": True}}}


def main() -> None:
    model, url = sys.argv[1:]
    if url.startswith("file://"):
        Path(url.removeprefix("file://")).mkdir(parents=True, exist_ok=True)
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
    sampling = SamplingParams(temperature=0, max_tokens=8, extra_args=REPORT)
    [output] = llm.generate([DOCUMENT], sampling, use_tqdm=False)
    tiers = output.kv_transfer_params["kvcore"]["tiers"]
    print(f"reused by tier: {tiers}, {output.outputs[0].text!r}")
    time.sleep(2)  # the store is written in the background


if __name__ == "__main__":
    main()
