"""Where kvcore steps into SGLang, beside the linker's own interface. Checked against 0.5.23.

    UnifiedCacheLinkerWrapper.match                 lookups get page hashes, and kvcore's keys
    UnifiedRadixCache.insert                        need the tokens; so do saves
    UnifiedCacheLinkerWrapper.load_back             blended requests are barred from the tree
    UnifiedRadixCache.finish_external_linker_loads  requests whose load failed are told apart
    Scheduler.handle_generate_request               and computed again, as if they had just come,
    SchedulerOutputStreamer.stream_output           in place of being answered with an error
    Scheduler.send_abort_output                     records of requests end with these two
    Scheduler.get_internal_state                    what kvcore says of itself, on /server_info
    PrefillAdder.add_one_req                        others go first while KV comes from a disk
    ModelRunner.forward                             how long prefill takes

Every hook is around the original and passes through unless the cache's linker is kvcore's. One
whose signature is not the one known here is not registered, and the linker then stands aside.
"""

from __future__ import annotations

import inspect
import pkgutil
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvcore.errors import UnsupportedError
from kvcore.log import get_logger
from kvcore.telemetry.rates import ForwardPart

_log = get_logger("kvcore.sglang.hooks")

Original = Callable[..., Any]

_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_WRAPPER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"


class Hook(NamedTuple):
    """``around(original, self, ...)`` in place of ``target``, whose parameters are these."""

    target: str
    parameters: tuple[str, ...]
    around: Callable[..., Any]


def kvcore_linker(cache: Any) -> Any:
    """The cache's `KVCoreLinker` where it has one and serves; else None."""
    linker = getattr(getattr(cache, "linker", None), "cache_linker", None)
    return linker if getattr(linker, "wants_inserts", False) else None


# --- tokens --------------------------------------------------------------------------------------


def around_match(original: Original, wrapper: Any, key: Any, req: Any, result: Any) -> Any:
    linker = kvcore_linker(wrapper.cache)
    if linker is None:
        return original(wrapper, key, req, result)
    if getattr(req, "positional_embed_overrides", None) is not None:
        req.skip_radix_cache_insert = True  # its tokens do not tell its KV
        return result
    with linker.asking(key, result.device_prefix_len, req):
        return original(wrapper, key, req, result)


def around_insert(original: Original, cache: Any, params: Any) -> Any:
    """Nodes that the insert offers are saved together when it has ended, by the key's tokens."""
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
    root = cache.root_node_handle(params.key.extra_key)
    slots = cache.tree_core.collect_full_device_indices(offered[-1].publish_node_ids[-1], root)
    linker.end_insert(params.key, slots if len(slots) <= len(params.key) else None)
    return result


def around_load_back(original: Original, wrapper: Any, req: Any) -> Any:
    """What a blend makes is approximate, and so is all behind it: the tree never has it.

    Its slots are the request's own from the first one that the tree did not hold, and are freed
    with it.
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
    """Match a request that has just come, so that its KV is on the way while it waits its turn."""
    if kvcore_linker(cache).stages and req.to_finish is None and not req.finished():
        req.init_next_round_input(cache, cow_mamba=False)


def around_add_one_req(original: Original, adder: Any, req: Any, *args: Any, **options: Any) -> Any:
    """A request whose KV is on the way stays in the queue, and the next one is looked at."""
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
"""On a request: the scheduler, weakly, and the message that it was made from."""
AGAIN = "kvcore_again"
"""On a request whose load failed: it will be computed in place of being answered with an error."""


def around_handle_generate_request(
    original: Original, scheduler: Any, recv_req: Any, **options: Any
) -> Any:
    result = original(scheduler, recv_req, **options)
    queued = scheduler.waiting_queue
    if queued and queued[-1].rid == recv_req.rid and kvcore_linker(scheduler.tree_cache):
        setattr(queued[-1], SOURCE, (weakref.ref(scheduler), recv_req))
        _look_up(scheduler.tree_cache, queued[-1])
    return result


def around_finish_loads(original: Original, cache: Any, reqs: list[Any]) -> Any:
    linker = kvcore_linker(cache)
    if linker is not None:
        _take_out_landed(cache.linker, reqs)
    failed = original(cache, reqs)
    if failed and linker is not None:
        linker.refuse([req.rid for req in failed])
        for req in failed:
            setattr(req, AGAIN, hasattr(req, SOURCE))
    return failed


def _take_out_landed(wrapper: Any, reqs: list[Any]) -> None:
    """A batch's loads fail together. Those of requests that were answered in part landed when they
    were planned, and the requests cannot be computed again."""
    for req in reqs:
        if req.output_ids and req.rid in wrapper.inflight_load_rids:
            wrapper.inflight_load_rids.remove(req.rid)
            wrapper.private_load_indices.pop(req.rid, None)


def around_stream_output(
    original: Original, streamer: Any, reqs: list[Any], *args: Any, **options: Any
) -> Any:
    again = [req for req in reqs if getattr(req, AGAIN, False) and req.finished()]
    result = original(streamer, [req for req in reqs if req not in again], *args, **options)
    linker = kvcore_linker(getattr(streamer, "tree_cache", None))
    if linker is not None:
        _tell_of_ends(linker, (req for req in reqs if req not in again))
    for req in again:
        _compute_again(req)
    return result


def around_send_abort_output(original: Original, scheduler: Any, abort_req: Any, req: Any) -> Any:
    if getattr(req, AGAIN, False):
        _compute_again(req)
        return None
    if (linker := kvcore_linker(scheduler.tree_cache)) is not None:
        linker.ended(req.rid, "abort", trace_headers(req))
    return original(scheduler, abort_req, req)


def _compute_again(req: Any) -> None:
    """Let the scheduler have the request anew. The old one is finished and was not answered."""
    scheduler, source = getattr(req, SOURCE)
    setattr(req, AGAIN, False)
    setattr(req, TOLD, True)  # its end is that of the request that comes in its place
    req.finished_output = True  # with overlap it comes by once more, and is passed over then
    living = scheduler()
    if living is not None:
        _log.warning("computed_again", request=req.rid, reason="its KV could not be loaded")
        living.handle_generate_request(source)


# --- a request ends ------------------------------------------------------------------------------

TOLD = "kvcore_told"
"""On a request of whose end the linker has heard: with overlap it comes by once more, and its name
may be another's by then."""


