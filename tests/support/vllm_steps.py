"""A step of vLLM's worker side: its plan, with the promises that vLLM counts on."""

from __future__ import annotations

from kvcore_vllm.messages import KVCoreMetadata, Promises, StepPlan
from kvcore_vllm.worker import WorkerConnector
from kvcore_vllm.worker_guard import WorkerGuard

__all__ = ["begin"]


def begin(guard: WorkerGuard, plan: StepPlan, worker: WorkerConnector) -> None:
    """Begin a plan. vLLM counts on all of its loads and blends."""
    between = [name for name, _ in (*plan.async_loads, *plan.blend_loads)]
    between += [*plan.failed_loads, *(order.request_id for order in plan.blends)]
    pages = [page for graph in plan.sync_loads for page in worker.pages_of(graph.units)]
    guard.count_on(Promises(tuple(between), (*pages, *plan.unfilled)))
    guard.begin(KVCoreMetadata.of(plan))
