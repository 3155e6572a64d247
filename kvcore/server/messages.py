"""What a server and its clients say: one of `ServerRequest` or of `ServerReply` in each message.

Orders of operators, and the framing of messages, are in `kvcore.control.messages`.

Every request has a ``ref``, its reply the same one; `OpsEnded`, `WithdrawRequest`, `EnterSession` and `Bye` have no
reply but a refusal. `ControlRequest` may have its reply long after it. A session is spoken in by the
connection that said `Hello`, and by those of its ranks that said `EnterSession`. Prefix keys travel as one
run of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvcore._util.msgpack import MAX_MESSAGE
from kvcore.control.messages import HEADER as HEADER  # the protocol is one, for orders too
from kvcore.control.messages import ControlReply, ControlRequest, Ref, Refused, decode_frames
from kvcore.control.messages import frames as frames
from kvcore.errors import FormatError
from kvcore.model.keys import KEY_BYTES
from kvcore.model.shape import BlockShape
from kvcore.transfer.graph import OpReport, RowError, Span, TransferGraph

MAX_BLOCKS = 1 << 18
"""Blocks of one prompt in a message: 4 million tokens in blocks of 16."""

MAX_REPORTS = 4096
"""Ops that a message tells the end of; who has more sends several."""

Count = Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Keys = Annotated[bytes, Meta(max_length=MAX_BLOCKS * KEY_BYTES)]
PackedTokens = Annotated[bytes, Meta(max_length=MAX_MESSAGE)]
"""Tokens, as `kvcore.model.keys.pack_tokens` packs them."""
Digest = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
TierName = Annotated[str, Meta(max_length=64)]
SourceSpan = tuple[TierName, Count, Count]
"""A tier and the blocks [start, stop) of a chain that it answers."""
MAX_WAIT_S = 86400.0
PackedPromise = tuple[
    Annotated[int, Meta(ge=1, le=MAX_BLOCKS)],
    Annotated[float, Meta(gt=0, le=MAX_WAIT_S)],
    Annotated[str, Meta(max_length=300)],
]
"""`kvcore.manager.base.Promise`."""


class Model(msgspec.Struct, frozen=True, array_like=True):
    """Whose KV: the whole canonical block, not a rank's part, and `model_fingerprint`'s digest."""

    layers: Annotated[int, Meta(ge=1, le=4096)]
    kv_heads: Annotated[int, Meta(ge=1, le=4096)]
    head_dim: Annotated[int, Meta(ge=1, le=65536)]
    block_tokens: Annotated[int, Meta(ge=1, le=1024)]
    dtype: Annotated[str, Meta(max_length=32)]
    kv_factor: Annotated[int, Meta(ge=1, le=2)]
    v_head_dim: Annotated[int, Meta(ge=1, le=65536)] | None
    fingerprint: Annotated[bytes, Meta(min_length=1, max_length=64)]

    @classmethod
    def of(cls, shape: BlockShape, fingerprint: bytes) -> Model:
        return cls(**shape.to_dict(), fingerprint=fingerprint)

    @property
    def shape(self) -> BlockShape:
        """Raises LayoutError when there is no such block."""
        data = msgspec.structs.asdict(self)
        del data["fingerprint"]
        return BlockShape.from_dict(data)


# -- requests -------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A leader asks for a session; ``ranks`` are its workers."""

    ref: Ref
    model: Model
    ranks: Annotated[int, Meta(ge=1, le=4096)]
    version: Annotated[str, Meta(max_length=64)]


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """The session is alive."""

    ref: Ref
    session: Number


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """The session is over, as soon as no worker holds its lock."""

    ref: Ref
    session: Number


class EnterSession(msgspec.Struct, frozen=True, array_like=True, tag="enter"):
    """A rank's connection takes part in a session, whose file has the ``secret``. No reply."""

    ref: Ref
    session: Number
    secret: Annotated[bytes, Meta(max_length=64)]


class MatchRequest(msgspec.Struct, frozen=True, array_like=True, tag="match"):
    """What is held of a chain; ``ask`` a store for more, beyond ``computed`` leading blocks.
    ``promise`` comes with the first question about a prompt."""

    ref: Ref
    session: Number
    keys: Keys
    namespace: Digest
    computed: Count = 0
    ask: bool = False
    promise: PackedPromise | None = None


