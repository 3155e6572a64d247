"""A harness that drives a TensorRT-LLM connector without TensorRT-LLM, and without a GPU.

`Harness` repeats the executor's order of calls over a real small model. The model's KV is in pages
as in the engine, so greedy output with a connector can be compared with output without one:

    with installed():                       # stands in for tensorrt_llm if it is absent
        from some_connector import Scheduler, Worker
        with Harness(folder, connector=(Scheduler, Worker)) as harness:
            answers = harness.generate(prompts, max_tokens=8)

It covers neither CUDA streams, nor the engine's kernels, nor the replay of CUDA graphs.
"""

from kvcore_trtllm.testing.executor import Call, Limits
from kvcore_trtllm.testing.harness import Harness, HarnessArgs
from kvcore_trtllm.testing.requests import LlmRequest, State
from kvcore_trtllm.testing.standins import installed

__all__ = ["Call", "Harness", "HarnessArgs", "Limits", "LlmRequest", "State", "installed"]
