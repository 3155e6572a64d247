"""``KVCoreScheduler`` and ``KVCoreWorker``: kvcore behind TensorRT-LLM's KV cache connector.

The engine constructs a worker on every rank and a scheduler on rank 0, then registers the KV
memory. The leader needs that memory, so rank 0's worker builds it and hands it to the scheduler,
which is in the same process. The two find each other by the engine arguments that both were
constructed with.

If kvcore cannot serve a model correctly, the model runs untouched: kvcore matches and saves
nothing, and logs one warning that says why.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from kvcore import log
from kvcore.config import Config, forwarded_config
from kvcore.connector.guard import Guard, Neutral, covered
from kvcore.errors import ConfigError, EngineMustEnd, KVCoreError
from kvcore_trtllm import engine
from kvcore_trtllm.build import (
    agree_on_fusion,
    build_leader,
    build_worker_connector,
    refusing_worker_connector,
)
from kvcore_trtllm.describe import ModelFacts, check_settings, check_weights, describe
from kvcore_trtllm.layout import Memory, of_pool, of_regions
from kvcore_trtllm.leader import Leader
from kvcore_trtllm.messages import KVCoreMetadata, StepPlan
from kvcore_trtllm.worker import WorkerConnector

_log = logging.getLogger("kvcore.trtllm")
_T = TypeVar("_T")
_names = engine.find()
_WorkerBase: Any = _names.worker
_SchedulerBase: Any = _names.scheduler


class _Meeting:
    """The place where rank 0's worker puts the leader for the scheduler."""

    def __init__(self) -> None:
        self.leader: Leader | None = None


_meetings: dict[int, tuple[Any, _Meeting]] = {}


def _meet(llm_args: Any) -> _Meeting:
    """Return the meeting for these engine arguments. The first call adds it, the second removes it.

    The arguments are kept with it, so that no other object gets their id meanwhile.
    """
    found = _meetings.pop(id(llm_args), None)
    if found is not None:
        return found[1]
    meeting = _Meeting()
    _meetings[id(llm_args)] = (llm_args, meeting)
    return meeting


def _started(llm_args: Any) -> Config:
    """Load the settings and set up logging. Raises ConfigError, on every rank, if they are wrong.

    The settings are checked against the engine's arguments.
    """
    config = forwarded_config()
    log.configure(config.log.level, config.log.format)
    check_settings(llm_args)
    return config


# -- worker ---------------------------------------------------------------------------------


class KVCoreWorker(_WorkerBase):  # type: ignore[misc]  # the engine's class, unknown to mypy
    """The worker half, which moves bytes. Reads its settings from ``TRTLLM_KVCORE_CONFIG``."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._config = _started(llm_args)
        self._rank = _names.rank()
        self._meeting = _meet(llm_args) if self._rank == 0 else _Meeting()
        self._layerwise = self._config.trtllm.layerwise and not _compiled(llm_args)
        self._facts: ModelFacts | None = None
        try:
            check_weights(llm_args, self._config.namespace.weights_change)
            self._facts = describe(llm_args)
        except Exception as error:  # noqa: BLE001 - the engine runs without kvcore
            _stand_aside(error)
        self._side: WorkerConnector | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """Build this rank's worker over its KV, which is one tensor."""
        self._register(lambda facts: of_pool(kv_cache_tensor, facts, self._rank))

    def register_kv_cache_layout(self, layout: Any) -> None:
        """Build this rank's worker over its KV as newer versions lay it out, by layer group."""
        self._register(lambda facts: of_regions(layout, facts, self._rank))

    def _register(self, look: Callable[[ModelFacts], Memory]) -> None:
        self.shutdown()  # memory that was registered before is gone
        ranks = int(self._llm_args.tensor_parallel_size or 1)
        memory: Memory | None = None
        self._side = refusing_worker_connector(ranks, _names.allgather)
        if self._facts is not None:  # else other ranks may serve the model all the same
            try:
                memory = look(self._facts)
                self._side = build_worker_connector(
                    self._config,
                    memory,
                    self._rank,
                    _names.allgather,
                    layerwise=self._layerwise,
                    llm_args=self._llm_args,
                )
            except Exception as error:  # noqa: BLE001 - the engine runs without kvcore
                _log.warning("kvcore stands aside on rank %d: %s", self._rank, error)
        agree_on_fusion(self._config, self._side, ranks, _names.allgather)
        leader = None
        if self._rank == 0 and memory is not None:
            leader = self._meeting.leader = self._build_leader(memory, self._side)
        self._finalizer = weakref.finalize(self, _close, self._side, leader)

    def _build_leader(self, memory: Memory, side: WorkerConnector) -> Leader | None:
        """Build the leader; None if it cannot be had. Raises ConfigError for wrong settings."""
        try:
            return build_leader(self._config, memory, side, layerwise=self._layerwise)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - the engine runs without kvcore
            _stand_aside(error)
            return None

    def register_forward_pass_callable(self) -> Callable[[], None]:
        """Return what the engine calls at the end of a forward, even if no layer hook runs."""
        return self._forward_ended

    def _forward_ended(self) -> None:
        """End the step. The engine also calls this in warm-up and while it captures a graph."""
        if self._side is not None and not _capturing():
            self._side.end_forward()

    def start_load_kv(self, stream: Any) -> None:
        """Begin the step's plan, before the forward. See `WorkerConnector.begin`."""
        metadata = self.get_connector_meta()
        if self._side is not None and isinstance(metadata, KVCoreMetadata):
            self.bind_connector_meta(None)  # a plan runs once, even if the engine calls again
            with self._side.on(stream):
                self._side.begin(metadata.plan())

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Let ``stream`` wait for the loads of a layer. See `WorkerConnector.wait_for_layer`."""
        if self._side is not None:
            with self._side.on(stream):
                self._side.wait_for_layer(layer_idx)

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Do nothing: kvcore saves whole blocks, after the step's forward."""

    def wait_for_save(self, stream: Any) -> None:
        """Start the step's late saves, unless the end of the forward has done so."""
        if self._side is not None:
            with self._side.on(stream):
                self._side.end_forward()

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the requests whose saves, and those whose loads, have ended on all ranks."""
        if self._side is None:
            return list(finished_gen_req_ids), list(started_loading_req_ids)
        return self._side.finished(finished_gen_req_ids, started_loading_req_ids)

    def shutdown(self) -> None:
        """Finish the saves in flight, then flush and release the tiers. Blocks. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()
        self._side, self._meeting.leader = None, None


