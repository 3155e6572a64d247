"""kvcore's hooks in SGLang, beyond the linker's own interface.

    UnifiedCacheLinkerWrapper.match                 gives kvcore the tokens of a lookup
    UnifiedRadixCache.insert                        gives kvcore the tokens of a save
    UnifiedRadixCache.checkpoint                    tells kvcore whose KV the tree takes
    UnifiedCacheLinkerWrapper.load_back             keeps blended requests out of the tree
    UnifiedRadixCache.finish_external_linker_loads  marks requests whose load failed
    Scheduler.handle_generate_request               remembers what a request was made from
    SchedulerOutputStreamer.stream_output           computes marked requests again, reports ends
    Scheduler.send_abort_output                     computes marked requests again, reports ends
    Scheduler.get_internal_state                    adds kvcore's state to /server_info
    PrefillAdder.add_one_req                        lets others go first while KV is being fetched
    ModelRunner.forward                             times prefill
    SchedulerWeightUpdaterManager.update_weights_*  separates KV of new weights from earlier KV

Every hook wraps the original, and calls straight through unless the cache's linker is kvcore's. A
hook is not registered if its target has another signature than the one known here. kvcore's linker
then turns itself off, or does without what the hook is for.

No error of a hook reaches SGLang (`guarded`): the original is called all the same, its result
stands, and kvcore stops.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvcore.connector.guard import attempt
from kvcore.errors import EngineMustEnd, UnsupportedError
from kvcore.log import get_logger
from kvcore.telemetry.rates import ForwardPart

_log = get_logger("kvcore.sglang.hooks")

Original = Callable[..., Any]

_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_WRAPPER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"


linkers: weakref.WeakSet[Any] = weakref.WeakSet()
"""The linkers of this process. An error of a hook stops them."""


class _Called:
    """The original of one call of a hook. It remembers what came of it."""

    def __init__(self, original: Original) -> None:
        self._original = original
        self.done = False
        self.result: Any = None
        self.raised: BaseException | None = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.done = True
        try:
            self.result = self._original(*args, **options)
        except BaseException as error:
            self.raised = error
            raise
        return self.result


def guarded(around: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that does what ``around`` does, and raises only what the original raises.

    On an error of kvcore, kvcore stops. If the original was not called yet, it is called as without
    kvcore. If it was, its result is returned. An `EngineMustEnd` passes.
    """

    @functools.wraps(around)
    def hook(original: Original, *args: Any, **options: Any) -> Any:
        called = _Called(original)
        try:
            return around(called, *args, **options)
        except EngineMustEnd:
            raise
        except Exception as error:
            if error is called.raised:
                raise
            failed = error
        for linker in list(linkers):
            linker.stop(f"an error in {around.__name__}", failed)
        if called.raised is not None:
            raise called.raised
        return called.result if called.done else original(*args, **options)

    return hook


class Hook(NamedTuple):
    """A function ``around(original, self, ...)`` that wraps ``target``.

    ``parameters`` are those that ``target`` must have.
    """

    target: str
    parameters: tuple[str, ...]
    around: Callable[..., Any]


def kvcore_linker(cache: Any) -> Any:
    """Return the cache's `KVCoreLinker` if it has one that serves, else None."""
    linker = getattr(getattr(cache, "linker", None), "cache_linker", None)
    return linker if getattr(linker, "wants_inserts", False) else None


# --- tokens --------------------------------------------------------------------------------------


def around_match(original: Original, wrapper: Any, key: Any, req: Any, result: Any) -> Any:
    """Give the linker the key and the request of a match while it looks up page hashes."""
    linker = kvcore_linker(wrapper.cache)
    if linker is None:
        return original(wrapper, key, req, result)
    if undetermined(req, linker.vocabulary):
        req.skip_radix_cache_insert = True
        return result
    linker.ask(key, result.device_prefix_len, req)
    try:
        return original(wrapper, key, req, result)
    finally:
        linker.asked()


