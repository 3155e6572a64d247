"""The driver of SGLang for `kvcore.harness.engine_process`.

Run as ``python -m kvcore_sglang.testing.driver FD``. It uses SGLang's Python engine, whose
scheduler runs in a process of its own, as under SGLang's server.
"""

from __future__ import annotations

from kvcore_sglang.testing.standins import install

install()  # at the top: SGLang's processes are spawned from this module, and run it again

import asyncio  # noqa: E402
import contextlib  # noqa: E402
import functools  # noqa: E402
import gc  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Collection  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from prometheus_client import CollectorRegistry  # noqa: E402

from kvcore.errors import UnsupportedError  # noqa: E402
from kvcore.harness.driver import (  # noqa: E402
    KV_ON_A_CPU,
    EngineDriver,
    Prompt,
    Stopwatch,
    samples,
)
from kvcore.harness.driver import run as answer_calls  # noqa: E402
from kvcore.harness.engine_forks import architecture as architecture_of  # noqa: E402
from kvcore.harness.models import token_nbytes  # noqa: E402
from kvcore.telemetry.metrics import Metrics  # noqa: E402

CORES_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"
SETTLE_S = 60.0
"""Seconds that saves in flight may take at the end, before SGLang kills its scheduler."""

CPU_SETTINGS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
}

MODEL_MODULES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma3_causal",
    "Phi3ForCausalLM": "phi3",
    "DeepseekV2ForCausalLM": "deepseek_v2",
}
"""The modules in which SGLang has the architectures of small models."""
MLA_ARCHITECTURES = frozenset({"DeepseekV2ForCausalLM"})


