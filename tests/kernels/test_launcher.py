"""A launcher starts the build that Triton would find for the same arguments."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.jit import JITFunction

from kvcore_kernels import unlaunched
from kvcore_kernels.all import KERNELS
from kvcore_kernels.launcher import Launcher

DTYPES = [torch.bfloat16, torch.float32, torch.int32, torch.int64]
NUMBERS = st.sampled_from([1, 2, 15, 16, 17, 256, 1 << 20]) | st.integers(1, (1 << 31) - 1)


def compiled(kernel: Any) -> Any:
    """Return the kernel as it is decorated where nothing interprets it."""
    if isinstance(kernel, JITFunction):
        return kernel
    names = ("do_not_specialize", "do_not_specialize_on_alignment")
    return JITFunction(kernel.fn, **{name: kernel.kwargs[name] for name in names})


@st.composite
def arguments(draw: st.DrawFn, kernel: Any) -> list[Any]:
    """Draw what a launch passes before the constants: pointers of any alignment, and numbers."""
    given: list[Any] = []
    for param in kernel.params:
        if param.is_constexpr:
            break
        if param.annotation_type == "fp32":
            given.append(draw(st.sampled_from([0.5, 1.0, 16.0])))
        elif param.annotation_type or param.name.startswith(("k_", "v_", "query_", "words")):
            given.append(draw(NUMBERS))
        else:
            memory = torch.empty(32, dtype=draw(st.sampled_from(DTYPES)))
            given.append(memory[draw(st.sampled_from([0, 1, 4])) :])
    return given


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.fn.__name__)
@given(data=st.data())
@settings(max_examples=30)
def test_the_build_is_the_one_that_triton_finds(kernel: Any, data: st.DataObject) -> None:
    kernel = compiled(kernel)
    constants = {param.name: 1 for param in kernel.params if param.is_constexpr}
    device, started = torch.device("cpu"), []
    with (
        mock.patch.object(unlaunched, "merge_kernel", kernel),
        mock.patch.object(unlaunched._Kernel, "run", lambda self, *_: started.append(self)),
        unlaunched.unlaunched(lambda _: None),
    ):
        launch = Launcher(kernel, constants, num_warps=4)
        for _ in range(data.draw(st.integers(1, 6))):
            given = data.draw(arguments(kernel))
            launch(device, (1,), *given)
            kernel[(1,)](*given, **constants, num_warps=4)
            with mock.patch.object(JITFunction, "run", None):  # Triton is asked once a kind
                launch(device, (1,), *given)
            first, tritons, second = started[-3:]
            assert first is second is tritons
