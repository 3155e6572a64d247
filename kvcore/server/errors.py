"""The server's own errors, and the kind by which a client knows each."""

from __future__ import annotations

from kvcore.errors import CapacityError, FormatError, KVCoreError, LayoutError

__all__ = ["AmbiguousModel", "MachineAway", "Misfit", "ModelBusy", "NoSession", "refusal_kind"]


class NoSession(KVCoreError):
    """The session ended, was given by another server, or belongs to another client."""


class ModelBusy(KVCoreError):
    """The model is still being prepared. The client retries."""


class MachineAway(KVCoreError):
    """The server of another machine of a model is not there. The client retries."""


class Misfit(KVCoreError):
    """A client's settings do not fit the server's, so it can never be served with them."""


class AmbiguousModel(KVCoreError):
    """A command names no model that is served here, or more than one."""


_KINDS = {
    NoSession: "session",
    ModelBusy: "busy",
    MachineAway: "away",
    Misfit: "misfit",
    CapacityError: "capacity",
    AmbiguousModel: "control",
    LayoutError: "misfit",
    FormatError: "malformed",
}


def refusal_kind(error: KVCoreError) -> str:
    """Return the ``kind`` of `kvcore.admin.messages.Refused` for ``error``."""
    return next((name for kind, name in _KINDS.items() if isinstance(error, kind)), "stale")
