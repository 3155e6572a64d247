"""Cables that delay and lose packets: by the kernel where it has netem, and by a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, NamedTuple

import pytest

from kvcore.errors import UnsupportedError
from kvcore.testing.waiting import until
from kvcore_devtools.hosts import Facts, Host, Network, keeper

PORT = 4000
LIMIT_S = 300.0
DELAY_S = 0.05


@pytest.fixture(params=["kernel", "process"])
def lossy(
    request: pytest.FixtureRequest, network: Network, monkeypatch: pytest.MonkeyPatch
) -> Network:
    """Whose cables are made worse in this way."""
    facts = network.facts
    if not (facts.netem if request.param == "kernel" else facts.tap):
        pytest.skip(f"by the {request.param}: {facts}")
    monkeypatch.setattr(network, "facts", facts._replace(netem=request.param == "kernel"))
    return network


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]


ECHO = """
import socket, sys
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.bind((sys.argv[1], int(sys.argv[2])))
print("up", flush=True)
while True:
    end.sendto(*end.recvfrom(65536))
"""
PING = """
import socket, sys, time
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.settimeout(5)
times = []
while len(times) < int(sys.argv[3]):
    began = time.monotonic()
    end.sendto(repr(began).encode(), (sys.argv[1], int(sys.argv[2])))
    try:
        while end.recv(100) != repr(began).encode():
            pass
    except TimeoutError:  # the machine stood still
        continue
    times.append(time.monotonic() - began)
print(min(times))
"""


def began(host: Host, argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """A process that has said its first line."""
    process = host.start(argv, stdout=subprocess.PIPE, **options)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def shortest(host: Host, other: Host, count: int = 3) -> float:
    """Seconds to another host and back, the best of ``count`` times."""
    return float(host.run(python(PING, other.address, PORT, count), LIMIT_S))


def test_a_delay_is_added_each_way_and_taken_away(lossy: Network) -> None:
    a, b, store = lossy["a"], lossy["b"], lossy["store"]
    began(b, python(ECHO, b.address, PORT))
    a.slow(delay_s=DELAY_S)
    assert shortest(a, b) >= 2 * DELAY_S
    b.slow(delay_s=DELAY_S)
    assert shortest(a, b) >= 4 * DELAY_S
    assert shortest(store, b) >= 2 * DELAY_S
    a.slow()
    b.heal()
    limit = time.monotonic() + LIMIT_S
    while shortest(a, b) >= 2 * DELAY_S:
        assert time.monotonic() < limit, "it is still there"


class Came(NamedTuple):
    """Numbers of the datagrams that came to a host, in their order."""

    numbers: list[int]
    sent: int

    @property
    def share(self) -> float:
        return len(self.numbers) / self.sent


COUNT = """
import socket, sys
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE: nothing is lost in here
end.bind((sys.argv[1], int(sys.argv[2])))
print("up", flush=True)
while (said := end.recv(100)) != b"end":
    print(said.decode())
end.settimeout(float(sys.argv[3]) or None)
while end.gettimeout():  # what the end has overtaken, on a busy machine much of it
    try:
        said = end.recv(100)
    except TimeoutError:
        break
    if said != b"end":
        print(said.decode())
"""
SEND = """
import socket, sys, time
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
to = sys.argv[1], int(sys.argv[2])  # not connected: who has heard the end hears no more
for number in range(int(sys.argv[3])):
    end.sendto(str(number).encode(), to)
    if number % 20 == 0:
        time.sleep(0.001)
time.sleep(float(sys.argv[4]))
for _ in range(100):
    end.sendto(b"end", to)
"""


def send(host: Host, other: Host, count: int, rest_s: float = 0.0) -> Came:
    """``count`` datagrams, and after ``rest_s`` a word that there are no more.

    Where that may overtake some, the other waits for them until none has come for a while.
    """
    for one, its in ((host, other), (other, host)):  # ARP may be lost as well
        [link] = [
            word
            for line in its.run(["ip", "link", "show", "eth0"]).splitlines()
            for before, word in zip(line.split(), line.split()[1:], strict=False)
            if before == "link/ether"
        ]
        one.run(["ip", "neigh", "replace", its.address, "lladdr", link, "dev", "eth0"])
    counter = began(other, python(COUNT, other.address, PORT, 20 * rest_s))
    host.run(python(SEND, other.address, PORT, count, rest_s), LIMIT_S)
    said, _ = counter.communicate(timeout=LIMIT_S)
    return Came([int(word) for word in said.split()], count)


def test_the_share_of_packets_that_is_lost_is_what_was_said(lossy: Network) -> None:
    a, b = lossy["a"], lossy["b"]
    assert send(a, b, 5000) == Came([*range(5000)], 5000), "a whole cable loses none"
    a.slow(loss=0.2, seed=7)
    for one, other in ((a, b), (b, a)):
        came = send(one, other, 5000)
        assert came.numbers == sorted(set(came.numbers))
        assert 0.766 < came.share < 0.834, "six standard deviations"
    b.slow(loss=0.2, seed=8)
    assert 0.599 < send(a, b, 5000).share < 0.681, "two cables"
    a.slow(loss=1.0)
    assert a.run(python(SEND, b.address, PORT, 1, 0)) == ""
    b.heal()
    a.slow()
    assert send(a, b, 500).share == 1.0


def test_jitter_lets_packets_overtake_each_other(lossy: Network) -> None:
    a, b = lossy["a"], lossy["b"]
    a.slow(delay_s=DELAY_S, jitter_s=DELAY_S)
    came = send(a, b, 1000, rest_s=2 * DELAY_S)
    assert sorted(came.numbers) == list(range(1000))
    assert came.numbers != sorted(came.numbers)


SERVE = """
import hashlib, random, socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
while True:
    connection, _ = server.accept()
    digest, piece = hashlib.sha256(), random.Random(1).randbytes(1 << 16)
    for number in range(int(sys.argv[3]) >> 16):
        piece = number.to_bytes(8, "big") + piece[8:]
        connection.sendall(piece)
        digest.update(piece)
    connection.sendall(digest.digest())
    connection.close()
