"""`Control` from settings: over a server's model, or at an engine's own socket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.config import Config
from kvcore.control.audit import AuditLog
from kvcore.control.operations import Control
from kvcore.control.tenants import Tenants
from kvcore.events.plan import rank_endpoint
from kvcore.manager import KVManager
from kvcore.model.spec import ModelDescription
from kvcore.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from kvcore.control.endpoint import Endpoint

__all__ = ["make_control", "open_endpoint"]


def make_control(
    config: Config,
    model: ModelDescription,
    manager: KVManager,
    tenants: Tenants,
    metrics: Metrics,
    audit: AuditLog,
) -> Control:
    """Return the operator's commands over one model's manager."""
    return Control(
        manager,
        tenants,
        audit,
        metrics,
        block_tokens=config.block.tokens,
        block_nbytes=model.shape.nbytes,
        deadline_s=config.transfer.load_deadline_s,
    )


def open_endpoint(
    config: Config, model: ModelDescription, control: Control, data_parallel_rank: int | None
) -> Endpoint:
    """Listen for commands at ``control.address``.

    A data-parallel rank after the first listens at that address with ``_dpRANK`` appended. Raises
    ConfigError if it cannot be bound, and UnsupportedError without pyzmq.
    """
    from kvcore.control.endpoint import Endpoint

    assert config.control.address is not None
    address = rank_endpoint(config.control.address, data_parallel_rank)
    return Endpoint(address, control, model.fingerprint)
