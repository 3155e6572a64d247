"""``KVCoreScheduler`` and ``KVCoreWorker``: kvcore behind TensorRT-LLM's KV cache connector.

The engine constructs a worker on every rank and a scheduler on rank 0, then registers the KV
memory. The leader needs that memory, so rank 0's worker builds it and hands it to the scheduler,
which is in the same process. The two find each other by the engine arguments that both were
constructed with.

If kvcore cannot serve a model correctly, the model runs untouched: kvcore matches and saves
nothing, and logs one warning that says why.

No error of kvcore reaches TensorRT-LLM, but for three kinds. A `StepBroken` at the end of a forward
says that KV which TensorRT-LLM was promised is not there; it cannot be told in another way. An
`EngineMustEnd` says that ranks are out of step, or that copies may still touch pages of others. A
ConfigError at the start names a wrong setting.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from kvcore import log
from kvcore.config import Config, forwarded_config
from kvcore.connector.guard import Guard, Neutral, attempt, covered
from kvcore.errors import ConfigError, EngineMustEnd, KVCoreError, RankLostError, StepBroken
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


_NOTHING = Neutral(lambda: None)
_NO = Neutral(lambda: False)
_STARTS = Neutral(lambda: None, (ConfigError,))
_ENDS_STEP = Neutral(lambda: None, (StepBroken,))
_UNKNOWN = "it is not known what KV TensorRT-LLM was promised"


# -- worker ---------------------------------------------------------------------------------


@covered(
    {
        "register_kv_caches": _STARTS,
        "register_kv_cache_layout": _STARTS,
        "register_forward_pass_callable": Neutral(lambda: _nothing),
        "forward_ended": _ENDS_STEP,
        "start_load_kv": _NOTHING,
        "wait_for_layer_load": _NOTHING,
        "save_kv_layer": _NOTHING,
        "wait_for_save": _ENDS_STEP,
        "get_finished": Neutral(lambda: ([], [])),
        "shutdown": _NOTHING,
    }
)
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
        self._must_end: EngineMustEnd | None = None

    @contextlib.contextmanager
    def _in_forward(self) -> Iterator[None]:
        """In this block, keep an EngineMustEnd for `get_finished`, which raises it again.

        TensorRT-LLM takes what is raised in a forward for an error of its requests, and goes on.
        """
        try:
            yield
        except EngineMustEnd as error:
            self._must_end = error
            raise

    def _failed(self, name: str, error: Exception, args: tuple[Any, ...]) -> Any:
        """Stop this rank after an error in one of TensorRT-LLM's calls; return a substitute."""
        with self._in_forward():
            return self._recovered(name, error, args)

    def _recovered(self, name: str, error: Exception, args: tuple[Any, ...]) -> Any:
        why, side = f"an error in {name}", self._side
        if side is None or name == "shutdown":
            _log.error("%s: kvcore stands aside on this rank", why, exc_info=error)
        elif name == "start_load_kv" and (metadata := self._bound()) is not None:
            self.bind_connector_meta(None)
            side.begin_in_error(metadata, why, error)
        elif name in ("forward_ended", "wait_for_save"):
            side.end_in_error(why, error)
        elif name == "get_finished":
            saving, loading = args
            return side.finish_in_error(saving, loading, why, error)
        else:
            side.halt(why, error)
        return None

    def _bound(self) -> KVCoreMetadata | None:
        """Return the metadata of a step that has not begun; None if there is none."""
        metadata = self.get_connector_meta()
        return metadata if isinstance(metadata, KVCoreMetadata) else None

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
        closing: list[WorkerConnector | Leader] = []
        self._finalizer = weakref.finalize(self, _close, closing)
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
        closing.append(self._side)
        try:
            agree_on_fusion(self._config, self._side, ranks, _names.allgather)
        except Exception as error:
            if ranks > 1:
                raise RankLostError("the ranks cannot agree on fusion") from error
            raise
        if self._rank == 0 and memory is not None:
            leader = self._build_leader(memory, self._side)
            if leader is not None:
                closing.append(leader)
            self._meeting.leader = leader

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
        return self.forward_ended

    def forward_ended(self) -> None:
        """End the step. The engine also calls this in warm-up and while it captures a graph."""
        if self._side is not None and not _capturing():
            with self._in_forward():
                self._side.end_forward()

    def start_load_kv(self, stream: Any) -> None:
        """Begin the step's plan, before the forward. See `WorkerConnector.begin`."""
        metadata = self._bound()
        if self._side is not None and metadata is not None:
            with self._side.on(stream):
                self._side.begin(self._side.read(metadata))
            self.bind_connector_meta(None)  # a plan runs once, even if the engine calls again

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Let ``stream`` wait for the loads of a layer. See `WorkerConnector.wait_for_layer`."""
        if self._side is not None:
            with self._in_forward(), self._side.on(stream):
                self._side.wait_for_layer(layer_idx)

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Do nothing: kvcore saves whole blocks, after the step's forward."""

    def wait_for_save(self, stream: Any) -> None:
        """Start the step's late saves, unless the end of the forward has done so."""
        if self._side is not None:
            with self._in_forward(), self._side.on(stream):
                self._side.end_forward()

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the requests whose saves, and those whose loads, have ended on all ranks."""
        if self._must_end is not None:
            raise self._must_end
        if self._side is None:
            return list(finished_gen_req_ids), list(started_loading_req_ids)
        return self._side.finished(finished_gen_req_ids, started_loading_req_ids)

    def shutdown(self) -> None:
        """Finish the saves in flight, then flush and release the tiers. Blocks. Idempotent."""
        finalizer, self._finalizer = self._finalizer, None
        self._side, self._meeting.leader = None, None
        if finalizer is not None:
            finalizer()


def _nothing() -> None:
    pass


def _stand_aside(error: Exception) -> None:
    """Log why the model runs without kvcore, with the trace of an unforeseen error."""
    trace = None if isinstance(error, (KVCoreError, OSError)) else error
    _log.warning("kvcore stands aside, the model runs without it: %s", error, exc_info=trace)


def _close(parts: list[WorkerConnector | Leader]) -> None:
    """Close the worker of a rank, and then the leader."""
    for part in parts:
        attempt(f"the close of the {type(part).__name__}", part.close, None)


def _compiled(llm_args: Any) -> bool:
    """Return True if the engine may run a forward without calling the layers' hooks."""
    graphs = getattr(llm_args, "cuda_graph_config", None)
    return graphs is not None or getattr(llm_args, "torch_compile_config", None) is not None


