"""Two engines on two hosts share a store on a third, or each other's memory, and what goes wrong
between them costs recomputation: answers stay those of an engine without a cache, and nothing waits
past its deadline.

    host a: engine ──┐
                     ├── switch ── host store: Redis, or Mooncake's master and a client that lends
    host b: engine ──┘
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvcore.testing.waiting import until

pytest.importorskip("transformers")

from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.testing.engine import EngineArgs, ReferenceEngine, random_llama
from kvcore_devtools.hosts import Network
from kvcore_devtools.servers import (
    Server,
    Start,
    mooncake_lender,
    mooncake_master,
    need_client,
    redis_like,
)

ANSWER = 6
LONG = 800
"""Tokens of a prompt whose KV, 50 blocks of 16 KiB, takes seconds on a `SLOW` cable."""
SLOW = 200_000
"""Bytes a second."""
RETURNS = 60
"""Seconds, and prompts, after which a store that is back is used: a breaker pauses for 5 s, which
may have doubled."""
PEER_PORT = 7801
SLACK_S = 60.0
"""What a busy machine may take longer. A request that hangs waits for ever."""
SLICE_S = 0.1
"""Time is counted in such slices: one in which this process stood still is one, however long."""


class Pace(NamedTuple):
    """What an engine waits for, in seconds: to hear what the store holds, for its answer to one
    request, and for a load as a whole."""

    lookup_s: float
    timeout_s: float
    load_s: float

    @property
    def bound_s(self) -> float:
        """A request is looked up, and loaded, at most twice; then it is computed."""
        return 2 * (self.lookup_s + self.load_s) + SLACK_S

    @property
    def options(self) -> dict[str, Any]:
        return {
            "lookup_s": self.lookup_s,
            "timeout_s": self.timeout_s,
            "deadline_s": self.timeout_s,
            "retries": 0,
        }


PATIENT = Pace(60.0, 60.0, 60.0)
"""Where nothing is to be late."""
HURRIED = Pace(10.0, 2.0, 3.0)
Plain = Callable[[Sequence[int]], list[int]]


class Store(NamedTuple):
    """``server``, where there is one, answers questions; ``lender``, with Mooncake, has the
    blocks."""

    plugin: str
    options: dict[str, Any]
    server: Server | None = None
    lender: Server | None = None


def redis(start: Start, network: Network, *more: str) -> Store:
    need_client("redis")
    host = network["store"]
    server = start(redis_like("redis-server", *more, bind=host.address), host)
    return Store("redis", {"url": f"redis://{server.address}/0"}, server)


def mooncake(start: Start, network: Network, lent: int = 64 << 20) -> Store:
    need_client("mooncake.store")
    host = network["store"]
    server = start(mooncake_master(), host)
    lender = start(mooncake_lender(server.address, host.address, lent), host)
    return Store("mooncake", {"master": server.address, "lend": "0"}, server, lender)


def peer(start: Start, network: Network) -> Store:
    """No server: the engines lend each other memory."""
    need_client("nixl_cu13")
    nodes = [f"{network[name].address}:{PEER_PORT}" for name in ("a", "b")]
    return Store("peer", {"peers": nodes, "lend": "16MiB"})


STORES = {"peer": peer, "mooncake": mooncake, "redis": redis}
WITH_SERVERS = ("mooncake", "redis")
_faults: Counter[str] = Counter()


def on_each(*names: str) -> pytest.MarkDecorator:
    """Run a fault on each of these stores.

    In `make test` it runs on one of them, which has had the fewest faults so far. The others are
    left to `make test-all`.
    """
    turn = min(names, key=lambda name: _faults[name])
    _faults[turn] += 1
    return pytest.mark.parametrize(
        "store",
        [
            pytest.param(name, marks=[] if name == turn else pytest.mark.exhaustive)
            for name in names
        ],
        indirect=True,
    )


def words(seed: int, count: int = LONG) -> list[int]:
    picks = random.Random(seed)
    return [picks.randrange(1, 512) for _ in range(count)]


@pytest.fixture(scope="module")
def plain() -> Iterator[Plain]:
    """Answers of an engine without kvcore, on no host."""
    with ReferenceEngine(random_llama(), EngineArgs(prefix_cache=False)) as engine:
        answers: dict[tuple[int, ...], list[int]] = {}

        def answer(prompt: Sequence[int]) -> list[int]:
            if tuple(prompt) not in answers:
                [answers[tuple(prompt)]] = engine.generate([prompt], ANSWER)
            return answers[tuple(prompt)]

        yield answer


class Engines:
    """Starts engines on hosts."""

    def __init__(self, network: Network, folder: Path) -> None:
        self._network = network
        self._folder = folder
        self.made: list[EngineProcess] = []

    def start(self, name: str, store: Store, pace: Pace) -> EngineProcess:
        """Returns at once: the first call waits."""
        host = self._network[name]
        options = {**store.options, **pace.options}
        if store.plugin == "mooncake":
            options["host"] = host.address
        if store.plugin == "peer":
            options["listen"] = f"{host.address}:{PEER_PORT}"
            options["trusted_network"] = True
        far = {"plugin": store.plugin, "capacity": "16MiB", "options": options}
        self.made.append(
            EngineProcess(
                "random",
                engine="reference",
                within=host.command,
                env={"UCX_TLS": "tcp"},  # hosts of one machine would share memory
                log=self._folder / f"engine-{name}.log",
                kvcore={
                    "host": {"capacity": "16MiB", "huge_pages": False},
                    "transfer": {"load_deadline_s": pace.load_s},
                    "tiers": {"far": far},
                },
                prefix_cache=False,
            )
        )
        return self.made[-1]

    def pair(self, store: Store, pace: Pace) -> tuple[EngineProcess, EngineProcess]:
        """One that nothing hurries on host a, another at ``pace`` on host b."""
        return self.start("a", store, PATIENT), self.start("b", store, pace)


@pytest.fixture
def engines(network: Network, tmp_path: Path) -> Iterator[Engines]:
    made = Engines(network, tmp_path)
    yield made
    for engine in made.made:
        engine.kill()


@pytest.fixture
def store(request: pytest.FixtureRequest, start_server: Start, network: Network) -> Store:
    return STORES[request.param](start_server, network)


def ask(engine: EngineProcess, prompt: Sequence[int], pace: Pace = HURRIED) -> Generation:
    """A greedy answer, which comes in time."""
    return in_time(engine.submit(prompt, ANSWER), pace)


def in_time(answer: Future[Generation], pace: Pace = HURRIED) -> Generation:
    for _ in range(int(pace.bound_s / SLICE_S)):
        with suppress(FutureTimeout):
            return answer.result(SLICE_S)
    raise AssertionError(f"no answer in {pace.bound_s} s: a request hangs")


def share(engine: EngineProcess, prompt: Sequence[int]) -> list[int]:
    """Answer, with the blocks in the store at the end."""
    got = ask(engine, prompt, PATIENT)
    engine.settle()
    return got.token_ids


def far(got: Generation) -> int:
    """Prompt tokens that came from the store."""
    return got.tiers.get("far", 0)


def need_loss(network: Network) -> None:
    if not (network.facts.netem or network.facts.tap):
        pytest.skip(str(network.facts))


def begin_to_load(network: Network, b: EngineProcess, prompt: Sequence[int]) -> Future[Generation]:
    """A request on host b whose KV is on its way, over a slow cable, when this returns."""
    b.wait_ready()
    network["b"].slow(SLOW)
    before = network["b"].received
    answer = b.submit(prompt, ANSWER)
    until(lambda: network["b"].received - before > SLOW // 2 or answer.done())
    assert not answer.done(), "the load was over, or never began"
    return answer


def reuse_returns(a: EngineProcess, b: EngineProcess, plain: Plain) -> None:
    """AssertionError unless b loads again, sooner or later, what a has shared by then."""
    for seed in range(1000, 1000 + RETURNS):
        prompt = words(seed, 100)
        assert share(a, prompt) == plain(prompt)
        got = ask(b, prompt)
        assert got.token_ids == plain(prompt)
        if far(got):
            return
        time.sleep(1)
    raise AssertionError("host b never loads again")


@on_each(*STORES)
def test_what_one_host_computes_the_other_loads(
    store: Store, engines: Engines, plain: Plain, network: Network
) -> None:
    a, b = engines.pair(store, PATIENT)
    prompt = words(1, 100)
    assert share(a, prompt) == plain(prompt)
    before = network["b"].received
    got = ask(b, prompt, PATIENT)
    assert (got.token_ids, far(got)) == (plain(prompt), 96)
    assert network["b"].received - before > 6 * 16384, "over the cable"
    longer = [*prompt, *words(2, 60)]
    assert share(b, longer) == plain(longer)
    assert far(ask(a, longer, PATIENT)) == 63


@on_each(*STORES)
def test_a_host_that_is_cut_off_in_the_middle_computes(
    store: Store, engines: Engines, plain: Plain, network: Network
) -> None:
    a, b = engines.pair(store, HURRIED)
    first, second = words(3), words(4)
    share(a, first)
    share(a, second)
    answer = begin_to_load(network, b, first)
    network["b"].cut()
    got = in_time(answer)
    assert (got.token_ids, far(got)) == (plain(first), 0)
    for prompt in (second, words(5)):
        got = ask(b, prompt)
        assert (got.token_ids, far(got)) == (plain(prompt), 0)
    network["b"].heal()
    reuse_returns(a, b, plain)


@pytest.mark.exhaustive  # a load is late on a cable that delays, below
@on_each(*WITH_SERVERS)
def test_a_load_that_is_late_on_a_slow_cable_is_computed(
    store: Store, engines: Engines, plain: Plain, network: Network
) -> None:
    a, b = engines.pair(store, HURRIED)
    prompt = words(6)
    share(a, prompt)
    network["b"].slow(SLOW / 4)  # 16 s for the prompt
    before = network["b"].received
    got = ask(b, prompt)
    assert (got.token_ids, far(got)) == (plain(prompt), 0)
    assert network["b"].received - before > 16384, "it was on its way"
    network["b"].heal()
    reuse_returns(a, b, plain)


@on_each(*STORES)
def test_a_cable_that_delays_and_loses_costs_time_alone(
    store: Store, engines: Engines, plain: Plain, network: Network
) -> None:
    """What comes before its deadline is used, and what does not is computed."""
    need_loss(network)
    for name in ("a", "b"):  # before they connect
        network[name].slow(delay_s=0.05, loss=0.02)
    a, b = engines.pair(store, HURRIED)
    reuse_returns(a, b, plain)
    prompt, late = words(12, 300), words(13, 100)
    assert share(a, prompt) == plain(prompt)
    assert ask(b, prompt).token_ids == plain(prompt)
    assert share(a, late) == plain(late)
    network["b"].slow(delay_s=HURRIED.load_s)
    got = ask(b, late)
    assert (got.token_ids, far(got)) == (plain(late), 0)
    network.heal()
    reuse_returns(a, b, plain)


@on_each("redis", "peer")
def test_a_cable_that_loses_most_has_the_store_left_alone_until_it_is_good(
    store: Store, engines: Engines, plain: Plain, network: Network
) -> None:
    need_loss(network)
    a, b = engines.pair(store, HURRIED)
    prompt = words(14)
    share(a, prompt)
    answer = begin_to_load(network, b, prompt)
    network["b"].slow(SLOW, loss=0.6)
    assert in_time(answer).token_ids == plain(prompt)
    for seed in range(50, 50 + RETURNS):
        if "tier left alone" in b.log.read_text():
            break
        prompt = words(seed, 200)
        share(a, prompt)
        assert ask(b, prompt).token_ids == plain(prompt)
    else:
        raise AssertionError("the store is asked again and again")
    network["b"].heal()
    reuse_returns(a, b, plain)
    assert "tier works again" in b.log.read_text()


@on_each(*WITH_SERVERS)
def test_a_server_that_is_killed_in_the_middle_costs_recomputation(
    store: Store, engines: Engines, plain: Plain, network: Network
) -> None:
    """Redis, or Mooncake's master: blocks that are on their way from a client may still come."""
    a, b = engines.pair(store, HURRIED)
    prompt = words(7)
    share(a, prompt)
    answer = begin_to_load(network, b, prompt)
    assert store.server is not None
    store.server.kill()
    assert in_time(answer).token_ids == plain(prompt)
    network["b"].heal()
    got = ask(b, words(8))
    assert (got.token_ids, far(got)) == (plain(words(8)), 0)
    store.server.start()
    reuse_returns(a, b, plain)


