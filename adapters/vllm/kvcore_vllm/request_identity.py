"""What the KV of one request is stored under: its namespace, and the content of its media.

A medium is known by the tensors that vLLM's encoder gets. vLLM's own identifier may be a client's
text or a counter. vLLM's caches however go by that identifier, also for what the encoder made of
the tensors: an identifier that comes with two contents is therefore trusted no more.

vLLM reads an adapter's files when it needs them, and does not say when. If they change while it
runs, only a request to reload them in place tells which ones it uses. kvcore looks at them on
threads of its own (`AdapterFiles`).
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvcore.errors import UnsupportedError
from kvcore.model.adapter_files import AdapterFiles
from kvcore.model.identity import Namespaces
from kvcore.model.ingredients import MediaIdentity
from kvcore.model.keys import Extra, Namespace, canonical_bytes

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

__all__ = ["KEPT", "LateError", "RequestIdentities", "RequestIdentity"]

KEPT = 1 << 16
"""Identifiers of media, digests of contents, and adapters that are remembered, of each kind."""

_TWO_CONTENTS = b""


class RequestIdentity(NamedTuple):
    """The namespace of a request, and its media in the keys of their blocks.

    The request has waited for ``waited_s`` seconds until it was known.
    """

    namespace: Namespace
    extras: tuple[Extra, ...]
    waited_s: float = 0.0


class LateError(UnsupportedError):
    """The files of a request's adapter were not read in time."""


class _Look(NamedTuple):
    """A look at the files of a request's adapter, asked for at the monotonic time ``since``."""

    request: Request
    number: int
    since: float


class RequestIdentities:
    """Makes the identities of requests. The scheduling thread owns it.

    ``media`` is what shapes the KV of all media, or the reason why media cannot be told apart.
    ``files`` look at adapters, for which a request waits up to ``wait_s`` seconds.
    """

    def __init__(
        self,
        namespaces: Namespaces,
        media: MediaIdentity | str,
        wait_s: float,
        files: AdapterFiles | None = None,
    ) -> None:
        self._namespaces = namespaces
        self._media = media
        self._wait_s = wait_s
        self._files = files or AdapterFiles()
        self._looks: dict[str, _Look] = {}
        self._adapters: OrderedDict[tuple[int, str, str], str] = OrderedDict()
        self._contents: OrderedDict[str, bytes] = OrderedDict()
        self._digests: OrderedDict[int, tuple[weakref.ref[Any], bytes]] = OrderedDict()

    def of(self, request: Request) -> RequestIdentity | None:
        """Return the identity of a request, or None while its adapter's files are looked at.

        Hashes its media: about a second for each GB. Raises UnsupportedError, with the reason, if
        its KV cannot be told from other KV.
        """
        lora, name, waited_s = request.lora_request, "", 0.0
        if lora is not None:
            look = self._look(request, lora)
            found = self._found(lora, look)
            if found is None:
                return None
            name, waited_s = self._checked(lora, found), time.monotonic() - look.since
        extras = tuple(self._medium(feature) for feature in request.mm_features or ())
        return RequestIdentity(self._namespaces.of(name, request.cache_salt), extras, waited_s)

    def unchanged(self, request: Request, namespace: Namespace) -> bool | None:
        """Return True if the files of the request's adapter are those that it began with.

        They are looked at once more. Returns None while that is under way: ask again later.
        """
        lora = request.lora_request
        if lora is None:
            return True
        try:
            found = self._found(lora, self._look(request, lora))
        except UnsupportedError:
            return False
        return None if found is None else found == namespace.lora

    def forget(self, request: Request) -> None:
        """Forget what is looked at for a request that has ended."""
        self._looks.pop(request.request_id, None)

    def _look(self, request: Request, lora: LoRARequest) -> _Look:
        """Return the look at the adapter's files for a request. Begins one if none is under way."""
        look = self._looks.get(request.request_id)
        if look is None or look.request is not request:
            since = time.monotonic()
            look = _Look(request, self._files.ask(lora.lora_name, lora.lora_path), since)
            self._looks[request.request_id] = look
        return look

    def _found(self, lora: LoRARequest, look: _Look) -> str | None:
        """Return what a look at the adapter's files has found. The look is over then.

        Returns None while it is under way.
        """
        name, path = lora.lora_name, lora.lora_path
        found = self._files.told(name, path, look.number)
        if found is None and time.monotonic() - look.since < self._wait_s:
            return None
        del self._looks[look.request.request_id]
        if found is None:
            raise LateError(f"the files of the LoRA adapter {name} in {path} are not read in time")
        if isinstance(found, UnsupportedError):
            raise found
        return found

    def _checked(self, lora: LoRARequest, found: str) -> str:
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
