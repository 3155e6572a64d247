"""The shape of a canonical block: its layers, heads, tokens and dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvcore.errors import LayoutError

__all__ = ["ITEM_BYTES", "BlockShape", "item_bytes"]

ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}
"""Supported dtypes of KV, by their torch names, and their bytes per element."""


def item_bytes(dtype: str) -> int:
    """Return the bytes per element of ``dtype``; LayoutError if it is not supported."""
    if dtype not in ITEM_BYTES:
        raise LayoutError(f"given KV of dtype {dtype!r}; supported are {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


@dataclass(frozen=True)
class BlockShape:
    """The canonical block of a model, or of one rank's heads and layers.

    ``kv_factor`` is 2 for K and V, and 1 for a latent (MLA), which does not use ``v_head_dim``.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    kv_factor: int = 2
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        sizes = (self.layers, self.kv_heads, self.head_dim, self.block_tokens, self.v_head_dim)
        if any(not isinstance(n, int) or n < 1 for n in sizes) or self.kv_factor not in (1, 2):
            raise LayoutError(f"not the shape of a block: {self}")
        item_bytes(self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return item_bytes(self.dtype)

    def dims(self) -> tuple[int, ...]:
        """Return the head dim of each of the ``kv_factor`` parts."""
        assert self.v_head_dim is not None
        return (self.head_dim, self.v_head_dim)[: self.kv_factor]

    @property
    def head_nbytes(self) -> int:
        """Bytes of one head of one layer of a block: its K and V."""
        return sum(self.dims()) * self.block_tokens * self.itemsize

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer of a block."""
        return self.kv_heads * self.head_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.layers * self.layer_nbytes

    def with_heads(self, kv_heads: int) -> BlockShape:
        """Return the same block with another number of heads, such as a rank's share."""
        return replace(self, kv_heads=kv_heads)

    def with_layers(self, layers: int) -> BlockShape:
        """Return the same block with another number of layers, such as a stage's share."""
        return replace(self, layers=layers)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, which ``from_dict`` reads."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BlockShape:
        """Make a shape from the data of ``to_dict``; LayoutError if it is not such data."""
        try:
            return cls(**data)
        except TypeError as error:
            raise LayoutError(f"not the shape of a block: {data!r} ({error})") from error