def undetermined(req: Any, vocabulary: int) -> bool:
    """Return True if the tokens of a request do not determine its KV.

    That is so for embeddings in place of tokens, and for a medium whose content no token stands
    for, as in models that run Transformers' code. Elsewhere SGLang puts numbers beyond the
    ``vocabulary`` in the place of a medium, and the linker knows these.
    """
    for name in ("positional_embed_overrides", "input_embeds"):
        if getattr(req, name, None) is not None:
            return True
    media = getattr(getattr(req, "multimodal_inputs", None), "mm_items", None)
    return bool(media) and max(req.origin_input_ids, default=0) < vocabulary


def around_insert(original: Original, cache: Any, params: Any) -> Any:
    """Save the nodes that an insert offers, together, after it has ended, by the key's tokens."""
    linker = kvcore_linker(cache)
    if linker is None or params.key is None:
        return original(cache, params)
    before = len(cache.linker.pending_offloads)
    linker.begin_insert()
    result = original(cache, params)
    offered = cache.linker.pending_offloads[before:]
    if not offered:
        linker.abandon_insert()
        return result
    # The ranks meet in end_insert, so it is called whatever the slots are.
    slots = attempt("the slots of an insert", lambda: _slots(cache, params.key, offered[-1]), None)
    linker.end_insert(params.key, slots)
    return result


def _slots(cache: Any, key: Any, last: Any) -> Any:
    """Return the slots of an insert up to the last node that was offered; None if unknown."""
    root = cache.root_node_handle(key.extra_key)
    slots = cache.tree_core.collect_full_device_indices(last.publish_node_ids[-1], root)
    return slots if len(slots) <= len(key) else None


def around_checkpoint(original: Original, cache: Any, req: Any, **options: Any) -> Any:
    """Tell the linker whose KV the tree takes, so that a request's wish not to save is followed."""
    linker = kvcore_linker(cache)
    if linker is None:
        return original(cache, req, **options)
    linker.saving(req)
    try:
        return original(cache, req, **options)
    finally:
        linker.saving(None)


def around_load_back(original: Original, wrapper: Any, req: Any) -> Any:
    """Keep a request that will be blended out of the tree, and give the linker its slots.

    A blend's KV is approximate, and so is all KV after it. From the first slot that the tree did
    not hold, the slots are the request's own, and they are freed with it.
    """
    result = original(wrapper, req)
    linker = kvcore_linker(wrapper.cache)
    if linker is not None and linker.blends(req.rid):
        req.skip_radix_cache_insert = True
        cache = wrapper.cache
        root = cache.root_node_handle(req.extra_key)
        before = cache.tree_core.collect_full_device_indices(req.last_node, root)
        linker.place(req.rid, [before, wrapper.private_load_indices[req.rid]])
    return result


# --- KV that takes a while -----------------------------------------------------------------------


def _look_up(cache: Any, req: Any) -> None:
    """Look up a new request, so that its KV is fetched while the request waits in the queue."""
    if kvcore_linker(cache).stages and req.to_finish is None and not req.finished():
        req.init_next_round_input(cache, cow_mamba=False)


def around_add_one_req(original: Original, adder: Any, req: Any, *args: Any, **options: Any) -> Any:
    """Leave a request in the queue while its KV is being fetched, and let the next one go first."""
    linker = kvcore_linker(adder.tree_cache)
    if linker is not None:
        running = adder.running_batch
        idle = not adder.can_run_list and (running is None or running.is_empty())
        if linker.holds(req.rid, resting=idle):
            from sglang.srt.managers.schedule_policy import AddReqResult

            return AddReqResult.CONTINUE
    return original(adder, req, *args, **options)


# --- a load that failed --------------------------------------------------------------------------

SOURCE = "kvcore_source"
"""Attribute of a request: a weak reference to the scheduler, and the message it was made from."""
AGAIN = "kvcore_again"
"""Attribute of a request whose load failed: it is computed again instead of answered by an error.
"""