def _capturing() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


# -- scheduler ------------------------------------------------------------------------------


@covered(
    {
        "get_num_new_matched_tokens": Neutral(lambda: (0, False)),
        "update_state_after_alloc": _NOTHING,
        "update_state_after_alloc_by_layer_group": _NOTHING,
        "build_connector_meta": Neutral(lambda: KVCoreMetadata(stopped=_UNKNOWN, broken=_UNKNOWN)),
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
        self._left = ""
        """Why the leader is called no more, after an error in its recovery; empty before."""

    @property
    def _leader(self) -> Leader | None:
        """The leader, while it may be called."""
        return None if self._left else self._meeting.leader

    def _failed(self, name: str, error: Exception, args: tuple[Any, ...]) -> Any:
        """Stop kvcore after an error: the other ranks wait for rank 0, so nothing is raised.

        What the call has promised is withdrawn, and what the engine was promised before is lost.
        """
        why = f"an error in {name}"
        attempt("the stop of kvcore", lambda: self._stop(why, error), None)
        leader = self._meeting.leader
        if leader is None:
            return None
        if name == "build_connector_meta":
            self._leave(why)
            return self._last_word(leader, *args)
        if name == "get_num_new_matched_tokens":
            self._recover(why, lambda: leader.forget(args[0].request_id))
        elif name.startswith("update_state_after_alloc"):
            self._recover(why, lambda: leader.lose(args[0].request_id))
        return None

    def _stop(self, why: str, error: BaseException) -> None:
        leader = self._meeting.leader
        if leader is not None:
            self._recover(why, lambda: leader.stop(why, error))

    def _recover(self, why: str, call: Callable[[], object]) -> None:
        """Call ``call`` after an error; call the leader no more if it fails."""
        if attempt("a recovery", lambda: [call()], None) is None:
            self._leave(why)

    def _leave(self, why: str) -> None:
        self._left = self._left or why

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return the number of tokens that kvcore will load, and True if the request parks."""
        if self._leader is None:
            return 0, False
        return self._leader.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Take in the pages that the engine has allocated for a request."""
        self.update_state_after_alloc_by_layer_group(request, [block_ids])

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        """Do what ``update_state_after_alloc`` does; newer versions call this one."""
        if self._leader is not None:
            self._leader.allocated(request, block_ids_by_layer_group)

    def build_connector_meta(self, scheduler_output: Any) -> KVCoreMetadata:
        """Return the plan of a step.

        If a plan cannot be made, the workers stop. A step whose requests were promised KV that is
        not known to have come fails.
        """
        leader = self._meeting.leader
        if leader is None:
            return KVCoreMetadata()
        if self._left:
            return self._last_word(leader, scheduler_output)
        plan = self._guard.run(
            "build_connector_meta",
            lambda: leader.build_plan(scheduler_output),
            None,
            lambda: leader.last_plan(scheduler_output),
        )
        if plan is None:
            self._leave("kvcore could not plan a step")
            return self._last_word(leader, scheduler_output)
        metadata = KVCoreMetadata.of(plan)
        leader.promises.hand(plan)
        return metadata

    def _last_word(self, leader: Leader, output: Any) -> KVCoreMetadata:
        """Return what stops the workers, without asking the leader for more than its promises."""
        leader.promises.recall()
        return KVCoreMetadata(stopped=self._left, broken=leader.why_broken(output))

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
