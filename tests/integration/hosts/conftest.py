"""Hosts are network namespaces; the tests on them carry the marker `remote`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcore.errors import UnsupportedError
from kvcore_devtools.hosts import Network
from kvcore_devtools.servers import Start, lacking, servers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.remote)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    try:
        network = Network("a", "b", "store").__enter__()
    except UnsupportedError as error:
        lacking("a network of hosts", f"cannot be had: {error}")
        raise AssertionError("lacking() ends the test") from error
    yield network
    network.close()


@pytest.fixture
def network(hosts: Network) -> Iterator[Network]:
    """With whole cables, and nothing running on the hosts."""
    yield hosts
    hosts.heal()
    for host in hosts.values():
        host.kill()


@pytest.fixture
def start_server(tmp_path: Path, network: Network) -> Iterator[Start]:
    with servers(tmp_path) as start:
        yield start
