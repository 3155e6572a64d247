"""What every engine test stands on."""

from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvcore.harness.models import tiny_model

GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
"""How each engine finds kvcore."""


@pytest.fixture(autouse=True, scope="module")
def adapter_is_found(request: pytest.FixtureRequest) -> None:
    """Skip where the module's engine is not installed; where it is, it must find kvcore by itself,
    as a user's does.

    Without this, a missing entry point shows as one puzzling failure per engine start.
    """
    name = request.module.__name__.rpartition(".")[2].removeprefix("test_").partition("_")[0]
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed here: tools/env.py {name} makes an environment of it")
    names = {entry.name for entry in entry_points(group=GROUPS[name])}
    assert "kvcore" in names, f"kvcore is not installed (editable) beside {name}: run tools/env.py"


@pytest.fixture(scope="session")
def model() -> Path:
    """A small random Llama, which answers hundreds of prompts in minutes."""
    return tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64)
