"""What every engine test stands on."""

from importlib.metadata import entry_points
from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True, scope="session")
def adapter_is_found() -> None:
    """Skip where there is no vLLM; where there is, it must find kvcore by itself, as a user's does.

    Without this, a missing entry point shows as one puzzling failure per engine start.
    """
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: `make test` makes an environment that has it")
    names = {entry.name for entry in entry_points(group="vllm.general_plugins")}
    assert "kvcore" in names, "kvcore is not installed (editable) beside vLLM: run `make env`"
