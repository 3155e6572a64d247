"""What comes over the socket: malformed, oversized, of another version, from someone else."""

import contextlib
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from kvcore._util.curve import make_keys
from kvcore._util.msgpack import MAX_MESSAGE
from kvcore.admin import commands as o
from kvcore.config import Config
from kvcore.config.schema_server import ServerConfig
from kvcore.errors import ConfigError, FormatError, TierUnavailable, TransferError, UnsupportedError
from kvcore.manager.base import Hit, Promise, Source
from kvcore.model.keys import KEY_BYTES
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.server import messages as m
from kvcore.server.client import RemoteManager
from kvcore.server.rpc import Link
from kvcore.server.runtime_dir import SessionLock
from kvcore.testing.waiting import until
from kvcore.transfer.graph import OpReport, RowError, Span, TransferGraph
from kvcore_devtools.server_fixture import RunningServer, settings
from kvcore_devtools.servers import free_port
from support.server_wire import DESCRIBED, MODEL, SHAPE, SPACE, join, keys, save, units
from support.transfers import load_blocks, save_blocks

Start = Callable[[Config], RunningServer]


class Raw:
    """A client that says whatever it is told to."""

    def __init__(self, address: str) -> None:
        self.socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def send(self, *parts: bytes) -> None:
        self.socket.send_multipart(parts)

    def ask(self, request: Any) -> Any:
        """The reply to a request; replies to what was sent before are left out."""
        self.socket.send_multipart(m.frames(request))
        while self.socket.poll(60_000):
            reply = m.decode_reply(self.socket.recv_multipart())
            if reply.ref == request.ref:
                return reply
        raise AssertionError("the server does not answer")

    def welcome(self) -> m.Welcome:
        welcome: m.Welcome = until(self._hello)
        return welcome

    def _hello(self) -> m.Welcome | None:
        reply = self.ask(m.Hello(1, MODEL, 1, "test"))
        return reply if isinstance(reply, m.Welcome) else None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One for all: nothing that a test says may harm the next."""
    tables: dict[str, Any] = {"fusion": {"enabled": True}}
    running = RunningServer(settings(tmp_path_factory.mktemp("wire") / "kv", **tables))
    yield running
    running.close()
    running.server.check_integrity()


@pytest.fixture(scope="module")
def raw(server: RunningServer) -> Raw:
    return Raw(f"ipc://{server.server._folder.path}/server.sock")


def test_a_client_cannot_fill_the_log(
    server: RunningServer, raw: Raw, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither with what is malformed or of another version, nor with a session of another one."""
    client = Raw(f"ipc://{server.server._folder.path}/server.sock")
    before, other = server.server.status()["refusals"], raw.welcome().session
    for number in range(300):
        client.send(b"\xc1" * (number % 7 + 1))
        client.send(b"kvcore", bytes([number % 256]), b"\xc1")
        client.send(*m.frames(m.EnterSession(1, other, bytes([number % 256]))))
        assert client.ask(m.Heartbeat(number + 1, other)).kind == "session"
    raw.send(*m.frames(m.Bye(1, other)))
    assert server.server.status()["refusals"] >= before + 1200
    assert len(caplog.records) < 50, caplog.text[:2000]


# -- decoding ---------------------------------------------------------------------------------

CHAIN = st.one_of(
    st.binary(max_size=64),
    st.integers(0, 8).map(lambda count: m.join(keys(count))),
    st.lists(st.sampled_from(keys(8)), unique=True).map(m.join),  # of no prompt
)
COUNTS = st.integers(0, 12)
PLACES = st.lists(st.tuples(st.sampled_from(["host", "disk", ""]), COUNTS, COUNTS), max_size=3)
REPORTS = st.lists(
    st.builds(
        OpReport,
        st.integers(-5, 5) | st.integers(-(1 << 63), (1 << 64) - 1),  # as msgpack has them
        st.integers(-2, 3),
        st.dictionaries(st.integers(-3, 20), st.sampled_from(RowError), max_size=4),
    ),
    max_size=4,
)


