"""`Harness`: the executor, a model and a connector behind an interface like an engine's."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvcore.errors import TransferError
from kvcore.testing.page_table import PageTable
from kvcore.testing.ranks import Ranks
from kvcore_trtllm.testing.executor import Call, Executor, Limits
from kvcore_trtllm.testing.model import PagedModel, load
from kvcore_trtllm.testing.modules import PyTorchModelEngine, model_of_rank
from kvcore_trtllm.testing.requests import LlmRequest, State

__all__ = ["Harness", "HarnessArgs"]

HUNG_ITERATIONS = 2000


@dataclass(frozen=True)
class HarnessArgs:
    """The engine's arguments that matter here.

    ``order`` is the order of a page's inner axes, HND or NHD. ``dtype`` is the type of the model
    and of its KV.
    """

    ranks: int = 1
    num_pages: int = 64
    page_tokens: int = 32
    order: str = "HND"
    dtype: str = "float32"
    limits: Limits = field(default_factory=Limits)


class Harness(AbstractContextManager["Harness"]):
    """One engine over the checkpoint ``folder``. For one thread only; close it when done.

    ``connector`` is a scheduler class and a worker class, or None. ``llm_args`` overrides fields of
    their constructor's argument, by dotted names. ``model`` is a loaded one, to share between
    harnesses.
    """

    def __init__(
        self,
        folder: Path,
        args: HarnessArgs | None = None,
        *,
        connector: tuple[type[Any], type[Any]] | None = None,
        llm_args: dict[str, Any] | None = None,
        model: Any = None,
    ) -> None:
        self.args = args or HarnessArgs()
        args = self.args
        self.llm_args = _llm_args(folder, args, llm_args or {})
        self.model = PagedModel(
            load(folder, args.dtype) if model is None else model,
            args.num_pages,
            args.page_tokens,
            args.ranks,
            args.order,
        )
        self.table = PageTable(args.num_pages, args.page_tokens)
        self.ranks = Ranks(args.ranks)
        self.scheduler: Any = None
        self.workers: list[Any] = []
        self.model_engines: list[PyTorchModelEngine] = []
        self._callables: list[Any] = []
        self._ids = itertools.count(1)
        try:
            if connector is not None:
                self._connect(*connector)
        except BaseException:
            self.ranks.close()
            raise
        self.executor = Executor(
            self.model,
            self.table,
            args.limits,
            self.ranks,
            self.scheduler,
            self.workers,
            self._callables,
        )

    def _connect(self, scheduler: type[Any], worker: type[Any]) -> None:
        """Construct the connector in the engine's order.

        Models, workers, the scheduler, the callable with a warm-up, then the memory.
        """
        model, size = self.model.decoder.model, self.ranks.size
        self.model_engines = [
            model_of_rank(self.llm_args, model, rank, size) for rank in range(size)
        ]
        self.workers = self.ranks.each(lambda rank: worker(self.llm_args))
        self.scheduler = self.ranks.on(0, lambda: scheduler(self.llm_args))
        self._callables = self.ranks.each(
            lambda rank: self.workers[rank].register_forward_pass_callable()
        )
        for rank, call in enumerate(self._callables):
            if call is not None:
                self.ranks.on(rank, call)  # warm-up
        self.ranks.each(lambda rank: self.workers[rank].register_kv_caches(self.model.pools[rank]))
        self.ranks.on(0, self.scheduler.wait_for_initialization)

    @property
    def calls(self) -> list[Call]:
        """Every call of the connector so far, in order."""
        return self.executor.calls

    def count(self, name: str) -> int:
        """Return how often a method of the connector was called on rank 0."""
        return sum(call.name == name for call in self.calls)

    def submit(self, tokens: Sequence[int], max_tokens: int = 8, **fields: Any) -> LlmRequest:
        """Queue a request with other ``fields`` of `LlmRequest`, for example ``cache_salt``."""
        request = LlmRequest(next(self._ids), list(tokens), max_tokens, **fields)
        self.executor.enqueue(request)
        return request

    def abort(self, request: LlmRequest) -> None:
        """Cancel a request, as when its client disconnects."""
        self.executor.cancel(request.request_id)

    def run(self, timeout_s: float = 60.0) -> None:
        """Iterate until nothing is left to do. Raises TransferError after ``timeout_s``."""
        self._iterate(lambda: self.executor.idle, "idle", timeout_s)

    def step_until(self, request: LlmRequest, state: State, timeout_s: float = 60.0) -> None:
        """Iterate until ``request`` is in ``state``."""
        what = f"request {request.request_id} {state.value}"
        self._iterate(lambda: request.state is state, what, timeout_s)

    def _iterate(self, done: Callable[[], bool], what: str, timeout_s: float) -> None:
        limit, first = time.monotonic() + timeout_s, self.executor.iteration
        while not done():
            self.executor.step()
            spun = self.executor.iteration - first
            # Also require many iterations: the machine may have been halted.
            if time.monotonic() > limit and spun > HUNG_ITERATIONS:
                raise TransferError(
                    f"not {what} after {timeout_s} s and {spun} iterations: a request waits for a "
                    "report that does not arrive"
                )

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **fields: Any
    ) -> list[list[int]]:
        """Return the greedy answers to prompts that are submitted together."""
        requests = [self.submit(prompt, max_tokens, **fields) for prompt in prompts]
        self.run()
        return [request.generated for request in requests]

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        self.table.forget()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Shut down the connector's halves, if they have a ``shutdown``, then the ranks."""
        halves = [*enumerate(self.workers), (0, self.scheduler)]
        for rank, half in halves:
            shutdown = getattr(half, "shutdown", None)
            if shutdown is not None:
                self.ranks.on(rank, shutdown)
        self.workers, self.scheduler, self.model_engines = [], None, []
        self.ranks.close()


def _llm_args(folder: Path, args: HarnessArgs, overrides: dict[str, Any]) -> SimpleNamespace:
    """Return the fields of the engine's arguments that a connector may read."""
    limits = asdict(args.limits)
    made = SimpleNamespace(
        model=str(folder),
        revision=None,
        tensor_parallel_size=args.ranks,
        pipeline_parallel_size=1,
        context_parallel_size=1,
        enable_attention_dp=False,
        max_beam_width=1,
        max_num_tokens=limits["max_num_tokens"],
        max_batch_size=limits["max_batch_size"],
        enable_chunked_prefill=limits["chunked"],
        disable_overlap_scheduler=not limits["overlap"],
        attn_backend="VANILLA" if args.order == "NHD" else "TRTLLM",
        dtype=args.dtype,
        quant_config=None,
        cuda_graph_config=None,
        torch_compile_config=None,
        speculative_config=None,
        scheduler_config=SimpleNamespace(capacity_scheduler_policy="GUARANTEED_NO_EVICT"),
        kv_cache_config=SimpleNamespace(
            enable_block_reuse=True,
            enable_partial_reuse=False,
            tokens_per_block=args.page_tokens,
            dtype="auto",
            host_cache_size=0,
            max_attention_window=None,
        ),
    )
    for name, value in overrides.items():
        *path, last = name.split(".")
        place = made
        for part in path:
            place = getattr(place, part)
        setattr(place, last, value)
    return made
