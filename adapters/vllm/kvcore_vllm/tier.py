"""``KVCoreTier``: kvcore's tiers below vLLM's own offloading, as one of its secondary tiers.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
        "secondary_tiers": [{"type": "KVCoreTier", "module_path": "kvcore_vllm.tier",
                             "disk": {"path": "/var/cache/kvcore", "capacity": "200GiB"}}]}}'

vLLM copies chunks of every cache group between the device and rows of equal size in a region of
host memory. kvcore keeps rows under vLLM's own keys, and what makes two rows the same bytes
(`kvcore_vllm.tier_identity`), in one backing tier or in a server.

    scheduler   lookup  submit_*  get_finished_jobs
                   │        │            ▲
                   ▼        ▼            │
                PageJobs ─▶ threads ─▶ Pages ─▶ a backing tier, or a server

One tier serves all ranks: it is in the scheduler's process, and a row has the bytes of every rank.
"""

from __future__ import annotations

import logging
import secrets
import weakref
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvcore.config import Config
from kvcore.connector.build import build_pages
from kvcore.connector.guard import Neutral, attempt, covered
from kvcore.errors import ConfigError, KVCoreError, PagesInUse, UnsupportedError
from kvcore.model.shape import BlockShape
from kvcore.runtime.page_jobs import PageJobs
from kvcore.runtime.page_store import Pages, page_settings
from kvcore.telemetry.metrics import PAGE_SPECS, Kind
from kvcore.tiers.geometry import Geometry
from kvcore_vllm.engine import tier_base
from kvcore_vllm.fusion import find_worker
from kvcore_vllm.tier_identity import Starting, check, rows_identity, starting
from kvcore_vllm.weights import watch_weights

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

__all__ = ["KVCoreTier"]

_log = logging.getLogger("kvcore.vllm.tier")

_Base: Any = tier_base()

SETTINGS_FROM = "secondary_tiers"
_OF_VLLM = ("backpressure_detector", "locality")
"""Options of a tier that are vLLM's own."""

_NOTHING = Neutral(lambda: None)


def _metrics() -> dict[str, OffloadingMetricMetadata]:
    kinds = {Kind.GAUGE: OffloadingGaugeMetadata, Kind.COUNTER: OffloadingCounterMetadata}
    return {spec.name: kinds[spec.kind](documentation=spec.help) for spec in PAGE_SPECS}


