"""Whose session it is: that of who opened it, and of its ranks, whatever number is named."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")

from kvcore._util.curve import make_keys
from kvcore.config import Config
from kvcore.model.shape import BlockShape
from kvcore.server import messages as m
from kvcore.server import sessions as module
from kvcore.server.rpc import Link
from kvcore.server.runtime_dir import SessionLock
from kvcore.testing.waiting import PATIENCE_S, until
from kvcore.transfer.graph import OpReport, TransferGraph
from kvcore_devtools.server_fixture import RunningServer, serve, settings, words
from kvcore_devtools.servers import free_port

Start = Callable[[Config], RunningServer]

MODEL = m.Model.of(BlockShape(2, 2, 8, 16, "float32"), b"fingerprint")
NAMES = [bytes([i + 1]) * 16 for i in range(4)]
CHAIN, SPACE = m.join(NAMES), b"n" * 16


class Client:
    """A leader without an engine."""

    def __init__(self, config: Config) -> None:
        self.link = Link(config.server)
        self.number = 0

    def ask(self, kind: Callable[..., Any], *said: Any) -> Any:
        return self.link.ask(kind(self.link.ref(), *said), PATIENCE_S)

    def join(self, folder: Path) -> SessionLock:
        welcome = until(self._hello)
        self.number = welcome.session
        return SessionLock(folder, welcome.file)

    def _hello(self) -> m.Welcome | None:
        reply = self.ask(m.Hello, MODEL, 1, "test")
        return reply if isinstance(reply, m.Welcome) else None

    def save(self) -> TransferGraph:
        launched = self.ask(m.SaveRequest, self.number, CHAIN, SPACE)
        assert isinstance(launched, m.LaunchReply)
        assert launched.graph is not None
        return launched.graph


def ended(graph: TransferGraph) -> list[OpReport]:
    return [OpReport(graph.graph_id, op.op_id, {}) for op in graph.ops]


@pytest.fixture(params=["local", "tcp"])
def config(request: Any, folder: Path, tmp_path: Path) -> Config:
    """Over TCP every client has the same keys."""
    server: dict[str, Any] = {}
    if request.param == "tcp":
        make_keys(tmp_path / "keys")
        server = {"address": f"tcp://127.0.0.1:{free_port()}", "keys": str(tmp_path / "keys")}
    return settings(folder, server=server)


@pytest.fixture
def clients(config: Config, start: Start, folder: Path) -> Iterator[tuple[Client, Client]]:
    """The owner of a session, and one who has another."""
    start(config)
    owner, other = Client(config), Client(config)
    held = [owner.join(folder), other.join(folder)]
    yield owner, other
    for each, hold in zip((owner, other), held, strict=True):
        hold.close()
        each.link.close()


def graphs(client: Client, number: int) -> int:
    status = client.ask(m.StatusRequest).status
    sessions = [each for model in status["models"] for each in model["sessions"]]
    [found] = [each["graphs"] for each in sessions if each["session"] == number]
    return int(found)


def test_nobody_ends_or_begins_anything_in_anothers_session(
    clients: tuple[Client, Client],
) -> None:
    """What another said to have ended would be published: blocks that nobody has filled."""
    owner, other = clients
    graph = owner.save()
    said: list[tuple[Any, ...]] = [
        (m.OpsEnded, ended(graph)),
        (m.MatchRequest, CHAIN, SPACE),
        (m.LoadRequest, CHAIN, SPACE, [("host", 0, 4)], 0, 4),
        (m.SaveRequest, CHAIN, SPACE),
        (m.HeldRequest, "host", CHAIN),
        (m.ReadRequest, graph.graph_id, 0, 0),
        (m.WithdrawRequest, graph.graph_id),
        (m.ClearRequest, None),
        (m.LearnTokens, SPACE, CHAIN, 0, 0, b""),
        (m.PublishTokens, CHAIN, b""),
        (m.SearchRequest, SPACE, b""),
        (m.PathRequest, NAMES[0]),
        (m.Heartbeat,),
        (m.Bye,),
    ]
    for kind, *rest in said:
        reply = other.ask(kind, owner.number, *rest)
        assert isinstance(reply, m.Refused), kind
        assert reply.kind == "session"
        assert "is not this connection's" in reply.message
    assert graphs(other, owner.number) == 1
    assert owner.ask(m.MatchRequest, owner.number, CHAIN, SPACE).sources == [], (
        "nothing is published"
    )
    owner.link.tell(m.OpsEnded(owner.link.ref(), owner.number, ended(graph)))
    assert owner.ask(m.MatchRequest, owner.number, CHAIN, SPACE).sources == [("host", 0, 4)]
    assert isinstance(other.ask(m.Heartbeat, other.number), m.HeartbeatReply), (
        "its own session is as it was"
    )


def test_a_rank_is_who_knows_what_is_in_the_sessions_file(
    clients: tuple[Client, Client], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it may do what ranks do, no more. A rank has no more connections than are remembered."""
    monkeypatch.setattr(module, "CONNECTIONS", 1)
    owner, rank = clients
    held = SessionLock(folder, f"session-{owner.number}")
    secret = bytes.fromhex(held.metadata()["secret"])
    held.close()
    for wrong in (b"", secret[:-1], secret[::-1]):
        reply = rank.ask(m.EnterSession, owner.number, wrong)
        assert (type(reply), reply.kind) == (m.Refused, "session")
    assert isinstance(rank.ask(m.Heartbeat, owner.number), m.Refused)
    rank.link.tell(m.EnterSession(rank.link.ref(), owner.number, secret))
    assert isinstance(rank.ask(m.Heartbeat, owner.number), m.HeartbeatReply)
    reply = rank.ask(m.ReadRequest, owner.number, 7, 0, 0)
    assert (type(reply), reply.kind) == (m.Refused, "malformed"), "it is heard: there is no graph 7"
    assert isinstance(rank.ask(m.SaveRequest, owner.number, CHAIN, SPACE), m.Refused)
    rank.link.renew()
    assert isinstance(rank.ask(m.Heartbeat, owner.number), m.Refused), "another connection"
    rank.link.tell(m.EnterSession(rank.link.ref(), owner.number, secret))
    assert isinstance(rank.ask(m.Heartbeat, owner.number), m.HeartbeatReply)
    owner.link.tell(m.EnterSession(owner.link.ref(), owner.number, secret))
    assert isinstance(owner.ask(m.Heartbeat, owner.number), m.HeartbeatReply), (
        "and what it said before is heard"
    )
    assert isinstance(rank.ask(m.Heartbeat, owner.number), m.Refused), "the last one is remembered"


