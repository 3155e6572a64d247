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
