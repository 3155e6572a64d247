"""The record of what operators ordered: lines of JSON, appended.

{"at": "2026-11-22T04:00:00Z", "who": "uid 1000 pid 42", "order": "clear", "state": "begun", ...}

An order that changes something is recorded as "begun" before it is carried out, and then as "done"
or "abandoned". An order that is not carried out is recorded as "refused".
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from kvcore._util.curve import curve_key
from kvcore._util.fd import Descriptor
from kvcore._util.private import open_file
from kvcore.config.fields import expand_user
from kvcore.errors import ConfigError, TierUnavailable

__all__ = ["AuditLog", "identity"]

_log = logging.getLogger("kvcore.admin")

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT


class AuditLog:
    """Writes to one file or, without a file, only to the log.

    Any thread may write: each line is one write.
    """

    def __init__(self, path: str | None = None) -> None:
        """Create the file with mode 0600. Raises ConfigError if it cannot be written.

        A file that another user owns or may write, and a symbolic link, cannot be written.
        """
        self._path: Path | None = None
        self._file: Descriptor | None = None
        self._torn = False  # the last line was written only in part
        if path is not None:
            self._path = expand_user(path)
            try:
                self._file = Descriptor(open_file(self._path, _FLAGS, adopt=True))
            except OSError as error:
                raise ConfigError(
                    f"control.audit {path!r} cannot be written: {error.strerror}; name a file that "
                    "belongs to this user"
                ) from error

    def begin(self, who: str, order: str, **what: Any) -> None:
        """Record that an order is about to be carried out. Blocks for a short write.

        Raises TierUnavailable if the file cannot be written. The order must not be carried out
        then.
        """
        try:
            self._append(who, order, "begun", what)
        except OSError as error:
            _log.error("an order is refused, because the audit log cannot be written: %s", error)
            raise TierUnavailable(
                f"nothing is done, because control.audit {self._path} cannot be written: "
                f"{error.strerror}"
            ) from error

    def end(self, who: str, order: str, state: str, **what: Any) -> None:
        """Record how an order ended: "done", "abandoned" or "refused". Blocks for a short write.

        If that cannot be written, it is logged.
        """
        try:
            self._append(who, order, state, what)
        except OSError as error:
            _log.error("the audit log lacks a line: %s", error)

    def _append(self, who: str, order: str, state: str, what: dict[str, Any]) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = json.dumps({"at": at, "who": who, "order": order, "state": state, **what})
        _log.info("an order %s", line)
        if self._file is None:
            return
        with self._file as number:
            if not os.fstat(number).st_nlink:
                raise OSError(errno.ENOENT, "the file was removed: restart kvcore")
            data = b"\n" * self._torn + line.encode() + b"\n"
            written = os.write(number, data)
            self._torn = written != len(data)
            if self._torn:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file. Idempotent. Later orders cannot be recorded."""
        if self._file is not None:
            self._file.close()


def identity(frame: Any, *, curve: bool = False) -> str:
    """Return who sent a ZeroMQ frame: the key of a CURVE client, or the process at a local socket.

    The kernel vouches for a local peer, and CURVE for a key, if the socket is locked with it. A
    name given by the client proves nothing, and neither does a key that it names elsewhere.
    """
    from kvcore._util.zmq_socket import local_peer, said

    if curve:
        return f"curve key {curve_key(frame)}"
    if (peer := local_peer(frame)) is not None:
        return f"uid {peer.uid} pid {peer.pid}"
    address = said(frame, "Peer-Address")
    return f"address {address}" if address else "unknown"
