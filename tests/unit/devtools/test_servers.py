"""What the tests of servers stand on."""

import socket
import subprocess
import sys

from kvcore_devtools.servers import free_port

OTHER = """
from kvcore_devtools.servers import free_port
print(*(free_port() for _ in range(300)), flush=True)
input()
"""


def test_no_two_processes_are_given_one_port() -> None:
    """Also while nothing listens on it yet, which is when two servers would meet there."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", OTHER], stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None
        theirs = [int(word) for word in other.stdout.readline().split()]
        ours = [free_port() for _ in range(300)]
        other.communicate(b"\n")
    assert len({*theirs, *ours}) == 600
    socket.create_server(("127.0.0.1", ours[0])).close()


def test_successive_ports_are_all_reserved() -> None:
    """A node has a port for each rank."""
    first = [free_port(3) for _ in range(200)]
    assert len({port + more for port in first for more in range(3)} | {free_port()}) == 601