class Driver(EngineDriver):
    """One `sglang.Engine`, with the calls that an `EngineProcess` makes."""

    restarts = True

    def __init__(self) -> None:
        super().__init__()
        self._engine: Any = None
        self._kvcore: dict[str, Any] | None = None
        self._forgets: Any = None
        self._architecture: str | None = None
        self._cores = os.environ.get(CORES_VARIABLE)

    async def start(
        self,
        model: str,
        kvcore: dict[str, Any] | None,
        start_method: str = "spawn",
        **engine_args: Any,
    ) -> dict[str, Any]:
        """Build the engine; blocks this process's loop until it takes requests.

        With the ``start_method`` "fork" its processes do not import SGLang again, each in 15 s of
        a core: on a CPU alone, a GPU's state does not survive a fork. One engine may follow another
        that was shut down; their models are of one architecture.
        """
        architecture = architecture_of(model)
        if self._architecture not in (None, architecture):
            raise UnsupportedError(
                f"this process has had an engine for {self._architecture}, and {model} holds "
                f"{architecture or 'another'}: use a process of its own"
            )
        self._architecture = architecture
        if Path(model).is_dir():
            os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the folder
        import torch

        on_cpu = not torch.cuda.is_available()
        if on_cpu:
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
            engine_args = {**CPU_SETTINGS, **bounded(model, engine_args)}
            if self._cores is None:
                _name_cores(engine_args.get("tp_size", 1) * engine_args.get("dp_size", 1))
            _import_small_models(architecture)
        import sglang

        _make_attention_known(engine_args.get("attention_backend"), start_method)
        if start_method == "fork" and on_cpu:
            _fork_processes()
            _attend_latents_in_torch(architecture)
        if on_cpu and engine_args.get("enable_hierarchical_cache"):
            engine_args = _with_hicache(engine_args, start_method)
        if kvcore is not None:
            from kvcore.config import load_config
            from kvcore_sglang.plugin import engine_settings

            self._kvcore = kvcore
            if start_method == "fork" and on_cpu and self._forgets is None:
                self._forgets = _forget_on_word()
            sglang_settings = {**kvcore.get("sglang", {}), "list_requests": True}
            given = {**kvcore, "sglang": sglang_settings}
            config = load_config(overrides=given, env={}, overrides_from="the test")
            engine_args.update(engine_settings(config))
        self._engine = sglang.Engine(model_path=model, log_level="info", **engine_args)
        device = "cpu" if on_cpu else "cuda"
        return {"engine": "sglang", "version": sglang.__version__, "device": device}

    async def answer(self, prompt: Prompt) -> dict[str, Any]:
        """Answer a request; return the fields of a `Generation`."""
        if prompt.lora or prompt.image or prompt.promise is not None:
            raise UnsupportedError("the driver of SGLang takes text without LoRA or a promise")
        kind = "prompt" if isinstance(prompt.prompt, str) else "input_ids"
        wishes = _wishes(prompt)
        trace = {"traceparent": prompt.traceparent} if prompt.traceparent else None
        got = _Collected(prompt.request_id)
        outputs = await self._engine.async_generate(
            **{kind: prompt.prompt},
            sampling_params={
                "temperature": 0.0,
                "max_new_tokens": prompt.max_tokens,
                "ignore_eos": prompt.ignore_eos,
                **wishes,
            },
            rid=prompt.request_id,
            return_logprob=prompt.logprobs or prompt.likeliest > 0,
            top_logprobs_num=prompt.likeliest,
            stream=True,
            cache_salt=prompt.cache_salt,
            external_trace_header=trace,
        )
        await self.collect(prompt, outputs, got, to_the_end=True)
        return got.reply(await self._reused(prompt.request_id))

    async def _reused(self, request_id: str) -> dict[str, Any]:
        """Return what kvcore reused for a request; empty if kvcore does not serve."""
        try:
            states = await self._states()
        except UnsupportedError:
            return {}
        for state in states:
            if request_id in state["requests"] or request_id in state["fusion"]:
                tiers = state["requests"].get(request_id, {})
                found = {"reused_tokens": sum(tiers.values()), "tiers": tiers}
                fusion = state["fusion"].get(request_id)
                return found if fusion is None else {**found, "fusion": fusion}
        return {"reused_tokens": 0, "tiers": {}}

    async def _states(self) -> list[dict[str, Any]]:
        """Return kvcore's own state in each replica of the engine, in no order."""
        if self._kvcore is None:
            raise UnsupportedError("the engine was started without kvcore")
        states = await self._engine.tokenizer_manager.get_internal_state()
        if any("kvcore" not in state for state in states):
            raise UnsupportedError("kvcore does not serve here: the engine's log says why")
        return [state["kvcore"] for state in states]

    async def abort(self, request_id: str) -> None:
        """Abort one request. Unknown and finished requests are ignored."""
        self._engine.tokenizer_manager.abort_request(rid=request_id)

    async def reset_prefix_cache(self, connector: bool, timeout_s: float) -> None:
        """Empty the engine's own cache, and kvcore's tiers unless ``sglang.keep_on_flush``.

        With ``keep_on_flush`` and ``connector``, processes that are forks empty kvcore all the
        same. Raises UnsupportedError if they are not forks, or after ``timeout_s`` seconds.
        """
        keeps = bool((self._kvcore or {}).get("sglang", {}).get("keep_on_flush", True))
        forced = connector and self._forgets is not None
        if self._kvcore is not None and connector == keeps and not forced:
            raise UnsupportedError(
                f"given connector={connector} and sglang.keep_on_flush={keeps}; a flush of SGLang "
                "empties kvcore only if keep_on_flush is false"
            )
        if not forced:
            return await self._flush(timeout_s)
        self._forgets.value = 1
        try:
            await self._flush(timeout_s)
        finally:
            self._forgets.value = 0

    async def _flush(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not (await self._engine.tokenizer_manager.flush_cache()).success:
            if time.monotonic() > deadline:
                raise UnsupportedError(
                    f"the prefix cache could not be reset within {timeout_s} s: requests run"
                )
            await asyncio.sleep(0.05)

    async def settle(self, timeout_s: float) -> None:
        """Wait until no transfer of kvcore's is in flight, at most ``timeout_s`` seconds."""
        limit = time.monotonic() + timeout_s
        while await self._is_busy():
            if time.monotonic() >= limit:
                raise UnsupportedError(f"saves are still in flight after {timeout_s} s")
            await asyncio.sleep(0.05)

    async def _is_busy(self) -> bool:
        """Return True if transfers of kvcore's are in flight.

        If kvcore has stood aside, what it had planned may never end, and nobody waits for it.
        """
        try:
            return any(state["in_flight"] and not state["aside"] for state in await self._states())
        except UnsupportedError:
            return False

    async def metrics(self) -> dict[str, float]:
        """Return kvcore's Prometheus samples, added up over all replicas."""
        if self._kvcore is None:
            return {}
        metrics, registry = Metrics("driver"), CollectorRegistry()
        for state in await self._states():
            metrics.absorb(state["metrics"])
        metrics.register(registry)
        return samples(registry)

    async def shutdown(self) -> None:
        """Wait for kvcore's transfers, then end the engine. `start` may be called again."""
        if self._engine is None:
            return
        with contextlib.suppress(UnsupportedError):
            await self.settle(SETTLE_S)
        engine, self._engine, self._kvcore = self._engine, None, None
        engine.shutdown()


class _Collected:
    """The outputs of one request, each of which has all tokens so far."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.watch = Stopwatch()
        self.token_ids: list[int] = []
        self.text = ""
        self.meta: dict[str, Any] = {}

    def add(self, output: dict[str, Any]) -> None:
        self.token_ids = list(output.get("output_ids") or self.token_ids)
        self.watch.note(len(self.token_ids))
        self.text, self.meta = output.get("text", self.text), output["meta_info"]

    def reply(self, kvcore: dict[str, Any]) -> dict[str, Any]:
        reason = self.meta.get("finish_reason") or {}
        logprobs = self.meta.get("output_token_logprobs") or []
        likeliest = (self.meta.get("output_top_logprobs") or [None])[0] or []
        sources = self.meta.get("cached_tokens_details") or {}
        return {
            "request_id": self.request_id,
            "token_ids": self.token_ids,
            "text": self.text,
            "prompt_tokens": self.meta.get("prompt_tokens", 0),
            "cached_tokens": self.meta.get("cached_tokens", 0),
            **self.watch.times(),
            "finish_reason": reason.get("type"),
            "kvcore": kvcore,
            "logprobs": [logprob for logprob, *_ in logprobs],
            "likeliest": [(token, logprob) for logprob, token, *_ in likeliest],
            "sources": {name: n for name, n in sources.items() if isinstance(n, int)},
        }


def bounded(model: str, engine_args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments, with a size of the engine's pool if they have none."""
    if engine_args.keys() & {"max_total_tokens", "mem_fraction_static"}:
        return engine_args
    each = token_nbytes(model, engine_args.get("dtype", "auto"))
    return {**engine_args, "max_total_tokens": KV_ON_A_CPU // each}


def _fork_processes() -> None:
    """Make this process's children forks of it, although SGLang asks to spawn them.

    On a CPU every flush runs the garbage collector. The modules that are imported here are frozen,
    so that it does not walk them.
    """
    from sglang.srt.entrypoints import engine  # noqa: F401 - with all that the children need

    gc.freeze()
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **options: None


def _forget_on_word() -> Any:
    """Make flushes empty kvcore's tiers too while the returned value is not 0.

    The value is shared with this process's later forks, in which this takes effect.
    """
    from kvcore_sglang.linker import KVCoreLinker

    word = multiprocessing.get_context("fork").Value("b", 0, lock=False)
    real = KVCoreLinker.reset

    @functools.wraps(real)
    def reset(self: KVCoreLinker) -> None:
        real(self)
        if word.value and self.leader is not None:
            self.leader.clear()

    KVCoreLinker.reset = reset  # type: ignore[method-assign]
    return word


def _with_hicache(engine_args: dict[str, Any], start_method: str) -> dict[str, Any]:
    """Prepare HiCache to run without a GPU; return the engine's arguments with those it needs."""
    if start_method != "fork":
        raise UnsupportedError(
            f"HiCache on a CPU with start_method={start_method!r}: its processes must be forks of "
            "this one, which has the stand-ins; use 'fork'"
        )
    from sglang.srt.mem_cache.allocator import paged
    from sglang.srt.mem_cache.pool_host import base, mha

    from kvcore_sglang.testing.hicache import SETTINGS, find_slots_in_python, stand_in

    stand_in(base, mha)
    find_slots_in_python(paged)
    return {**SETTINGS, **engine_args}


def _name_cores(ranks: int) -> None:
    """Name a core for each rank in the environment: otherwise SGLang wants a NUMA node for each."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ.pop(CORES_VARIABLE, None)
    if ranks > 1:
        named = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
        os.environ[CORES_VARIABLE] = named


def _import_small_models(architecture: str) -> bool:
    """Keep SGLang from importing all its models (10 s on a small CPU) if those of small ones do.

    Return True if they do.
    """
    package = importlib.util.find_spec("sglang")
    if architecture not in MODEL_MODULES or package is None or package.origin is None:
        return False
    models = (Path(package.origin).parent / "srt" / "models").glob("*.py")
    others = {path.stem for path in models} - set(MODEL_MODULES.values())
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(sorted(others)))
    return True


def _make_attention_known(name: str | None, start_method: str) -> None:
    """Register `kvcore_sglang.attention` with SGLang if ``name`` asks for it."""
    from kvcore_sglang.attention import ROWS, register

    if name != ROWS:
        return
    if start_method != "fork":
        raise UnsupportedError(
            f"attention_backend={name!r} is registered in this process alone: start_method is "
            f"{start_method!r}, it must be 'fork'"
        )
    register()


def _attend_latents_in_torch(architecture: str) -> None:
    """Let attention in plain torch serve MLA, in this process and its forks.

    The backend can do it, but SGLang's table has no entry for it and falls back to Triton.
    """
    if architecture not in MLA_ARCHITECTURES:
        return
    from sglang.srt.models.deepseek_common import attention_backend_handler as ways

    ways.AttentionBackendRegistry.register(
        CPU_SETTINGS["attention_backend"], lambda layer, batch: ways.AttnForwardMethod.MLA
    )


def _wishes(prompt: Prompt) -> dict[str, Any]:
    """Return a request's options for kvcore in the form in which SGLang passes them on."""
    asked = {} if prompt.fusion is None else {"fusion": prompt.fusion}
    if isinstance(prompt.asked, dict):
        asked |= prompt.asked
    text = prompt.asked if isinstance(prompt.asked, str) else json.dumps(asked)
    return {"custom_params": {"kvcore": text}} if asked or text != "{}" else {}


def preload(model: str) -> Collection[str] | None:
    """Import what an engine for ``model`` on a CPU imports, for forks of this process.

    Starts nothing. Return the architectures of small models if only those are imported.
    """
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    small = _import_small_models(architecture_of(model))
    from sglang.srt.entrypoints import engine  # noqa: F401

    _import_what_schedulers_do(small)
    with contextlib.suppress(UnsupportedError):  # an older SGLang has no linkers
        import kvcore_sglang.linker  # noqa: F401
    _flush_without_collecting()
    _resolve_settings_once()
    return list(MODEL_MODULES) if small else None


def _import_what_schedulers_do(small: bool) -> None:
    """Import what every scheduler imports when it starts, which takes each one 8 s of a core.

    SGLang has some functions compiled while it imports them, and torch imports its compiler for
    that. All models are left out unless ``small`` says that SGLang imports only a few.
    """
    if small:
        from sglang.srt.models import registry  # noqa: F401 - imports the models
    with contextlib.suppress(ImportError):  # another SGLang may not have it
        import sglang.srt.dllm.algorithm  # noqa: F401
    with contextlib.suppress(ImportError):  # needs setuptools; SGLang loads its extensions with it
        import torch.utils.cpp_extension  # noqa: F401


def _flush_without_collecting() -> None:
    """Let SGLang empty its cache on a CPU without a garbage collection.

    It collects to free a model's memory. Tests empty the cache between their prompts, and a walk
    through all that SGLang has imported takes as long as several answers.
    """
    with contextlib.suppress(ImportError):  # an older SGLang does not collect
        from sglang.srt.platforms.cpu import CpuDeviceMixin

        mixin: Any = CpuDeviceMixin
        mixin.empty_cache = lambda self: None


def _resolve_settings_once() -> None:
    """Let SGLang resolve its settings once, and not whenever kvcore's state is asked for.

    A test asks until all saves have ended. Each reply has all settings, and SGLang resolves them
    for as long as a step of a small model takes.
    """
    try:
        from sglang.srt.runtime_context import RuntimeContext

        real = RuntimeContext.resolved_server_args_dict
    except (ImportError, AttributeError):  # an older SGLang
        return
    resolved: dict[int, dict[str, Any]] = {}

    def resolve(self: Any, base: dict[str, Any] | None = None) -> Any:
        if base is None:
            settings = self.server_args
            if id(settings) not in resolved:
                resolved[id(settings)] = settings.resolved_dict()
            base = resolved[id(settings)]
        return real(self, base)

    RuntimeContext.resolved_server_args_dict = resolve


def run(descriptor: int) -> None:
    """Answer the calls of an `EngineProcess` until it closes the socket."""
    answer_calls(Driver(), descriptor)


if __name__ == "__main__":
    run(int(sys.argv[1]))
