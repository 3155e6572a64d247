"""An engine whose ranks are on several machines, with a server on each.

Here the machines are folders: each has its own server, memory and disk, and no server or rank opens
the folder of another one. What needs a real engine is in tests/integration/hosts.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as tried_with
from hypothesis import strategies as st

from kvcore._util.curve import make_keys
from kvcore.config import Config
from kvcore.errors import ConfigError
from kvcore.runtime.build import hold_tiers
from kvcore.server import machine_server
from kvcore.server.machine_server import MachineServer
from kvcore.testing.engine import EngineArgs, Llama, ReferenceEngine, random_llama
from kvcore.testing.waiting import PATIENCE_S, until
from kvcore_devtools.server_fixture import RunningServer, expire, hurry, serve, settings, words

Plain = Callable[..., list[int]]


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_llama(layers=4, kv_heads=4)


@pytest.fixture(scope="module")
def plain(model: Llama) -> Iterator[Plain]:
    with ReferenceEngine(model, EngineArgs(num_pages=128, prefix_cache=False)) as engine:
        yield lambda prompt: engine.generate([prompt], 6)[0]


class RunningMachine:
    """A `MachineServer` in a thread of this process."""

    def __init__(self, config: Config, machine: int) -> None:
        self.server = MachineServer(config, machine)
        self.server.open()
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server of a machine did not end"


class Engine(ReferenceEngine):
    """A reference engine whose ranks know the folder of their own machine alone."""

    site: "Site"

    def settings_on(self, config: Config, machine: int) -> Config:
        return self.site.config(machine)


class Site:
    """Machines 0 and 1 and so on, with a server on each, and an engine over all of them."""

    def __init__(self, folder: Path, model: Llama, machines: int, **tables: Any) -> None:
        self.folder, self.machines, self._model = folder, machines, model
        self._tables = tables
        self._first: RunningServer | None = None
        self._others: dict[int, RunningMachine] = {}
        self._engines: list[ReferenceEngine] = []

    def config(self, machine: int, folder: str = "") -> Config:
        home = self.folder / (folder or f"machine-{machine}")
        (home / "disk").mkdir(parents=True, exist_ok=True)
        server = {
            "address": f"ipc://{self.folder}/machine-0/kv/server.sock",
            "machines": [f"m{number}" for number in range(1, self.machines)],
            "lease_s": 5.0,
        }
        tables = {"host": {"capacity": "2MiB"}, **self._tables}
        tables["disk"] = {"path": str(home / "disk"), "capacity": "64MiB"}
        tables["server"] = server | self._tables.get("server", {})
        return settings(home / "kv", **tables)

    def start(self, *machines: int) -> None:
        """Start the servers of some machines, by default of all that have none."""
        for machine in machines or range(self.machines):
            if machine == 0 and self._first is None:
                self._first = RunningServer(self.config(0))
            elif machine and machine not in self._others:
                self._others[machine] = RunningMachine(self.config(machine), machine)

    def stop(self, machine: int) -> None:
        if machine == 0 and self._first is not None:
            first, self._first = self._first, None
            first.close()
            first.server.check_integrity()
            for engine in self._engines:  # they need not wait until they believe it
                hurry(engine.leader.manager.keeper)
                expire(engine.leader.manager.keeper)
        elif machine in self._others:
            self._others.pop(machine).close()

    @property
    def first(self) -> RunningServer:
        assert self._first is not None
        return self._first

    def other(self, machine: int) -> MachineServer:
        return self._others[machine].server

    def engine(self, **args: Any) -> ReferenceEngine:
        """Start an engine, and wait until it is joined if all servers are there."""
        args = {"ranks": self.machines, "machines": self.machines, **args}
        Engine.site = self
        engine = Engine(self._model, EngineArgs(**args), self.config(0))
        self._engines.append(engine)
        if self._first is not None and len(self._others) == self.machines - 1:
            self.joined(engine)
        return engine

    def joined(self, engine: ReferenceEngine, after: int | None = None) -> None:
        """Wait until the engine has a session that its server knows, another one than ``after``."""

        def is_known() -> bool:
            member = engine.leader.manager.keeper.member
            sessions = {session.number for session in self.first.server.sessions} - {after}
            return member is not None and member.number in sessions

        until(is_known)

    def settle(self) -> None:
        until(lambda: self.first.idle)

    def evict(self) -> None:
        """Drop all that is in host memory and on disk from host memory. Only while idle."""
        [cache] = self.first.server.models
        cache.manager.index.evictions.evict("host", 10_000)

    def close_engine(self, engine: ReferenceEngine) -> None:
        self._engines.remove(engine)
        engine.settle()
        engine.close()

    def close(self) -> None:
        for engine in self._engines:
            engine.settle()
            engine.check_integrity()
            engine.close()
        self._engines.clear()
        for machine in range(self.machines):
            self.stop(machine)


@pytest.fixture
def site(tmp_path: Path, model: Llama) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def begin(machines: int = 2, **tables: Any) -> Site:
        made.append(Site(tmp_path, model, machines, **tables))
        return made[-1]

    yield begin
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("machines", "ranks", "stages"),
    [(2, 2, 1), (2, 4, 1), (2, 1, 2), (4, 2, 2), (2, 1, 4)],
)
def test_what_one_engine_computes_the_next_loads_from_memory_and_disks(
    site: Callable[..., Site],
    plain: Plain,
    caplog: pytest.LogCaptureFixture,
    machines: int,
    ranks: int,
    stages: int,
) -> None:
    """The ranks of a stage on several machines, a stage on each, and several stages on one."""
    home = site(machines)
    home.start()
    first = home.engine(ranks=ranks, stages=stages)
    prompt = words(1, 100)
    assert serve(first, prompt) == (plain(prompt), {})
    home.settle()
    home.close_engine(first)
    second = home.engine(ranks=ranks, stages=stages, prefix_cache=False)
    assert serve(second, prompt) == (plain(prompt), {"host": 96})
    home.settle()
    home.evict()
    assert serve(second, prompt) == (plain(prompt), {"disk": 96})
    longer = [*prompt, *words(2, 60)]
    assert serve(second, longer)[0] == plain(longer)
    home.settle()
    home.close_engine(second)
    for machine in range(machines):
        home.stop(machine)
    home.start()
    third = home.engine(ranks=ranks, stages=stages)
    answer, reused = serve(third, longer)
    assert answer == plain(longer)
    assert reused == {"disk": 159}
    assert not caplog.records, caplog.text


def test_each_machine_has_its_part_alone(site: Callable[..., Site], plain: Plain) -> None:
    home = site(2)
    home.start()
    engine = home.engine()
    prompt = words(1, 100)
    serve(engine, prompt)
    home.settle()
    [cache] = home.first.server.models
    whole = cache.model.shape
    parts = [cache._transport.worker.arena.shape, home.other(1)._cache(1).worker.arena.shape]
    assert [part.kv_heads for part in parts] == [whole.kv_heads // 2] * 2
    shards = [sorted(p.name for p in (home.folder / f"machine-{n}").rglob("shard-*.data"))
              for n in range(2)]  # fmt: skip
    assert [len(found) for found in shards] == [1, 1]
    assert shards[0] != shards[1]


@pytest.mark.parametrize("machine", [0, 1])
def test_a_server_that_comes_back_has_lost_its_memory_and_kept_its_disk(
    site: Callable[..., Site], plain: Plain, machine: int
) -> None:
    home = site(2)
    home.start()
    engine = home.engine(prefix_cache=False)
    prompt = words(1, 100)
    serve(engine, prompt)
    home.settle()
    [session] = home.first.server.sessions
    home.stop(machine)
    assert serve(engine, prompt)[0] == plain(prompt)
    home.start()
    home.joined(engine, after=session.number)
    found: dict[str, int] = {}

    def is_served() -> bool:
        answer, reused = serve(engine, prompt)
        assert answer == plain(prompt)
        found.update(reused)
        return bool(reused)

    until(is_served)
    assert set(found) == {"disk"}, "what was in one machine's memory is nowhere"


@pytest.mark.parametrize("machine", [0, 1])
def test_what_is_damaged_on_one_machines_disk_is_computed(
    site: Callable[..., Site], plain: Plain, machine: int
) -> None:
    home = site(2)
    home.start()
    first, prompt = home.engine(), words(1, 100)
    serve(first, prompt)
    home.settle()
    home.close_engine(first)
    for number in range(2):
        home.stop(number)
    [file] = (home.folder / f"machine-{machine}").rglob("shard-*.data")
    file.write_bytes(bytes(byte ^ 0xFF for byte in file.read_bytes()))
    home.start()
    second = home.engine(prefix_cache=False)
    assert serve(second, prompt) == (plain(prompt), {})
    home.settle()
    assert serve(second, prompt) == (plain(prompt), {"host": 96})


def test_an_engine_computes_until_all_machines_are_there(
    site: Callable[..., Site], plain: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    home = site(2)
    home.start(0)
    engine, prompt = home.engine(prefix_cache=False), words(1, 100)
    assert serve(engine, prompt) == (plain(prompt), {})
    assert "no kvcore server of machine 1 has joined" in caplog.text
    [machine] = home.first.status()["machines"]
    assert machine == {"machine": 1, "name": "m1", "joined": False}
    home.start(1)
    home.joined(engine)
    assert [each["joined"] for each in home.first.status()["machines"]] == [True]
    assert serve(engine, prompt) == (plain(prompt), {})
    home.settle()
    assert serve(engine, prompt) == (plain(prompt), {"host": 96})


def test_slots_are_kept_while_a_rank_of_another_machine_may_touch_them(
    site: Callable[..., Site], plain: Plain
) -> None:
    home = site(2)
    home.start()
    engine, prompt = home.engine(), words(1, 100)
    serve(engine, prompt)
    home.settle()
    [cache] = home.first.server.models
    ended: list[int] = []
    end = cache.end
    cache.end = lambda number: ended.append(number) or end(number)
    [session] = home.first.server.sessions
    held = engine.workers[1].worker._held  # the rank's on machine 1, which lives on
    engine.workers[1].worker._held = None
    home.close_engine(engine)
    until(lambda: not list(home.first.server.sessions))
    pause = threading.Event()
    pause.wait(0.6)
    assert not ended, "machine 1 still holds it"
    held.close()
    until(lambda: ended == [session.number])


def test_a_server_with_other_settings_is_not_admitted(
    site: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    home = site(2)
    home.start(0)
    other = home.config(1)
    host = other.host.model_copy(update={"capacity": other.host.capacity // 2})
    strange = RunningMachine(other.model_copy(update={"host": host}), 1)
    until(lambda: "goes by other settings than that of machine 0: host" in caplog.text)
    strange.close()
    unnamed = RunningMachine(home.config(1), 7)
    until(lambda: "machine 7 with the keys of nobody" in caplog.text)
    unnamed.close()


@pytest.mark.slow
def test_of_two_servers_of_one_machine_the_later_one_stays(
    site: Callable[..., Site], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier one waits, and comes back when the later one has ended."""
    monkeypatch.setattr(machine_server, "MISFIT_RETRY_S", 0.05)
    home = site(2, server={"lease_s": 3.0})
    home.start()
    machines = home.first.server.machines
    until(lambda: machines.status()[0]["joined"])
    later = RunningMachine(home.config(1, "other"), 1)
    until(lambda: "another kvcore server has joined as machine 1" in caplog.text)
    threading.Event().wait(1.0)
    assert caplog.text.count("has started anew") == 1, "neither pushes the other out again"
    assert caplog.text.count("refuses this one: another kvcore server") == 1, "it is told once"
    later.close()
    until(lambda: "has been silent" in caplog.text)
    until(lambda: home.other(1)._lease_s > 0)


