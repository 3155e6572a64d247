"""An engine's own pages as a model of the server: each page is a chain of one block.

The server is told the size of a page and nothing else. What makes two pages of equal keys the same
bytes is in the blocks' keys (`kvcore.runtime.page_store`), so that all pages of one size are one
model, with one share of host memory.
"""

from __future__ import annotations

import hashlib

from kvcore.config import Config
from kvcore.errors import UnsupportedError
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.runtime.page_store import oldest_first

__all__ = ["for_pages", "is_of_pages", "page_model"]

_MAX_HEADS, _MAX_DIM = 4096, 65536
"""The most that `kvcore.server.messages.Model` carries of each."""


def page_model(nbytes: int) -> ModelDescription:
    """Return the model whose blocks are pages of ``nbytes`` bytes.

    Raises UnsupportedError for a size that is no product of two numbers of the protocol.
    """
    smallest = -(-nbytes // _MAX_DIM)
    heads = next((n for n in range(smallest, _MAX_HEADS + 1) if nbytes % n == 0), None)
    if heads is None:
        raise UnsupportedError(
            f"pages of {nbytes} bytes behind a server; supported are products of a number up to "
            f"{_MAX_HEADS} and one up to {_MAX_DIM}: use a backing tier, and leave server.address "
            "away"
        )
    shape = BlockShape(
        layers=1,
        kv_heads=heads,
        head_dim=nbytes // heads,
        block_tokens=1,
        dtype="uint8",
        kv_factor=1,
    )
    return ModelDescription(shape, (LayerGroup(0, 1, (0,)),), _fingerprint(nbytes), 1)


def is_of_pages(model: ModelDescription) -> bool:
    """Return True if the blocks of ``model`` are pages."""
    return model.fingerprint == _fingerprint(model.shape.nbytes)


def for_pages(config: Config) -> Config:
    """Return the settings with which a server keeps pages.

    The oldest go first, and no events are published: pages are no blocks of tokens.
    """
    silent = config.events.model_copy(update={"endpoint": None, "nats": None})
    return oldest_first(config).model_copy(update={"events": silent})


def _fingerprint(nbytes: int) -> bytes:
    return hashlib.sha256(b"kvcore pages %d" % nbytes).digest()[:16]
