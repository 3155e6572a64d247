"""The driver of vLLM for `kvcore.harness.engine_process`.

Run as ``python -m kvcore_vllm.testing.driver FD``. It uses vLLM's asynchronous client, because only
streaming shows when the first token arrives. The engine core and its workers run in processes of
their own, as under ``vllm serve``.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from kvcore.errors import UnsupportedError
from kvcore.harness.driver import KV_ON_A_CPU, EngineDriver, Prompt, Stopwatch, samples
from kvcore.harness.driver import run as answer_calls
from kvcore_vllm.testing import rig

rig.interpret()  # here, because a process that vLLM spawns runs this file's top level again

SHUTDOWN_S = 60.0
"""Seconds that the engine core may take to end: it must finish the saves in flight."""
SPACE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
"""Environment variable with the size of the KV cache in GiB."""
LOOK_S = 0.0005
"""Seconds between looks for a message of another process of vLLM."""
PUBLISHED_S = 0.5
"""Seconds without work after which every save is published: vLLM does not report that."""


class Driver(EngineDriver):
    """One `AsyncLLM`, with the calls that an `EngineProcess` makes."""

    def __init__(self) -> None:
        super().__init__()
        self._engine: Any = None
        self._far: Any = None
        self._asks = False
        self._loras: dict[str, int] = {}

    async def start(
        self,
        model: str,
        kvcore: dict[str, Any] | None,
        start_method: str = "spawn",
        kv_role: str = "kv_both",
        asynchronous: bool = False,
        piecewise: bool = False,
        steps: str | None = None,
        **engine_args: Any,
    ) -> dict[str, Any]:
        """Start the engine. Blocks this process's event loop until the engine takes requests.

        With ``start_method`` "fork" on a CPU, the engine core and its workers are forks of this
        process. They do not import vLLM again, which takes longer than a small model's answers.

        On a CPU, steps are scheduled asynchronously only if ``asynchronous`` is true, and graphs
        are split only if ``piecewise`` is. ``steps`` is the path of a file for the order of the
        scheduler's calls (`kvcore_vllm.testing.rig`).

        With a ``node_rank`` above 0, only the ranks of that machine are started, as by ``vllm serve
        --headless``. They take no calls, and end with `shutdown`, whatever the first machine does.
        """
        if Path(model).is_dir():
            os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the folder
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        if current_platform.is_cpu():
            engine_args.setdefault("enforce_eager", True)
            if "kv_cache_memory_bytes" in engine_args:
                os.environ.pop(SPACE_VARIABLE, None)  # it would be taken instead
            else:
                os.environ.setdefault(SPACE_VARIABLE, str(KV_ON_A_CPU >> 30))
            sizes = ("tensor_parallel_size", "pipeline_parallel_size")
            ranks = math.prod(int(engine_args.get(size, 1)) for size in sizes)
            _bind_threads(ranks // int(engine_args.get("nnodes", 1)))
            rig.keep(asynchronous, piecewise)
        if kvcore is not None:
            self._asks = True
            engine_args["kv_transfer_config"] = {
                "kv_connector": "KVCoreConnector",
                "kv_role": kv_role,
                "kv_connector_extra_config": kvcore,
            }
        engine_args.setdefault("worker_extension_cls", "kvcore_vllm.testing.rig.InWorker")
        arguments = AsyncEngineArgs(model=model, **_with_own_types(engine_args))
        far = engine_args.get("node_rank", 0) > 0
        settings = arguments.create_engine_config(headless=far)
        if steps is not None:
            rig.record(settings, steps)
        if current_platform.is_cpu():
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = start_method
            if start_method == "fork":
                _keep_frozen()
        if far:
            from vllm.v1.executor.multiproc_executor import MultiprocExecutor

            self._far = MultiprocExecutor(settings, monitor_workers=False)
            return {"engine": "vllm", "version": vllm.__version__}
        self._engine = AsyncLLM.from_vllm_config(settings)
        [runner, *_] = await self._engine.collective_rpc("kvcore_runner")
        [pieces, *_] = await self._engine.collective_rpc("kvcore_pieces")
        return {
            "engine": "vllm",
            "version": vllm.__version__,
            "device": current_platform.device_type,
            "runner": runner,
            "pieces": pieces,
        }

    async def answer(self, prompt: Prompt) -> dict[str, Any]:
        """Answer a request; return the fields of a `Generation`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=prompt.max_tokens,
            ignore_eos=prompt.ignore_eos,
            logprobs=prompt.likeliest or (0 if prompt.logprobs else None),
            output_kind=RequestOutputKind.DELTA,
            extra_args=self._extra_args(prompt),
        )
        adapter = self._lora_request(prompt.lora) if prompt.lora else None
        headers = {"traceparent": prompt.traceparent} if prompt.traceparent else None
        got = _Collected(prompt.request_id)
        outputs = self._engine.generate(
            _request(prompt),
            sampling,
            prompt.request_id,
            lora_request=adapter,
            trace_headers=headers,
        )
        await self.collect(prompt, outputs, got, to_the_end=False)
        return got.reply()

    def _extra_args(self, prompt: Prompt) -> dict[str, Any] | None:
        """Return a request's options for kvcore, which ask for a report; None without kvcore."""
        if not self._asks:
            return None
        wishes = {"report": True, "fusion": prompt.fusion, "promise": prompt.promise}
        asked = {name: wish for name, wish in wishes.items() if wish is not None}
        if prompt.asked is not None:
            asked = {**asked, **prompt.asked} if isinstance(prompt.asked, dict) else prompt.asked
        return {"kv_transfer_params": {"kvcore": asked}}

    def _lora_request(self, folder: str) -> Any:
        """Return vLLM's request for the weights in a folder. A folder keeps its first number."""
        from vllm.lora.request import LoRARequest

        number = self._loras.setdefault(folder, len(self._loras) + 1)
        return LoRARequest(Path(folder).name, number, folder)

    async def abort(self, request_id: str) -> None:
        """Abort one request. Unknown and finished requests are ignored."""
        await self._engine.abort(request_id)

    async def reset_prefix_cache(self, connector: bool, timeout_s: float) -> None:
        """Empty the engine's own cache. Waits for pages that a save still reads."""
        deadline = time.monotonic() + timeout_s
        while not await self._engine.reset_prefix_cache(reset_connector=connector):
            if time.monotonic() > deadline:
                raise UnsupportedError(
                    f"the prefix cache could not be reset within {timeout_s} s: pages are in use"
                )
            await asyncio.sleep(0.05)

    async def settle(self, timeout_s: float) -> None:
        """Wait for as long as saves take: vLLM does not report their end."""
        await asyncio.sleep(min(PUBLISHED_S, timeout_s))

    async def metrics(self) -> dict[str, float]:
        """Return every Prometheus sample of this process."""
        from prometheus_client import REGISTRY

        await asyncio.sleep(0)  # let the output loop log the last step
        return samples(REGISTRY)

    async def shutdown(self) -> None:
        """End the engine core and wait for it."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.shutdown(timeout=SHUTDOWN_S)
        if self._far is not None:
            far, self._far = self._far, None
            far.shutdown()


class _Collected:
    """The outputs of one request, each of which has only the new tokens."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.watch = Stopwatch()
        self.token_ids: list[int] = []
        self.text: list[str] = []
        self.logprobs: list[float] = []
        self.likeliest: list[tuple[int, float]] = []
        self.last: Any = None

    def add(self, output: Any) -> None:
        [choice] = output.outputs
        self.token_ids.extend(choice.token_ids)
        self.watch.note(len(self.token_ids))
        self.text.append(choice.text)
        for token, candidates in zip(choice.token_ids, choice.logprobs or ()):  # noqa: B905
            if not self.logprobs and len(candidates) > 1:
                self.likeliest = [(other, each.logprob) for other, each in candidates.items()]
            self.logprobs.append(candidates[token].logprob)
        self.last = output

    def reply(self) -> dict[str, Any]:
        params = (self.last and self.last.kv_transfer_params) or {}
        return {
            "request_id": self.request_id,
            "token_ids": self.token_ids,
            "text": "".join(self.text),
            "prompt_tokens": len(self.last.prompt_token_ids or ()) if self.last else 0,
            "cached_tokens": (self.last and self.last.num_cached_tokens) or 0,
            **self.watch.times(),
            "finish_reason": self.last.outputs[0].finish_reason if self.last else None,
            "kvcore": params.get("kvcore") or {},
            "logprobs": self.logprobs,
            "likeliest": self.likeliest,
        }


