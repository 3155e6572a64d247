"""The kit itself: hosts reach each other, cables break, and nothing is left of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kvcore_devtools.hosts import Host, Network, keeper, why_not
from kvcore_devtools.hosts import network as network_module

PORT = 4000
SERVE = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
while True:
    connection, _ = server.accept()
    connection.sendall(b"x" * int(sys.argv[3]))
    connection.close()
"""
FETCH = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), int(sys.argv[3])) as connection:
        total = 0
        while data := connection.recv(65536):
            total += len(data)
    print(total)
except TimeoutError:
    print("silence")
"""


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]


def serve(host: Host, nbytes: int) -> None:
    """Whoever connects to the host gets so many bytes."""
    host.start(python(SERVE, host.address, PORT, nbytes))
    limit = time.monotonic() + 60
    while not host.listens(PORT):
        assert time.monotonic() < limit
        time.sleep(0.02)


def fetch(host: Host, server: Host, patience_s: int = 10) -> str:
    return host.run(python(FETCH, server.address, PORT, patience_s)).strip()


def test_a_cable_that_is_cut_says_nothing_and_heals(network: Network) -> None:
    a, b, store = network["a"], network["b"], network["store"]
    serve(store, 1000)
    assert fetch(a, store) == fetch(b, store) == "1000"
    before = a.received
    b.cut()
    assert fetch(b, store, patience_s=2) == "silence"
    assert "state UP" in b.run(["ip", "link", "show", "eth0"]), "the host is not told"
    assert fetch(a, store) == "1000", "the others go on"
    assert a.received > before
    b.heal()
    assert fetch(b, store) == "1000"


def test_a_slow_cable_takes_its_time_both_ways(network: Network) -> None:
    if not (network.facts.rate or network.facts.netem):
        pytest.skip(str(network.facts))
    a, b = network["a"], network["b"]
    serve(a, 200_000)
    serve(b, 200_000)
    a.slow(100_000)
    for one, other in ((a, b), (b, a)):
        began = time.monotonic()
        assert fetch(one, other) == "200000"
        assert time.monotonic() - began > 1.0, "two seconds, less what may go at once"


def test_the_power_goes_and_comes_back(network: Network) -> None:
    host = network["a"]
    process = host.start(["sh", "-c", "sleep 600 & sleep 600 & wait"])
    while len(keeper.running(host._namespace.number)) < 4:
        time.sleep(0.02)
    host.kill()
    assert process.returncode == -signal.SIGKILL
    assert keeper.running(host._namespace.number) == [host.pid]
    assert host.run(["echo", "back"]) == "back\n"


def test_what_is_still_on_its_way_to_the_host_does_not_arrive(network: Network) -> None:
    """The power goes before a process that was started has entered the host's namespace."""
    host = network["a"]
    for _ in range(20):
        process = host.start(["sleep", "600"])
        host.kill()
        assert process.returncode == -signal.SIGKILL
        assert keeper.running(host._namespace.number) == [host.pid]


MAKER = """
import os, signal, sys
from kvcore_devtools.hosts import Network
from kvcore_devtools.hosts import keeper
network = Network("a", "b").__enter__()
network["b"].start(["sleep", "600"])
if network.facts.tap and not network.facts.netem:
    network["b"].slow(delay_s=0.1)
spaces = [network._switch, *(host._namespace for host in network.values())]
print(*(pid for space in spaces for pid in keeper.running(space.number)), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
raise RuntimeError("a failure in the middle")
"""


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_nothing_is_left_however_its_maker_ends(network: Network, how: str) -> None:
    """``network`` is there to skip the test where there is none."""
    done = subprocess.run(
        [sys.executable, "-c", MAKER, how], stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == (-signal.SIGKILL if how == "killed" else 1)
    pids = [int(word) for word in done.stdout.split()]
    cables = network.facts.tap and not network.facts.netem
    assert len(pids) == 4 + cables, "three keepers, a sleeper and a cable"
    limit = time.monotonic() + 60
    while any(keeper.namespace_of(pid) for pid in pids):
        assert time.monotonic() < limit, "a process of the network still runs"
        time.sleep(0.02)


def test_a_keeper_does_not_keep_its_makers_namespace() -> None:
    """It would end everything that runs there."""
    own = keeper.namespace_of("self")
    done = subprocess.run(
        [sys.executable, keeper.__file__, str(own)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "start it in one of its own" in done.stderr


def test_the_machine_itself_is_not_touched(network: Network) -> None:
    names = {name for _, name in socket.if_nameindex()}
    assert not names & {"hub", "port1", "port2", "port3"}
    assert keeper.namespace_of("self") not in {
        network._switch.number,
        *(host._namespace.number for host in network.values()),
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_without_privileges_it_works_or_says_why_not(tmp_path: Path) -> None:
    """Somebody else has the interpreter of the system, and what kvcore needs to say an error."""
    python = Path("/usr/bin/python3")
    if not python.exists():
        pytest.skip(f"no {python}: another's interpreter cannot be told")
    code = """
    from kvcore_devtools.hosts import why_not, Network
    reason = why_not()
    if reason is None:
        with Network("a") as network:
            network["a"].cut()
            print(network["a"].run(["id", "-u"]).strip(), network.facts)
    else:
        print(reason)
    """
    root = Path(network_module.__file__).resolve().parents[2]
    done = subprocess.run(
        [str(python), "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
        user=65534,
        group=65534,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    if "Permission denied" in done.stderr or "No module named 'kvcore" in done.stderr:
        pytest.skip("another user may not read this tree")
    assert done.returncode == 0, done.stderr
    assert "in a user namespace" in done.stdout


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_module, "_SEARCHED", "/nowhere")
    assert "install util-linux" in str(why_not())


@pytest.mark.parametrize("names", [(), ("a", "a")])
def test_names_are_there_and_differ(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="different names"):
        Network(*names)
