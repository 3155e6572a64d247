"""vLLM offline with a disk tier.

    python examples/vllm_offline.py MODEL [DISK_FOLDER]

Run it twice. The second answer of a run reads its KV from host memory, and the first answer of the
next run reads it from disk. MODEL is a Hugging Face name or a folder.
"""

import os
import sys
import time

# vLLM's CPU build takes nearly all memory for its KV cache unless it is told how many GiB to take.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams

REPORT = {"kv_transfer_params": {"kvcore": {"report": True}}}
DOCUMENT = " ".join(f"Rule {n}: the shelf numbered {n} holds {n * 7} books." for n in range(100))
QUESTION = f"{DOCUMENT}\n\nHow many books does the shelf numbered 5 hold?"


def start(model: str, disk: str) -> LLM:
    """Make an engine that keeps KV in 1 GiB of host memory and 4 GiB of disk."""
    return LLM(
        model,
        max_model_len=4096,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "KVCoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "host": {"capacity": "1GiB"},
                "disk": {"path": disk, "capacity": "4GiB"},
            },
        },
    )


def ask(llm: LLM, name: str) -> dict:
    """Answer the question; print how long it took, and return the tokens reused by tier."""
    began = time.perf_counter()
    sampling = SamplingParams(temperature=0, max_tokens=8, extra_args=REPORT)
    [output] = llm.chat([{"role": "user", "content": QUESTION}], sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    tiers = output.kv_transfer_params["kvcore"]["tiers"]
    print(f"{name}: {seconds:.2f} s, reused by tier: {tiers}, {output.outputs[0].text!r}")
    return tiers


def main() -> None:
    disk = sys.argv[2] if len(sys.argv) > 2 else "kvcore-example"
    llm = start(sys.argv[1], disk)
    ask(llm, "first answer")  # computed, or read from disk if this is the second run
    time.sleep(1)  # saves end in the background
    llm.reset_prefix_cache()  # empties vLLM's own cache only
    ask(llm, "second answer")  # read from host memory


if __name__ == "__main__":
    main()
