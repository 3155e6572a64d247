"""What messages of a server are made of: bounded numbers, keys, and the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from kvcore._util.msgpack import MAX_MESSAGE
from kvcore.errors import LayoutError
from kvcore.model.keys import KEY_BYTES
from kvcore.model.points import PointCounts, PointRows
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.transfer.graph import Span

MAX_BLOCKS = 1 << 18
"""Blocks of one prompt in a message: 4 million tokens in blocks of 16."""

MAX_POINT_ROWS = 1 << 16
"""Rows of one resume point."""

MAX_REPORTS = 4096
"""Ended ops in one message; a client with more sends several messages."""

Count = Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Keys = Annotated[bytes, Meta(max_length=MAX_BLOCKS * KEY_BYTES)]
PackedTokens = Annotated[bytes, Meta(max_length=MAX_MESSAGE)]
"""Tokens as `kvcore.model.keys.pack_tokens` packs them."""
Digest = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
TierName = Annotated[str, Meta(max_length=64)]
SourceSpan = tuple[TierName, Count, Count]
"""A tier, and the blocks [start, stop) of a chain that are read from it."""
MAX_WAIT_S = 86400.0
PackedPromise = tuple[
    Annotated[int, Meta(ge=1, le=MAX_BLOCKS)],
    Annotated[float, Meta(gt=0, le=MAX_WAIT_S)],
    Annotated[str, Meta(max_length=300)],
]
"""The fields of `kvcore.manager.base.Promise`."""
Rows = Annotated[int, Meta(ge=0, le=MAX_POINT_ROWS)]


class Points(msgspec.Struct, frozen=True, array_like=True):
    """The fields of `kvcore.model.points.PointCounts`."""

    every: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
    state_rows: Rows
    window_sizes: Annotated[tuple[tuple[Rows, Rows], ...], Meta(max_length=64)]


class Model(msgspec.Struct, frozen=True, array_like=True):
    """The model whose KV is shared: the shape of a whole block, and its fingerprint.

    The shape is the canonical one, not the part of one rank. ``points`` are the rows of its resume
    points, if it has any. ``packed`` tells that blocks are pages of the engine's own format.
    ``machines`` hold the parts of its ranks, ``stages`` are then those of
    `kvcore.model.spec.ModelDescription.by_machine`.
    """

    layers: Annotated[int, Meta(ge=1, le=4096)]
    kv_heads: Annotated[int, Meta(ge=1, le=4096)]
    head_dim: Annotated[int, Meta(ge=1, le=65536)]
    block_tokens: Annotated[int, Meta(ge=1, le=1024)]
    dtype: Annotated[str, Meta(max_length=32)]
    kv_factor: Annotated[int, Meta(ge=1, le=2)]
    v_head_dim: Annotated[int, Meta(ge=1, le=65536)] | None
    fingerprint: Annotated[bytes, Meta(min_length=1, max_length=64)]
    points: Points | None = None
    packed: bool = False
    machines: Annotated[int, Meta(ge=1, le=4096)] = 1
    stages: Annotated[tuple[Span, ...], Meta(max_length=4096)] = ()

    @classmethod
    def of(
        cls,
        shape: BlockShape,
        fingerprint: bytes,
        points: PointRows | None = None,
        *,
        packed: bool = False,
        machines: int = 1,
        stages: Sequence[tuple[int, int]] = (),
    ) -> Model:
        told = None
        if points is not None:
            told = Points(points.every, points.state_rows, points.window_sizes)
        return cls(
            **shape.to_dict(),
            fingerprint=fingerprint,
            points=told,
            packed=packed,
            machines=machines,
            stages=tuple(Span(*stage) for stage in stages),
        )

    @property
    def shape(self) -> BlockShape:
        """Return the shape of a block. Raises LayoutError if there is no such block."""
        data = msgspec.structs.asdict(self)
        for name in ("fingerprint", "points", "packed", "machines", "stages"):
            del data[name]
        return BlockShape.from_dict(data)

    @property
    def described(self) -> ModelDescription:
        """Return the model with each machine as a rank. Raises LayoutError if there is none."""
        layers = LayerGroup(0, self.block_tokens, tuple(range(self.layers)))
        stages = tuple((start, stop) for start, stop in self.stages)
        count = self.machines
        return ModelDescription(
            self.shape, (layers,), self.fingerprint, count, stages=stages, machines=count
        )

    @property
    def point_rows(self) -> PointCounts | None:
        """Return the rows of the resume points. Raises LayoutError if there are no such points."""
        if self.points is None:
            return None
        rows = PointCounts(*msgspec.structs.astuple(self.points))
        if rows.most_rows > MAX_POINT_ROWS:
            raise LayoutError(
                f"resume points of {rows.most_rows} rows; supported are {MAX_POINT_ROWS}"
            )
        return rows
