"""Kernels run in Triton's interpreter here: it is chosen when a kernel is decorated.

The variable is set for these imports and these tests alone, so that no process that other tests
start inherits it.
"""

import os
import sys

import pytest

INTERPRET = "TRITON_INTERPRET"

pytest.importorskip("torch")
if "triton" in sys.modules and os.environ.get(INTERPRET) != "1":
    pytest.skip(
        "Triton is imported already, for a GPU: run `pytest tests/kernels` as a process of its own",
        allow_module_level=True,
    )
with pytest.MonkeyPatch.context() as patch:
    patch.setenv(INTERPRET, "1")
    pytest.importorskip("triton")
    import kvcore_kernels.all  # noqa: F401 - decorates every kernel


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERPRET, "1")