@pytest.mark.parametrize("ranks", [1, 2])
def test_who_connects_anew_goes_on(
    start: Start, engine: Any, plain: Any, folder: Path, tmp_path: Path, ranks: int
) -> None:
    """A rank with its next read, a leader in another session."""
    disk = {"path": str(tmp_path / "disk"), "capacity": "64MiB"}
    config = settings(folder, host={"capacity": "256KiB"}, disk=disk, server={"lease_s": 0.4})
    server = start(config)
    serving = engine(config, ranks=ranks, prefix_cache=False)
    prompts = [words(seed, 165) for seed in range(3)]
    for prompt in prompts:
        assert serve(serving, prompt)[0] == plain(prompt)
        until(lambda: server.idle)
    read = 0
    for prompt in prompts:
        for made in serving.workers:
            made.worker._link.renew()
        answer, reused = serve(serving, prompt)
        assert answer == plain(prompt)
        read += reused.get("disk", 0)
        until(lambda: server.idle)
    assert read, "ranks' new connections read from disk"
    keeper = serving.leader.manager.keeper
    before = keeper.member.number
    keeper.link.renew()
    until(lambda: keeper.member is not None and keeper.member.number != before)
    for prompt in prompts:
        assert serve(serving, prompt)[0] == plain(prompt)
        until(lambda: server.idle)
