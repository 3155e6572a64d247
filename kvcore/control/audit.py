"""The record of what operators changed: one line of JSON each, appended.

{"at": "2026-11-22T04:00:00Z", "who": "uid 1000 pid 42", "order": "clear", ...}
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

from kvcore._util.curve import curve_key
from kvcore._util.fd import Descriptor
from kvcore.config.fields import expand_user
from kvcore.errors import ConfigError

__all__ = ["AuditLog", "identity"]

_log = logging.getLogger("kvcore.control")

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class AuditLog:
    """Writes to one file or, without a file, only to the log.

    Any thread may write: each line is one write.
    """

    def __init__(self, path: str | None = None) -> None:
        """Create the file with mode 0600. Raises ConfigError if it cannot be written."""
        self._file: Descriptor | None = None
        if path is not None:
            try:
                self._file = Descriptor(os.open(expand_user(path), _FLAGS, 0o600))
                with self._file as number:
                    os.fchmod(number, 0o600)
            except OSError as error:
                self.close()
                raise ConfigError(
                    f"control.audit {path!r} cannot be written: {error.strerror}; name a file that "
                    "belongs to this user"
                ) from error

    def write(self, who: str, order: str, **what: Any) -> None:
        """Record that ``who`` had the command ``order`` carried out. Blocks for a short write."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = json.dumps({"at": at, "who": who, "order": order, **what})
        _log.info("an order was carried out %s", line)
        if self._file is None:
            return
        try:
            with self._file as number:
                os.write(number, line.encode() + b"\n")
        except OSError as error:
            _log.error("the audit log lacks a line: %s", error)

    def close(self) -> None:
        """Close the file. Idempotent.

        Later records only go to the log, with an error.
        """
        if self._file is not None:
            self._file.close()


def identity(frame: Any, *, curve: bool = False) -> str:
    """Return who sent a ZeroMQ frame: the key of a CURVE client, or the process at a local socket.

    The kernel vouches for a local peer, and CURVE for a key, if the socket is locked with it. A
    name given by the client proves nothing, and neither does a key that it names elsewhere.
    """
    from kvcore._util.zmq_socket import local_peer, zmq

    if curve:
        return f"curve key {curve_key(frame)}"
    if (peer := local_peer(frame)) is not None:
        return f"uid {peer.uid} pid {peer.pid}"
    try:
        return f"address {frame.get('Peer-Address')}"
    except zmq.ZMQError:
        return "unknown"