def around_handle_generate_request(
    original: Original, scheduler: Any, recv_req: Any, **options: Any
) -> Any:
    """Remember what a new request was made from, and look it up."""
    result = original(scheduler, recv_req, **options)
    queued = scheduler.waiting_queue
    linker = kvcore_linker(scheduler.tree_cache)
    if queued and queued[-1].rid == recv_req.rid and linker:
        if undetermined(queued[-1], linker.vocabulary) or linker.keeps_out(queued[-1]):
            queued[-1].skip_radix_cache_insert = True
        setattr(queued[-1], SOURCE, (weakref.ref(scheduler), recv_req))
        _look_up(scheduler.tree_cache, queued[-1])
    return result


def around_finish_loads(original: Original, cache: Any, reqs: list[Any]) -> Any:
    """Mark the requests of a batch whose loads failed, to be computed again."""
    linker = kvcore_linker(cache)
    if linker is not None:
        _take_out_landed(cache.linker, reqs)
    failed = original(cache, reqs)
    if failed and linker is not None:
        for req in failed:
            setattr(req, AGAIN, hasattr(req, SOURCE))
        linker.refuse([req.rid for req in failed])
    return failed


def _take_out_landed(wrapper: Any, reqs: list[Any]) -> None:
    """Remove the requests that were answered in part from a batch's loads.

    The loads of a batch fail together. Those of requests that were answered in part had ended when
    they were planned. Such a request cannot be computed again without answering twice.
    """
    for req in reqs:
        if req.output_ids and req.rid in wrapper.inflight_load_rids:
            wrapper.inflight_load_rids.remove(req.rid)
            wrapper.private_load_indices.pop(req.rid, None)


def around_stream_output(
    original: Original, streamer: Any, reqs: list[Any], *args: Any, **options: Any
) -> Any:
    """Compute marked requests again instead of answering them; report the end of the others."""
    again = [req for req in reqs if getattr(req, AGAIN, False) and req.finished()]
    result = original(streamer, [req for req in reqs if req not in again], *args, **options)
    linker = kvcore_linker(getattr(streamer, "tree_cache", None))
    if linker is not None:
        _report_ends(linker, (req for req in reqs if req not in again))
    for req in again:
        if not _tries_again(req):
            original(streamer, [req], *args, **options)  # answered as a failed load without kvcore
    return result


def around_send_abort_output(original: Original, scheduler: Any, abort_req: Any, req: Any) -> Any:
    """Compute a marked request again instead of aborting it; report the end of any other."""
    if getattr(req, AGAIN, False) and _tries_again(req):
        return None
    if (linker := kvcore_linker(scheduler.tree_cache)) is not None:
        linker.ended(req.rid, "abort", trace_headers(req))
    return original(scheduler, abort_req, req)


def _tries_again(req: Any) -> bool:
    """Compute a request again that has ended without an answer; return False if that fails.

    Somebody must answer it then: it has no successor.
    """
    return attempt("a request's second try", lambda: _compute_again(req), otherwise=False)


def _compute_again(req: Any) -> bool:
    """Give the scheduler the request's message again. Returns True."""
    setattr(req, AGAIN, False)
    scheduler, source = getattr(req, SOURCE)
    living = scheduler()
    if living is not None:
        _log.warning("computed_again", request=req.rid, reason="its KV could not be loaded")
        living.handle_generate_request(source)
    setattr(req, ENDED, True)  # the end that counts is that of the request that replaces it
    req.finished_output = True  # with overlap it is streamed once more, and must be skipped
    return True


# --- what a request asks of kvcore ---------------------------------------------------------------

CONTROL = "kvcore_control"
"""Attribute of a request: what it asks of kvcore, once that was read."""

# --- a request ends ------------------------------------------------------------------------------

ENDED = "kvcore_ended"
"""Attribute of a request whose end was reported to the linker. With overlap it is streamed once
more, and another request may have its id by then."""


def _report_ends(linker: Any, reqs: Iterable[Any]) -> None:
    """Report requests that have ended to the linker, each once."""
    for req in reqs:
        if req.finished() and not getattr(req, ENDED, False):
            setattr(req, ENDED, True)
            linker.ended(req.rid, outcome(req), trace_headers(req))


