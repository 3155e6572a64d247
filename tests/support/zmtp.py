"""What a stranger on the network can send: ZMTP 3 by hand, without a ZeroMQ library's restraint."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from pathlib import Path

MORE, LONG, COMMAND = 1, 2, 4
MIB = 1 << 20


def grown(act: Callable[[], object]) -> int:
    """Return how far this process's resident bytes rose above what they were, during ``act``."""
    before = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now's
    act()
    status = Path("/proc/self/status").read_text()
    [peak] = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peak) * 1024 - before


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body


class Stranger:
    """One raw connection to tcp://HOST:PORT."""

    def __init__(self, address: str, mechanism: bytes = b"NULL") -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 30)
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)
        self.socket.sendall(greeting)

    def ready(self, kind: bytes = b"DEALER", **more: bytes) -> Stranger:
        """End the handshake of one without keys. ``more`` are properties of the connection."""
        self.socket.recv(64, socket.MSG_WAITALL)
        said = {b"Socket-Type": kind, **{key.encode(): value for key, value in more.items()}}
        properties = b"".join(
            bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
            for name, value in said.items()
        )
        self.socket.sendall(frame(b"\x05READY" + properties, COMMAND))
        _, size = self.socket.recv(2, socket.MSG_WAITALL)  # a message before this is an error
        self.socket.recv(size, socket.MSG_WAITALL)
        return self

    def flood(self, piece: bytes, nbytes: int) -> int:
        """Send ``piece`` until ``nbytes`` are sent, the connection is closed, or nobody reads.

        Returns the bytes sent.
        """
        self.socket.settimeout(2)
        many = piece * max(1, 65536 // len(piece))
        sent = 0
        try:
            while sent < nbytes:
                sent += self.socket.send(many)
        except OSError:
            pass
        return sent

    def closed(self) -> bool:
        """Return True if the other side closes the connection, whatever it says before."""
        self.socket.settimeout(30)
        try:
            while self.socket.recv(65536):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True