NAMES = st.sampled_from(["host", "disk", "", "ann", "x" * 70])
WHERE = st.builds(
    o.BlockFilter,
    st.none() | NAMES,
    st.none() | NAMES,
    st.none() | st.binary(max_size=17),
    st.binary(max_size=17),
    st.none() | st.binary(max_size=300),
    st.none() | NAMES,
)
ORDERS = st.one_of(
    st.builds(o.ListBlocks, WHERE, st.booleans(), COUNTS),
    st.builds(o.PinBlocks, WHERE),
    st.builds(o.PinBlocks, WHERE, st.none() | st.floats(1e-9, o.MAX_TTL_S)),
    st.builds(o.UnpinBlocks, WHERE),
    st.builds(o.MoveBlocks, WHERE, NAMES),
    st.builds(o.PrefetchBlocks, WHERE),
    st.builds(o.ClearBlocks, WHERE),
    st.builds(o.SetQuota, NAMES, NAMES, st.sampled_from(["1MiB", "5%", "?", "0"]), NAMES),
    st.builds(o.ShowQuotas),
)


def requests(session: int) -> st.SearchStrategy[Any]:
    """Well-formed requests that mean anything, good or not, in a session that exists."""
    ref, here = st.integers(10, 1 << 40), st.just(session)
    space = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
    spans = st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 3)), max_size=3)
    return st.one_of(
        st.builds(m.MatchRequest, ref, here, CHAIN, space, COUNTS, st.booleans()),
        st.builds(m.LoadRequest, ref, here, CHAIN, space, PLACES, COUNTS, COUNTS, spans),
        st.builds(m.SaveRequest, ref, here, CHAIN, space),
        st.builds(
            m.HeldRequest, ref, here, st.sampled_from(["host", "none"]), CHAIN, st.booleans()
        ),
        st.builds(m.OpsEnded, ref, here, REPORTS),
        st.builds(m.ReadRequest, ref, here, st.integers(0, 9), COUNTS, st.integers(0, 3)),
        st.builds(m.WithdrawRequest, ref, here, st.integers(0, 9)),
        st.builds(m.ClearRequest, ref, here, st.none() | space),
        st.builds(m.LearnTokens, ref, here, space, CHAIN, COUNTS, COUNTS, st.binary(max_size=600)),
        st.builds(m.SearchRequest, ref, here, space, st.binary(max_size=600)),
        st.builds(m.PathRequest, ref, here, space),
        st.builds(m.StatusRequest, ref),
        st.builds(m.ControlRequest, ref, ORDERS, st.binary(max_size=3)),
    )


@given(st.binary(max_size=200))
def test_bytes_are_a_message_or_a_format_error(payload: bytes) -> None:
    for decode in (m.decode_request, m.decode_reply):
        with contextlib.suppress(FormatError):
            decode([m.HEADER, payload])


@given(requests(7), st.data())
def test_a_message_comes_back_as_it_was_and_a_damaged_one_is_no_other_error(
    request: Any, data: st.DataObject
) -> None:
    try:
        parts = m.frames(request)
        assert m.decode_request(parts) == request
    except FormatError:
        parts = m.frames(m.StatusRequest(1))  # a value out of its bounds: the encoder does not look
    payload = bytearray(parts[1])
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FormatError):
        m.decode_request([parts[0], bytes(payload)])


def test_chains_are_whole_keys_each_once() -> None:
    assert m.split(m.join(keys(3))) == keys(3)
    for bad in (m.join(keys(2)) + b"x", m.join(keys(2) + keys(1))):
        with pytest.raises(FormatError):
            m.split(bad)


# -- a live server ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session(server: RunningServer, raw: Raw) -> Iterator[int]:
    welcome = raw.welcome()
    held = SessionLock(server.server._folder.path, welcome.file)
    yield welcome.session
    held.close()


@budget(max_examples=60)
@given(data=st.data())
def test_no_message_harms_the_server_or_another_client(
    server: RunningServer, raw: Raw, session: int, data: st.DataObject
) -> None:
    garbage = st.lists(st.binary(max_size=40), min_size=1, max_size=3)
    for said in data.draw(st.lists(requests(session) | garbage, max_size=8)):
        raw.send(*(said if isinstance(said, list) else _encoded(said)))
    assert isinstance(raw.ask(m.StatusRequest(2)), m.StatusReply), "it lives"
    matched = raw.ask(m.MatchRequest(3, session, m.join(keys(4)), SPACE))
    assert isinstance(matched, m.MatchReply), "it serves"
    server.server.check_integrity()


