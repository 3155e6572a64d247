"""``KVCoreScheduler`` and ``KVCoreWorker``: kvcore behind TensorRT-LLM's KV cache connector.

The engine makes a worker on every rank and a scheduler on rank 0, then registers the KV memory. The
leader can only be built then, by rank 0's worker, which lives in the scheduler's process: the two
meet by the engine arguments both were made with. A model that kvcore cannot serve right runs
untouched: nothing is promised or kept, and one warning says why.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from kvcore import log
from kvcore.config import Config, forwarded_config
from kvcore.errors import LayoutError, UnsupportedError
from kvcore_trtllm import engine
from kvcore_trtllm.build import (
    agree_on_fusion,
    build_leader,
    build_worker_connector,
    refusing_worker_connector,
)
from kvcore_trtllm.describe import ModelFacts, check_settings, describe
from kvcore_trtllm.layout import Memory, of_pool, of_regions
from kvcore_trtllm.messages import KVCoreMetadata, StepPlan
from kvcore_trtllm.scheduler import Leader
from kvcore_trtllm.worker import WorkerConnector

_log = logging.getLogger("kvcore.trtllm")
_T = TypeVar("_T")
_names = engine.find()
_WorkerBase: Any = _names.worker
_SchedulerBase: Any = _names.scheduler


class _Meeting:
    """Where rank 0's worker leaves the leader for the scheduler."""

    def __init__(self) -> None:
        self.leader: Leader | None = None


_meetings: dict[int, tuple[Any, _Meeting]] = {}


def _meet(llm_args: Any) -> _Meeting:
    """The meeting of these engine arguments. The first comer opens it, the second takes it along.

    The arguments are kept with it, so that their id cannot be another's meanwhile.
    """
    found = _meetings.pop(id(llm_args), None)
    if found is not None:
        return found[1]
    meeting = _Meeting()
    _meetings[id(llm_args)] = (llm_args, meeting)
    return meeting


def _started(llm_args: Any) -> Config:
    """Settings, checked against the engine's. Raises ConfigError on all ranks alike."""
    config = forwarded_config()
    log.configure(config.log.level, config.log.format)
    check_settings(llm_args)
    return config


# -- worker ---------------------------------------------------------------------------------


class KVCoreWorker(_WorkerBase):  # type: ignore[misc]  # the engine's class, unknown to mypy
    """The half that moves bytes. Settings come from ``TRTLLM_KVCORE_CONFIG``."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._config = _started(llm_args)
        self._rank = _names.rank()
        self._meeting = _meet(llm_args) if self._rank == 0 else _Meeting()
        self._layerwise = self._config.trtllm.layerwise and not _compiled(llm_args)
        self._facts: ModelFacts | None = None
        try:
            self._facts = describe(llm_args)
        except UnsupportedError as error:
            _log.warning("kvcore stands aside, the model runs without it: %s", error)
        self._side: WorkerConnector | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """The one tensor of a rank's KV."""
        self._register(lambda facts: of_pool(kv_cache_tensor, facts, self._rank))

    def register_kv_cache_layout(self, layout: Any) -> None:
        """The newer form: regions by layer group."""
        self._register(lambda facts: of_regions(layout, facts, self._rank))

    def _register(self, look: Callable[[ModelFacts], Memory]) -> None:
        if self._facts is None:
            return
        self.shutdown()  # memory registered before is no more
        memory: Memory | None = None
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
        except (UnsupportedError, LayoutError) as error:
            _log.warning("kvcore stands aside on rank %d: %s", self._rank, error)
            self._side = refusing_worker_connector(self._facts.world_size, _names.allgather)
        agree_on_fusion(self._config, self._side, self._facts.world_size, _names.allgather)
        leader = None
        if self._rank == 0 and memory is not None:
            leader = self._meeting.leader = build_leader(self._config, memory, self._side)
        self._finalizer = weakref.finalize(self, _close, self._side, leader)

    def register_forward_pass_callable(self) -> Callable[[], None]:
        """What the engine calls at the end of a forward, also where no layer hook runs."""
        return self._forward_ended

    def _forward_ended(self) -> None:
        """Called during warm-up too, and while a graph is captured: there is nothing to do then."""
        if self._side is not None and not _capturing():
            self._side.end_forward()

    def start_load_kv(self, stream: Any) -> None:
        metadata = self.get_connector_meta()
        if self._side is not None and isinstance(metadata, KVCoreMetadata):
            self.bind_connector_meta(None)  # a plan is run once, whatever the engine does
            self._side.begin(metadata.plan())

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        if self._side is not None:
            self._side.wait_for_layer(layer_idx)

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Saves are whole blocks, started when the step's forward has ended."""

    def wait_for_save(self, stream: Any) -> None:
        if self._side is not None:
            self._side.end_forward()

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        if self._side is None:
            return list(finished_gen_req_ids), list(started_loading_req_ids)
        return self._side.finished(finished_gen_req_ids, started_loading_req_ids)

    def shutdown(self) -> None:
        """Finish saves in flight, flush the tiers and let go of them. May be called twice."""
        if self._finalizer is not None:
            self._finalizer()
        self._side, self._meeting.leader = None, None


