"""The server's metrics for Prometheus, over HTTP."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, start_http_server

from kvcore.errors import ConfigError
from kvcore.telemetry.metrics import Metrics

__all__ = ["show"]

_END_S = 5.0
"""Seconds that the end of a server waits for an answer under way."""


def show(metrics: Metrics, listen: str) -> Callable[[], None]:
    """Serve ``metrics`` at ``listen`` ("HOST:PORT") from a thread; return a function that stops it.

    Raises ConfigError if the address cannot be bound.
    """
    registry = CollectorRegistry()
    metrics.register(registry)
    host, _, port = listen.rpartition(":")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
        raise ConfigError(f"server.metrics {listen!r} cannot be bound: {error}") from error

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(_END_S)

    return close