class LoadRequest(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Plan a load of blocks [start, stop), which `MatchRequest` said to be at ``sources``."""

    ref: Ref
    session: Number
    keys: Keys
    namespace: Digest
    sources: Annotated[list[SourceSpan], Meta(max_length=64)]
    start: Count
    stop: Count
    layers: Annotated[list[Span], Meta(max_length=4096)] = []
    deadline_s: Annotated[float, Meta(gt=0)] | None = None


class SaveRequest(msgspec.Struct, frozen=True, array_like=True, tag="save"):
    """Plan a save of what the host tier lacks of a chain."""

    ref: Ref
    session: Number
    keys: Keys
    namespace: Digest


class HeldRequest(msgspec.Struct, frozen=True, array_like=True, tag="held"):
    """How many leading blocks a tier holds or is receiving."""

    ref: Ref
    session: Number
    tier: TierName
    keys: Keys


class OpsEnded(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Ops have ended on every rank of the session."""

    ref: Ref
    session: Number
    reports: Annotated[list[OpReport], Meta(max_length=MAX_REPORTS)]


class ReadRequest(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """A rank is ready for a read op of a graph. It is carried out once all ranks are."""

    ref: Ref
    session: Number
    graph_id: Number
    op_id: Count
    rank: Annotated[int, Meta(ge=0, lt=4096)]


class WithdrawRequest(msgspec.Struct, frozen=True, array_like=True, tag="withdraw"):
    """A graph was cancelled: reads of it that have not begun will not."""

    ref: Ref
    session: Number
    graph_id: Number


class ClearRequest(msgspec.Struct, frozen=True, array_like=True, tag="clear"):
    """Forget every block (of a namespace) of the session's model."""

    ref: Ref
    session: Number
    namespace: Digest | None = None


class LearnTokens(msgspec.Struct, frozen=True, array_like=True, tag="learn"):
    """Tokens of stored blocks, to be found by `SearchRequest`: ``keys`` and ``tokens`` are those of a
    chain from block ``first`` on, and news from ``keys[start]`` on. No reply."""

    ref: Ref
    session: Number
    namespace: Digest
    keys: Keys
    first: Count
    start: Count
    tokens: PackedTokens


class PublishTokens(msgspec.Struct, frozen=True, array_like=True, tag="spell"):
    """``tokens`` of the blocks of ``keys``, which are being saved, for block events. No reply."""

    ref: Ref
    session: Number
    keys: Keys
    tokens: PackedTokens


class SearchRequest(msgspec.Struct, frozen=True, array_like=True, tag="search"):
    """Which runs of ``tokens`` are stored, wherever they stood."""

    ref: Ref
    session: Number
    namespace: Digest
    tokens: PackedTokens


class PathRequest(msgspec.Struct, frozen=True, array_like=True, tag="trail"):
    """The chain that ends with a block."""

    ref: Ref
    session: Number
    key: Digest


class StatusRequest(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    """How the server is."""

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
)

# -- replies --------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """A session has begun: ``file`` in the folder is its lock. ``tiers`` below the host have a path
    of reads each; ``lease_s`` is the longest silence. ``texts``: whether tokens are kept;
    ``wants_tokens``: whether events tell them. ``node`` is `kvcore.manager.base.Manager.node`'s."""

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
    """The answer to `Heartbeat`: blocks used and slots, by tier."""

    ref: Ref
    tiers: dict[str, tuple[int, int]]


class MatchReply(msgspec.Struct, frozen=True, array_like=True, tag="matched"):
    """The answer to `MatchRequest`; the last five are `kvcore.manager.base.Room`'s. ``asking``: more is
    on its
    way, of a store or of what was promised here; it is said without being asked of the latter."""

    ref: Ref
    sources: list[SourceSpan]
    asking: bool
    full: bool
    free: int
    staging: bool
    lent: bool
    moving: bool


class LaunchReply(msgspec.Struct, frozen=True, array_like=True, tag="launched"):
    """The plan, without the engine's places; None when there is nothing to do, or no room.
    ``first`` is the position in the chain of its first row."""

    ref: Ref
    graph: TransferGraph | None
    first: Count = 0


class ReadReply(msgspec.Struct, frozen=True, array_like=True, tag="rows"):
    """A read has ended; these rows failed."""

    ref: Ref
    failed: dict[int, RowError]


class CountReply(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    """A number: blocks held, copies cleared."""

    ref: Ref
    value: int


class SearchReply(msgspec.Struct, frozen=True, array_like=True, tag="reuses"):
    """The answer to `SearchRequest`: what `kvcore.fusion.segments.Reusable` has, run by run."""

    ref: Ref
    found: list[tuple[int, int, int, Digest]]


class PathReply(msgspec.Struct, frozen=True, array_like=True, tag="trailed"):
    """The answer to `PathRequest`: the chain's keys up to the block, and its namespace."""

    ref: Ref
    keys: Keys
    namespace: Digest


class StatusReply(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """How the server is, as plain data."""

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
)

# -- frames ---------------------------------------------------------------------------------


_requests: msgspec.msgpack.Decoder[ServerRequest] = msgspec.msgpack.Decoder(ServerRequest)
_replies: msgspec.msgpack.Decoder[ServerReply] = msgspec.msgpack.Decoder(ServerReply)


def decode_request(parts: Sequence[bytes]) -> ServerRequest:
    """Raises WrongProtocol, or FormatError for what is no request."""
    return decode_frames(_requests, parts)


def decode_reply(parts: Sequence[bytes]) -> ServerReply:
    """Raises WrongProtocol, or FormatError for what is no reply."""
    return decode_frames(_replies, parts)


def join(keys: Sequence[bytes]) -> bytes:
    """Keys as one run of bytes."""
    return b"".join(keys)


def split(joined: bytes) -> list[bytes]:
    """Raises FormatError unless the run is of whole keys, none twice."""
    keys = [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]
    if len(joined) % KEY_BYTES or len(set(keys)) != len(keys):
        raise FormatError(f"{len(joined)} bytes are no chain of keys of {KEY_BYTES} bytes each")
    return keys
