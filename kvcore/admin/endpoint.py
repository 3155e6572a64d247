"""The socket at which an engine's leader takes commands. A server has a socket of its own.

    kvcore ctl ──▶ thread: decodes, refuses the rest ──commands──▶ leader's `step` ──▶ Admin
               ◀── thread ◀────────────────────────── replies ─────┘

The leader carries a command out when the engine calls it next, so an idle engine answers with its
next step.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Any

from kvcore._util.log_limit import LogLimit
from kvcore._util.threads import GuardedThread
from kvcore._util.zmq_socket import Context, bind_local, is_of_another_user, make_socket, zmq
from kvcore.admin.audit import identity
from kvcore.admin.messages import (
    ControlReply,
    ControlRequest,
    NotACommand,
    Refused,
    decode_command,
    frames,
)
from kvcore.admin.operations import Admin
from kvcore.errors import CapacityError, ConfigError, FormatError, KVCoreError

__all__ = ["Endpoint"]

_log = logging.getLogger("kvcore.admin")

WAITING = 16
"""Commands that may wait for the leader; more are refused."""
POLL_MS = 20
_CLOSE_S = 5.0


class Endpoint:
    """Listens from the start. The leader calls `step` and `close`."""

    def __init__(self, address: str, admin: Admin, fingerprint: bytes) -> None:
        """Bind the socket and start the thread.

        Raises ConfigError if the address cannot be bound.
        """
        self._admin = admin
        self._fingerprint = fingerprint
        self._orders: deque[tuple[bytes, ControlRequest, str]] = deque()
        self._replies: deque[tuple[bytes, ControlReply | Refused]] = deque()
        self._logged = LogLimit()  # lines that a client can cause with every message
        self._ended = threading.Event()
        self._context = Context()
        self._socket = make_socket(self._context, zmq.ROUTER)
        try:
            bind_local(self._socket, address, "control.address")
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = GuardedThread("kvcore-control", self._listen, self._deaf)
        self._thread.start()

    def step(self) -> None:
        """Begin the commands that have come, and go on with a job. Costs nothing without any."""
        while self._orders:
            client, asked, who = self._orders.popleft()
            try:
                self._begin(client, asked, who)
            except Exception as error:  # noqa: BLE001 - an order must not end the engine
                _log.exception("an order failed kind=%s", type(asked.order).__name__)
                self._replies.append((client, Refused(asked.ref, "internal", str(error)[:1000])))
        self._admin.step()

    def _begin(self, client: bytes, asked: ControlRequest, who: str) -> None:
        def tell(told: dict[str, Any] | KVCoreError) -> None:
            reply: ControlReply | Refused = (
                Refused(asked.ref, "control", str(told)[:1000])
                if isinstance(told, KVCoreError)
                else ControlReply(asked.ref, told)
            )
            self._replies.append((client, reply))

        if not self._fingerprint.startswith(asked.model):
            other = ConfigError(
                f"this engine's model is {self._fingerprint.hex()}: name it, or none"
            )
            self._admin.record_refusal(asked.order, who, other)
            tell(other)
        else:
            self._admin.begin(asked.order, who, tell)

    def close(self) -> None:
        """Stop listening, and send the replies that are ready. Blocks for a moment."""
        self._admin.close()
        self._ended.set()
        self._thread.join(_CLOSE_S)

    # -- the thread -----------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._ended.is_set():
            if self._socket.poll(POLL_MS):
                client, *parts = self._socket.recv_multipart(copy=False)
                if is_of_another_user(client):
                    if self._logged.admit("user") is not None:
                        who = identity(client)
                        _log.warning("refused: a message of another user who=%s", who)
                else:
                    self._try_take(client.bytes, parts)
            self._answer()
        self._answer()
        self._context.destroy(linger=100)

    def _deaf(self, error: BaseException) -> None:
        """Close the socket: whoever has an order learns that nobody listens."""
        self._context.destroy(linger=0)

    def _try_take(self, client: bytes, parts: list[Any]) -> None:
        try:
            self._take(client, parts)
        except Exception as error:  # noqa: BLE001 - thread boundary: the next order may be good
            _log.exception("an order could not be taken")
            self._replies.append((client, Refused(0, "internal", str(error)[:1000])))

    def _take(self, client: bytes, parts: list[Any]) -> None:
        try:
            asked = decode_command([part.bytes for part in parts])
        except NotACommand as error:
            self._replies.append((client, Refused(error.ref, "misfit", str(error))))
            return
        except FormatError as error:
            if self._logged.admit("malformed") is not None:
                _log.warning("refused what is no order: %s", error)
            self._replies.append((client, Refused(0, "malformed", str(error)[:1000])))
            return
        if len(self._orders) >= WAITING:
            why = CapacityError(f"{WAITING} orders wait already: ask again")
            self._admin.record_refusal(asked.order, identity(parts[-1]), why)
            self._replies.append((client, Refused(asked.ref, "busy", str(why))))
        else:
            self._orders.append((client, asked, identity(parts[-1])))

    def _answer(self) -> None:
        while self._replies:
            client, reply = self._replies.popleft()
            try:
                self._socket.send_multipart([client, *frames(reply)], zmq.NOBLOCK)
            except (zmq.ZMQError, FormatError) as error:
                if self._logged.admit("lost") is not None:
                    _log.warning("an answer to an order is lost: %s", error)
