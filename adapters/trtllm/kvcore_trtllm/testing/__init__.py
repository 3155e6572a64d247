"""A harness that drives a TensorRT-LLM connector without TensorRT-LLM, and without a GPU.

`Harness` replays the executor's order of calls over a real small model whose KV lies in pages as
the engine keeps them, so greedy output with a connector can be compared with that of none:

    with installed():                       # stands in for tensorrt_llm where it is absent
        from some_connector import Scheduler, Worker
        with Harness(folder, connector=(Scheduler, Worker)) as harness:
            answers = harness.generate(prompts, max_tokens=8)

What it cannot show: CUDA streams, the engine's kernels, CUDA-graph replay.
"""

from kvcore_trtllm.testing.executor import Call, Limits
from kvcore_trtllm.testing.harness import Harness, HarnessArgs
from kvcore_trtllm.testing.requests import LlmRequest, State
from kvcore_trtllm.testing.standins import installed

__all__ = ["Call", "Harness", "HarnessArgs", "Limits", "LlmRequest", "State", "installed"]
