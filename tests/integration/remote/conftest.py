"""Tests against real servers carry the marker `remote`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcore_devtools.servers import Start, servers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.remote)


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with servers(tmp_path_factory.mktemp("servers")) as start:
        yield start
