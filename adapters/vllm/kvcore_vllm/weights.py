"""Changes of weights in place, as far as vLLM's workers can be seen to make them.

    reload_weights, update_weights, reset_weights   of the worker
    reload_weights                                  of the model runner
    load_weights                                    of the model: what RL frameworks call by RPC

A tensor that something else writes to is not seen: `namespace.weights_change` is for that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvcore.errors import UnsupportedError
from kvcore.log import get_logger
from kvcore_vllm.fusion import find_worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["watch_weights"]

_log = get_logger("kvcore.vllm.weights")

_WORKER = ("reload_weights", "update_weights", "reset_weights")
_RUNNER = ("reload_weights",)
_MODEL = ("load_weights",)


def watch_weights(vllm_config: VllmConfig, changed: Callable[[], object]) -> None:
    """Call ``changed`` before each change of the weights of this process's worker."""
    try:
        worker = find_worker(vllm_config)
    except UnsupportedError as error:
        _log.warning("weights_not_watched", reason=str(error))
        return
    runner = worker.model_runner
    for owner, names in ((worker, _WORKER), (runner, _RUNNER), (worker.get_model(), _MODEL)):
        for name in names:
            if (method := getattr(owner, name, None)) is not None:
                setattr(owner, name, _telling(method, changed))


def _telling(method: Callable[..., Any], changed: Callable[[], object]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        changed()
        return method(*args, **kwargs)

    return call