def test_the_server_of_machine_0_is_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--machine 1 with server\.address 'local'"):
        MachineServer(settings(tmp_path / "kv"), 1).open()
    assert not (tmp_path / "kv").exists()


@pytest.mark.slow
def test_over_tcp_a_machine_is_known_by_its_keys(
    site: Callable[..., Site], plain: Plain, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from kvcore_devtools.servers import free_port

    keys = {name: tmp_path / f"keys-{name}" for name in ("all", "m1", "rogue")}
    for name in ("m1", "rogue"):
        make_keys(keys["all"], name)
    for name in ("m1", "rogue"):
        (keys[name] / "clients").mkdir(parents=True)
        for file in ("server.key", f"clients/{name}.key_secret"):
            (keys[name] / file).write_bytes((keys["all"] / file).read_bytes())
    address = f"tcp://127.0.0.1:{free_port()}"
    home = site(2, server={"address": address, "keys": str(keys["all"])})
    home.start(0)

    def with_keys(name: str) -> Config:
        config = home.config(1)
        server = config.server.model_copy(update={"keys": keys[name]})
        return config.model_copy(update={"server": server})

    rogue = RunningMachine(with_keys("rogue"), 1)
    until(lambda: "machine 1 with the keys of rogue" in caplog.text)
    rogue.close()
    home._others[1] = RunningMachine(with_keys("m1"), 1)
    engine, prompt = home.engine(prefix_cache=False), words(1, 100)
    serve(engine, prompt)
    home.settle()
    assert serve(engine, prompt) == (plain(prompt), {"host": 96})


def test_a_machine_that_misses_an_order_gives_up_what_it_has(
    site: Callable[..., Site], plain: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connection breaks for a moment: the first server sends to nobody, and learns it."""
    home = site(2)
    home.start()
    engine, prompt = home.engine(prefix_cache=False), words(1, 100)
    serve(engine, prompt)
    home.settle()
    with caplog.at_level(logging.WARNING):
        home.other(1)._link.renew()
        until(lambda: "its sessions here are over" in caplog.text)
    assert serve(engine, prompt)[0] == plain(prompt)
    home.joined(engine)
    until(lambda: serve(engine, prompt) == (plain(prompt), {"disk": 96}))


def test_what_is_cleared_is_erased_on_every_machine(site: Callable[..., Site]) -> None:
    home = site(2)
    home.start()
    engine = home.engine()
    described = engine.describe(16).by_machine()
    serve(engine, words(1, 100))
    serve(engine, words(2, 100))
    home.settle()
    assert engine.leader.manager.clear() > 0
    home.settle()
    home.close_engine(engine)
    for machine in range(2):
        home.stop(machine)
    for machine in range(2):
        held, release = hold_tiers(home.config(machine), described, machine)
        release()
        assert held["disk"].num_slots > 0
        assert not held["disk"].slots, f"machine {machine} still has blocks"


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("serve"), st.integers(0, 3), st.integers(1, 9)),
        st.tuples(st.just("evict"), st.just(0), st.just(0)),
        st.tuples(st.just("restart"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
    ),
    min_size=4,
    max_size=12,
)


@pytest.mark.slow
@tried_with(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(STEPS)
def test_any_history_answers_as_without_kvcore(
    tmp_path_factory: pytest.TempPathFactory, model: Llama, plain: Plain, steps: list[Any]
) -> None:
    home = Site(tmp_path_factory.mktemp("site"), model, 2)
    home.start()
    engine = home.engine(prefix_cache=False)
    try:
        for what, which, blocks in steps:
            if what == "serve":
                prompt = words(which, 16 * blocks + 5)
                assert serve(engine, prompt)[0] == plain(prompt)
            elif what == "evict":
                home.settle()
                if list(home.first.server.models):
                    home.evict()
            elif what == "restart":
                home.stop(which)
                home.start(which)
            else:
                engine.leader.manager.clear()
        home.joined(engine)
        home.settle()
    finally:
        home.close()