def outcome(req: Any) -> str:
    """Return how SGLang's request ended, in one word."""
    reason = getattr(req, "finished_reason", None)
    return "done" if reason is None else str(reason.to_json()["type"])


def trace_headers(req: Any) -> dict[str, str]:
    """Return the W3C trace context of the request; empty if SGLang does not trace it."""
    traced = getattr(getattr(req, "time_stats", None), "trace_ctx", None)
    context = getattr(traced, "root_span_context", None)
    if context is None or getattr(traced, "tracing_enable", False) is not True:
        return {}
    from opentelemetry.propagate import inject

    headers: dict[str, str] = {}
    inject(headers, context)
    return headers


# --- kvcore's state ------------------------------------------------------------------------------


def around_internal_state(original: Original, scheduler: Any, recv_req: Any) -> Any:
    """Add kvcore's state to the engine's, on the rank that leads."""
    result = original(scheduler, recv_req)
    linker = kvcore_linker(scheduler.tree_cache)
    state = linker.state if linker is not None else None
    if state is not None:
        result.internal_state["kvcore"] = state
    return result


# --- how long prefill takes ----------------------------------------------------------------------


def around_forward(
    original: Original, runner: Any, forward_batch: Any, *args: Any, **options: Any
) -> Any:
    """Time a forward of the target model if its time shows the cost of prefill."""
    gate = getattr(runner.token_to_kv_pool, "layer_transfer_counter", None)
    around = getattr(gate, "around_forward", None)  # only kvcore's gate has it
    if around is None or runner.is_draft_worker:
        return original(runner, forward_batch, *args, **options)
    with around(prefill_parts(forward_batch)):
        return original(runner, forward_batch, *args, **options)


def prefill_parts(batch: Any) -> list[ForwardPart]:
    """Return the parts that SGLang's batch computes, decodes included; empty if not comparable.

    A batch is not comparable if it is no plain prefill, if its forward does more (images,
    log-probabilities of prompts), or if it waits for other replicas (data-parallel attention).
    """
    plain = batch.forward_mode.name in ("EXTEND", "MIXED")
    if not plain or batch.return_logprob or batch.global_num_tokens_cpu is not None:
        return []
    if batch.contains_mm_inputs():
        return []
    rows, before = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    return [ForwardPart(int(new), int(held)) for new, held in zip(rows, before, strict=True)]


# --- weights that change in place ----------------------------------------------------------------

storages: weakref.WeakSet[Any] = weakref.WeakSet()
"""The storages of this process. HiCache's threads use them while weights are updated."""


def around_update(original: Original, updater: Any, recv_req: Any) -> Any:
    """Tell all that keep KV that the weights are changing, even if the update then fails.

    The linker hears of it first, because it could not tell a flush in the update from one that a
    client asked for. The storages hear of it last: HiCache writes until then what the old weights
    have computed.
    """
    linker = kvcore_linker(getattr(updater.scheduler, "tree_cache", None))
    if linker is not None:
        linker.weights_changed()
    try:
        return original(updater, recv_req)
    finally:
        for storage in list(storages):
            storage.weights_changed()  # does not raise


HOOKS = (
    Hook(f"{_WRAPPER}.match", ("self", "key", "req", "result"), around_match),
    Hook(f"{_CACHE}.insert", ("self", "params"), around_insert),
    Hook(f"{_CACHE}.finish_external_linker_loads", ("self", "reqs"), around_finish_loads),
    Hook(
        f"{_SCHEDULER}.handle_generate_request",
        ("self", "recv_req", "mm_input_error"),
        around_handle_generate_request,
    ),
    Hook(
        f"{_STREAMER}.stream_output",
        ("self", "reqs", "return_logprob", "skip_req"),
        around_stream_output,
    ),
    Hook(f"{_SCHEDULER}.send_abort_output", ("self", "abort_req", "req"), around_send_abort_output),
    Hook(f"{_SCHEDULER}.get_internal_state", ("self", "recv_req"), around_internal_state),
)

