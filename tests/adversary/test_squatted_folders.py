"""Attacker: a local user who makes the server's folder, socket or memory before its owner does."""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("zmq")

from kvcore.admin import commands as o
from kvcore.cli.ctl import Target, ask, parse_where
from kvcore.config import load_config, paths
from kvcore.errors import ConfigError, TierUnavailable
from kvcore.server import session
from kvcore.server.messages import StatusRequest
from kvcore.server.pending_clears import PendingClears
from kvcore.server.rpc import Link
from kvcore.server.runtime_dir import RuntimeDir, SessionLock, open_arena
from kvcore.testing.engine import EngineArgs, ReferenceEngine, random_llama
from kvcore.testing.waiting import until
from kvcore_devtools.server_fixture import RunningServer, serve, settings, words
from support.other_user import OTHER, OtherProcess, as_other_user, needs_root, shared_folder

SQUATTER = """
import sys
from kvcore.config import load_config, paths
from kvcore.server.server import Server

class Squatter(Server):
    def _receive(self, client, parts):
        print("heard", flush=True)
        super()._receive(client, parts)

tables = {"server": {"address": "local", "folder": sys.argv[1]},
          "host": {"capacity": "16MiB", "huge_pages": False}}
become_other()
server = Squatter(load_config(None, tables))
server.open()
print("ready", flush=True)
server.run()
"""
"""A real server of the other user. It tells of each message that reaches it."""

ANSWERER = """
import sys, zmq
become_other()
socket = zmq.Context.instance().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
print("ready", flush=True)
while True:
    client, *parts = socket.recv_multipart()
    print("heard", flush=True)
    socket.send_multipart([client, *parts])
"""
ASKER = """
import sys, zmq
from kvcore.admin.messages import frames
from kvcore.server.messages import StatusRequest
become_other()
socket = zmq.Context.instance().socket(zmq.DEALER)
socket.setsockopt(zmq.LINGER, 0)
socket.connect(sys.argv[1])
socket.send_multipart(frames(StatusRequest(1)))
print("answered" if socket.poll(2000) else "no answer", flush=True)
"""


@pytest.fixture
def shm() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


@contextmanager
def squatted(folder: Path) -> Iterator[OtherProcess]:
    with as_other_user(SQUATTER, str(folder)) as squatter:
        until(lambda: squatter.lines == ["ready"])
        yield squatter


def answers_alone(config: Any) -> None:
    """Assert that an engine with ``config`` answers right, and reuses nothing."""
    model, prompt = random_llama(), words(1, 100)
    with ReferenceEngine(model, EngineArgs(num_pages=128, prefix_cache=False)) as plain:
        right = plain.generate([prompt], 6)[0]
    with ReferenceEngine(model, EngineArgs(prefix_cache=False), config) as engine:
        for _ in range(2):
            assert serve(engine, prompt) == (right, {})


