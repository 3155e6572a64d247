"""Kernels run in Triton's interpreter here: it is chosen when a kernel is decorated.

The variable is set for these imports and these tests alone, so that no process that other tests
start inherits it.

KERNEL_TESTS_ON=cuda runs the same cases on a GPU, compiled (`support.moved_kernels`).
KERNEL_TESTS_ON=cpu moves tensors too, to other memory of the CPU, and interprets the kernels there:
it shows that moving changes no case.
"""

import os
import sys

import numpy as np
import pytest

INTERPRET = "TRITON_INTERPRET"
DEVICE = os.environ.get("KERNEL_TESTS_ON", "")
COMPILED = DEVICE not in ("", "cpu")  # as in `support.moved_kernels`, which needs Triton

torch = pytest.importorskip("torch")
if COMPILED and not torch.cuda.is_available():
    raise pytest.UsageError(f"given KERNEL_TESTS_ON={DEVICE}, but torch sees no GPU: unset it")
if not COMPILED and "triton" in sys.modules and os.environ.get(INTERPRET) != "1":
    pytest.skip(
        "Triton is imported already, for a GPU: run `pytest tests/kernels` as a process of its own",
        allow_module_level=True,
    )
with pytest.MonkeyPatch.context() as patch:
    if COMPILED:
        patch.delenv(INTERPRET, raising=False)
    else:
        patch.setenv(INTERPRET, "1")
    pytest.importorskip("triton")
    import kvcore_kernels.all  # noqa: F401 - decorates every kernel

if DEVICE:  # before the test modules import names; for as long as this process lasts
    from support.moved_kernels import refuse_unmoved, replace_launches

    replace_launches(pytest.MonkeyPatch(), torch.device(DEVICE))
    if not COMPILED:
        refuse_unmoved(pytest.MonkeyPatch())


# What torch calls Triton's floats.
FLOATS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8e4nv": "float8_e4m3fn",
    "fp8e5": "float8_e5m2",
}


def _convert(data, source, target, rounding):  # type: ignore[no-untyped-def]
    """Bits of Triton floats ``source`` as bits of ``target``: to the nearest, as GPUs do."""
    width = target.primitive_bitwidth // 8
    bits = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
    floats = bits.view(getattr(torch, FLOATS[source.name])).to(getattr(torch, FLOATS[target.name]))
    return floats.view(torch.uint8).numpy().view(f"uint{8 * width}").reshape(data.shape)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also mends two faults of the interpreter (3.6 to 3.9): its dot multiplies bfloat16's bits as
    integers (operands are widened to float32 first, which is exact), and its conversions of
    bfloat16 and fp8 cut off bits, lose carries and make numbers of NaN."""
    if COMPILED:
        return
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def widened(operand):  # type: ignore[no-untyped-def]
        if operand.dtype.scalar != bfloat16:
            return operand
        wide = _convert(operand.data, bfloat16, float32, None)
        return interpreter.TensorHandle(wide.view(np.float32), float32)

    def mended(self, a, b, *rest):  # type: ignore[no-untyped-def]
        return dot(self, widened(a), widened(b), *rest)

    monkeypatch.setenv(INTERPRET, "1")
    monkeypatch.setattr(interpreter, "_convert_float", _convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", mended)