SAVE_HOOKS = (Hook(f"{_CACHE}.checkpoint", ("self", "req", "up_to", "kwargs"), around_checkpoint),)
"""Without these hooks a request that asks not to be saved is kept out of SGLang's tree."""

FUSION_HOOKS = (Hook(f"{_WRAPPER}.load_back", ("self", "req"), around_load_back),)
"""Without these hooks there is no fusion. Everything else works."""

HOLD_HOOKS = (
    Hook(
        f"{_ADDER}.add_one_req",
        ("self", "req", "has_chunked_req", "truncation_align_size"),
        around_add_one_req,
    ),
)
"""Without these hooks a request uses only the KV that is in host memory when its turn comes."""

TIME_HOOKS = (
    Hook(
        f"{_RUNNER}.forward",
        (
            "self",
            "forward_batch",
            "skip_attn_backend_init",
            "pp_proxy_tensors",
            "reinit_attn_backend",
            "split_forward_count",
        ),
        around_forward,
    ),
)
"""Without these hooks prefill is not timed, and the time that loads save is not counted."""

WEIGHT_HOOKS = tuple(
    Hook(f"{_UPDATER}.update_weights_from_{source}", ("self", "recv_req"), around_update)
    for source in ("disk", "distributed", "tensor", "ipc")
)
"""Without these hooks every flush counts as one for new weights: what was kept is not found."""

PUBLISHING = ("checkpoint_kv_cache", "release_kv_cache")
"""The functions of ``sglang.srt.mem_cache.common`` that put a request's KV into the tree. They skip
a request that has ``skip_radix_cache_insert``."""

_originals: dict[str, Any] = {}
_problems: list[str] = []


def register_all() -> None:
    """Register every hook that fits its target. Imports the modules of the targets."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in (*HOOKS, *SAVE_HOOKS, *WEIGHT_HOOKS, *FUSION_HOOKS, *HOLD_HOOKS, *TIME_HOOKS):
        problem = _misfit(hook)
        if problem:
            _problems.append(problem)
            _log.warning("hook_not_registered", target=hook.target, reason=problem)
            continue
        _originals[hook.target] = pkgutil.resolve_name(hook.target)
        HookRegistry.register(hook.target, guarded(hook.around), HookType.AROUND)


def _misfit(hook: Hook) -> str:
    """Return why the hook does not fit this SGLang; empty if it does."""
    try:
        found = tuple(inspect.signature(pkgutil.resolve_name(hook.target)).parameters)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        return f"{hook.target} was not found: {error}"
    if found != hook.parameters:
        return f"{hook.target} takes {found}; kvcore expects {hook.parameters}"
    return ""


def check_fusion() -> None:
    """Raise UnsupportedError unless kvcore can keep approximate KV out of SGLang's tree."""
    check(FUSION_HOOKS)
    for name in PUBLISHING:
        function = pkgutil.resolve_name(f"sglang.srt.mem_cache.common.{name}")
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is None or "skip_radix_cache_insert" not in code.co_names:
            raise UnsupportedError(f"{name} does not check skip_radix_cache_insert")


def fit(hooks: Iterable[Hook]) -> bool:
    """Return True if all of ``hooks`` are in place."""
    return not _missing(hooks)


def check(hooks: Iterable[Hook] | None = None) -> None:
    """Raise UnsupportedError unless all of ``hooks`` are in place, by default the required ones."""
    missing = _missing(HOOKS if hooks is None else hooks)
    if missing:
        raise UnsupportedError(
            f"kvcore's hooks are not in place at {', '.join(missing)}: "
            f"{'; '.join(_problems) or 'SGLang did not load its plugins (SGLANG_PLUGINS?)'}"
        )


def _missing(hooks: Iterable[Hook]) -> list[str]:
    """Return the targets of the hooks that are not in place."""
    return [
        hook.target
        for hook in hooks
        if hook.target not in _originals
        or pkgutil.resolve_name(hook.target) is _originals[hook.target]
    ]
