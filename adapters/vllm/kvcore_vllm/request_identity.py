"""What the KV of one request is stored under: its namespace, and the content of its media.

A medium is known by the tensors that vLLM's encoder gets. vLLM's own identifier may be a client's
text or a counter. vLLM's caches however go by that identifier, also for what the encoder made of
the tensors: an identifier that comes with two contents is therefore trusted no more.

vLLM reads an adapter's files when it needs them, and does not say when. If they change while it
runs, only a request to reload them in place tells which ones it uses.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvcore.errors import UnsupportedError
from kvcore.model.identity import Namespaces, lora_identity
from kvcore.model.ingredients import MediaIdentity
from kvcore.model.keys import Extra, Namespace, canonical_bytes

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

__all__ = ["KEPT", "RequestIdentities", "RequestIdentity"]

KEPT = 1 << 16
"""Identifiers of media, digests of contents, and adapters that are remembered, of each kind."""

_TWO_CONTENTS = b""


class RequestIdentity(NamedTuple):
    """The namespace of a request, and its media in the keys of their blocks."""

    namespace: Namespace
    extras: tuple[Extra, ...]


class RequestIdentities:
    """Makes the identities of requests. The scheduling thread owns it.

    ``media`` is what shapes the KV of all media, or the reason why media cannot be told apart.
    """

    def __init__(self, namespaces: Namespaces, media: MediaIdentity | str) -> None:
        self._namespaces = namespaces
        self._media = media
        self._adapters: OrderedDict[tuple[int, str, str], str] = OrderedDict()
        self._contents: OrderedDict[str, bytes] = OrderedDict()
        self._digests: OrderedDict[int, tuple[weakref.ref[Any], bytes]] = OrderedDict()

    def of(self, request: Request) -> RequestIdentity:
        """Return the identity of a request. Hashes its media: about a second for each GB.

        Raises UnsupportedError, with the reason, if its KV cannot be told from other KV.
        """
        lora = request.lora_request
        name = "" if lora is None else self._adapter(lora)
        extras = tuple(self._medium(feature) for feature in request.mm_features or ())
        return RequestIdentity(self._namespaces.of(name, request.cache_salt), extras)

    def unchanged(self, request: Request, namespace: Namespace) -> bool:
        """Return True if the files of the request's adapter are those that it began with."""
        lora = request.lora_request
        if lora is None:
            return True
        try:
            return lora_identity(lora.lora_name, lora.lora_path) == namespace.lora
        except UnsupportedError:
            return False

    def _adapter(self, lora: LoRARequest) -> str:
        found = lora_identity(lora.lora_name, lora.lora_path)
        key = (lora.lora_int_id, lora.lora_name, lora.lora_path)
        before = self._adapters.get(key, found)
        if found != before and not getattr(lora, "load_inplace", False):
            raise UnsupportedError(
                f"the files of the LoRA adapter {lora.lora_name} in {lora.lora_path} changed while "
                "vLLM may use the old ones: load the new ones in place, or from another folder"
            )
        _remember(self._adapters, key, found)
        return found

    def _medium(self, feature: MultiModalFeatureSpec) -> Extra:
        if isinstance(self._media, str):
            raise UnsupportedError(self._media)
        content = self._content(feature)
        if self._contents.get(feature.identifier, content) != content:
            content = _TWO_CONTENTS
        _remember(self._contents, feature.identifier, content)
        if content == _TWO_CONTENTS:
            raise UnsupportedError(
                "one identifier of a medium (`uuid`) came with two contents, so vLLM's own caches "
                "may give the KV of either: send each content under an identifier of its own"
            )
        where = feature.mm_position
        return Extra(where.offset, where.length, self._media.medium(content))

    def _content(self, feature: MultiModalFeatureSpec) -> bytes:
        """Return a digest of the tensors of a medium and of the places that they fill."""
        item = feature.data
        if item is None:
            raise UnsupportedError(_NO_TENSORS)
        known = self._digests.get(id(item))
        if known is None or known[0]() is not item:
            known = (weakref.ref(item), _digest(item))
        _remember(self._digests, id(item), known)
        embeds = getattr(feature.mm_position, "is_embed", None)
        places = b"" if embeds is None else b"".join(_bytes_of(embeds))
        told = canonical_bytes([str(feature.modality), known[1], places])
        return hashlib.sha256(told).digest()


_NO_TENSORS = (
    "the content of a medium is not in vLLM's scheduler: send its data with the request, and leave "
    "mm_processor_cache_type at 'lru'"
)


def _remember(kept: OrderedDict[Any, Any], key: object, value: object) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > KEPT:
        kept.popitem(last=False)


def _digest(item: Any) -> bytes:
    """Return a digest of a medium's tensors. Raises UnsupportedError if its content is not there.

    vLLM may have a place in shared memory instead. And beside a connector it takes a medium of
    which only sizes are given, as for embeddings that another engine made.
    """
    digest, content = hashlib.sha256(), False
    for name in sorted(item):
        digest.update(canonical_bytes(name))
        for leaf in _leaves(item[name].data):
            content |= _is_content(leaf)
            for part in _bytes_of(leaf):
                digest.update(part)
    if not content:
        raise UnsupportedError(_NO_TENSORS)
    return digest.digest()


def _is_content(leaf: Any) -> bool:
    """Return True for pixels, features or embeddings, and False for sizes, masks and times."""
    if not isinstance(leaf, torch.Tensor) or leaf.ndim < 2:
        return False
    return leaf.is_floating_point() or leaf.dtype == torch.uint8


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        yield f"list of {len(value)}"
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _bytes_of(leaf: Any) -> Sequence[Any]:
    """Return the bytes of a tensor, with its type and shape, or of a plain value."""
    if isinstance(leaf, torch.Tensor):
        flat = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return canonical_bytes([str(leaf.dtype), list(leaf.shape)]), flat.numpy().data
    if hasattr(leaf, "tobytes"):
        return canonical_bytes([str(leaf.dtype), list(leaf.shape)]), leaf.tobytes()
    if leaf is None:
        raise UnsupportedError(_NO_TENSORS)
    return (canonical_bytes([type(leaf).__name__, str(leaf)]),)