def _tell_of_ends(linker: Any, reqs: Iterable[Any]) -> None:
    for req in reqs:
        if req.finished() and not getattr(req, TOLD, False):
            setattr(req, TOLD, True)
            linker.ended(req.rid, outcome(req), trace_headers(req))


def outcome(req: Any) -> str:
    """How SGLang's request ended, in a word."""
    reason = getattr(req, "finished_reason", None)
    return "done" if reason is None else str(reason.to_json()["type"])


def trace_headers(req: Any) -> dict[str, str]:
    """The W3C trace context of the request, where SGLang traces it."""
    traced = getattr(getattr(req, "time_stats", None), "trace_ctx", None)
    context = getattr(traced, "root_span_context", None)
    if context is None or getattr(traced, "tracing_enable", False) is not True:
        return {}
    from opentelemetry.propagate import inject

    headers: dict[str, str] = {}
    inject(headers, context)
    return headers


# --- what kvcore says of itself ------------------------------------------------------------------


def around_internal_state(original: Original, scheduler: Any, recv_req: Any) -> Any:
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
    """The target model's forward is timed, where its time tells of prefill."""
    gate = getattr(runner.token_to_kv_pool, "layer_transfer_counter", None)
    around = getattr(gate, "around_forward", None)  # kvcore's has it
    if around is None or runner.is_draft_worker:
        return original(runner, forward_batch, *args, **options)
    with around(prefill_parts(forward_batch)):
        return original(runner, forward_batch, *args, **options)


def prefill_parts(batch: Any) -> list[ForwardPart]:
    """What SGLang's batch computes, its decodes included; none where more is done in its forward
    than that (pictures, log-probabilities of prompts), it waits for other replicas (attention
    in data parallel), or it is no plain prefill."""
    plain = batch.forward_mode.name in ("EXTEND", "MIXED")
    if not plain or batch.return_logprob or batch.global_num_tokens_cpu is not None:
        return []
    if batch.contains_mm_inputs():
        return []
    rows, before = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    return [ForwardPart(int(new), int(held)) for new, held in zip(rows, before, strict=True)]


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

FUSION_HOOKS = (Hook(f"{_WRAPPER}.load_back", ("self", "req"), around_load_back),)
"""Without these there is no fusion, and all the rest."""

HOLD_HOOKS = (
    Hook(
        f"{_ADDER}.add_one_req",
        ("self", "req", "has_chunked_req", "truncation_align_size"),
        around_add_one_req,
    ),
)
"""Without these requests are computed with what is in host memory when their turn comes."""

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
"""Without these nobody knows what prefill takes, and what loads save is not counted."""

_BARRING = ("checkpoint_kv_cache", "release_kv_cache")
"""Of ``sglang.srt.mem_cache.common``: all that publishes a request's KV, and heeds the bar."""

_originals: dict[str, Any] = {}
_problems: list[str] = []


def register_all() -> None:
    """Register every hook whose target is what it was. Imports the modules of the targets."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in (*HOOKS, *FUSION_HOOKS, *HOLD_HOOKS, *TIME_HOOKS):
        problem = _misfit(hook)
        if problem:
            _problems.append(problem)
            _log.warning("hook_not_registered", target=hook.target, reason=problem)
            continue
        _originals[hook.target] = pkgutil.resolve_name(hook.target)
        HookRegistry.register(hook.target, hook.around, HookType.AROUND)


def _misfit(hook: Hook) -> str:
    """Why the hook does not fit this SGLang; empty where it does."""
    try:
        found = tuple(inspect.signature(pkgutil.resolve_name(hook.target)).parameters)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        return f"{hook.target} is not there: {error}"
    if found != hook.parameters:
        return f"{hook.target} takes {found} and was known to take {hook.parameters}"
    return ""


def check_fusion() -> None:
    """Raise UnsupportedError unless SGLang can be kept from publishing what is approximate."""
    check(FUSION_HOOKS)
    for name in _BARRING:
        function = pkgutil.resolve_name(f"sglang.srt.mem_cache.common.{name}")
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is None or "skip_radix_cache_insert" not in code.co_names:
            raise UnsupportedError(f"{name} does not ask whether a request is barred from the tree")


def fit(hooks: Iterable[Hook]) -> bool:
    """Whether every one of ``hooks`` took."""
    return not _loose(hooks)


def check(hooks: Iterable[Hook] | None = None) -> None:
    """Raise UnsupportedError unless every one of ``hooks`` took: all that kvcore cannot do
    without, where none are given."""
    loose = _loose(HOOKS if hooks is None else hooks)
    if loose:
        raise UnsupportedError(
            f"kvcore's hooks did not take at {', '.join(loose)}: "
            f"{'; '.join(_problems) or 'SGLang did not load its plugins (SGLANG_PLUGINS?)'}"
        )


def _loose(hooks: Iterable[Hook]) -> list[str]:
    """Targets of hooks that did not take."""
    return [
        hook.target
        for hook in hooks
        if hook.target not in _originals
        or pkgutil.resolve_name(hook.target) is _originals[hook.target]
    ]
