"""Stand-ins for the CUDA-only modules that SGLang imports, each only if the real one is missing.

    triton, torchvision   names to import; kernels that raise when they are launched
    sgl_kernel            two functions in plain torch; every other name raises when it is called

SGLang 0.5.23 imports these at the top of its modules, also on a CPU, where only those two functions
are called. Only SGLang's own import statements get the stand-ins. For ``sys.modules`` and
``importlib.util.find_spec`` the modules stay absent, so that torch, transformers and other
libraries that probe for them do not use them.

`install` must run in every process of the engine before SGLang is imported. The program that
SGLang's processes are spawned from calls it at its top level, which a spawned process runs again.
"""

from __future__ import annotations

import builtins
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from kvcore.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = ["MODULES", "install"]

IMPORTER = "sglang"
MODULES = ("triton", "torchvision", "sgl_kernel")
"""The modules that have stand-ins."""

_lock = threading.Lock()


def install() -> tuple[str, ...]:
    """Give SGLang stand-ins for missing modules from now on; return the names of the missing ones.

    Does nothing if none is missing. Idempotent.
    """
    missing = tuple(name for name in MODULES if _absent(name))
    with _lock:
        if missing and not isinstance(builtins.__import__, _Import):
            builtins.__import__ = _Import(builtins.__import__, missing)
    return missing


@cache
def _absent(name: str) -> bool:
    return name not in sys.modules and importlib.util.find_spec(name) is None


class _Import:
    """A replacement for ``__import__`` that gives stand-ins to import statements in SGLang."""

    def __init__(self, real: Callable[..., Any], missing: Sequence[str]) -> None:
        self._real = real
        self._roots = {name: _ROOTS[name](name) for name in missing}

    def __call__(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        root = None if level else self._roots.get(name.partition(".")[0])
        if root is None or not _is_ours(globals):
            return self._real(name, globals, locals, fromlist, level)
        if not fromlist:  # `import a.b` binds a; `import a.b as c` takes b from it
            return root
        found = root
        for part in name.split(".")[1:]:
            found = getattr(found, part)
        return found


def _is_ours(importer: Mapping[str, Any] | None) -> bool:
    name = str((importer or {}).get("__name__", ""))
    return name == IMPORTER or name.startswith(f"{IMPORTER}.")


# --- names that can be looked up, called and subscripted, and do nothing -------------------------


class _Inert(ModuleType):
    """A module, type or value of a missing library. Every name in it is another one of these.

    A call returns one more, so that declarations (configurations, types of arguments) work. It is
    no kernel and computes nothing.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"{self.__name__} is a stand-in and has no {name}")
        made = type(self)(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self)(f"{self.__name__}()")

    def __getitem__(self, item: object) -> Any:
        return self

    def __or__(self, other: object) -> Any:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return ()

    def __repr__(self) -> str:
        return f"<stand-in for {self.__name__}>"


class _Kernel:
    """The result of a decorator of Triton's. Launching or calling it raises UnsupportedError."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = getattr(function, "__doc__", None)
        self.__module__ = getattr(function, "__module__", "")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(f"{self.__module__}.{self.__name__}", "triton")

    def __getitem__(self, grid: object) -> Callable[..., NoReturn]:
        return self


def _refuse(name: str, module: str) -> NoReturn:
    raise UnsupportedError(
        f"{name} was called, and {module} is not installed here: kvcore_sglang.testing stands in "
        "for its names only. Choose a backend of SGLang's that runs in plain torch, or install it"
    )


def _decorator(*args: Any, **kwargs: Any) -> Any:
    """Stand in for ``@jit`` and ``@jit(...)``, ``@autotune(...)`` and ``@heuristics(...)``."""
    if len(args) == 1 and not kwargs and (callable(args[0]) and not isinstance(args[0], _Inert)):
        return args[0] if isinstance(args[0], _Kernel) else _Kernel(args[0])
    return _decorator


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _triton(name: str) -> _Inert:
    made: Any = _Inert(name)
    made.__version__ = "0.0.0"
    made.jit = made.autotune = made.heuristics = _decorator
    made.cdiv, made.next_power_of_2 = _cdiv, _next_power_of_2
    made.runtime.jit.JITFunction = _Kernel
    made.language.constexpr_function = made.runtime.jit.constexpr_function = _decorator
    made.experimental.gluon.jit = _decorator
    made.runtime.driver = _Loud("triton.runtime.driver")  # asked which device there is: none
    return cast(_Inert, made)


class _Loud(_Inert):
    """Like `_Inert`, but every call raises UnsupportedError."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self.__name__, self.__name__.partition(".")[0])


def _sgl_kernel(name: str) -> _Loud:
    made: Any = _Loud(name)
    made.assign_req_to_token_pool_cpu = assign_req_to_token_pool_cpu
    made.copy_all_layer_kv_cache_cpu = copy_all_layer_kv_cache_cpu
    return cast(_Loud, made)


_ROOTS: dict[str, Callable[[str], _Inert]] = {
    "triton": _triton,
    "torchvision": _Loud,
    "sgl_kernel": _sgl_kernel,
}


# --- the two functions that are called -----------------------------------------------------------


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the next ``end - start`` slots to ``req_to_token[row, start:end]`` for each request.

    ``req_to_token`` ``[requests, pool_len]`` is changed in place. The others are one-dimensional.
    """
    begin = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        taken = out_cache_loc[begin : begin + end - start]
        req_to_token[row, start:end] = taken.to(req_to_token.dtype)
        begin += end - start


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, target: torch.Tensor, source: torch.Tensor
) -> None:
    """Copy rows ``source`` to rows ``target`` in each buffer. All rows are read before any write.

    ``data_ptrs`` has the address of each buffer, and ``strides`` the bytes of one of its rows.
    """
    import ctypes

    for address, width in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + row * width, width) for row in source.tolist()]
        for row, content in zip(target.tolist(), rows, strict=True):
            ctypes.memmove(address + row * width, content, width)
