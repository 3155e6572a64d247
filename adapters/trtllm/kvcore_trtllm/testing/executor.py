"""TensorRT-LLM's executor loop as a KV cache connector sees it.

One iteration:

    admit, schedule                                   requests and chunks that fit
    first chunk: add the sequence ─▶ match ─▶ update_state_after_alloc
    requests that load asynchronously leave the batch (parked)
    build_connector_meta ─▶ broadcast ─▶ bind ─▶ start_load_kv
    forward: for each layer  wait_for_layer_load, the layer, save_kv_layer;  wait_for_save
    take in tokens, request_finished, aborts          of this batch; with overlap, of the last one
    get_finished on every rank; requests that all ranks reported are freed or scheduled again

Written from the facts in TensorRT-LLM's documentation and tests. One thread drives it. Each rank's
half runs on a thread of its own. Nothing is timed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvcore.errors import CapacityError, ConfigError
from kvcore.testing.engine.model import Rows
from kvcore.testing.page_table import PageTable
from kvcore.testing.ranks import Ranks
from kvcore_trtllm.testing import standins
from kvcore_trtllm.testing.model import PagedModel
from kvcore_trtllm.testing.requests import LlmRequest, State

__all__ = ["Call", "Executor", "Limits"]

STREAM = object()
"""Stands for a CUDA stream. A connector may pass it on, and must not use it on a CPU."""


class Call(NamedTuple):
    """A call of a connector's method on rank 0, with an argument or two."""

    name: str
    detail: Any = None


@dataclass(frozen=True)
class Limits:
    """The engine's limits and modes. Prompts longer than ``max_num_tokens`` need ``chunked``."""

    max_num_tokens: int = 4096
    max_batch_size: int = 8
    chunked: bool = False
    overlap: bool = False
    version: str = "1.3"
    tells_of_aborts: bool = False
    """True if the connector learns of an aborted request as of a finished one. Not in 1.2 and 1.3.
    """
    goes_on: bool = False
    """True if all requests fail after an error in a forward, and the executor goes on, as without
    overlap in 1.2 and 1.3. With it, those end. Otherwise `Executor.step` raises the error.
    """
    replays: bool = False
    """True if forwards run as replayed CUDA graphs do: no hook or callable is called."""


def _nothing() -> None:
    return None


@dataclass
class _Sent:
    """How much of a request the connector has received. The next message holds the rest."""

    tokens: int = 0
    pages: int = 0


@dataclass
class _Parked:
    """Requests that wait for a connector, by id.

    ``fresh`` are new, ``pending`` were passed to get_finished, ``reported`` are back; the last two
    by rank.
    """

    fresh: dict[int, LlmRequest] = field(default_factory=dict)
    pending: list[dict[int, LlmRequest]] = field(default_factory=list)
    reported: list[dict[int, LlmRequest]] = field(default_factory=list)

    def announce(self) -> list[int]:
        """Return the ids of new requests, which are pending on every rank from now on."""
        ids = list(self.fresh)
        for pending in self.pending:
            pending.update(self.fresh)
        self.fresh = {}
        return ids

    def take(self, rank: int, ids: Sequence[int]) -> None:
        """Take in the ids that a rank has reported."""
        for request_id in ids:
            self.reported[rank][request_id] = self.pending[rank].pop(request_id)

    def agreed(self) -> list[LlmRequest]:
        """Remove and return the requests that every rank has reported."""
        ids = set.intersection(*(set(reported) for reported in self.reported))
        done = [self.reported[0][request_id] for request_id in sorted(ids)]
        for reported in self.reported:
            for request_id in ids:
                del reported[request_id]
        return done

    def __bool__(self) -> bool:
        return bool(self.fresh) or any(self.pending) or any(self.reported)


