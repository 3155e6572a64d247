"""The reference engine: a small serving engine with kvcore, driven as any adapter drives it.

    model = load(tiny_model("llama"))            # or random_llama(...), on a CPU or a GPU
    with ReferenceEngine(model, EngineArgs(ranks=2), config) as engine:
        answers = engine.generate(prompts, max_tokens=8)

It runs Llama with greedy decoding in plain torch. It has paged KV, chunked prefill, continuous
batching, a prefix cache, preemption, aborts, tiers and fusion. Read it first when you write an
adapter. `kvcore.testing.conformance` is tested on it.
"""

from kvcore.testing.engine.engine import EngineArgs, ReferenceEngine
from kvcore.testing.engine.model import Llama, load, random_llama
from kvcore.testing.engine.requests import Request, State

__all__ = ["EngineArgs", "Llama", "ReferenceEngine", "Request", "State", "load", "random_llama"]