def _request(prompt: Prompt) -> dict[str, Any]:
    kind = "prompt" if isinstance(prompt.prompt, str) else "prompt_token_ids"
    request: dict[str, Any] = {kind: prompt.prompt}
    if prompt.cache_salt is not None:
        request["cache_salt"] = prompt.cache_salt
    if prompt.image is not None:
        from PIL import Image

        request["multi_modal_data"] = {"image": Image.open(prompt.image)}
        if prompt.image_uuid is not None:
            request["multi_modal_uuids"] = {"image": [prompt.image_uuid]}
    return request


def _with_own_types(engine_args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with vLLM's own types for configs that JSON gives as dicts."""
    from vllm.config import KVEventsConfig, KVTransferConfig

    types = {"kv_transfer_config": KVTransferConfig, "kv_events_config": KVEventsConfig}
    made = {
        name: types[name](**value)
        for name, value in engine_args.items()
        if name in types and isinstance(value, dict)
    }
    return {**engine_args, **made}


def _bind_threads(ranks: int) -> None:
    """Divide this process's cores among an engine's ranks, unless the environment already does.

    By default vLLM's CPU build reserves a core for its front end, and one for each rank if there is
    a connector. On two cores it then refuses to start two ranks. One rank computes on one core
    without a connector and on two with one, so the two could not be compared. Ranks that are more
    than the cores share them all.
    """
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::ranks] for rank in range(ranks)]
    if all(shares):
        bind = "|".join(",".join(map(str, share)) for share in shares)
    else:
        bind = "nobind"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", bind)