@pytest.mark.exhaustive
def test_a_client_whose_memory_is_gone_costs_recomputation(
    start_server: Start, engines: Engines, plain: Plain, network: Network
) -> None:
    """Mooncake's master still names the client that had the blocks."""
    store = mooncake(start_server, network)
    a, b = engines.pair(store, HURRIED)
    first, second = words(9), words(10)
    share(a, first)
    share(a, second)
    answer = begin_to_load(network, b, first)
    assert store.lender is not None
    store.lender.kill()
    assert in_time(answer).token_ids == plain(first)
    network["b"].heal()
    assert ask(b, second).token_ids == plain(second)
    store.lender.start()
    reuse_returns(a, b, plain)


@on_each(*WITH_SERVERS)
def test_an_engine_killed_while_it_writes_leaves_nothing_torn(
    store: Store, engines: Engines, plain: Plain, network: Network
) -> None:
    a, b = engines.pair(store, PATIENT)
    prompt = words(11)
    a.wait_ready()
    b.wait_ready()
    host = network["a"]
    host.slow(SLOW)
    before = host.sent
    a.submit(prompt, ANSWER)
    until(lambda: host.sent - before > SLOW // 2)
    host.cut()  # else the kernel would still send what the dead one has given it
    a.kill()
    assert host.sent - before < LONG // 16 * 16384, "killed in the middle"
    got = ask(b, prompt, PATIENT)
    assert got.token_ids == plain(prompt)
    assert far(got) < LONG - 16, "what was not written is not there"
    b.settle()
    third = engines.start("store", store, PATIENT)
    again = ask(third, prompt, PATIENT)
    assert again.token_ids == plain(prompt)


def test_a_full_store_refuses_and_nobody_minds(
    start_server: Start, engines: Engines, plain: Plain, network: Network
) -> None:
    store = redis(start_server, network, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    a, b = engines.pair(store, PATIENT)
    prompts = [words(seed) for seed in range(20, 26)]
    for prompt in prompts:
        assert share(a, prompt) == plain(prompt)
    found = [ask(b, prompt, PATIENT) for prompt in prompts]
    assert [got.token_ids for got in found] == [plain(prompt) for prompt in prompts]
    assert far(found[0]) == LONG - 1
    assert sum(map(far, found)) < len(prompts) * LONG // 2, "5 MB in less than 3"


@pytest.mark.exhaustive
def test_a_full_mooncake_forgets_and_nobody_minds(
    start_server: Start, engines: Engines, plain: Plain, network: Network
) -> None:
    store = mooncake(start_server, network, 16 << 20)
    a, b = engines.pair(store, PATIENT)
    prompts = [words(seed, 1900) for seed in range(30, 41)]
    for prompt in prompts:
        assert share(a, prompt) == plain(prompt)
    found = [ask(b, prompt, PATIENT) for prompt in prompts]
    assert [got.token_ids for got in found] == [plain(prompt) for prompt in prompts]
    assert sum(map(far, found)) < len(prompts) * 1888, "21 MB in 16 MiB"
    reuse_returns(a, b, plain)
