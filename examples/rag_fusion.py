"""RAG with fusion: documents that were computed once are reused in any order.

    python examples/rag_fusion.py MODEL

A prefix cache reuses the documents only in the order in which it saw them. Fusion reuses each one
where it now stands and recomputes a share of its tokens (`ratio`), so its answer is close to the
engine's own and not always equal to it: docs/fusion.md. With SmolLM2-135M, which is small, a share
of 0.15 gives a wrong answer here, and 0.3 the right one.
"""

import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; without it vLLM takes nearly all

from vllm import LLM, SamplingParams, TokensPrompt

TOWNS = {"Arden": "copper", "Brill": "salt", "Cove": "amber", "Dale": "slate"}


def document(town: str, ware: str) -> str:
    filler = " ".join(f"In year {n}, {n * 3} carts came to {town}." for n in range(1, 31))
    return f"About {town}. {town} is known for its {ware}. {filler}\n\n"


def ask(llm: LLM, prompt: list[int], max_tokens: int, **fusion: object) -> tuple[str, dict]:
    """Return the answer's text and kvcore's report; ``fusion`` holds wishes of this request."""
    wishes = {"kvcore": {"report": True, "fusion": fusion}}
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, extra_args={"kv_transfer_params": wishes}
    )
    [output] = llm.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
    return output.outputs[0].text, output.kv_transfer_params["kvcore"]


def main() -> None:
    llm = LLM(
        sys.argv[1],
        max_model_len=4096,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "KVCoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"fusion": {"enabled": True, "ratio": 0.3}},
        },
    )
    encode = llm.get_tokenizer().encode
    documents = [encode(document(town, ware)) for town, ware in TOWNS.items()]
    for tokens in documents:  # warm: compute each document once, by itself
        ask(llm, tokens, 1, enabled=False)
    time.sleep(1)  # saves end in the background
    llm.reset_prefix_cache()
    question = encode("\n\nQuestion: what is Brill known for?\nAnswer: Brill is known for its")
    shuffled = [*documents[3], *documents[1], *documents[2], *documents[0], *question]
    for name, wishes in {"blended": {}, "exact": {"enabled": False}}.items():
        began = time.perf_counter()
        text, report = ask(llm, shuffled, 8, **wishes)
        reused = report.get("fusion", {}).get("blended_tokens", 0)
        seconds = time.perf_counter() - began
        print(f"{name}: {seconds:.2f} s, {reused} of {len(shuffled)} tokens blended, {text!r}")


if __name__ == "__main__":
    main()
