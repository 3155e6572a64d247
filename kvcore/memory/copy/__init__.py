"""Device operations: copies of KV between layouts, and the choice among their implementations.

What a blend does on a device is in `kvcore.fusion.ops`, which imports torch.
"""

from __future__ import annotations

__all__ = ["Copy", "DeviceOps", "HeadRange", "select_ops"]

import logging
from collections.abc import Iterable

from kvcore.errors import ConfigError, UnsupportedError
from kvcore.memory.copy.base import Copy, DeviceOps, HeadRange
from kvcore.memory.layout import KVView

_log = logging.getLogger("kvcore.memory.copy")


def builtin_ops() -> list[DeviceOps]:
    """Return the built-in implementations that work here, and log those that do not."""
    from kvcore.memory.copy.link import LinkOps
    from kvcore.memory.copy.reference import ReferenceOps

    found: list[DeviceOps] = [ReferenceOps(), LinkOps()]
    try:
        from kvcore.memory.copy.native import NativeOps

        found.append(NativeOps())
    except UnsupportedError as error:
        _log.warning("no native copies: %s", error)
    return found


def select_ops(
    src: KVView, dst: KVView, candidates: Iterable[DeviceOps], backend: str = "auto"
) -> DeviceOps:
    """Return the implementation for copies between two views: the named one, or the fastest.

    Raises ConfigError if ``backend`` names none, or one that cannot copy between them.
    """
    by_name = {ops.name: ops for ops in candidates}
    if backend != "auto":
        if backend not in by_name:
            raise ConfigError(
                f"given ops.backend = {backend!r}; available here are auto, "
                f"{', '.join(sorted(by_name))}"
            )
        if not by_name[backend].supports(src, dst):
            raise ConfigError(f"ops.backend = {backend!r} cannot copy between these devices")
        return by_name[backend]
    fitting = [ops for ops in by_name.values() if ops.supports(src, dst)]
    return max(fitting, key=lambda ops: ops.priority)
