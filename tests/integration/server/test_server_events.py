"""Block events behind a server: told once, by who has the tiers, and they add up to its index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcore.config import Config
from kvcore.errors import ConfigError
from kvcore.events import Subscriber
from kvcore.events.wire import SNAPSHOT, BlockStored, decode
from kvcore.events.zmq_bus import ZmqSource
from kvcore.model.keys import KeyChain
from kvcore.server.server import Server
from kvcore.testing.waiting import until
from kvcore_devtools.server_fixture import RunningServer, follows, serve, settings, words

Start = Callable[[Config], RunningServer]
BLOCK = 16


@pytest.fixture
def where(tmp_path: Path) -> dict[str, Any]:
    return {
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
        "heartbeat_s": 0.2,
        "token_ids": True,
    }


@pytest.fixture
def follow(where: dict[str, Any]) -> Iterator[Callable[[], Subscriber]]:
    made: list[Subscriber] = []

    def begin() -> Subscriber:
        source = ZmqSource(where["endpoint"], where["replay_endpoint"], "kvcore")
        made.append(Subscriber(source, retry_s=0.1))
        return made[-1]

    yield begin
    for each in made:
        each.close()


def agrees(subscriber: Subscriber, server: RunningServer) -> Callable[[], bool]:
    return partial(follows, subscriber, server)


def test_events_are_the_servers_index_through_stores_evictions_and_a_clear(
    start: Start,
    engine: Any,
    plain: Any,
    folder: Path,
    tmp_path: Path,
    where: dict[str, Any],
    follow: Any,
) -> None:
    disk = {"path": str(tmp_path / "disk"), "capacity": "2MiB"}
    config = settings(folder, host={"capacity": "512KiB"}, disk=disk, events=where)
    server = start(config)
    first, second = engine(config, prefix_cache=False), engine(config, prefix_cache=False)
    subscriber = follow()
    until(agrees(subscriber, server))
    prompts = [words(seed, 165) for seed in range(8)]
    for number, prompt in enumerate(prompts):
        assert serve((first, second)[number % 2], prompt)[0] == plain(prompt)
        until(lambda: server.idle)
    until(agrees(subscriber, server))
    held = subscriber.tiers()
    stored = sum(len(prompt) // BLOCK for prompt in prompts)
    assert 0 < len(held["host"]) < stored, "some were evicted"
    assert len(held["disk"]) > len(held["host"])

    subscriber.close()
    again = follow()
    serve(first, words(100, 100))
    until(lambda: server.idle)
    until(agrees(again, server))
    assert again.resyncs, "what it was not there for came by a snapshot"

    first.leader.manager.clear()
    until(lambda: server.idle and not server.index())
    until(agrees(again, server))
    assert not again.tiers()


def test_a_routers_own_keys_can_be_made_of_the_tokens(
    start: Start, engine: Any, folder: Path, where: dict[str, Any], follow: Any
) -> None:
    """Token ids come from the client that stored, parents and sizes from the server."""
    config = settings(folder, events=where)
    server = start(config)
    serving = engine(config)
    prompt, salted = words(1, 100), words(2, 100)
    serve(serving, prompt)
    request = serving.submit(salted, 1, salt="tenant")
    serving.run()
    serving.settle()
    assert request.answer
    until(lambda: server.idle)
    subscriber = follow()
    until(agrees(subscriber, server))
    answer = subscriber._source.ask(SNAPSHOT, 20.0)
    assert answer is not None
    runs = [e for m in answer for e in decode(m.payload) if isinstance(e, BlockStored)]
    told = [run for run in runs if run.token_ids]
    assert {run.ownership for run in runs} == {"host"}
    assert sum(len(run.block_hashes) for run in runs) > sum(len(run.block_hashes) for run in told)
    chain = KeyChain(serving.leader.namespaces.of(), BLOCK)
    for run in told:
        assert run.block_size == BLOCK
        assert len(run.token_ids) == BLOCK * len(run.block_hashes)
        assert run.parent_block_hash == (chain.keys[-1] if chain.keys else None)
        before = len(chain.keys)
        assert chain.extend(run.token_ids)[before:] == run.block_hashes
    assert len(chain.keys) == 6
    tokens = [token for run in told for token in run.token_ids]
    assert tokens == prompt[: len(tokens)]


def test_models_whose_events_could_not_be_told_apart_are_refused(
    folder: Path, where: dict[str, Any]
) -> None:
    config = settings(folder, server={"models": 2}, events=where)
    with pytest.raises(ConfigError, match=r"2 models \(server\.models\).*events\.endpoint"):
        Server(config).open()
