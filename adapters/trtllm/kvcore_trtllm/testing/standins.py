"""Stand-ins for the names of TensorRT-LLM that a connector needs, for use without the engine.

TensorRT-LLM cannot be imported without CUDA libraries. `installed` puts modules of the same names
into ``sys.modules``. They have base classes, data classes and MPI helpers of the same signatures,
so that a connector's own imports run unchanged. The stand-ins are for `kvcore_trtllm.testing` only:
their classes cannot be constructed outside a running harness, and they refuse to hide a real
engine.
"""

from __future__ import annotations

import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

from kvcore.errors import UnsupportedError
from kvcore_trtllm.testing.modules import PyTorchModelEngine, RotaryEmbedding
from kvcore_trtllm.testing.ranks import allgather as mpi_allgather
from kvcore_trtllm.testing.ranks import rank as mpi_rank

__all__ = [
    "MODULES",
    "KvCacheConnectorScheduler",
    "KvCacheConnectorWorker",
    "RequestData",
    "RequestDataOf13",
    "SchedulerOutput",
    "installed",
]

_EXECUTOR = "tensorrt_llm._torch.pyexecutor"
MODULES: Final = {
    "1.2": f"{_EXECUTOR}.kv_cache_connector",
    "1.3": f"{_EXECUTOR}.connectors.kv_cache_connector",
}
"""The module in which each version has its connector classes."""


@dataclass
class RequestData:
    """A scheduled request, with the tokens and blocks that were added since its last step."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class RequestDataOf13(RequestData):
    """A scheduled request, with the fields that version 1.3 adds."""

    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    """The requests of a step: those that are new to the connector, and the others."""

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


class KvCacheConnectorWorker(ABC):
    """The worker half, one for each rank."""

    def __init__(self, llm_args: Any) -> None:
        mpi_rank()  # raises outside a harness
        self._llm_args = llm_args
        self._metadata: object = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    def register_forward_pass_callable(self) -> Callable[[], None] | None:
        return None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Any) -> None: ...

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]: ...


class KvCacheConnectorScheduler(ABC):
    """The scheduler half, on rank 0 only."""

    def __init__(self, llm_args: Any) -> None:
        if mpi_rank() != 0:
            raise AssertionError("the scheduler half may exist on rank 0 only")
        self._llm_args = llm_args

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object: ...

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]: ...

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...

    def wait_for_initialization(self) -> None:
        return None


def _module(name: str, package: bool, **names: object) -> ModuleType:
    module = ModuleType(name, "A stand-in made by kvcore_trtllm.testing.")
    module.__file__ = __file__  # where the probes read what it has
    if package:
        module.__path__ = []
    vars(module).update(names)
    return module


def _modules(version: str) -> dict[str, ModuleType]:
    data = RequestData if version == "1.2" else RequestDataOf13
    path = MODULES[version]
    parts = path.split(".")
    packages = {
        ".".join(parts[:n]): _module(".".join(parts[:n]), True) for n in range(1, len(parts))
    }
    packages["tensorrt_llm"].__dict__["__version__"] = f"{version}.0"
    modules = "tensorrt_llm._torch.modules"
    return {
        **packages,
        modules: _module(modules, True),
        f"{modules}.rotary_embedding": _module(
            f"{modules}.rotary_embedding", False, RotaryEmbedding=RotaryEmbedding
        ),
        f"{_EXECUTOR}.model_engine": _module(
            f"{_EXECUTOR}.model_engine", False, PyTorchModelEngine=PyTorchModelEngine
        ),
        "tensorrt_llm._utils": _module(
            "tensorrt_llm._utils", False, mpi_rank=mpi_rank, mpi_allgather=mpi_allgather
        ),
        path: _module(
            path,
            False,
            RequestData=data,
            SchedulerOutput=SchedulerOutput,
            KvCacheConnectorWorker=KvCacheConnectorWorker,
            KvCacheConnectorScheduler=KvCacheConnectorScheduler,
        ),
    }


@contextmanager
def installed(version: str = "1.3") -> Iterator[None]:
    """In this block, let the names of ``version`` ("1.2" or "1.3") be imported.

    Blocks may overlap in any way. Of those that have not ended, the one that began last counts.
    Raises UnsupportedError if the real engine is installed: it must be tested, not hidden.
    """
    if not _active and importlib.util.find_spec("tensorrt_llm") is not None:
        raise UnsupportedError(
            "TensorRT-LLM is installed here; the harness only stands in for a missing engine. "
            "Run adapters/trtllm/verify_on_gpu.py against the real one"
        )
    made = _modules(version)
    _active.append(made)
    _show()
    try:
        yield
    finally:
        _active[:] = [modules for modules in _active if modules is not made]
        _show()


_active: list[dict[str, ModuleType]] = []
"""The modules of the blocks that have not ended, in the order in which they began."""


def _show() -> None:
    for name in [name for name in sys.modules if _ours(name)]:
        del sys.modules[name]
    if _active:
        sys.modules.update(_active[-1])


def _ours(name: str) -> bool:
    return name == "tensorrt_llm" or name.startswith("tensorrt_llm.")