class Executor:
    """The loop over one model. ``scheduler`` and ``workers`` are a connector's halves, or None."""

    def __init__(
        self,
        model: PagedModel,
        table: PageTable,
        limits: Limits,
        ranks: Ranks,
        scheduler: Any = None,
        workers: Sequence[Any] = (),
        callables: Sequence[Callable[[], None] | None] = (),
    ) -> None:
        self.calls: list[Call] = []
        self.iteration = 0
        self.table = table
        self._model = model
        self._limits = limits
        self._ranks = ranks
        self._scheduler = scheduler
        self._workers = list(workers)
        self._callables = list(callables)
        self._queue: list[LlmRequest] = []
        self._active: list[LlmRequest] = []
        self._previous: list[LlmRequest] | None = None
        self._cancelled: set[int] = set()
        self._sent: dict[int, _Sent] = {}
        self._matched: dict[int, int] = {}
        count = len(self._workers)
        self._loading = _Parked({}, [{} for _ in range(count)], [{} for _ in range(count)])
        self._saving = _Parked({}, [{} for _ in range(count)], [{} for _ in range(count)])

    # -- from outside -----------------------------------------------------------------------

    def enqueue(self, request: LlmRequest) -> None:
        """Queue a request. Raises ConfigError if it can never run."""
        limits, needed = self._limits, self._needed(request)
        if needed > self.table.num_pages:
            raise ConfigError(f"a request of {needed} pages; there are {self.table.num_pages}")
        if not limits.chunked and len(request.tokens) > limits.max_num_tokens:
            raise ConfigError(
                f"a prompt of {len(request.tokens)} tokens; max_num_tokens is "
                f"{limits.max_num_tokens}: raise it, or turn chunked prefill on"
            )
        self._queue.append(request)

    def cancel(self, request_id: int) -> None:
        """Abort a request the next time the executor looks for aborts."""
        self._cancelled.add(request_id)

    @property
    def idle(self) -> bool:
        """True if nothing is queued or running, and no report of a connector is outstanding."""
        waiting = self._queue or self._active or self._loading or self._saving
        return not waiting and self._previous is None

    def step(self) -> None:
        """Run one iteration. Raises what a connector raises: the engine would stall then."""
        self.iteration += 1
        batch = self._schedule()
        if batch:
            batch = self._start(batch)
        sampled = self._forward_or_fail(batch) if batch else None
        if self._limits.overlap:
            sampled, self._previous = self._previous, sampled
        self._take_in(sampled or [])
        if self._workers:
            self._collect()

    # -- scheduling -------------------------------------------------------------------------

    def _needed(self, request: LlmRequest) -> int:
        return self.table.pages_for(request.prompt_len + request.max_tokens)

    def _schedule(self) -> list[LlmRequest]:
        self._admit()
        generating = [
            request
            for request in self._active
            if request.state is State.GENERATING and request.sampled < request.max_tokens
        ]
        budget = self._limits.max_num_tokens - len(generating)
        context = []
        for request in self._active:
            left = request.prompt_len - request.computed
            if request.state is not State.CONTEXT or budget <= 0:
                continue
            if left > budget and not self._limits.chunked:
                continue
            context.append(request)
            budget -= left
        return [*context, *generating]

    def _admit(self) -> None:
        """Begin queued requests, in order, that can certainly run to their end."""
        self._queue = [request for request in self._queue if not self._dropped(request)]
        while self._queue and len(self._active) < self._limits.max_batch_size:
            promised = sum(map(self._needed, self._active))
            pinned = sum(len(request.pages) for request in self._waiting_to_save())
            if promised + pinned + self._needed(self._queue[0]) > self.table.num_pages:
                return
            request = self._queue.pop(0)
            request.state = State.CONTEXT
            self._active.append(request)

    def _dropped(self, request: LlmRequest) -> bool:
        if request.request_id not in self._cancelled:
            return False
        self._cancelled.discard(request.request_id)
        request.state = State.ABORTED
        return True

    def _waiting_to_save(self) -> list[LlmRequest]:
        saving = dict(self._saving.fresh)
        for place in (*self._saving.pending, *self._saving.reported):
            saving.update(place)
        return list(saving.values())

    # -- before the forward -----------------------------------------------------------------

    def _start(self, batch: list[LlmRequest]) -> list[LlmRequest]:
        """Allocate the batch's pages and bind the connector's metadata; return who stays in it."""
        for request in batch:
            if request.state is State.CONTEXT and not request.added:
                self._add_sequence(request)
            elif request.state is State.GENERATING:
                self._grow(request)
        if self._scheduler is None:
            return batch
        parked = self._loading.fresh
        output = self._scheduler_output([r for r in batch if r.request_id not in parked])
        for request in parked.values():
            request.state = State.LOADING
        self._bind(output)
        return [request for request in batch if request.state is not State.LOADING]

    def _add_sequence(self, request: LlmRequest) -> None:
        """Claim stored pages, ask the connector for more tokens, allocate for the whole prompt."""
        request.added = True
        request.pages = self.table.claim(request.tokens, request.salt)
        request.cached_tokens = len(request.pages) * self.table.page_tokens
        fresh = self.table.pages_for(request.prompt_len) - len(request.pages)
        if self._scheduler is not None:
            self._match(request)
        request.pages += self.table.allocate(fresh)
        request.computed = request.cached_tokens + request.num_connector_matched_tokens
        if self._scheduler is not None:
            pages = list(request.pages)
            self._on_leader(
                "update_state_after_alloc",
                lambda: self._scheduler.update_state_after_alloc(request, pages),
                len(pages),
            )

    def _match(self, request: LlmRequest) -> None:
        matched, parks = self._on_leader(
            "get_num_new_matched_tokens",
            lambda: self._scheduler.get_num_new_matched_tokens(request, request.cached_tokens),
            request.request_id,
        )
        if not matched and parks:
            raise RuntimeError("no tokens matched, and yet they are to be loaded asynchronously")
        assert 0 <= matched < request.prompt_len - request.cached_tokens, (
            f"{matched} tokens matched beyond {request.cached_tokens} of {request.prompt_len}: "
            "one must stay uncomputed"
        )
        request.num_connector_matched_tokens = matched
        self._matched[request.request_id] = matched
        if parks:
            self._loading.fresh[request.request_id] = request

    def _grow(self, request: LlmRequest) -> None:
        missing = self.table.pages_for(request.computed + 1) - len(request.pages)
        request.pages += self.table.allocate(missing)

    def _chunk(self, request: LlmRequest) -> int:
        """Return the prompt tokens of this step. A chunk ends at a page's end, except the last."""
        left = request.prompt_len - request.computed
        if not self._limits.chunked or left <= self._limits.max_num_tokens:
            return left
        stop = request.computed + self._limits.max_num_tokens
        stop -= stop % self.table.page_tokens
        if stop <= request.computed:
            raise CapacityError("max_num_tokens holds less than a page: raise it")
        return stop - request.computed

    def _scheduler_output(self, batch: list[LlmRequest]) -> standins.SchedulerOutput:
        output = standins.SchedulerOutput()
        for request in batch:
            new = request.request_id not in self._sent
            (output.new_requests if new else output.cached_requests).append(self._data(request))
        self._matched.clear()
        return output

    def _data(self, request: LlmRequest) -> standins.RequestData:
        sent = self._sent.setdefault(request.request_id, _Sent())
        tokens, pages = request.tokens[sent.tokens :], request.pages[sent.pages :]
        sent.tokens, sent.pages = len(request.tokens), len(request.pages)
        if request.state is State.CONTEXT:
            position = request.computed - self._matched.get(request.request_id, 0)
            scheduled = self._chunk(request)
        else:
            position, scheduled = len(request.tokens) - 1, 1
        values = (request.request_id, tokens, pages, position, scheduled)
        if self._limits.version == "1.2":
            return standins.RequestData(*values)
        return standins.RequestDataOf13(*values, cache_salt=request.cache_salt)

    def _bind(self, output: standins.SchedulerOutput) -> None:
        meta = self._on_leader(
            "build_connector_meta", lambda: self._scheduler.build_connector_meta(output), output
        )
        sent = pickle.dumps(meta)  # what a broadcast does
        self.calls.append(Call("start_load_kv"))

        def start(rank: int) -> None:
            self._workers[rank].bind_connector_meta(pickle.loads(sent))
            self._workers[rank].start_load_kv(STREAM)

        self._ranks.each(start)

    # -- the forward ------------------------------------------------------------------------

    def _forward(self, batch: list[LlmRequest]) -> list[LlmRequest]:
        """Compute the batch; return the requests that got a token."""
        rows = []
        for request in batch:
            count = self._chunk(request) if request.state is State.CONTEXT else 1
            start = request.computed
            tokens = request.everything[start : start + count]
            lora = None if request.py_lora_path is None else Path(request.py_lora_path)
            rows.append(Rows(tokens, start, request.pages, lora))
        sampled = self._model.forward(rows, self._before_layer, self._after_layer)
        self._forward_ended()
        if self._workers:
            self.calls.append(Call("wait_for_save"))
            self._ranks.each(lambda rank: self._workers[rank].wait_for_save(STREAM))
        done = [
            self._advance(request, row.start + len(row.tokens), token)
            for request, row, token in zip(batch, rows, sampled, strict=True)
        ]
        return [request for request, whole in zip(batch, done, strict=True) if whole]

    def _forward_or_fail(self, batch: list[LlmRequest]) -> list[LlmRequest]:
        """Do as `_forward` does. Whatever it raises may fail all requests."""
        try:
            return self._forward(batch)
        except Exception:
            if not self._limits.goes_on:
                raise
        for request in list(self._active):
            self._active.remove(request)
            self._cancelled.discard(request.request_id)
            request.state = State.FAILED
            if self._limits.tells_of_aborts and request.added:
                self._tell_finished(request)
            self.table.release(request.pages)
            request.pages = []
        return []

    def _advance(self, request: LlmRequest, computed: int, token: int) -> bool:
        """Return True if the token counts, because the whole prompt is computed."""
        request.computed = computed
        if computed < request.prompt_len:
            return False
        if request.state is State.CONTEXT:
            request.state = State.GENERATING
            self.table.store(request.tokens[: request.prompt_len], request.salt, request.pages)
        request.ahead.append(token)
        return True

    def _before_layer(self, layer: int) -> None:
        if self._workers and not self._limits.replays:
            self.calls.append(Call("wait_for_layer_load", layer))
            self._ranks.each(lambda rank: self._workers[rank].wait_for_layer_load(layer, STREAM))

    def _after_layer(self, layer: int) -> None:
        if self._workers and not self._limits.replays:
            self.calls.append(Call("save_kv_layer", layer))
            self._ranks.each(lambda rank: self._workers[rank].save_kv_layer(layer, STREAM))

    def _forward_ended(self) -> None:
        if any(self._callables) and not self._limits.replays:
            self.calls.append(Call("forward_pass_callable"))
            self._ranks.each(lambda rank: (self._callables[rank] or _nothing)())

    # -- after the forward ------------------------------------------------------------------

    def _take_in(self, sampled: list[LlmRequest]) -> None:
        """Make a token of each ``sampled`` request known; remove requests that have ended."""
        finished = []
        for request in sampled:
            if request.state is State.GENERATING:
                request.tokens.append(request.ahead.pop(0))
                if len(request.generated) >= request.max_tokens:
                    finished.append(request)
        for request in finished:
            self._finish(request)
        for request in [r for r in self._active if r.request_id in self._cancelled]:
            self._abort(request)

    def _finish(self, request: LlmRequest) -> None:
        self._active.remove(request)
        self._cancelled.discard(request.request_id)
        request.state = State.DONE
        if self._tell_finished(request):
            request.state = State.SAVING
            self._saving.fresh[request.request_id] = request
        else:
            self._free(request)

    def _tell_finished(self, request: LlmRequest) -> bool:
        if self._scheduler is None:
            return False
        pages = list(request.pages)
        answer: bool = self._on_leader(
            "request_finished",
            lambda: self._scheduler.request_finished(request, pages),
            request.request_id,
        )
        return answer

    def _abort(self, request: LlmRequest) -> None:
        """Free an aborted request's pages at once. The connector learns of it in some versions."""
        self._active.remove(request)
        self._cancelled.discard(request.request_id)
        if request.state is State.LOADING:
            request.computed = request.cached_tokens  # not what the load brings
        request.state = State.ABORTED
        if self._limits.tells_of_aborts and request.added and self._tell_finished(request):
            self._saving.fresh[request.request_id] = request
        else:
            self._free(request)

    def _free(self, request: LlmRequest) -> None:
        known = min(request.computed, len(request.tokens))
        self.table.store(request.tokens[:known], request.salt, request.pages)
        self.table.release(request.pages)
        request.pages = []

    def _collect(self) -> None:
        saving, loading = self._saving.announce(), self._loading.announce()
        self.calls.append(Call("get_finished", (saving, loading)))
        found = self._ranks.each(
            lambda rank: self._workers[rank].get_finished(list(saving), list(loading))
        )
        for rank, (saved, loaded) in enumerate(found):
            self._saving.take(rank, saved)
            self._loading.take(rank, loaded)
        for request in self._saving.agreed():
            if request.state is State.SAVING:
                request.state = State.DONE
            self._free(request)
        for request in self._loading.agreed():
            if request.state is State.LOADING:
                request.state = State.CONTEXT

    def _on_leader(self, name: str, call: Callable[[], Any], detail: Any = None) -> Any:
        self.calls.append(Call(name, detail))
        return self._ranks.on(0, call)
