"""The start of kvcore on the ranks of SGLang: all of them serve the model, or none does.

    describe ── ranks agree ──▶ layers for blends ── ranks agree ──▶ build ── ranks agree ──▶ Parts

A rank that finds a problem tells the others, and does not leave them waiting in a collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from kvcore.config import Config
from kvcore.errors import ConfigError, KVCoreError, RankLostError
from kvcore.telemetry.metrics import Data, PrometheusSink
from kvcore_sglang import hooks
from kvcore_sglang.build import Fusable, Parts, build
from kvcore_sglang.describe import Rank, Served, describe, find_rank
from kvcore_sglang.fusion import SglangLayers, ropes_of
from kvcore_sglang.identity import find_model
from kvcore_sglang.ranks import first_problem

_log = logging.getLogger("kvcore.sglang")

T = TypeVar("T")


def start(
    config: Config, server_args: Any, params: Any, components: set[Any], forward_stream: Any
) -> Parts | None:
    """Build leader and worker of this rank; return None on all ranks if one cannot serve.

    A collective. Raises ConfigError on every rank for settings that cannot be used, and
    RankLostError if other ranks may wait for this one.
    """
    served = _described(config, server_args, params, components)
    if served is None:
        return None
    fusable = _fusable(config, server_args, params, served)
    parts: Parts | None = None
    problem = ""
    wrong: ConfigError | None = None
    try:
        publish = _publisher(server_args, params)
        times_forwards = hooks.fit(hooks.TIME_HOOKS)
        parts = build(
            config, served, forward_stream, publish, fusable, times_forwards=times_forwards
        )
    except ConfigError as error:
        wrong, problem = error, str(error)
    except RankLostError:  # the others wait for this rank in another call
        raise
    except Exception as error:  # noqa: BLE001 - the other ranks wait, and the engine goes on
        problem = _problem(error)
    # A wrong size shows on every rank. A server that refuses shows on the leader's only.
    first = first_problem(served.rank, problem)
    if not first:
        return parts
    if parts is not None:
        parts.close()
    if wrong is not None:
        raise wrong
    _log.warning("kvcore stands aside, the model runs without it: %s", first)
    return None


def _described(
    config: Config, server_args: Any, params: Any, components: set[Any]
) -> Served | None:
    """Return what is served of the model; None on all ranks if one cannot serve it.

    A collective.
    """

    def described() -> Served:
        hooks.check()
        return describe(server_args, params, components, config.block.tokens)

    served, problem = _on_all(find_rank(params), described)
    if problem:
        _log.warning("kvcore stands aside, the model runs without it: %s", problem)
    return served


def _fusable(config: Config, server_args: Any, params: Any, served: Served) -> Fusable | None:
    """Return the model for blends; None on all ranks if fusion is off or cannot serve it.

    A collective if fusion is on.
    """
    if not config.fusion.enabled:
        return None

    def fusable() -> Fusable:
        hooks.check_fusion()
        ropes = ropes_of(served, server_args)
        model = find_model(params.token_to_kv_pool_allocator.get_kvcache())
        most = int(getattr(server_args, "chunked_prefill_size", None) or 0)
        buffers = served.pool.view.tensors
        layers = SglangLayers(model, buffers, most if most > 0 else None, served.rank.ranks)
        return Fusable(layers, ropes)

    found, problem = _on_all(served.rank, fusable)
    if problem:
        _log.warning("exact prefixes only: %s", problem)
    return found


def _on_all(rank: Rank, make: Callable[[], T]) -> tuple[T | None, str]:
    """Return what ``make`` makes; None and why on all ranks if it fails on one. A collective."""
    made: T | None = None
    problem = ""
    try:
        made = make()
    except Exception as error:  # noqa: BLE001 - the other ranks wait, and the engine goes on
        problem = _problem(error)
    problem = first_problem(rank, problem)
    return None if problem else made, problem


def _publisher(server_args: Any, params: Any) -> Callable[[Data], None] | None:
    """Return what adds counts to the engine's own Prometheus metrics; None if they are off."""
    if not params.enable_metrics:
        return None
    sink = PrometheusSink(("model_name",))
    name = str(getattr(server_args, "served_model_name", None) or server_args.model_path)
    return lambda counted: sink.apply(counted, (name,))


def _problem(error: Exception) -> str:
    """Return an error in words, and log the trace of an unforeseen one."""
    if not isinstance(error, (KVCoreError, OSError)):
        _log.warning("unforeseen at the start: %s", error, exc_info=error)
    return str(error) or type(error).__name__
