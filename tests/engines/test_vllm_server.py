"""Two real vLLM engines, one kvcore server: what one computed the other loads; and without it.
Fusion of one with chunks of the reference engine."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcore.admin.commands import ClearBlocks
from kvcore.cli.ctl import Target, ask
from kvcore.events import Subscriber
from kvcore.events.wire import SNAPSHOT, BlockStored, decode
from kvcore.harness.compare import (
    Reference,
    answers,
    assert_all_from,
    assert_same_answers,
    settle_and_empty,
)
from kvcore.harness.compare import small_engine as engine
from kvcore.harness.prompts import windows
from kvcore.testing.waiting import until
from kvcore_devtools import shared_server_checks
from kvcore_devtools.server_fixture import RunningServer, follows, server_process, settings
from kvcore_devtools.shared_server_checks import Pair, Texts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

pytest.importorskip("zmq")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def server(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """`kvcore server`, ready for clients."""
    given = [f"server.folder={folder}", "host.capacity=512MiB", "log.level=warning"]
    with server_process(*given) as process:
        yield process


def test_two_engines_share_and_a_killed_server_changes_no_answer(
    server: subprocess.Popen[str], folder: Path, model: Path
) -> None:
    documents = windows(model, 6, 150, 500, seed=1)
    with engine(model, None, enable_prefix_caching=False) as process:
        expected = Reference(process)(documents)
    kvcore: dict[str, Any] = {
        "server": {"address": "local", "folder": str(folder), "deadline_s": 20.0}
    }
    with engine(model, kvcore) as first:
        assert_same_answers(answers(first, documents), expected)
        with engine(model, kvcore) as second:
            found = answers(second, documents)
            assert_same_answers(found, expected)
            assert_all_from("host", found, [len(document) // 16 * 16 for document in documents])
            settle_and_empty(second)
            server.kill()
            server.wait()
            gone = answers(second, documents)
            assert_same_answers(gone, expected)
            assert all(not answer.reused_tokens for answer in gone), "there is nothing to reuse"


def test_a_servers_events_add_up_to_its_index(folder: Path, tmp_path: Path, model: Path) -> None:
    """After stores, evictions and a clear; and for who was away. The tokens are the engine's."""
    from kvcore.events.zmq_bus import ZmqSource

    events = {
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
        "heartbeat_s": 0.2,
        "token_ids": True,
    }
    config = settings(folder, host={"capacity": "2MiB"}, events=events)
    client = {"server": {"address": "local", "folder": str(folder), "deadline_s": 20.0}}
    documents = windows(model, 8, 200, 500, seed=2)

    def subscriber() -> Subscriber:
        source = ZmqSource(events["endpoint"], events["replay_endpoint"], "kvcore")
        return Subscriber(source, retry_s=0.1)

    with closing(RunningServer(config)) as server, engine(model, client) as process:
        with closing(subscriber()) as first:
            answers(process, documents[:5])
            settle_and_empty(process)
            until(partial(follows, first, server), seconds=200.0)
            blocks = sum(len(document) // 16 for document in documents[:5])
            assert 0 < len(first.tiers()["host"]) < blocks, "some were evicted"
        answers(process, documents[5:7])
        settle_and_empty(process)
        answers(process, documents[7:])  # alone: the last of its blocks evict nothing of it
        settle_and_empty(process)
        last = list(documents[7][: len(documents[7]) // 16 * 16])

        def told(source: ZmqSource) -> bool:
            """Is the last prompt told whole? The server may not have read of it yet."""
            answer = source.ask(SNAPSHOT, 60.0)
            assert answer is not None
            runs = [e for m in answer for e in decode(m.payload) if isinstance(e, BlockStored)]
            roots = [run.token_ids for run in runs if run.parent_block_hash is None]
            return any(list(tokens[: len(last)]) == last for tokens in roots)

        with closing(subscriber()) as second:
            until(partial(follows, second, server), seconds=200.0)
            until(partial(told, second._source), seconds=60.0)
            until(partial(follows, second, server), seconds=200.0)
            ask(Target(config, "", None, 60.0), ClearBlocks())
            until(partial(follows, second, server), seconds=200.0)
            assert not second.tiers()


# -- fusion ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(model: Path) -> Texts:
    return Texts.of(model)


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with shared_server_checks.pair("vllm", model, tmp_path_factory.mktemp("pair") / "kv") as made:
        yield made


@pytest.mark.exhaustive
def test_one_blends_what_the_other_learnt_and_a_killed_server_changes_no_answer(
    pair: Pair, texts: Texts
) -> None:
    pair.serve()
    shared_server_checks.shares(pair, texts)
    shared_server_checks.outlives(pair, texts)


def test_loads_that_were_counted_on_and_are_not_planned(pair: Pair, texts: Texts) -> None:
    shared_server_checks.misses(pair, texts)


def test_a_tier_that_was_not_there_when_the_engines_started(
    pair: Pair, texts: Texts, tmp_path: Path
) -> None:
    shared_server_checks.returns(pair, texts, tmp_path / "disk")
