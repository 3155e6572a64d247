"""Control from settings: over a server's model, or at an engine's own socket."""

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
    """The orders over one model's manager."""
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
    """Take orders at ``control.address``; a data-parallel rank after the first at that with
    ``_dpRANK`` behind it. Raises ConfigError where it cannot be bound, UnsupportedError without
    pyzmq."""
    from kvcore.control.endpoint import Endpoint

    assert config.control.address is not None
    address = rank_endpoint(config.control.address, data_parallel_rank)
    return Endpoint(address, control, model.fingerprint)
