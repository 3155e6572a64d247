"""`Admin` from settings: over a server's model, or at an engine's own socket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.admin.audit import AuditLog
from kvcore.admin.operations import Admin
from kvcore.admin.tenants import Tenants
from kvcore.config import Config
from kvcore.events.plan import rank_endpoint
from kvcore.manager import KVManager
from kvcore.model.spec import ModelDescription
from kvcore.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from kvcore.admin.endpoint import Endpoint

__all__ = ["make_admin", "open_endpoint"]


def make_admin(
    config: Config,
    model: ModelDescription,
    manager: KVManager,
    tenants: Tenants,
    metrics: Metrics,
    audit: AuditLog,
) -> Admin:
    """Return the operator's commands over one model's manager."""
    return Admin(
        manager,
        tenants,
        audit,
        metrics,
        block_tokens=config.block.tokens,
        block_nbytes=model.shape.nbytes,
        deadline_s=config.transfer.load_deadline_s,
    )


def open_endpoint(
    config: Config, model: ModelDescription, admin: Admin, data_parallel_rank: int | None
) -> Endpoint:
    """Listen for commands at ``control.address``.

    A data-parallel rank after the first listens at that address with ``_dpRANK`` appended. Raises
    ConfigError if it cannot be bound, and UnsupportedError without pyzmq.
    """
    from kvcore.admin.endpoint import Endpoint

    assert config.control.address is not None
    address = rank_endpoint(config.control.address, data_parallel_rank)
    return Endpoint(address, admin, model.fingerprint)
