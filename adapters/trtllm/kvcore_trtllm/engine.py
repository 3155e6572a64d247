"""The names of TensorRT-LLM that the connector needs, from where this version keeps them.

The only module that imports the engine, and only these names: everything else of it is read from
the objects it hands over, and from the model that fusion looks up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from kvcore.connector.engine_layers import live_objects
from kvcore.errors import UnsupportedError

MODULES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",  # from 1.3
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",  # 1.2
)


MODEL_ENGINE = "tensorrt_llm._torch.pyexecutor.model_engine"
ROTARY = "tensorrt_llm._torch.modules.rotary_embedding"


class EngineNames(NamedTuple):
    """Base classes of the two halves, and the collectives of the engine's ranks."""

    scheduler: type[Any]
    worker: type[Any]
    rank: Callable[[], int]
    allgather: Callable[[Any], list[Any]]


def find() -> EngineNames:
    """Raises UnsupportedError where there is no TensorRT-LLM with a connector interface."""
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
    raise UnsupportedError(
        f"TensorRT-LLM's KV cache connector is not here; looked for {' and '.join(MODULES)}. "
        "Install tensorrt_llm 1.2 or 1.3 in this environment"
    )


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("tensorrt_llm"):
            raise  # something that TensorRT-LLM itself needs
        raise UnsupportedError(
            f"{name} is not there: fusion knows TensorRT-LLM 1.2 and 1.3"
        ) from error


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
    """What rotates q and k of an attention module whose kernel does so otherwise."""
    kind = _module(ROTARY).RotaryEmbedding
    params = attention.pos_embd_params
    return kind(params.rope, head_dim=attention.head_dim, is_neox=params.is_neox)