def _encoded(request: Any) -> list[bytes]:
    return [m.HEADER, msgspec.msgpack.encode(request)]


def test_an_unknown_session_is_told_to_say_hello(raw: Raw) -> None:
    reply = raw.ask(m.Heartbeat(5, 12345678))
    assert isinstance(reply, m.Refused)
    assert (reply.kind, "say hello" in reply.message) == ("session", True)


def test_a_client_of_another_protocol_is_refused_by_name(raw: Raw) -> None:
    raw.send(b"kvcore" + struct.pack("<I", 9), b"whatever that is there")
    reply = m.decode_reply(raw.socket.recv_multipart())
    assert isinstance(reply, m.Refused)
    assert reply.kind == "misfit"
    assert "protocol 9; this side speaks protocol 4" in reply.message


def test_a_message_past_the_bound_ends_its_connection_and_nothing_else(
    server: RunningServer, raw: Raw
) -> None:
    other = Raw(f"ipc://{server.server._folder.path}/server.sock")
    other.send(m.HEADER, bytes(MAX_MESSAGE + 1))
    assert not other.socket.poll(300)
    assert isinstance(raw.ask(m.StatusRequest(6)), m.StatusReply)
    with pytest.raises(FormatError, match="at most"):
        m.frames(m.SaveRequest(1, 1, bytes(MAX_MESSAGE + 1), SPACE))


# -- the client's side ------------------------------------------------------------------------


def test_what_a_server_says_badly_is_no_answer(folder: Path) -> None:
    """A server that answers garbage, of another version, and at last never."""
    folder.mkdir(mode=0o700)
    socket: Any = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(f"ipc://{folder}/server.sock")
    answers = [[b"x"], [m.HEADER, b"\xc1"], [b"kvcore" + struct.pack("<I", 7), b""]]
    ended = threading.Event()

    def answer() -> None:
        while not ended.is_set():
            if socket.poll(20):
                client, *_ = socket.recv_multipart()
                if answers:
                    socket.send_multipart([client, *answers.pop(0)])

    thread = threading.Thread(target=answer)
    thread.start()
    patient = settings(folder)
    try:
        with pytest.raises(UnsupportedError, match="1 frames"):
            join(patient)
        with pytest.raises(UnsupportedError, match="not a message of protocol 4"):
            join(patient)
        with pytest.raises(UnsupportedError, match="protocol 7; this side speaks protocol 4"):
            join(patient)
        # It does not answer: the engine goes on without.
        manager, _ = join(settings(folder, server={"deadline_s": 0.5}))
        assert manager.get_match(keys(4), SPACE).depth == 0
        assert save_blocks(manager, keys(4), SPACE, 4, units) is None
        manager.close()
    finally:
        ended.set()
        thread.join()
        socket.close(0)