def _stand_aside(error: Exception) -> None:
    """Log why the model runs without kvcore, with the trace of an unforeseen error."""
    trace = None if isinstance(error, (KVCoreError, OSError)) else error
    _log.warning("kvcore stands aside, the model runs without it: %s", error, exc_info=trace)


def _close(side: WorkerConnector, leader: Leader | None) -> None:
    side.close()
    if leader is not None:
        leader.close()


def _compiled(llm_args: Any) -> bool:
    """Return True if the engine may run a forward without calling the layers' hooks."""
    graphs = getattr(llm_args, "cuda_graph_config", None)
    return graphs is not None or getattr(llm_args, "torch_compile_config", None) is not None


def _capturing() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


# -- scheduler ------------------------------------------------------------------------------


def _or_end(recover: Callable[[], _T]) -> _T:
    """Return what ``recover`` returns. If it fails, a promise would not be told as failed."""
    try:
        return recover()
    except Exception as error:
        raise EngineMustEnd("kvcore can neither keep a promise of KV nor fail it") from error


_NOTHING = Neutral(lambda: None)
_NO = Neutral(lambda: False)


@covered(
    {
        "get_num_new_matched_tokens": Neutral(lambda: (0, False)),
        "update_state_after_alloc": _NOTHING,
        "update_state_after_alloc_by_layer_group": _NOTHING,
        "build_connector_meta": Neutral(KVCoreMetadata),
        "request_finished": _NO,
        "request_finished_by_layer_group": _NO,
        "request_reset": _NOTHING,
        "wait_for_initialization": _NOTHING,
        "shutdown": _NOTHING,
    }
)
class KVCoreScheduler(_SchedulerBase):  # type: ignore[misc]  # as above
    """The scheduler half, which decides, on rank 0. Its methods never raise into the executor."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        _started(llm_args)
        self._meeting = _meet(llm_args)
        self._guard = Guard(self._stop)
        self._offered: dict[int, bool] = {}

    @property
    def _leader(self) -> Leader | None:
        return self._meeting.leader

    def _failed(self, name: str, error: Exception, args: tuple[Any, ...]) -> None:
        self._stop(f"an error in {name}", error)

    def _stop(self, why: str, error: BaseException) -> None:
        """Stop kvcore after an error: the other ranks wait for rank 0, so nothing is raised."""
        if self._leader is not None:
            self._leader.disable(why, error)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return the number of tokens that kvcore will load, and True if the request parks."""
        if self._leader is None:
            return 0, False
        matched, parks = self._leader.match(request, num_computed_tokens)
        if matched:
            self._offered[request.request_id] = parks
        return matched, parks

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Take in the pages that the engine has allocated for a request."""
        self.update_state_after_alloc_by_layer_group(request, [block_ids])

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        """Do what ``update_state_after_alloc`` does; newer versions call this one."""
        if self._leader is None:
            return
        leader = self._leader
        offered = self._offered.pop(request.request_id, None)

        def lose() -> None:
            if offered is not None:  # the engine counts on the tokens
                _or_end(lambda: leader.lose(request.request_id, parked=offered))

        self._guard.run(
            "update_state_after_alloc",
            lambda: leader.allocated(request, block_ids_by_layer_group),
            None,
            lose,
        )

    def build_connector_meta(self, scheduler_output: Any) -> KVCoreMetadata:
        """Return the plan of a step. If planning fails, return one that fails the whole step."""
        leader = self._leader
        if leader is None:
            return KVCoreMetadata()
        return self._guard.run(
            "build_connector_meta",
            lambda: KVCoreMetadata.of(leader.build_plan(scheduler_output)),
            KVCoreMetadata(),
            lambda: _or_end(
                lambda: KVCoreMetadata.of(leader.last_plan("kvcore could not plan the step"))
            ),
        )

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Save the last blocks of a request; return True while saves still read its pages."""
        return self.request_finished_by_layer_group(request, [cache_block_ids])

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        """Do what ``request_finished`` does; newer versions call this one."""
        if self._leader is None:
            return False
        return self._leader.finished(request, cache_block_ids_by_layer_group)

    def request_reset(self, request: Any) -> None:
        """Forget a request whose pages are gone. It will begin again (newer versions)."""
        if self._leader is not None:
            self._leader.forget(request.request_id)

    def wait_for_initialization(self) -> None:
        """Do nothing: the engine registers the memory before it calls this."""

    def shutdown(self) -> None:
        """Do nothing: rank 0's worker releases the leader's tiers, after it has flushed them."""


__all__ = ["KVCoreMetadata", "KVCoreScheduler", "KVCoreWorker", "StepPlan"]
