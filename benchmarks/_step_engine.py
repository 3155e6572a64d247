"""One vLLM engine without a model, for `step_cost`: ``python -m benchmarks._step_engine FD``.

The engine core, its scheduler, its KV pages and both halves of the connector are vLLM's own. Only
the forward is missing: in its place the engine sleeps, as a host waits for a GPU, and makes up one
token for each request. The tokens depend on the request alone, so every connector sees the same
requests.

Parent and child exchange JSON, one object per line, over the socket with number FD.
"""

from __future__ import annotations

import gc
import json
import os
import random
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PAGE_TOKENS, BLOCK_TOKENS = 32, 16
VOCABULARY = 30_000
STORED, TAIL = 512, 256
"""Tokens at the start of a prompt that a hit finds stored, and tokens after them, at most.

A chunk of LMCache has 256 tokens: with 256 requests running, one completes its chunk in each step.
"""

LEADER_CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "get_loaded_kv_cache_group_ids",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
    "get_kv_connector_stats",
    "has_pending_push_work",
    "has_pending_block_frees",
)
WORKER_CALLS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
"""What vLLM calls on a connector, in its scheduler and around a forward."""


class Clock:
    """Adds up the time inside the calls of one half of a connector: by the clock, and on a core.

    The time on a core leaves out other work on the machine. A call that the connector makes on
    itself is part of the call around it.
    """

    def __init__(self, connector: Any, calls: Sequence[str]) -> None:
        self._spent: dict[str, tuple[int, int]] = {}
        self._inside = False
        for name in calls:
            if hasattr(connector, name):  # LMCache serves models with one kind of pages only
                setattr(connector, name, self.timed(name, getattr(connector, name)))

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` with its time counted under ``name``."""
        lists = name == "take_events"  # a generator does its work when it is read

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside = True
            wall, core = self._spent.get(name, (0, 0))
            start, began = time.perf_counter_ns(), time.thread_time_ns()
            try:
                result = call(*args, **kwargs)
                return list(result) if lists else result
            finally:
                core += time.thread_time_ns() - began
                self._spent[name] = wall + time.perf_counter_ns() - start, core
                self._inside = False

        return timed

    def take(self) -> dict[str, tuple[int, int]]:
        """Return the nanoseconds by the clock and on a core, of each call since the last time."""
        taken, self._spent = self._spent, {}
        return taken


class Ran(NamedTuple):
    """One step: its kind, the blocks that it completed, and nanoseconds in the calls of each half.

    The kind is "decode" if every running request got one token and nothing else happened,
    "prefill" if a prompt or a part of one was computed, and "other".
    """

    kind: str
    completed: int
    leader: dict[str, tuple[int, int]]
    worker: dict[str, tuple[int, int]]


class StepEngine:
    """An engine core with a connector, driven step by step."""

    def __init__(
        self, model: str, transfer: dict[str, Any], running: int, memory_gb: int, forward_s: float
    ) -> None:
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE=str(memory_gb),
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
        )
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        settings = EngineArgs(
            model=model,
            dtype="bfloat16",
            block_size=PAGE_TOKENS,
            max_model_len=2048,
            max_num_seqs=running,
            max_num_batched_tokens=8192,
            enforce_eager=True,
            kv_transfer_config=KVTransferConfig(kv_role="kv_both", **transfer),
        ).create_engine_config()
        settings.parallel_config.distributed_executor_backend = "uni"  # one process, as on one GPU
        self._core = EngineCore(settings, UniProcExecutor, log_stats=True)
        self._settings = settings
        self._scheduler: Any = self._core.scheduler
        self._connector = get_kv_transfer_group()
        self._layers = list(settings.compilation_config.static_forward_context)
        self._forward_s = forward_s
        self._leader = Clock(self._scheduler.connector, LEADER_CALLS)
        self._worker = Clock(self._connector, WORKER_CALLS)
        self._pass_layers = self._worker.timed("layers", self._each_layer)
        self._made = 0
        gc.collect()
        gc.freeze()  # as vLLM does when it has started

    # -- rounds -------------------------------------------------------------------------------

    def fill(self, running: int, tokens: int) -> None:
        """Store ``tokens`` tokens, so that the connector's memory is full, as it is in service.

        Then store the prompts that later rounds find.
        """
        for seed in range(-(-tokens // 16_384)):
            self._run([_tokens(seed * 977 + i, 1024) for i in range(1_000_000, 1_000_016)])
        for first in range(0, running, 32):
            starts = range(first, min(first + 32, running), 2)
            self._run([[*_tokens(-1 - i, STORED), 7] for i in starts])

    def round(self, running: int, steps: int, seed: int) -> dict[str, Any]:
        """Run ``running`` requests, half of them hits, until ``steps`` steps only decoded."""
        return self._run([self._prompt(i, running, seed) for i in range(running)], steps)

    def _run(self, prompts: list[list[int]], steps: int = 1) -> dict[str, Any]:
        self._made += 1
        ran: list[Ran] = []
        self._add(prompts)
        while sum(step.kind == "decode" for step in ran) < steps:
            ran.append(self.step(len(prompts)))
        self._leader.take()
        self._scheduler.finish_requests(list(self._scheduler.requests), _stopped())
        ended = self._leader.take()
        self._drain()
        return {
            "steps": [step._asdict() for step in ran],
            "finish": ended,
            "reused": self._reused,
        }

    @staticmethod
    def _prompt(i: int, running: int, seed: int) -> list[int]:
        """Return a prompt: the even ones begin with what is stored, the odd ones are new.

        Their lengths differ, so that as many blocks are completed in one step as in the next.
        """
        own = seed * 100_003 + i
        start = _tokens(-1 - i if i % 2 == 0 else own, STORED)
        return start + _tokens(own + 50_000, 1 + i * TAIL // running)

    def _add(self, prompts: Sequence[list[int]]) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._reused = 0
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=0.0, max_tokens=1400, ignore_eos=True)
            self._core.add_request(
                Request(
                    f"{self._made}-{i}",
                    prompt,
                    sampling,
                    None,
                    block_hasher=self._core.request_block_hasher,
                )
            )

    def _drain(self) -> None:
        """Step until the connector has nothing in flight, and empty vLLM's own cache."""
        limit = time.monotonic() + 30
        while True:
            self.step(0)
            if not self._scheduler.has_requests() and self._scheduler.reset_prefix_cache():
                break
            if time.monotonic() > limit:
                raise SystemExit("the connector did not become idle in 30 s")
        time.sleep(0.1)  # saves in flight end
        self.step(0)
        gc.collect()

    # -- a step -------------------------------------------------------------------------------

    def step(self, running: int) -> Ran:
        """Run one step of `EngineCore.step`."""
        self._leader.take()
        self._worker.take()
        scheduler = self._scheduler
        scheduler.has_requests()
        output = scheduler.schedule()
        for new in output.scheduled_new_reqs:
            self._reused += new.num_computed_tokens
        scheduler.update_from_output(output, self._execute(output))
        tokens = output.num_scheduled_tokens
        completed = sum(
            scheduler.requests[name].num_computed_tokens % BLOCK_TOKENS == 0
            for name in tokens
            if name in scheduler.requests
        )
        kind = "other"
        if any(n > 1 for n in tokens.values()) or output.scheduled_new_reqs:
            kind = "prefill"
        elif len(tokens) == running:
            kind = "decode"
        return Ran(kind, completed, self._leader.take(), self._worker.take())

    def _execute(self, output: Any) -> Any:
        """Do what the model runner does with a connector around a forward."""
        from vllm.forward_context import set_forward_context
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

        self._connector.handle_preemptions(output.kv_connector_metadata)
        tokens = output.num_scheduled_tokens
        # LMCache takes a forward without attention metadata for a dummy run.
        with (
            set_forward_context({}, self._settings),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as transfers,
        ):
            if tokens:
                self._pass_layers()
            time.sleep(self._forward_s)
        names = list(tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[self._sampled(self._scheduler.requests[name]) for name in names],
            kv_connector_output=transfers,
        )

    def _each_layer(self) -> None:
        """Make the connector's calls around the attention of each layer."""
        for layer in self._layers:
            self._connector.wait_for_layer_load(layer)
            self._connector.save_kv_layer(layer, None, None)

    @staticmethod
    def _sampled(request: Any) -> list[int]:
        if request.num_computed_tokens < request.num_tokens:
            return []
        return [(zlib.crc32(request.request_id.encode()) + 31 * request.num_tokens) % VOCABULARY]


def _tokens(seed: int, count: int) -> list[int]:
    """Return ``count`` tokens that are the same for every connector."""
    return random.Random(str(seed)).choices(range(VOCABULARY), k=count)


def _stopped() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_STOPPED


def _calls(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        yield json.loads(line)


def main() -> None:
    talk = socket.socket(fileno=int(sys.argv[1])).makefile("rw")
    engine: StepEngine | None = None
    for call in _calls(iter(talk.readline, "")):
        name, answer = call.pop("call"), None
        if name == "start":
            engine = StepEngine(**call)
        else:
            answer = getattr(engine, name)(**call)
        print(json.dumps(answer), file=talk, flush=True)
    sys.stdout.flush()
    os._exit(0)  # the connectors' threads and vLLM's processes need no orderly end


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    main()