def test_a_client_that_was_slower_than_its_lease_asks_again(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session ended between the welcome and the client's look at it."""
    start(settings(folder))
    held: list[str] = []

    def slowly(where: Path, name: str) -> SessionLock:
        held.append(name)
        if len(held) == 1:
            raise TierUnavailable(f"{name} of the server is over")
        return SessionLock(where, name)

    monkeypatch.setattr("kvcore.server.session.SessionLock", slowly)
    manager, _ = join(settings(folder))
    assert manager.keeper.member is not None
    assert len(held) == 2
    manager.close()


def test_a_client_that_sees_another_folder_is_told_of_it(start: Start, folder: Path) -> None:
    start(settings(folder))
    elsewhere = {"address": f"ipc://{folder}/server.sock", "folder": f"{folder}-elsewhere"}
    with pytest.raises(UnsupportedError, match=r"server\.folder is .*elsewhere"):
        join(settings(folder, server=elsewhere))


def test_an_engine_with_other_blocks_is_refused_by_name(start: Start, folder: Path) -> None:
    config = settings(folder)
    start(config)
    first, _ = join(config)
    shape = BlockShape(2, 2, 8, 32, "float32")
    other = ModelDescription(shape, (LayerGroup(0, 16, (0, 1)),), MODEL.fingerprint, 1)
    with pytest.raises(UnsupportedError, match="block_tokens is 32, served is 16"):
        join(config, other)
    with pytest.raises(UnsupportedError, match="1 other models are served"):
        join(config, ModelDescription(SHAPE, DESCRIBED.groups, b"another model's.", 1))
    first.close()


def test_the_trail_of_a_block_that_nobody_holds_is_refused(raw: Raw) -> None:
    session = raw.welcome().session
    reply = raw.ask(m.PathRequest(5, session, b"k" * KEY_BYTES))
    assert isinstance(reply, m.Refused)
    assert reply.kind == "stale"
    reply = raw.ask(m.SearchRequest(6, session, SPACE, b"123"))
    assert isinstance(reply, m.Refused)
    assert reply.kind == "malformed"


def hurry(manager: RemoteManager) -> ServerConfig:
    """Have it wait for no answer longer than a moment; returns what it was set to before."""
    patient = manager.keeper._config
    manager.keeper._config = patient.model_copy(update={"deadline_s": 0.3})
    return patient


def test_a_plan_that_comes_too_late_is_given_back(start: Start, folder: Path) -> None:
    server = start(settings(folder))
    manager, outbox = join(settings(folder))
    patient = hurry(manager)
    held, save = threading.Event(), server.server._handlers[m.SaveRequest]

    def slow(*given: Any) -> Any:
        held.wait(60)
        return save(*given)

    server.server._handlers[m.SaveRequest] = slow
    assert save_blocks(manager, keys(4), SPACE, 4, units) is None, "in a deadline, without it"
    assert manager.get_match(keys(4), SPACE).depth == 0
    assert not outbox.graphs
    held.set()
    manager.keeper._config = patient
    [space] = server.server.models
    until(lambda: not manager.keeper.waiting and space.manager.in_flight == 0)
    until(lambda: save_blocks(manager, keys(4), SPACE, 4, units))
    [graph] = outbox.graphs
    assert graph.num_rows == 4, "what was given back can be saved again"
    manager.complete(OpReport(graph.graph_id, 0))
    assert manager.get_match(keys(6), SPACE).depth == 4
    manager.close()


def test_an_end_that_cannot_be_told_costs_the_session_and_no_slot(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has taken nothing for so long that its queue is full."""
    server = start(settings(folder))
    manager, _ = join(settings(folder))
    graph = save_blocks(manager, keys(4), SPACE, 4, units)
    assert graph is not None
    first, tell = manager.keeper.member, manager.keeper.link.tell
    full = lambda request: not isinstance(request, m.OpsEnded) and tell(request)  # noqa: E731
    monkeypatch.setattr(manager.keeper.link, "tell", full)
    manager.complete(OpReport(graph.graph_id, 0))
    monkeypatch.undo()
    until(lambda: manager.keeper.member not in (None, first))
    [space] = server.server.models
    until(lambda: not space.manager.in_flight)
    assert save_blocks(manager, keys(4), SPACE, 4, units) is not None, "it can be saved again"
    manager.close()


def test_ends_of_many_ops_are_told_in_several_messages(start: Start, folder: Path) -> None:
    server = start(settings(folder))
    manager, _ = join(settings(folder))
    member = manager.keeper.member
    assert member is not None
    refusals = server.server._refusals
    manager.keeper.report_ended(member, [OpReport(1, n) for n in range(2 * m.MAX_REPORTS + 1)])
    assert manager.get_match(keys(4), SPACE).depth == 0
    assert server.server._refusals == refusals
    manager.close()


def test_what_comes_between_two_questions_is_looked_up_again(start: Start, folder: Path) -> None:
    """A promised prompt was computed, its blocks being there: the answer that told of them said
    that nothing more was on its way."""
    start(settings(folder))
    waiting, _ = join(settings(folder))
    saving, _ = join(settings(folder))
    hit = waiting.get_match(keys(4), SPACE)
    graph = save_blocks(saving, keys(4), SPACE, 4, units)
    assert (hit.depth, graph is not None) == (0, True)
    saving.complete(OpReport(graph.graph_id, 0))
    assert saving.get_match(keys(4), SPACE).depth == 4, "it was told"
    assert waiting.ask_stores(hit, promise=Promise(4, 60.0, ""))
    hit = waiting.get_match(keys(4), SPACE)
    assert hit.depth == 4
    assert not waiting.ask_stores(hit)
    waiting.close()
    saving.close()


def test_what_a_load_keeps_in_host_memory_is_saved_without_a_question(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the load is on its way; not when one of its ops failed, nor of more than it reads."""
    server = start(settings(folder))
    manager, _ = join(settings(folder))
    chain, asked = keys(6), 0
    graph = save_blocks(manager, chain, SPACE, 4, units)
    assert graph is not None
    manager.complete(OpReport(graph.graph_id, 0))
    save = server.server._handlers[m.SaveRequest]

    def counted(*given: Any) -> Any:
        nonlocal asked
        asked += 1
        return save(*given)

    server.server._handlers[m.SaveRequest] = counted

    def questions(stop: int) -> int:
        before = asked
        saved = save_blocks(manager, chain, SPACE, stop, units)
        assert (saved is not None) == (stop > 4), "only what is not held is saved"
        for op in () if saved is None else saved.ops:
            manager.complete(OpReport(saved.graph_id, op.op_id, {0: RowError.IO, 1: RowError.IO}))
        return asked - before

    def load() -> TransferGraph:
        hit = manager.get_match(chain, SPACE)
        return load_blocks(manager, hit, 1, 4, units(1, 4), layers=[Span(0, 1), Span(1, 2)])

    first = load()
    assert [questions(stop) for stop in (4, 3, 6)] == [0, 0, 1]
    assert save_blocks(manager, keys(6, seed=1), SPACE, 3, units) is not None, "another prompt"
    manager.complete(OpReport(first.graph_id, 0))
    assert questions(4) == 0
    manager.complete(OpReport(first.graph_id, 1))
    assert questions(4) == 1, "nothing keeps them any more"
    second = load()
    manager.complete(OpReport(second.graph_id, 0, {0: RowError.IO}))
    assert questions(4) == 1, "what failed is not there"
    manager.complete(OpReport(second.graph_id, 1))
    hit = Hit(chain, SPACE, (Source("host", 0, 4), Source("disk", 4, 6)))
    for first, keeps in ((4, 0), (3, 1)):
        monkeypatch.setattr(
            manager.keeper, "ask", lambda *_, first=first: m.LaunchReply(1, second, first)
        )
        manager.plan_load(hit, Span(first, 6))
        assert len(manager._host) == keeps, "what it does not read it does not keep"
    manager.close()


def test_a_load_that_has_gone_stale_is_not_planned(start: Start, folder: Path) -> None:
    config = settings(folder)
    server = start(config)
    manager, outbox = join(config)
    save(manager, keys(4))
    outbox.graphs.clear()
    hit = manager.get_match(keys(4), SPACE)
    assert hit.depth == 4
    assert manager.clear() == 4
    with pytest.raises(TierUnavailable, match=r"the server does not load blocks 0\.\.4: "):
        manager.plan_load(hit, Span(0, 4), layers=[Span(0, 1), Span(1, 2)])
    assert not outbox.graphs
    assert not manager.in_flight
    [model] = server.server.models
    assert model.manager.in_flight == 0
    manager.close()


def test_plans_that_come_to_nothing_are_given_back(start: Start, folder: Path) -> None:
    server = start(settings(folder))
    manager, outbox = join(settings(folder))
    [model] = server.server.models
    planned = manager.plan_save(keys(4), SPACE, 4)
    assert planned is not None
    manager.drop(planned)
    assert manager.get_match(keys(4), SPACE).depth == 0
    assert model.manager.in_flight == 0, "the engine had the pages no more"
    save(manager, keys(4))
    hit = manager.get_match(keys(4), SPACE)
    planned = manager.plan_load(hit, Span(0, 4))
    assert model.manager.in_flight == 1
    assert manager.in_flight == 0, "no worker has it"
    manager.drop(planned)
    assert manager.get_match(keys(4), SPACE).depth == 4
    assert model.manager.in_flight == 0, "the load was dropped"
    assert not manager._host, "nothing keeps the blocks any more"
    with pytest.raises(TransferError):
        manager.launch(manager.plan_load(hit, Span(0, 4)), units(0, 3))
    assert manager.get_match(keys(4), SPACE).depth == 4
    assert model.manager.in_flight == 0, "its pages did not fit"
    assert len(outbox.graphs) == 1
    manager.close()


def test_a_session_ends_with_the_leader_that_leaves_it(start: Start, folder: Path) -> None:
    server = start(settings(folder))
    manager, _ = join(settings(folder))
    assert save_blocks(manager, keys(4), SPACE, 4, units) is not None
    manager.close()
    until(lambda: not list(server.server.sessions))
    [model] = server.server.models
    assert (model.manager.in_flight, model.used["host"][0]) == (0, 0), "its save never ended"


# -- who may talk -----------------------------------------------------------------------------


def test_nobody_else_can_reach_the_server_or_its_memory(start: Start, folder: Path) -> None:
    config = settings(folder)
    start(config)
    manager, _ = join(config)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {
        path.name.split("-")[0]: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()
    }
    assert modes.pop("counter") & 0o077 in (0, 0o044)
    assert modes == dict.fromkeys(("server.lock", "server.sock", "arena", "session"), 0o600)
    with pytest.raises(ConfigError, match="a server serves in"):
        RunningServer(config)
    manager.close()


def test_a_folder_that_others_may_enter_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="mode 0700"):
        RunningServer(settings(folder))
    os.chmod(folder, 0o700)
    long = folder / ("x" * 120)
    with pytest.raises(ConfigError, match="more than 107 bytes"):
        RunningServer(settings(folder, server={"address": f"ipc://{long}"}))


@pytest.mark.parametrize("name", ["", "..", "../engine-a", "a/b"])
def test_a_clients_keys_lie_in_the_folder_of_keys(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names of files"):
        make_keys(tmp_path / "keys", name)
    assert not list(tmp_path.iterdir())


def test_tcp_is_for_those_with_keys(start: Start, folder: Path, tmp_path: Path) -> None:
    tcp: dict[str, Any] = {"address": "tcp://127.0.0.1:0", "deadline_s": 0.5}
    with pytest.raises(ConfigError, match="--keygen"):
        RunningServer(settings(folder, server=tcp))
    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "others")
    tcp["keys"] = str(tmp_path / "keys")
    tcp["address"] = f"tcp://127.0.0.1:{free_port()}"
    start(settings(folder, server=tcp))
    manager, _ = join(settings(folder, server=tcp | {"deadline_s": 20.0}))
    assert manager.keeper.member is not None
    graph = save_blocks(manager, keys(2), SPACE, 2, units)
    assert graph is not None
    manager.complete(OpReport(graph.graph_id, 0))
    assert manager.get_match(keys(2), SPACE).depth == 2
    manager.close()
    stranger, _ = join(settings(folder, server=tcp | {"keys": str(tmp_path / "others")}))
    assert stranger.keeper.member is None, "the server does not know these keys, nor they it"
    stranger.close()
    naked = Raw(tcp["address"])
    naked.send(*m.frames(m.StatusRequest(1)))
    assert not naked.socket.poll(500), "without keys there is no answer"


@pytest.mark.parametrize("alive", [None, lambda: True], ids=["once", "in slices"])
def test_a_link_that_closes_answers_those_who_wait_with_nothing(folder: Path, alive: Any) -> None:
    """A read that hangs outlives its worker's close, and must not fail on a socket that is gone."""
    link = Link(settings(folder).server)
    asking = threading.Event()
    send = link._send

    def noting(request: m.ServerRequest) -> bool:
        sent = send(request)
        asking.set()
        return sent

    link._send = noting  # type: ignore[method-assign]
    timeout = 0.5 if alive is None else 600.0  # who does not ask for slices has the link alone
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(link.ask, m.Heartbeat(link.ref(), 1), timeout, alive=alive)
        assert asking.wait(60)
        link.close()
        assert waiting.result(60) is None
    assert link.ask(m.Heartbeat(link.ref(), 1), 600.0) is None, "at once"
    assert not link.tell(m.Heartbeat(link.ref(), 1))
    link.drain()
    link.close()