def _close(side: WorkerConnector, leader: Leader | None) -> None:
    side.close()
    if leader is not None:
        leader.close()


def _compiled(llm_args: Any) -> bool:
    """Whether the engine may run a forward without calling the layers' hooks."""
    graphs = getattr(llm_args, "cuda_graph_config", None)
    return graphs is not None or getattr(llm_args, "torch_compile_config", None) is not None


def _capturing() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


# -- scheduler ------------------------------------------------------------------------------


def _guarded(neutral: _T) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Nothing may be raised out of rank 0's scheduler: the other ranks wait for its word.

    An error is logged, kvcore stands aside from then on, and ``neutral`` is answered.
    """

    def decorate(method: Callable[..., _T]) -> Callable[..., _T]:
        @functools.wraps(method)
        def call(self: KVCoreScheduler, *args: Any, **kwargs: Any) -> _T:
            try:
                return method(self, *args, **kwargs)
            except Exception:  # noqa: BLE001 - named, and answered by standing aside
                _log.exception("%s failed", method.__name__)
                if self._leader is not None:
                    self._leader.disable(f"an error in {method.__name__}")
                return neutral

        return call

    return decorate


class KVCoreScheduler(_SchedulerBase):  # type: ignore[misc]  # as above
    """The half that decides, on rank 0. Never raises out of a call of the executor's."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        _started(llm_args)
        self._meeting = _meet(llm_args)
        self._offered: dict[int, bool] = {}

    @property
    def _leader(self) -> Leader | None:
        return self._meeting.leader

    @_guarded((0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        if self._leader is None:
            return 0, False
        matched, parks = self._leader.match(request, num_computed_tokens)
        if matched:
            self._offered[request.request_id] = parks
        return matched, parks

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        self.update_state_after_alloc_by_layer_group(request, [block_ids])

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        """The newer form of ``update_state_after_alloc``."""
        if self._leader is None:
            return
        offered = self._offered.pop(request.request_id, None)
        try:
            self._leader.allocated(request, block_ids_by_layer_group)
        except Exception:  # noqa: BLE001 - the engine counts on the tokens: see `Leader.lose`
            _log.exception("the load of request %s cannot be planned", request.request_id)
            self._leader.disable("an error in update_state_after_alloc")
            if offered is not None:
                self._leader.lose(request.request_id, parked=offered)

    def build_connector_meta(self, scheduler_output: Any) -> KVCoreMetadata:
        """The plan of a step. If it cannot be made, one that lets nothing of this step out."""
        leader = self._leader
        if leader is None:
            return KVCoreMetadata()
        try:
            return KVCoreMetadata.of(leader.build_plan(scheduler_output))
        except Exception:  # noqa: BLE001 - promised loads may be missing from the plan
            _log.exception("the step cannot be planned")
            leader.disable("an error in build_connector_meta")
            return KVCoreMetadata.of(leader.last_plan("kvcore could not plan the step"))

    @_guarded(False)
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        return self.request_finished_by_layer_group(request, [cache_block_ids])

    @_guarded(False)
    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        """The newer form of ``request_finished``."""
        if self._leader is None:
            return False
        return self._leader.finished(request, cache_block_ids_by_layer_group)

    @_guarded(None)
    def request_reset(self, request: Any) -> None:
        """The request's pages are gone and it will begin again (newer versions)."""
        if self._leader is not None:
            self._leader.forget(request.request_id)

    def wait_for_initialization(self) -> None:
        """There is nothing to wait for: the memory is registered before this is called."""

    def shutdown(self) -> None:
        """The leader's tiers are let go of with rank 0's worker, after it has flushed them."""


__all__ = ["KVCoreMetadata", "KVCoreScheduler", "KVCoreWorker", "StepPlan"]
