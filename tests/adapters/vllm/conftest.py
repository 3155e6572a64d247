"""The adapter's modules import vLLM's interfaces, so these tests need it installed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest


class _Module(pytest.Module):
    """A test module that is skipped where vLLM is missing, instead of failing to be collected."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            if "No module named 'vllm'" not in str(error):
                raise
            pytest.skip("vLLM is not installed here: make env", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return _Module.from_parent(parent, path=module_path)


@pytest.fixture(scope="session", autouse=True)
def _models_are_looked_at_here() -> None:
    """Have vLLM look at a model's class in this process.

    It does so in one of its own, lest a GPU wake. That process imports all of vLLM, for 17 s of a
    core a class.
    """
    if "vllm" in sys.modules:
        from vllm.model_executor.models import registry

        looks: Any = registry
        looks._run_in_subprocess = lambda look: look()