def _keep_frozen() -> None:
    """Keep vLLM's modules out of garbage collections, in this process and its forks.

    At its end vLLM unfreezes and collects in each process. Walking its modules takes longer than
    the rest of the end, and it copies their memory, which forks share.
    """
    gc.freeze()
    gc.unfreeze = lambda: None


def preload(model: str) -> None:
    """Import what an engine on a CPU imports, for forks of this process. Starts nothing.

    It depends on no model, so it serves every architecture. vLLM imports a model's class first in a
    process of its own, lest it wake a GPU, and keeps in its cache what it saw. On a CPU the fork
    looks for itself: that process would import all of vLLM once more.
    """
    import vllm
    import vllm.model_executor.layers.quantization.online.base
    import vllm.model_executor.models.llama
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.model_executor.models import registry

    import kvcore_vllm.connector  # noqa: F401
    from kvcore_vllm.engine import verdict

    registry._run_in_subprocess = lambda fn: fn()
    _wait_asleep()
    with suppress(UnsupportedError):  # each engine would raise it too
        verdict()  # it reads vLLM's sources, which takes a second


def _wait_asleep() -> None:
    """Let vLLM's processes sleep between looks for a message of another process.

    For a second after the last message they look again and again, and only offer the core. Where an
    engine has one, that takes up to half of it from the process that computes.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    module: Any = shm_broadcast
    module.sched_yield = partial(time.sleep, LOOK_S)


def run(descriptor: int) -> None:
    """Answer the calls of an `EngineProcess` until it closes the socket, and end the process."""
    answer_calls(Driver(), descriptor)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # engine core and workers have ended; tearing down the modules would take seconds


if __name__ == "__main__":
    run(int(sys.argv[1]))
