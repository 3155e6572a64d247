"""The messages between a server and its clients: one `ServerRequest` or `ServerReply` each.

The commands of operators, and the framing of messages, are in `kvcore.admin.messages`.

Every request has a ``ref``, and its reply has the same one. `OpsEnded`, `WithdrawRequest`,
`EnterSession`, `LearnTokens`, `PublishTokens` and `Bye` get no reply unless they are refused. The
reply to `ControlRequest` may come long after it. Only the connection that sent `Hello`, and the
connections of its ranks that sent `EnterSession`, may speak in a session. Prefix keys travel as one
run of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvcore.admin.messages import HEADER as HEADER  # the protocol is one, for orders too
from kvcore.admin.messages import ControlReply, ControlRequest, Ref, Refused, decode_frames
from kvcore.admin.messages import frames as frames
from kvcore.errors import FormatError
from kvcore.model.keys import KEY_BYTES
from kvcore.server import machine_messages as machine
from kvcore.server.wire import MAX_BLOCKS as MAX_BLOCKS
from kvcore.server.wire import MAX_POINT_ROWS as MAX_POINT_ROWS
from kvcore.server.wire import MAX_REPORTS as MAX_REPORTS
from kvcore.server.wire import MAX_WAIT_S as MAX_WAIT_S
from kvcore.server.wire import Count as Count
from kvcore.server.wire import Digest as Digest
from kvcore.server.wire import Keys as Keys
from kvcore.server.wire import Model as Model
from kvcore.server.wire import Number as Number
from kvcore.server.wire import PackedPromise as PackedPromise
from kvcore.server.wire import PackedTokens as PackedTokens
from kvcore.server.wire import Points as Points
from kvcore.server.wire import Rows as Rows
from kvcore.server.wire import SourceSpan as SourceSpan
from kvcore.server.wire import TierName as TierName
from kvcore.transfer.graph import OpReport, RowError, Span, TransferGraph

# -- requests -------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A leader asks for a session; ``ranks`` is the number of its workers.

    ``settings`` is the `settings_digest` of its namespaces, empty from older clients.
    """

    ref: Ref
    model: Model
    ranks: Annotated[int, Meta(ge=1, le=4096)]
    version: Annotated[str, Meta(max_length=64)]
    settings: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """The session is alive."""

    ref: Ref
    session: Number


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """The leader leaves; the session ends once no worker holds its lock."""

    ref: Ref
    session: Number


class EnterSession(msgspec.Struct, frozen=True, array_like=True, tag="enter"):
    """A rank's connection joins a session. No reply.

    ``secret`` is the one in the session's file.
    """

    ref: Ref
    session: Number
    secret: Annotated[bytes, Meta(max_length=64)]


class MatchRequest(msgspec.Struct, frozen=True, array_like=True, tag="match"):
    """Ask which blocks of a chain are held.

    With ``ask``, also ask the stores for blocks beyond the first ``computed`` ones. ``promise``
    comes with the first request about a prompt. Of a model with resume points, ``keys`` are those
    within which a point is wanted.
    """

    ref: Ref
    session: Number
    keys: Keys
    namespace: Digest
    computed: Count = 0
    ask: bool = False
    promise: PackedPromise | None = None