@covered(
    {
        "build_metric_definitions": Neutral(_metrics),
        "lookup": Neutral(lambda: LookupResult.MISS),
        "submit_store": _NOTHING,
        "submit_load": _NOTHING,
        "get_finished_jobs": Neutral(list),
        "touch": _NOTHING,
        "on_new_request": Neutral(RequestOffloadingContext),
        "on_request_finished": _NOTHING,
        "drain_jobs": _NOTHING,
        "get_stats": _NOTHING,
        "shutdown": _NOTHING,
    }
)
class KVCoreTier(_Base):  # type: ignore[misc]  # the engine's class, unknown to mypy
    """A secondary tier of vLLM's offloading, in the scheduler's process.

    Raises ConfigError for wrong settings, when vLLM starts. A model whose rows cannot be told from
    others, or a medium that cannot be used, leaves the tier empty, with one warning: vLLM's
    offloading goes on without it. Later failures of the medium cost hits. After an error of kvcore
    nothing is found or stored until the engine restarts.

    vLLM calls every method from one thread at a time. `drain_jobs` and `shutdown` block; all others
    wait for locks only.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        **options: Any,
    ) -> None:
        told = {name: options.pop(name) for name in _OF_VLLM if name in options}
        locality = told.pop("locality", None)
        super().__init__(offloading_spec, primary_kv_view, tier_type, **told)
        if locality is not None:
            self.locality = _locality(locality)
        self._jobs: PageJobs | None = None
        self._open: set[int] = set()  # jobs whose end vLLM has not been told
        self._running: set[str] = set()
        self._outdated: set[str] = set()  # requests that began before the weights changed
        self._told: dict[str, float] = {}
        self._stopped = False
        config = page_settings(options, SETTINGS_FROM)
        self._keeps = config.vllm.keep_on_reset
        self._renews = config.namespace.weights_change != "never"
        try:
            self._start(config, offloading_spec, primary_kv_view)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - vLLM's offloading works without this tier
            trace = None if isinstance(error, (KVCoreError, OSError)) else error
            _log.warning(
                "kvcore stands aside, vLLM's offloading works without it: %s", error, exc_info=trace
            )

    def _start(self, config: Config, spec: OffloadingSpec, view: memoryview) -> None:
        """Open the tier. Blocks while it is scanned, and while the weights' files are read."""
        engine = starting()
        check(engine.vllm_config)
        assert view.shape is not None, "rows of equal size"
        pages = _open_rows(config, engine, spec, view.shape[1])
        rows = np.asarray(view).view(np.uint8)
        self._jobs = PageJobs(pages, rows, config.transfer.load_deadline_s)
        self._watch(engine)

    def _watch(self, engine: Starting) -> None:
        """Notice changes of the weights in place, if the model is in this process."""
        try:
            find_worker(engine.vllm_config)
        except UnsupportedError:
            return  # then only a reset of the cache tells: `namespace.weights_change`
        this = weakref.ref(self)

        def changed() -> None:
            tier = this()
            if tier is not None:
                attempt("the change of the weights", tier._weights_changed, None)

        watch_weights(engine.vllm_config, changed)

    def _failed(self, name: str, error: Exception, args: tuple[Any, ...]) -> Any:
        """Find and store nothing from now on, and end all jobs: no row is touched after it.

        Raises PagesInUse if that cannot be.
        """
        if not self._stopped:
            self._stopped = True
            _log.error(
                "an error in %s: kvcore stands aside until the engine restarts, vLLM's offloading "
                "goes on",
                name,
                exc_info=error,
            )
        if name in ("submit_store", "submit_load"):
            self._open.add(args[0].job_id)
        try:
            if self._jobs is not None:
                self._jobs.stop()
        except Exception as second:
            raise PagesInUse(f"it is not known whether copies have ended after {name}") from second
        return self._give_up() if name == "get_finished_jobs" else None

    def _give_up(self) -> list[JobResult]:
        """Return the end of every job that vLLM waits for, as failed."""
        lost, self._open = self._open, set()
        return [JobResult(job_id=number, success=False) for number in sorted(lost)]

    @property
    def _serving(self) -> PageJobs | None:
        return None if self._stopped else self._jobs

    # -- chunks -------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a chunk is held; RETRY while a shared medium is asked. Does no I/O.

        RETRY is the answer for at most the store's ``lookup_s``.
        """
        found = False if (jobs := self._serving) is None else jobs.find(_name(key))
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Have a use of chunks counted. Does not wait for that."""
        if (jobs := self._serving) is not None:
            jobs.use([_name(key) for key in keys])

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Have rows of host memory stored. Does not wait for that.

        Chunks that are held already are not written again. Those of a request that began before the
        weights were changed are not stored: they may be of both.
        """
        self._open.add(job_metadata.job_id)
        jobs = self._serving
        if jobs is not None and job_metadata.req_context.req_id not in self._outdated:
            keys, rows = _keys_and_rows(job_metadata)
            jobs.store(job_metadata.job_id, keys, rows)
        elif jobs is not None:
            jobs.store(job_metadata.job_id, [], [])

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Have chunks loaded into rows of host memory. Does not wait for that."""
        self._open.add(job_metadata.job_id)
        if (jobs := self._serving) is not None:
            keys, rows = _keys_and_rows(job_metadata)
            jobs.load(job_metadata.job_id, keys, rows)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that have ended since the last call, at their deadline at the latest.

        After an error of kvcore that is all of them. Waits at most for one copy of a few MiB.
        """
        jobs = self._serving
        if jobs is None:
            return self._give_up()
        ended = []
        for job in jobs.take_ended():
            self._open.discard(job.number)
            ended.append(
                JobResult(
                    job_id=job.number,
                    success=len(job.good) == len(job.keys),
                    successful_keys=[OffloadKey(_key(job.keys[i])) for i in job.good],
                    transfer_time=job.seconds,
                )
            )
        return ended

    def drain_jobs(self) -> None:
        """Wait until every job has ended: vLLM resets its cache. Blocks up to the deadline.

        As `namespace.weights_change` and ``vllm.keep_on_reset`` say, chunks of before are not found
        any more, or erased.
        """
        if (jobs := self._serving) is None:
            return
        jobs.drain()
        if not self._keeps:
            jobs.clear()
        if self._renews:
            self._outdate(jobs)

    def _weights_changed(self) -> None:
        if (jobs := self._serving) is not None:
            self._outdate(jobs)

    def _outdate(self, jobs: PageJobs) -> None:
        """Find nothing of before, and store nothing of the requests that are under way."""
        self._outdated |= self._running
        jobs.renew()

    # -- requests -----------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Return vLLM's default: only chunks that are computed are offered. Does no I/O."""
        self._running.add(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request. Does no I/O."""
        self._running.discard(req_context.req_id)
        self._outdated.discard(req_context.req_id)

    # -- the engine's metrics and end ---------------------------------------------------------

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Return the definitions of `PAGE_SPECS`."""
        return _metrics()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what was counted since the last call. Does no I/O."""
        stats = OffloadingConnectorStats()
        jobs = self._jobs
        stats.set_gauge("kvcore_pages_aside", int(self._serving is None))
        if jobs is None:
            return stats
        counts = jobs.counts()
        stats.set_gauge("kvcore_pages_held", counts.held)
        now = {
            "kvcore_pages_stored_total": counts.written,
            "kvcore_pages_loaded_total": counts.read,
            "kvcore_pages_corrupt_total": counts.corrupt,
            "kvcore_page_jobs_late_total": jobs.late,
        }
        for name, count in now.items():
            if more := count - self._told.get(name, 0):
                stats.increase_counter(name, more)
        self._told.update(now)
        return stats

    def shutdown(self) -> None:
        """Finish the jobs under way, then close the tier. Blocks for some seconds. Idempotent.

        vLLM unmaps the rows after it, so none is touched any more, even if the medium hangs.
        """
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None


def _locality(name: str) -> Any:
    """Return vLLM's word for a tier's place. Raises ConfigError."""
    from vllm.v1.kv_offload.base import Locality

    try:
        return Locality(name)
    except ValueError as error:
        raise ConfigError(
            f"given locality={name!r}; supported are {', '.join(each.value for each in Locality)}"
        ) from error


def _open_rows(config: Config, engine: Starting, spec: OffloadingSpec, nbytes: int) -> Pages:
    """Open the store of rows of ``nbytes`` bytes. Blocks."""
    identity = rows_identity(engine, spec.config, nbytes)
    alone = identity.alone
    if config.namespace.weights_change == "any_time":
        alone = (*alone, 'namespace.weights_change = "any_time"')
    if alone:
        _log.warning(
            "KV of this engine is not shared, and not found after a restart: %s", "; ".join(alone)
        )
    secret = (config.namespace.secret or "").encode()
    mark = secrets.token_bytes(16) if alone else b""
    shape = BlockShape(
        layers=1, kv_heads=1, head_dim=nbytes, block_tokens=1, dtype="uint8", kv_factor=1
    )
    geometry = Geometry(shape, identity.digest[:16], ((0, 1),))
    replicas = int(spec.config.parallel.data_parallel_size)
    return build_pages(config, geometry, b"\0".join((identity.digest, mark, secret)), replicas)


def _name(key: bytes) -> str:
    """Return vLLM's key as text, for the store."""
    return key.decode("latin-1")


def _key(name: str) -> bytes:
    return name.encode("latin-1")


def _keys_and_rows(job: TransferJob) -> tuple[list[str], list[int]]:
    keys, rows = [_name(key) for key in job.keys], [int(row) for row in job.chunk_ids]
    assert len(keys) == len(rows), f"{len(keys)} chunks for {len(rows)} rows"
    return keys, rows
