"""``KVCoreConnector``: kvcore behind vLLM's KV connector interface (V1).

vLLM constructs one in the scheduler and one in every worker. If kvcore cannot serve a model
correctly, the model runs untouched: the connector matches and saves nothing, and logs why.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvcore import log
from kvcore.config import Config, load_config
from kvcore.connector.guard import Guard, Neutral, attempt, covered
from kvcore.errors import (
    ConfigError,
    EngineMustEnd,
    KVCoreError,
    PagesInUse,
    RankLostError,
    UnsupportedError,
)
from kvcore.model.identity import hooked
from kvcore.model.spec import ModelDescription
from kvcore.runtime.build import load_plugins
from kvcore.telemetry.metrics import Metrics
from kvcore.tiers.held import Held
from kvcore_vllm.build import (
    build_scheduler_side,
    build_worker_connector,
    loads_layerwise,
    refusing_worker_connector,
    warm_up_blends,
)
from kvcore_vllm.context import context_sizes, page_tokens
from kvcore_vllm.describe import dense_windows, describe
from kvcore_vllm.engine import tell_untried
from kvcore_vllm.events import engine_event
from kvcore_vllm.handshake import Told, awaits_ranks
from kvcore_vllm.leader import Leader
from kvcore_vllm.machines import HeldDisks, check_terms, machines, terms_of, usable
from kvcore_vllm.messages import KVCoreMetadata, KVCoreWorkerMetadata, Promises
from kvcore_vllm.stages import Stages, gather
from kvcore_vllm.stats import KVCorePromMetrics, KVCoreStats
from kvcore_vllm.weights import watch_weights
from kvcore_vllm.worker import WorkerConnector
from kvcore_vllm.worker_guard import WorkerGuard

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger("kvcore.vllm")

SLEEP_S = 30.0
"""Longest wait of vLLM's sleep for copies from and to its pages, in seconds."""

_SOURCES = {"host": "HOST", "disk": "DISK"}
"""Tiers that vLLM has a name for in `CacheHitSource`, from 0.32 on."""


_NOTHING = Neutral(lambda: None)
_NO = Neutral(lambda: False)
_AT_START = (ConfigError,)
"""Errors of what vLLM calls while it starts: whoever starts it mends the settings."""