"""
FETCH = """
import hashlib, socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    digest, last, total = hashlib.sha256(), b"", 0
    while data := connection.recv(1 << 20):
        data = last + data
        digest.update(data[:-32])
        last = data[-32:]
        total += len(data) - len(last)
    print(total, digest.digest() == last)
"""


def transfer(host: Host, server: Host, nbytes: int) -> subprocess.Popen[bytes]:
    server.start(python(SERVE, server.address, PORT, nbytes))
    until(lambda: server.listens(PORT))
    return host.start(python(FETCH, server.address, PORT), stdout=subprocess.PIPE)


def intact(fetching: subprocess.Popen[bytes], nbytes: int) -> bool:
    said, _ = fetching.communicate(timeout=LIMIT_S)
    return said.decode().split() == [str(nbytes), "True"]


@pytest.mark.parametrize(
    ("nbytes", "shape"),
    [
        (32 << 20, {"delay_s": 0.001}),
        (1 << 20, {"delay_s": 0.005, "loss": 0.05}),
        (1 << 20, {"delay_s": 0.005, "jitter_s": 0.005, "loss": 0.01}),
    ],
    ids=["fast", "losing", "jumbled"],
)
def test_what_comes_over_tcp_is_what_was_sent(
    lossy: Network, nbytes: int, shape: dict[str, float]
) -> None:
    """Whatever of its frames the kernel leaves to a network card, which is not there: lengths and
    checksums."""
    lossy["a"].slow(**shape)
    assert intact(transfer(lossy["a"], lossy["b"], nbytes), nbytes)
    lossy["b"].kill()
    assert intact(transfer(lossy["b"], lossy["a"], nbytes), nbytes)


def test_a_connection_lives_through_every_change(lossy: Network) -> None:
    a, b = lossy["a"], lossy["b"]
    if not (lossy.facts.rate or lossy.facts.netem):
        pytest.skip(str(lossy.facts))
    nbytes = 4 << 20
    b.slow(1e6)  # so that it takes seconds
    fetching = transfer(a, b, nbytes)
    for change in (
        lambda: a.slow(delay_s=0.01),
        lambda: a.slow(loss=0.01),
        a.heal,
        lambda: a.slow(delay_s=0.01, jitter_s=0.001),
        lambda: b.slow(1e6, delay_s=0.001),
    ):
        came, limit = a.received, time.monotonic() + LIMIT_S
        while a.received - came < 10_000:
            assert time.monotonic() < limit, "nothing comes"
            time.sleep(0.02)
        assert fetching.poll() is None
        change()
    b.heal()
    assert intact(fetching, nbytes)


def test_a_cable_that_is_cut_stays_so_when_it_is_made_worse(lossy: Network) -> None:
    a, b = lossy["a"], lossy["b"]
    assert send(a, b, 1).share == 1
    counter = began(b, python(COUNT, b.address, PORT))
    for shape in ({"delay_s": 0.001}, {"loss": 0.0}, {"loss": 0.01}):
        a.cut()
        a.slow(**shape)
        a.run(python(SEND, b.address, PORT, 5, 0))
    a.heal()
    a.run(python(SEND, b.address, PORT, 3, 0))
    said, _ = counter.communicate(timeout=LIMIT_S)
    assert said.split() == [b"0", b"1", b"2"]


def test_a_process_that_has_ended_is_no_cable_and_that_is_said(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All it had to carry is lost, which a test must not take for its subject's doing."""
    if not network.facts.tap:
        pytest.skip(str(network.facts))
    monkeypatch.setattr(network, "facts", network.facts._replace(netem=False))
    a, b = network["a"], network["b"]
    began(b, python(ECHO, b.address, PORT))
    for tell in (lambda: a.slow(loss=0.1), a.heal):
        a.slow(delay_s=0.001)
        [process] = keeper.running(network._switch.number, (network._switch.pid,))
        os.kill(process, signal.SIGKILL)
        with pytest.raises(UnsupportedError, match="exit code -9"):
            tell()
        with suppress(UnsupportedError):
            a.heal()
        assert shortest(a, b, 1) > 0
    assert keeper.running(network._switch.number) == [network._switch.pid]


def test_what_this_machine_lacks_is_told(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "facts", Facts("as root", rate=False, netem=False, tap=False))
    assert str(network.facts).count("cannot") == 2
    for shape in ({"delay_s": 0.2}, {"loss": 0.1}, {"bytes_s": 1e6}):
        with pytest.raises(UnsupportedError, match="sch_netem"):
            network["a"].slow(**shape)
    by_process = Facts("as root", rate=True, netem=False, tap=True)
    assert "a process delays" in str(by_process)
    assert str(by_process._replace(netem=True)) == "network namespaces, as root"


@pytest.mark.parametrize(
    "shape", [{"loss": 1.5}, {"loss": -0.1}, {"delay_s": -1}, {"jitter_s": 1}, {"bytes_s": 0}]
)
def test_what_no_cable_does_is_refused(network: Network, shape: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="supported are"):
        network["a"].slow(**shape)