class LoadRequest(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Plan a load of blocks [start, stop), which a `MatchReply` found at ``sources``.

    ``fetch`` loads what host memory lacks of the first ``stop`` blocks into host memory alone.
    ``point`` counts the rows of a resume point, in which ``keys`` then end.
    """

    ref: Ref
    session: Number
    keys: Keys
    namespace: Digest
    sources: Annotated[list[SourceSpan], Meta(max_length=64)]
    start: Count
    stop: Count
    layers: Annotated[list[Span], Meta(max_length=4096)] = []
    deadline_s: Annotated[float, Meta(gt=0)] | None = None
    fetch: bool = False
    point: Rows = 0


class SaveRequest(msgspec.Struct, frozen=True, array_like=True, tag="save"):
    """Plan a save of the blocks of a chain that the host tier lacks.

    With ``point``, the rows of the resume point behind them follow.
    """

    ref: Ref
    session: Number
    keys: Keys
    namespace: Digest
    point: bool = False


class HeldRequest(msgspec.Struct, frozen=True, array_like=True, tag="held"):
    """Ask how many leading blocks a tier holds or is receiving.

    With ``point``, those before the last resume point of which that is true.
    """

    ref: Ref
    session: Number
    tier: TierName
    keys: Keys
    point: bool = False


class OpsEnded(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Report ops that have ended on every rank of the session."""

    ref: Ref
    session: Number
    reports: Annotated[list[OpReport], Meta(max_length=MAX_REPORTS)]


class ReadRequest(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """A rank is ready for a read op of a graph.

    The server carries the read out once all ranks are ready.
    """

    ref: Ref
    session: Number
    graph_id: Number
    op_id: Count
    rank: Annotated[int, Meta(ge=0, lt=4096)]


class WithdrawRequest(msgspec.Struct, frozen=True, array_like=True, tag="withdraw"):
    """A graph was cancelled: its reads that have not begun are dropped."""

    ref: Ref
    session: Number
    graph_id: Number


class ClearRequest(msgspec.Struct, frozen=True, array_like=True, tag="clear"):
    """Forget every block of the session's model, or of one of its namespaces."""

    ref: Ref
    session: Number
    namespace: Digest | None = None


class LearnTokens(msgspec.Struct, frozen=True, array_like=True, tag="learn"):
    """Tokens of stored blocks, so that `SearchRequest` finds them. No reply.

    ``keys`` and ``tokens`` are those of a chain from block ``first`` on. The blocks from
    ``keys[start]`` on are new; those before them give the context.
    """

    ref: Ref
    session: Number
    namespace: Digest
    keys: Keys
    first: Count
    start: Count
    tokens: PackedTokens


class PublishTokens(msgspec.Struct, frozen=True, array_like=True, tag="spell"):
    """The tokens of the blocks of ``keys``, which are being saved, for block events. No reply."""

    ref: Ref
    session: Number
    keys: Keys
    tokens: PackedTokens


class SearchRequest(msgspec.Struct, frozen=True, array_like=True, tag="search"):
    """Ask which runs of ``tokens`` are stored, at whatever position they stood."""

    ref: Ref
    session: Number
    namespace: Digest
    tokens: PackedTokens


class PathRequest(msgspec.Struct, frozen=True, array_like=True, tag="trail"):
    """Ask for the chain that ends with a block."""

    ref: Ref
    session: Number
    key: Digest


class StatusRequest(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    """Ask for the server's status."""

    ref: Ref


ServerRequest = (
    Hello
    | Heartbeat
    | Bye
    | EnterSession
    | MatchRequest
    | LoadRequest
    | SaveRequest
    | HeldRequest
    | OpsEnded
    | ReadRequest
    | WithdrawRequest
    | ClearRequest
    | LearnTokens
    | PublishTokens
    | SearchRequest
    | PathRequest
    | StatusRequest
    | ControlRequest
    | machine.Request
)

# -- replies --------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """A session has begun.

    ``file`` is its lock file in the runtime directory. ``tiers`` are the tiers below the host, each
    with the path of its reads. ``stores`` says whether a shared store can be asked. ``lease_s`` is
    the longest silence allowed, in seconds. ``keeps_tokens`` says whether tokens are kept for
    fusion, ``wants_tokens`` whether block events carry tokens. ``node`` is the server's
    `kvcore.manager.base.Manager.node`.
    """

    ref: Ref
    session: Number
    file: Annotated[str, Meta(max_length=255, pattern=r"^[a-z0-9-]+$")]
    tiers: list[tuple[str, str]]
    stores: bool
    lease_s: float
    keeps_tokens: bool = False
    wants_tokens: bool = False
    node: str = ""


class HeartbeatReply(msgspec.Struct, frozen=True, array_like=True, tag="beating"):
    """The reply to `Heartbeat`: blocks used and slots, by tier."""

    ref: Ref
    tiers: dict[str, tuple[int, int]]


class MatchReply(msgspec.Struct, frozen=True, array_like=True, tag="matched"):
    """The reply to `MatchRequest`; ``full`` to ``moving`` are `kvcore.manager.base.Room`'s fields.

    ``asking`` says that more blocks are on their way, from a store or from another engine that
    saves a promised prompt. The latter is reported whether the request had ``ask`` or not.

    If the model has resume points, ``blocks`` are those before the point that was found, whose rows
    ``sources`` cover too. ``beside`` are then the sources of the leading blocks without it.
    """

    ref: Ref
    sources: list[SourceSpan]
    asking: bool
    full: bool
    free: int
    staging: bool
    lent: bool
    moving: bool
    blocks: Count = 0
    beside: list[SourceSpan] = []


class LaunchReply(msgspec.Struct, frozen=True, array_like=True, tag="launched"):
    """The planned graph without the engine's pages; None if there is nothing to do, or no room.

    ``first`` is the position in the chain of the graph's first row.
    """

    ref: Ref
    graph: TransferGraph | None
    first: Count = 0


class ReadReply(msgspec.Struct, frozen=True, array_like=True, tag="rows"):
    """A read has ended; the rows in ``failed`` did not arrive."""

    ref: Ref
    failed: dict[int, RowError]


class CountReply(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    """A number: the blocks held, or the copies cleared."""

    ref: Ref
    value: int


class SearchReply(msgspec.Struct, frozen=True, array_like=True, tag="reuses"):
    """The reply to `SearchRequest`: the fields of `kvcore.fusion.segments.Reusable`, run by run."""

    ref: Ref
    found: list[tuple[int, int, int, Digest]]


class PathReply(msgspec.Struct, frozen=True, array_like=True, tag="trailed"):
    """The reply to `PathRequest`: the chain's keys up to the block, and its namespace."""

    ref: Ref
    keys: Keys
    namespace: Digest


class StatusReply(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """The server's status as plain data."""

    ref: Ref
    status: dict[str, Any]


ServerReply = (
    Welcome
    | Refused
    | HeartbeatReply
    | MatchReply
    | LaunchReply
    | ReadReply
    | CountReply
    | SearchReply
    | PathReply
    | StatusReply
    | ControlReply
    | machine.Order
)

# -- frames ---------------------------------------------------------------------------------


_requests: msgspec.msgpack.Decoder[ServerRequest] = msgspec.msgpack.Decoder(ServerRequest)
_replies: msgspec.msgpack.Decoder[ServerReply] = msgspec.msgpack.Decoder(ServerReply)


def decode_request(parts: Sequence[bytes]) -> ServerRequest:
    """Return the request in ``parts``. Raises WrongProtocol, or FormatError if it is none."""
    return decode_frames(_requests, parts)


def decode_reply(parts: Sequence[bytes]) -> ServerReply:
    """Return the reply in ``parts``. Raises WrongProtocol, or FormatError if it is none."""
    return decode_frames(_replies, parts)


def join(keys: Sequence[bytes]) -> bytes:
    """Return keys as one run of bytes."""
    return b"".join(keys)


def split(joined: bytes) -> list[bytes]:
    """Return the keys in a run of bytes.

    Raises FormatError if the run does not consist of whole keys, or holds a key twice.
    """
    keys = [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]
    if len(joined) % KEY_BYTES or len(set(keys)) != len(keys):
        raise FormatError(f"{len(joined)} bytes are no chain of keys of {KEY_BYTES} bytes each")
    return keys
