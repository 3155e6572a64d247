"""The names of TensorRT-LLM that the connector needs, imported from where this version has them.

No other module imports the engine. Everything else is read from objects that the engine passes in,
and from the model that fusion finds in the process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from kvcore.connector.engine_layers import live_objects
from kvcore.engines.verdict import Standing, require
from kvcore.errors import UnsupportedError
from kvcore.log import get_logger
from kvcore_trtllm.plugin import ENGINE
from kvcore_trtllm.probes import MODEL_ENGINE, MODULES, ROTARY

_log = get_logger("kvcore.trtllm.engine")


class EngineNames(NamedTuple):
    """Base classes of the two halves, and the collectives of the engine's ranks."""

    scheduler: type[Any]
    worker: type[Any]
    rank: Callable[[], int]
    allgather: Callable[[Any], list[Any]]


def find() -> EngineNames:
    """Return the names of the installed TensorRT-LLM.

    Raises UnsupportedError if TensorRT-LLM is missing, or lacks an interface that kvcore needs. The
    engine's options name the connector, so it must not start without it.
    """
    if (verdict := require(ENGINE)).standing is Standing.PROBED:
        _log.warning("engine_untried", engine=verdict.about)
    for name in MODULES:
        try:
            module: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("tensorrt_llm"):
                raise  # something that TensorRT-LLM itself needs
            continue
        utils: Any = importlib.import_module("tensorrt_llm._utils")
        return EngineNames(
            module.KvCacheConnectorScheduler,
            module.KvCacheConnectorWorker,
            utils.mpi_rank,
            utils.mpi_allgather,
        )
    raise UnsupportedError(f"none of {' and '.join(MODULES)} can be imported")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("tensorrt_llm"):
            raise  # something that TensorRT-LLM itself needs
        raise UnsupportedError(f"{name} was not found: fusion needs it") from error


def loaded_model(llm_args: Any, rank: int) -> Any:
    """Return the model of this rank. Raises UnsupportedError unless exactly one is found."""
    kind = _module(MODEL_ENGINE).PyTorchModelEngine
    found = [
        each
        for each in live_objects(kind)
        if not getattr(each, "is_draft_model", False) and each.mapping.rank == rank
    ]
    own = [each for each in found if getattr(each, "llm_args", None) is llm_args]
    models = {id(each.model): each.model for each in own or found}
    if len(models) != 1:
        raise UnsupportedError(f"{len(models)} models of rank {rank} were found: fusion needs one")
    return next(iter(models.values()))


def rotary_embedding(attention: Any) -> Any:
    """Return a rotary embedding for an attention module that leaves RoPE to its kernel."""
    kind = _module(ROTARY).RotaryEmbedding
    params = attention.pos_embd_params
    return kind(params.rope, head_dim=attention.head_dim, is_neox=params.is_neox)