@covered(
    {
        "requires_kv_delivery": _NO,
        "requires_piecewise_for_cudagraph": Neutral(lambda: False, _AT_START),
        "supports_sleep_mode": Neutral(lambda: False, _AT_START),
        # the worker's role
        "register_kv_caches": _NOTHING,
        "unregister_kv_caches": _NOTHING,
        "get_handshake_metadata": _NOTHING,
        "handle_preemptions": _NOTHING,
        "start_load_kv": _NOTHING,
        "wait_for_layer_load": _NOTHING,
        "save_kv_layer": _NOTHING,
        "finish_forward": _NOTHING,
        "wait_for_save": _NOTHING,
        "get_transfer_results": Neutral(KVConnectorTransferResults),
        "get_finished": Neutral(lambda: (None, set())),
        "get_block_ids_with_load_errors": Neutral(set),
        "build_connector_worker_meta": _NOTHING,
        # the scheduler's role
        "set_xfer_handshake_metadata": Neutral(lambda: None, _AT_START),
        "set_xfer_handshake_metadata_pp_aware": Neutral(lambda: None, _AT_START),
        "bind_gpu_block_pool": _NOTHING,
        "get_num_new_matched_tokens": Neutral(lambda: (0, False)),
        "update_state_after_alloc": _NOTHING,
        "get_external_cache_hit_sources": Neutral(dict),
        "build_connector_meta": Neutral(KVCoreMetadata),
        "update_connector_output": _NOTHING,
        "request_finished": Neutral(lambda: (False, None)),
        "request_finished_all_groups": Neutral(lambda: (False, None)),
        "has_pending_push_work": _NO,
        "take_events": Neutral(tuple),
        "reset_cache": _NO,
        # both
        "shutdown": _NOTHING,
        "get_kv_connector_stats": _NOTHING,
        "build_kv_connector_stats": Neutral(KVCoreStats),
        "build_prom_metrics": _NOTHING,
    }
)
class KVCoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Tiered KV offload for vLLM.

    Settings come from ``kv_connector_extra_config``, the environment and the file that
    ``KVCORE_CONFIG`` names. vLLM documents when it calls each method. In a pipeline, and over
    several machines, the connector of the scheduler serves nothing until the ranks have told it
    what they know (`kvcore_vllm.handshake`).
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: Leader | None = None
        self._worker: WorkerGuard | None = None
        self._model: ModelDescription | None = None
        self._metrics = Metrics(role.name.lower())  # only if kvcore serves nothing here
        self._offered: dict[str, tuple[int, bool]] = {}
        self._waiting: list[str] = []  # the promises of the step that is being planned
        self._pages: list[int] = []
        self._taken: tuple[SchedulerOutput | None, Promises] = None, Promises()
        self._left = ""  # why the leader is called no more
        self._parted: Leader | None = None  # that leader, which is still to be closed
        self._layerwise = False
        self._hooks: list[str] = []  # the plugins that watch the model's attention
        self._awaited = False  # the leader starts when ranks have told it what they know
        self._stages: Stages | None = None  # if there are several, and this rank knows of them
        self._cold: WorkerConnector | None = None  # prepares blends with the first plan
        self._pool: BlockPool | None = None  # vLLM's, if the leader is still to come
        self._disks = HeldDisks()
        self._config = Config()
        try:
            self._start(role)
        except (ConfigError, EngineMustEnd):
            raise
        except Exception as error:  # noqa: BLE001 - the engine runs without kvcore
            self._model = None
            self._stand_aside(error)

    def _start(self, role: KVConnectorRole) -> None:
        """Read the settings and the model, and build the leader. Raises for wrong settings."""
        transfer = self._vllm_config.kv_transfer_config
        assert transfer is not None
        leads = role is KVConnectorRole.SCHEDULER
        if not leads:  # a collective: first of all, whatever fails later
            self._stages = gather(self._vllm_config, self._kv_cache_config)
        self._config = load_config(
            overrides=dict(transfer.kv_connector_extra_config),
            overrides_from="kv_connector_extra_config",
        )
        log.configure(self._config.log.level, self._config.log.format)
        self._config = usable(self._config, self._vllm_config, tell=leads)
        if transfer.kv_load_failure_policy != "recompute":
            # A cache that fails to load a block must never fail the request.
            transfer.kv_load_failure_policy = "recompute"
        self._awaited = leads and awaits_ranks(self._vllm_config)
        if not self._awaited:
            self._model = self._describe()
            if self._model is not None and leads:
                self._lead(self._model)
        self._layerwise = loads_layerwise(self._config, self._vllm_config, self._model)

    def _lead(self, model: ModelDescription, elsewhere: Sequence[Mapping[str, Held]] = ()) -> None:
        """Build the leader. Raises ConfigError for wrong settings.

        ``elsewhere`` is what the disks of each other machine hold.
        """
        attempt("the check of vLLM's release", tell_untried, None)
        self._scheduler = self._build_scheduler(model, elsewhere)
        if self._scheduler is not None and self._pool is not None:
            self._scheduler.watch(self._pool)

    # -- after an error ---------------------------------------------------------------------

    def _failed(self, name: str, error: Exception, args: tuple[Any, ...]) -> Any:
        """Stop kvcore, and return what tells vLLM of promises that are not kept; None if none."""
        why, worker = f"an error in {name}", self._worker
        if worker is None:
            return self._leader_failed(name, why, error, args)
        if name == "handle_preemptions":
            worker.count_on(args[0].promises)
        try:
            worker.halt(why, error)
        except EngineMustEnd:
            raise
        except Exception as second:
            raise PagesInUse(f"it is not known whether copies have ended after {why}") from second
        if name == "get_transfer_results":
            finished, failed = worker.lost_requests()
            return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)
        if name == "get_finished":
            return None, worker.lost_requests()[0]
        if name == "get_block_ids_with_load_errors":
            return worker.lost_pages()
        return None

    def _leader_failed(
        self, name: str, why: str, error: Exception, args: tuple[Any, ...]
    ) -> KVCoreMetadata | None:
        if name not in ("update_state_after_alloc", "build_connector_meta"):
            self._stop(why, error)
            return None
        self._leave(why, error)  # a plan of this leader may not say what becomes of promises
        if name == "build_connector_meta":
            return self._last_metadata(args[0])
        request, blocks, external = args
        if (offered := self._offered.pop(request.request_id, None)) is not None:
            start, in_step = offered
            self._promise(request, blocks, range(start, start + external), in_step=in_step)
        return None

    @functools.cached_property
    def _guard(self) -> Guard:
        return Guard(self._stop)

    def _stop(self, why: str, error: BaseException) -> None:
        """Stop the leader. If not even that works, it is called no more."""
        scheduler = self._scheduler
        if scheduler is None:
            _log.error("%s: kvcore stands aside on this rank", why, exc_info=error)
            return
        try:
            scheduler.stop(why, error)
        except Exception as second:  # noqa: BLE001 - recovery does not raise
            self._leave(f"an error in the stop of kvcore after {why}", second)

    def _leave(self, why: str, error: BaseException | None = None) -> None:
        """Call the leader no more: the workers stop with the next plan, and fail its promises."""
        if self._scheduler is not None:
            _log.error("%s: kvcore stands aside until the engine restarts", why, exc_info=error)
            self._scheduler, self._parted, self._left = None, self._scheduler, why
            attempt("the metrics", self._metrics.aside, None)

    def _build_scheduler(
        self, model: ModelDescription, elsewhere: Sequence[Mapping[str, Held]] = ()
    ) -> Leader | None:
        """Build the leader; None if it cannot be had. Raises ConfigError for wrong settings."""
        try:
            return build_scheduler_side(self._config, self._vllm_config, model, elsewhere)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - the engine runs without kvcore
            self._stand_aside(error)
            return None

    def _describe(self) -> ModelDescription | None:
        """Describe the model, with the layers of all stages; None if it is not served."""
        try:
            self._check_sleep()
            caches = self._kv_cache_config
            if self._stages is not None:
                leads = self.role is KVConnectorRole.SCHEDULER
                caches = self._stages.of_leader() if leads else self._stages.whole()
            model = describe(
                self._vllm_config,
                caches,
                self._config.block.tokens,
                dense_windows(self._config),
                self._stages.names if self._stages is not None else (),
            )
        except Exception as error:  # noqa: BLE001 - the engine runs without kvcore
            self._stand_aside(error)
            return None
        self._fit_blocks(model.shape.block_tokens)
        self._hooks = [h.identity for h in load_plugins(self._config).found("attention")]
        count = machines(self._vllm_config)
        return replace(model, fingerprint=hooked(model.fingerprint, self._hooks), machines=count)

    def _fit_blocks(self, tokens: int) -> None:
        """Go on with blocks of ``tokens``, which fit the model."""
        wanted = self._config.block.tokens
        if tokens != wanted:
            _log.info(
                "block.tokens is %d, not %d: blocks end where states or pages do", tokens, wanted
            )
            block = self._config.block.model_copy(update={"tokens": tokens})
            self._config = self._config.model_copy(update={"block": block})

    def _check_sleep(self) -> None:
        """Raise UnsupportedError if vLLM may sleep and kvcore cannot follow."""
        transfer = self._vllm_config.kv_transfer_config
        if not self._vllm_config.model_config.enable_sleep_mode:
            return
        if transfer is None or not self.supports_sleep_mode(transfer):
            raise UnsupportedError(
                "enable_sleep_mode takes the KV memory away while kvcore may copy from it; kvcore "
                "serves it with vLLM 0.33 or newer, which tells connectors to stop, and with "
                "disk.to_device = off"
            )

    def _stand_aside(self, error: Exception) -> None:
        """Log why the model runs without kvcore, with the trace of an unforeseen error."""
        self._metrics.aside()
        trace = None if isinstance(error, (KVCoreError, OSError)) else error
        _log.warning("kvcore stands aside, the model runs without it: %s", error, exc_info=trace)

    # -- properties -------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is dropped is only a later miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return True if loads are layerwise, or if a plugin hooks attention.

        A full CUDA graph can capture neither a wait inside the forward nor such a hook.
        """
        if extra_config.get("vllm", {}).get("layerwise") is True:
            return True
        config = load_config(
            overrides=dict(extra_config), overrides_from="kv_connector_extra_config"
        )
        return bool(load_plugins(config).found("attention"))

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return True if vLLM says when it sleeps, and no disk reads into device memory.

        vLLM keeps the content and the addresses of kvcore's own device memory over a sleep. Its
        registration for reads from a disk would be lost.
        """
        config = load_config(
            overrides=dict(kv_transfer_config.kv_connector_extra_config),
            overrides_from="kv_connector_extra_config",
        )
        told = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
        return told and config.disk.to_device == "off"

    # -- worker -----------------------------------------------------------------------------

    def unregister_kv_caches(self) -> None:
        """Block until no copy uses the KV memory, which vLLM takes away to sleep.

        vLLM gives it back under the same addresses, so nothing has to be restored. Its content is
        gone, and vLLM resets the leader with its own cache. Raises PagesInUse, and vLLM
        does not sleep, if copies have not ended after `SLEEP_S` seconds.
        """
        if self._worker is not None and not self._worker.quiesce(SLEEP_S):
            raise PagesInUse(f"copies of KV did not end in {SLEEP_S} s: vLLM must not sleep now")

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Build this rank's worker, or one that refuses all work if kvcore cannot move its KV."""
        groups = self._kv_cache_config.kv_cache_groups
        sizes = [page_tokens(self._vllm_config, group.kv_cache_spec) for group in groups]
        worker = self._build_worker(kv_caches)
        try:
            worker = worker or refusing_worker_connector(self._vllm_config, sizes)
            self._worker = WorkerGuard(worker)
        except Exception as error:  # the leader's loads would neither come nor fail
            raise EngineMustEnd("kvcore can neither serve on this rank nor refuse") from error
        if machines(self._vllm_config) > 1:  # ranks may have other settings: see `Terms`
            self._cold = worker
        else:
            self._warm_up(worker)
        if self._model is not None:
            watch_weights(self._vllm_config, self._worker.weights_changed)

    def _warm_up(self, worker: WorkerConnector) -> None:
        """Prepare blends. A collective if fusion is on."""
        try:
            warm_up_blends(self._config, self._vllm_config, worker)
        except Exception as error:
            if worker.meets_others:
                raise RankLostError("this rank failed where others prepare blends") from error
            raise

    def _build_worker(self, kv_caches: dict[str, torch.Tensor]) -> WorkerConnector | None:
        """Build this rank's worker; None if kvcore cannot move its KV."""
        if self._model is None:  # the leader may have read the model all the same
            return None
        try:
            return build_worker_connector(
                self._config,
                self._vllm_config,
                self._model,
                kv_caches,
                self._kv_cache_config.num_blocks,
            )
        except Exception as error:  # noqa: BLE001 - the engine runs without kvcore
            self._stand_aside(error)
            return None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what the leader has to know of this rank before it starts; None if nothing.

        All ranks know all stages of a pipeline, and the first one tells them: some connectors that
        vLLM may have beside this one take no word of later stages. On several machines each rank
        tells its own terms, but not behind vLLM's MultiConnector, which would pass on what one
        connector says alone.
        """
        parallel = self._vllm_config.parallel_config
        if machines(self._vllm_config) > 1:
            if self._model is None or get_kv_transfer_group() is not self:
                return None
            context = context_sizes(self._vllm_config)
            terms = terms_of(self._config, self._model, self._hooks, context)
            rank = parallel.rank % self._model.world_size
            held = self._disks.prepare(self._config, self._model, rank)
            return Told(self._stages, terms, held)
        if self._stages is None or parallel.rank % parallel.world_size:
            return None
        return Told(self._stages)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Start the step's plan, before the step writes to a page of a model that kvcore serves.

        Model Runner V1 calls it first of all. V2 first zeroes and copies pages of models that need
        it: with those, the saves of a step are followed at its end (`WorkerConnector`).
        """
        worker, metadata = self._worker, kv_connector_metadata
        assert isinstance(metadata, KVCoreMetadata)
        if self._cold is not None and metadata.payload:  # all ranks get their first plan together
            cold, self._cold = self._cold, None
            self._warm_up(cold)
        if worker is not None:
            worker.count_on(metadata.promises)
            worker.begin(metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Make the step's blends. All that follows waits for sync loads that are not layerwise.

        Model Runner V2 names the requests of the forward in ``request_ids``.
        """
        if self._worker is not None:
            self._worker.start(kwargs.get("request_ids", ()), layerwise=self._layerwise)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Let the forward wait until the sync loads have copied the layer."""
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Do nothing: kvcore saves whole blocks, after the step's forward."""

    def finish_forward(self) -> None:
        """Stop timing the forward, which was launched. Only Model Runner V2 calls this."""
        if self._worker is not None:
            self._worker.forward_launched()

    def wait_for_save(self) -> None:
        """Start the saves of what the forward computed. Does not wait for them."""
        if self._worker is not None:
            self._worker.end_forward()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose async load has ended or failed, each once."""
        if self._worker is None:
            return KVConnectorTransferResults()
        finished, failed = self._worker.finished_loads()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return None, and the requests whose async load has ended, each once."""
        return None, self.get_transfer_results(finished_req_ids).finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the pages that the step's sync loads and blends left unfilled, each once."""
        return self._worker.take_bad_pages() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return this rank's report for the scheduler, or None if there is nothing to report."""
        report = self._worker.take_report() if self._worker is not None else None
        return None if report is None else KVCoreWorkerMetadata([report])

    # -- scheduler --------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Build the leader, with what the ranks have told, if it waits for that.

        vLLM calls it before the first request, and again when it wakes up. Raises ConfigError for
        wrong settings.
        """
        if not self._awaited:
            return
        parallel, several = self._vllm_config.parallel_config, machines(self._vllm_config) > 1
        told = {place: found for place, found in metadata.items() if isinstance(found, Told)}
        stages = [found.stages for found in told.values() if found.stages is not None]
        if not stages and not several:
            return  # see `_miss_ranks`
        self._awaited, self._stages = False, stages[0] if stages else None
        if self._left or (model := self._describe()) is None:
            return
        try:
            if several:
                check_terms(
                    terms_of(self._config, model, self._hooks, context_sizes(self._vllm_config)),
                    {place: found.terms for place, found in told.items()},
                    parallel.pipeline_parallel_size,
                    parallel.tensor_parallel_size,
                )
        except UnsupportedError as error:
            self._stand_aside(error)
            return
        self._model = model
        held = {stage * parallel.tensor_parallel_size + r: t.held for (stage, r), t in told.items()}
        self._lead(model, [held[rank] or {} for rank in model.firsts[1:]])

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Do as `set_xfer_handshake_metadata_pp_aware` with what ranks of the first stage told."""
        self.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): told for rank, told in metadata.items()}
        )

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = gpu_block_pool
        if self._scheduler is not None:
            self._scheduler.watch(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            self._miss_ranks()
            return 0, False
        self._offered.pop(request.request_id, None)
        offer = self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        if offer[0]:
            self._offered[request.request_id] = num_computed_tokens, not offer[1]
        return offer

    def _miss_ranks(self) -> None:
        """Say once, at the first request, that no rank has told the leader what it waits for."""
        if self._awaited:
            self._awaited = False
            self._stand_aside(
                UnsupportedError(
                    "no rank told the scheduler of its pipeline stages, or of its settings on "
                    "several machines: kvcore serves them where it is vLLM's only connector, and "
                    "stages on one machine also as the first one that has something to tell"
                )
            )

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load of the tokens that vLLM takes up. If that fails, vLLM computes them."""
        scheduler, external = self._scheduler, num_external_tokens
        start, in_step = self._offered.pop(request.request_id, (0, False))
        if external:  # first of all, whatever fails later
            self._promise(request, blocks, range(start, start + external), in_step=in_step)
        if scheduler is None:
            return

        def lose() -> None:
            try:
                if external:
                    scheduler.lose(request, blocks, external, start, in_step=in_step)
            except Exception as error:  # noqa: BLE001 - recovery does not raise
                self._leave("an error where a load was to be told as failed", error)

        self._guard.run(
            "update_state_after_alloc",
            lambda: scheduler.update_state_after_alloc(request, blocks, external),
            None,
            lose,
        )

    def _promise(
        self, request: Request, blocks: KVCacheBlocks, tokens: range, *, in_step: bool
    ) -> None:
        """Note what vLLM counts on from this step: a load between steps, or pages in the step."""
        if not in_step:
            self._waiting.append(request.request_id)
            return
        [pages], [group] = blocks.get_block_ids(), self._kv_cache_config.kv_cache_groups
        size = page_tokens(self._vllm_config, group.kv_cache_spec)
        self._pages += pages[tokens.start // size : -(-tokens.stop // size)]

    def _take_promises(self, output: SchedulerOutput) -> Promises:
        """Return the promises of a step, and forget them with the next step."""
        if self._taken[0] is not output:
            self._taken = output, Promises(tuple(self._waiting), tuple(self._pages))
            self._waiting, self._pages = [], []
        return self._taken[1]

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Return the reused tokens by source. Versions of vLLM without the enum never call it."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        if self._scheduler is None or num_external_tokens == 0:
            return {}
        sources: dict[CacheHitSource, int] = {}
        found = self._scheduler.hit_sources(request.request_id, num_external_tokens)
        for tier, tokens in found.items():
            source = CacheHitSource[_SOURCES.get(tier, "EXTERNAL_UNSPECIFIED")]
            sources[source] = sources.get(source, 0) + tokens
        return sources

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the step's plan. If there is none, the workers stop and fail its promises."""
        metadata = None
        if (scheduler := self._scheduler) is not None:
            if self._hooks and self._vllm_config.use_v2_model_runner:
                # Only then V2 calls `start_load_kv`, which names the requests, before the forward.
                scheduler_output.has_sync_kv_loads = True
            metadata = self._guard.run(
                "build_connector_meta",
                lambda: scheduler.build_connector_meta(scheduler_output),
                None,
                lambda: self._last_plan(scheduler),
            )
        if metadata is None:
            return self._last_metadata(scheduler_output)
        metadata.promises = self._take_promises(scheduler_output)
        return metadata

    def _last_metadata(self, output: SchedulerOutput) -> KVCoreMetadata:
        """Return what fails the step's promises. Without a leader it also stops the workers."""
        return KVCoreMetadata(promises=self._take_promises(output), stopped=self._left)

    def _last_plan(self, scheduler: Leader) -> KVCoreMetadata | None:
        try:
            return scheduler.last_plan()
        except Exception as error:  # noqa: BLE001 - recovery does not raise
            self._leave("an error where a step was to be told as failed", error)
            return None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            self._scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Save the last blocks of a request; return False, and what its client gets back.

        vLLM may free the pages at once: a step that gives them away waits for the save first.
        """
        self._offered.pop(request.request_id, None)
        if self._scheduler is None:
            return False, None
        return False, self._scheduler.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Return True, to keep the engine stepping, until finished saves are published."""
        return self._scheduler is not None and self._scheduler.has_work

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the block events since the last call."""
        if self._scheduler is None:
            return ()
        events = self._scheduler.take_events()
        return [engine_event(event, self._config.block.tokens) for event in events]

    def reset_cache(self) -> bool | None:
        """Follow a reset of vLLM's cache; return None if kvcore does not serve the model.

        See `Leader.reset`. False after an error: nothing old is served by this engine, but
        tiers that were to be erased may not be.
        """
        if self._scheduler is None:
            return False if self._left else None
        self._scheduler.reset()
        return True

    # -- both -------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Finish the saves in flight, flush the tiers and release them. Blocks. Idempotent."""
        worker, leaders = self._worker, (self._scheduler, self._parted)
        self._worker = self._scheduler = self._parted = None
        if worker is not None:
            attempt("shutdown", worker.close, None)
        attempt("shutdown", self._disks.close, None)
        for leader in leaders:
            if leader is not None:
                attempt("shutdown", leader.close, None)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        source = self._scheduler.take_stats if self._scheduler is not None else self._metrics.delta
        data = source()
        return KVCoreStats(data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return KVCoreStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return KVCorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