@needs_root
def test_an_engine_does_not_join_another_users_server(
    shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It maps no memory of the squatter's, and tells it no key and no token."""
    with squatted(shm / "kv") as squatter:
        answers_alone(settings(shm / "kv", server={"deadline_s": 0.1}))
        assert squatter.lines == ["ready"]
        assert not list((shm / "kv").glob("arena-*"))
    assert f"it belongs to user {OTHER}, and this process is user 0" in caplog.text


@needs_root
def test_a_folder_that_was_replaced_is_not_joined_again(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine was joined to its own server before, and is joined again when that is back."""
    monkeypatch.setattr(session, "MISFIT_RETRY_S", 0.2)
    folder = shm / "kv"
    config = settings(folder, server={"deadline_s": 0.1, "lease_s": 0.5})
    own, prompt = RunningServer(config), words(1, 100)
    with ReferenceEngine(random_llama(), EngineArgs(prefix_cache=False), config) as engine:
        right, _ = serve(engine, prompt)
        until(lambda: own.idle)
        assert serve(engine, prompt) == (right, {"host": 96})
        own.close()
        shutil.rmtree(folder)
        with squatted(folder) as squatter:
            keeper = engine.leader.manager.keeper
            until(lambda: bool(keeper.link.distrusted))
            assert serve(engine, prompt) == (right, {})
            assert squatter.lines == ["ready"]
        shutil.rmtree(folder)
        own = RunningServer(config)
        until(lambda: keeper.member is not None)
        serve(engine, prompt)
        until(lambda: own.idle)
        assert serve(engine, prompt) == (right, {"host": 96})
    own.close()


@needs_root
def test_ctl_tells_a_squatter_neither_salt_nor_prompt(shm: Path, tmp_path: Path) -> None:
    (tmp_path / "salt").write_text("a secret")
    order = o.ClearBlocks(parse_where([f"salt={tmp_path / 'salt'}"]))
    with squatted(shm / "kv") as squatter:
        with pytest.raises(TierUnavailable, match=f"belongs to user {OTHER}"):
            ask(Target(settings(shm / "kv"), "", None, 5.0), order)
        assert squatter.lines == ["ready"]


@needs_root
def test_ctl_uses_no_socket_where_others_can_make_one(shm: Path) -> None:
    address = f"ipc://{shm}/ctl"
    with as_other_user(ANSWERER, address) as squatter:
        until(lambda: squatter.lines == ["ready"])
        config = settings(shm / "kv", server={"address": address})
        with pytest.raises(TierUnavailable, match="others may write in it"):
            ask(Target(config, "", None, 5.0), o.ShowQuotas())
        assert squatter.lines == ["ready"]


@needs_root
def test_an_answer_of_another_users_process_is_not_heard(shm: Path) -> None:
    """Its socket is in a folder of ours, which others could write to when it was made."""
    address = f"ipc://{shm}/server.sock"
    with as_other_user(ANSWERER, address) as squatter:
        until(lambda: squatter.lines == ["ready"])
        shm.chmod(0o755)
        link = Link(settings(shm / "kv", server={"address": address}).server)
        waits = link.ask(StatusRequest(link.ref()), 20.0, alive=lambda: not link.distrusted)
        assert waits is None
        assert "another user's process" in link.distrusted
        assert link.refused is None
        link.close()


@needs_root
def test_a_server_answers_its_own_user_alone(shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Even if somebody opened its folder and its socket to everyone."""
    server = RunningServer(settings(shm / "kv"))
    (shm / "kv").chmod(0o755)
    (shm / "kv" / "server.sock").chmod(0o666)
    with as_other_user(ASKER, f"ipc://{shm}/kv/server.sock") as asker:
        asker.wait()
    server.close()
    assert asker.lines == ["no answer"]
    assert f"another user who=uid {OTHER}" in caplog.text


@needs_root
def test_a_server_does_not_start_in_another_users_folder(shm: Path) -> None:
    (shm / "kv").mkdir(mode=0o700)
    os.chown(shm / "kv", OTHER, OTHER)
    with pytest.raises(ConfigError, match=f"it belongs to user {OTHER}"):
        RunningServer(settings(shm / "kv"))


@pytest.fixture
def places(shm: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for /run and /dev/shm, where the default folder is."""
    (shm / "run").mkdir(mode=0o755)
    monkeypatch.setattr(paths, "RUN", shm / "run")
    monkeypatch.setattr(paths, "MEMORY", shm)
    return shm


def by_default() -> Any:
    tables = settings(Path("/")).model_dump(mode="json", include={"host", "server"})
    del tables["server"]["folder"]
    return load_config(None, tables, env={})


@needs_root
def test_others_cannot_make_the_default_folder_first(places: Path) -> None:
    """They can make the one in /dev/shm, with all signs of a server's."""
    with squatted(places / f"kvcore-{os.geteuid()}") as squatter:
        config = by_default()
        server, prompt = RunningServer(config), words(1, 100)
        assert paths.folder_of(config.server) == places / "run" / "kvcore"
        with ReferenceEngine(random_llama(), EngineArgs(prefix_cache=False), config) as engine:
            serve(engine, prompt)
            until(lambda: server.idle)
            assert serve(engine, prompt)[1] == {"host": 96}
            [memory] = [arena.parent for arena in places.glob("kvcore-*/arena-1")]
            assert stat.S_IMODE(memory.stat().st_mode) == 0o700
        server.close()
        assert not memory.exists()
        assert squatter.lines == ["ready"]


@needs_root
def test_the_memory_of_a_killed_server_is_given_back(places: Path) -> None:
    folder = paths.folder_of(by_default().server)
    killed = RuntimeDir(folder, places)
    os.close(killed.make_arena("arena-1", 4096, huge_pages=False))
    os.close(killed._lock)  # as the kernel does
    own = RuntimeDir(folder, places)
    assert not killed.memory.exists()
    assert own.memory.exists()
    own.close()


@needs_root
def test_a_clear_is_not_written_to_another_users_folder(
    shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (shm / "kv").mkdir(mode=0o777)
    os.chown(shm / "kv", OTHER, OTHER)
    config = settings(shm / "kv")
    with ReferenceEngine(random_llama(), EngineArgs(), config) as engine:
        PendingClears(shm / "kv", engine.leader.manager.keeper.model).write(None)
    assert not list((shm / "kv").iterdir())
    assert "a clear is not written down" in caplog.text


@pytest.mark.parametrize(
    "name", ["/dev/shm/x", "../secret", "arena-1/../../secret", "arena-", "arena-1\n", "arena-²"]
)
def test_memory_outside_the_folder_is_not_mapped(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(bytes(4096))
    (tmp_path / "kv").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="supported are names"):
        open_arena(tmp_path / "kv", name)


def spoil(path: Path, how: str) -> None:
    path.unlink(missing_ok=True)
    elsewhere = path.with_name("elsewhere")
    elsewhere.write_bytes(bytes(4096))
    elsewhere.chmod(0o600)
    if how == "link":
        path.symlink_to(elsewhere)
    elif how == "hard link":
        path.hardlink_to(elsewhere)
    elif how == "pipe":
        os.mkfifo(path, 0o600)
    elif how == "folder":
        path.mkdir(mode=0o600)
    else:
        path.write_bytes(bytes(4096))
        path.chmod(0o666 if how == "writable" else 0o600)
        if how == "owner":
            os.chown(path, OTHER, OTHER)


SPOILT = [
    "link",
    "hard link",
    "pipe",
    "folder",
    "writable",
    pytest.param("owner", marks=needs_root),
]


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("name", ["arena-1", "session-1"])
def test_a_file_that_is_not_the_servers_is_not_used(tmp_path: Path, name: str, how: str) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    spoil(folder / name, how)
    with pytest.raises((ConfigError, TierUnavailable), match=name):
        open_arena(folder, name) if name.startswith("arena") else SessionLock(folder, name)
    with suppress(FileNotFoundError):
        assert stat.S_IMODE((folder / "elsewhere").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_session_in_a_folder_that_others_may_enter_is_not_locked(
    tmp_path: Path, mode: int
) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    spoil(folder / "session-1", "good")
    SessionLock(folder, "session-1").close()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="supported is mode 0700"):
        SessionLock(folder, "session-1")


@pytest.mark.parametrize(
    "table",
    [
        {"server": {"address": "ipc://@kvcore"}},
        {"control": {"address": "ipc://@kvcore"}},
        {"control": {"address": "ipc://*"}},
        {"events": {"endpoint": "ipc://@kvcore"}},
        {"events": {"endpoint": "tcp://*:1", "replay_endpoint": "ipc://@kvcore"}},
    ],
)
def test_abstract_sockets_have_no_owner_and_are_refused(table: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="ipc://"):
        load_config(None, table)
