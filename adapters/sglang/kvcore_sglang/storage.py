"""``KVCoreStorage``: kvcore's tiers as the storage backend of SGLang's HiCache.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "kvcore", "module_path": "kvcore_sglang.storage",
        "class_name": "KVCoreStorage", "interface_v1": 1,
        "kvcore": {"disk": {"path": "/var/cache/kvcore", "capacity": "200GiB"}}}'

HiCache names a page by the hash of its tokens and of all tokens before them. The name does not
depend on the model. Here a page is found only if its key, weights, RoPE parameters, KV type, page
size, byte order and rank are the same. A page that is read has the checksum of what was written.

    storage_config, server_args ─┐
    HostPages (a host pool)     ─┴▶ identity ─▶ Pages ─▶ a backing tier, or a server   (each rank)
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import secrets
from collections.abc import Sequence
from operator import mul
from typing import Any

import torch

from kvcore.connector.build import build_pages
from kvcore.connector.guard import Neutral, covered
from kvcore.errors import ConfigError, KVCoreError, UnsupportedError
from kvcore.memory.buffers import Buffers
from kvcore.model.shape import ITEM_BYTES, BlockShape
from kvcore.runtime.page_store import Pages, page_settings
from kvcore.tiers.geometry import Geometry
from kvcore_sglang import hooks
from kvcore_sglang.identity import model_identity, serving_model
from kvcore_sglang.plugin import storage_base

__all__ = ["HostPages", "KVCoreStorage"]

_log = logging.getLogger("kvcore.sglang.storage")

SETTINGS = "kvcore"
"""The key of kvcore's settings in HiCache's extra configuration."""

RANK_FIELDS = ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size")
POOL_FIELDS = (
    "layout",
    "head_num",
    "head_dim",
    "v_head_dim",
    "start_layer",
    "end_layer",
    "storage_format_tag",
)
"""The fields of a rank, and of its host pool, that determine the bytes of a page."""


class HostPages:
    """The bytes of the pages of one of HiCache's host pools.

    Raises UnsupportedError if the pool's pages cannot be addressed, or hold more than K and V.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page_tokens = int(pool.page_size)
        self.dtype = str(pool.dtype).removeprefix("torch.")
        buffer, first = pool.kv_buffer, self._page(0)
        if not isinstance(buffer, torch.Tensor) or not _is_view(first, buffer):
            raise self._refused("its pages are not views of one buffer")
        if ITEM_BYTES.get(self.dtype, 1) == 1:
            raise self._refused(f"{self.dtype} has scales that are not part of a page's identity")
        self._bytes = _flat(buffer)[0]
        self._itemsize = buffer.element_size()
        outer, inner = _split(first)
        self._run_nbytes = math.prod(inner) * self._itemsize
        self._offsets = [
            sum(map(mul, place, first.stride())) * self._itemsize
            for place in itertools.product(*map(range, outer))
        ]
        self.shape = BlockShape(
            layers=int(pool.layer_num),
            kv_heads=1,
            head_dim=first.numel() // (int(pool.layer_num) * self.page_tokens),
            block_tokens=self.page_tokens,
            dtype=self.dtype,
            kv_factor=1,
        )
        """A page as a block of one head, which holds K and V of all heads of this rank."""
        if self.shape.nbytes != first.numel() * self._itemsize:
            raise self._refused(f"pages of {first.numel()} elements are not {self.shape}")

    def buffers(self, slot: int) -> Buffers:
        """Return the bytes of the page that starts at token slot ``slot``. Shared with the pool."""
        start = self._page(slot).storage_offset() * self._itemsize
        nbytes, view = self._run_nbytes, self._bytes
        return [view[start + o : start + o + nbytes] for o in self._offsets]

    def describe(self) -> dict[str, Any]:
        """Return what determines the bytes of a page besides the model, as plain data."""
        fields = {name: _plain(getattr(self._pool, name, None)) for name in POOL_FIELDS}
        return {"type": type(self._pool).__name__, "shape": self.shape.to_dict(), **fields}

    def _page(self, slot: int) -> torch.Tensor:
        try:
            page: torch.Tensor = self._pool.get_data_page(slot, flat=False)
        except (ValueError, NotImplementedError, TypeError) as error:
            raise self._refused(str(error)) from error
        return page

    def _refused(self, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"a host pool of type {type(self._pool).__name__} laid out as "
            f"{self._pool.layout!r}: {reason}; kvcore stores pages of MHA and MLA pools laid out "
            "as layer_first, page_first, page_first_direct or page_head"
        )


_StorageBase: Any = storage_base()

_NOTHING, _NO = Neutral(lambda: None), Neutral(lambda: False)
_AT_START = Neutral(lambda: None, (KVCoreError, OSError))
_BATCHES = {"batch_get_v1": False, "batch_set_v1": False, "batch_get": None}
"""What each page of a batch is answered with after an error."""


@covered(
    {
        "register_mem_pool_host": _AT_START,
        "register_mem_host_pool_v2": _AT_START,
        "weights_changed": _NOTHING,
        "clear": Neutral(lambda: None, (UnsupportedError,)),
        "close": _NOTHING,
        "store": Neutral(lambda: None, (UnsupportedError,)),
        "batch_exists": Neutral(lambda: 0),
        "batch_get_v1": Neutral(list),
        "batch_set_v1": Neutral(list),
        "exists": _NO,
        "batch_get": Neutral(list),
        "batch_set": _NO,
        "get": _NOTHING,
        "set": _NO,
    }
)
class KVCoreStorage(_StorageBase):  # type: ignore[misc]  # the engine's class, unknown to mypy
    """HiCache's storage on one rank. HiCache calls it from its own threads, several at once.

    The tier must be usable when the engine starts: `register_mem_pool_host` raises an error if the
    settings, the pool or the folder are wrong. Later failures of the medium raise nothing: pages
    are then not found, and not stored. After an error of kvcore none is found or stored until the
    engine restarts.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = dict(storage_config.extra_config or {})
        if not isinstance(extra.get(SETTINGS), dict):
            raise ConfigError(
                f"given {sorted(extra)} as hicache-storage-backend-extra-config; kvcore's settings "
                f'go under {SETTINGS!r}: {{"{SETTINGS}": {{"disk": {{"path": ..., '
                '"capacity": ...}}}'
            )
        self._config = page_settings(extra[SETTINGS], "hicache-storage-backend-extra-config")
        self._storage = storage_config
        self._pages: HostPages | None = None
        self._store: Pages | None = None
        self._may_clear = False
        self._stopped = False

    def _failed(self, name: str, error: Exception, args: tuple[Any, ...]) -> Any:
        """Find and store nothing from now on; return what each page of a batch is answered with.

        A call that kvcore cannot serve stops nothing.
        """
        if isinstance(error, UnsupportedError):
            _log.debug("%s is answered with nothing: %s", name, error)
        elif not self._stopped:
            self._stopped = True
            _log.error(
                "an error in %s: kvcore's storage stands aside until the engine restarts",
                name,
                exc_info=error,
            )
        return [_BATCHES[name]] * len(args[0]) if name in _BATCHES else None

    # -- HiCache attaches and detaches --------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the tier for the pages of this pool. Blocks while the tier is scanned."""
        super().register_mem_pool_host(mem_pool_host)
        from sglang.srt.runtime_context import get_server_args

        server_args = get_server_args()
        _check(self._storage, server_args)
        keeps = self._config.sglang.keep_on_flush
        self._may_clear = not keeps or bool(server_args.admin_api_key)
        pages = HostPages(mem_pool_host)
        identity = _identity(self._storage, server_args, pages, self._config.namespace.secret)
        geometry = Geometry(pages.shape, identity[:16], ((0, pages.shape.kv_heads),))
        share = _ranks(self._storage, server_args)
        self._store, self._pages = build_pages(self._config, geometry, identity, share), pages
        hooks.storages.add(self)
        if not hooks.fit(hooks.WEIGHT_HOOKS):
            _log.warning(
                "updates of the weights in place are not noticed by this SGLang: clear the storage "
                "after one"
            )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Raise UnsupportedError for a pool besides KV: kvcore would store only a part."""
        if str(host_pool_name) != "kv":
            self.close()
            raise UnsupportedError(
                f"a model with a pool of {host_pool_name} besides its KV; kvcore's HiCache storage "
                "serves full and multi-head latent attention"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def weights_changed(self) -> None:
        """Stop finding pages that were stored before: the weights were updated in place.

        Pages that are stored from now on are found until the engine ends.
        """
        if self._store is not None:
            self._store.renew()

    def clear(self) -> None:
        """Forget every page of this rank, on the medium too.

        Raises UnsupportedError if every client of SGLang could ask for that. SGLang logs it.
        """
        if not self._may_clear:
            raise UnsupportedError(
                "every client can ask for it: start SGLang with --admin-api-key, or set "
                "sglang.keep_on_flush = false"
            )
        self.store.clear()

    def close(self) -> None:
        """Flush and close the tier. Blocks. Idempotent."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    @property
    def store(self) -> Pages:
        """The store of the pages, open from `register_mem_pool_host` to `close`.

        Raises UnsupportedError outside that time.
        """
        if self._store is None:
            raise UnsupportedError("the storage has no host pool yet, or is closed")
        if self._stopped:
            raise UnsupportedError("the storage has stopped after an error: look at the log")
        return self._store

    # -- pages of the host pool ---------------------------------------------------------------

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Return how many of the first pages are stored. A shared store is asked; that blocks."""
        return self.store.leading(keys)

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Read pages into the pool. Blocks; returns True for each page that was read.

        ``host_indices`` are the token slots of all pages, page after page.
        """
        return self.store.get(keys, self._at(host_indices))

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Store pages of the pool. Blocks; returns True for each page that is stored."""
        return self.store.put(keys, self._at(host_indices))

    def _at(self, host_indices: torch.Tensor) -> list[Buffers]:
        assert self._pages is not None, "a store is opened with its pages"
        pages = self._pages
        return [pages.buffers(slot) for slot in host_indices[:: pages.page_tokens].tolist()]

    # -- pages in any memory (without interface_v1) -------------------------------------------

    def exists(self, key: str) -> bool:
        """Return True if a page is stored."""
        return self.store.leading([key]) == 1

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Read pages into tensors of their size. Blocks; returns None for each that is missing."""
        if target_locations is None:
            raise UnsupportedError("kvcore needs the tensors to read pages into")
        found = self.store.get(keys, [_flat(target) for target in target_locations])
        return [
            target if good else None for target, good in zip(target_locations, found, strict=True)
        ]

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages. Blocks; returns True if all are stored."""
        if values is None:
            raise UnsupportedError("kvcore needs the tensors to store pages from")
        return all(self.store.put(keys, [_flat(value.contiguous()) for value in values]))

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Read one page into a tensor of its size. Blocks; returns None if it is missing."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store one page. Blocks; returns True if it is stored."""
        return self.batch_set([key], None if value is None else [value])


def _check(storage: Any, server_args: Any) -> None:
    """Raise UnsupportedError if keys would collide, or if one rank would write for all."""
    if storage.is_mla_model and storage.tp_size > 1:
        raise UnsupportedError(
            f"MLA on {storage.tp_size} tensor-parallel ranks: in HiCache one rank writes for all, "
            "and kvcore has a store for each rank; use 1"
        )
    if getattr(server_args, "enable_lora", False) or getattr(server_args, "lora_paths", None):
        raise UnsupportedError(
            "LoRA: HiCache's keys name adapters by numbers that differ between processes; use "
            "kvcore's linker, or no storage"
        )
    if getattr(server_args, "speculative_algorithm", None):
        raise UnsupportedError("speculative decoding: a page's key does not name the draft model")
    dcp_size = getattr(server_args, "dcp_size", 1) or 1
    if dcp_size > 1:
        raise UnsupportedError(f"dcp_size={dcp_size}; kvcore stores pages of dcp_size=1")


def _identity(storage: Any, server_args: Any, pages: HostPages, secret: str | None) -> bytes:
    """Return 32 bytes that are equal for two ranks if equal keys mean equal pages on them."""
    from sglang.srt.configs.model_config import ModelConfig

    config = ModelConfig.from_server_args(server_args)
    if config.is_multimodal:
        raise UnsupportedError(
            "a model that takes media: in HiCache a client may name the content of a medium "
            "(mm_hashes), and a page's key does not tell who named it; use kvcore's linker, or "
            "serve text only (--language-model-only)"
        )
    model = model_identity(server_args, config, pages.dtype, serving_model())
    if model.alone:
        _log.warning(
            "KV of this engine is not shared, and not found after a restart: %s",
            "; ".join(model.alone),
        )
    text = {
        "model": model.fingerprint.hex(),
        "alone": secrets.token_hex(16) if model.alone else None,
        "secret": secret,
        "pool": pages.describe(),
        "rank": {name: getattr(storage, name) for name in RANK_FIELDS},
    }
    return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).digest()


def _ranks(storage: Any, server_args: Any) -> int:
    """Return how many ranks have a store of their own."""
    replicas = int(getattr(server_args, "dp_size", 1) or 1)
    return replicas * int(storage.tp_size * storage.pp_size * storage.attn_cp_size)


def _plain(value: Any) -> str | int | None:
    return value if value is None or isinstance(value, int) else str(value)


def _is_view(page: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Return True if a page is in a buffer that is contiguous from its storage's start."""
    same = page.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    return same and buffer.is_contiguous() and buffer.storage_offset() == 0


def _split(page: torch.Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """Split a page's dims into (outer, inner), so that the inner dims are contiguous."""
    shape, run = page.shape, 1
    for dim in reversed(range(page.dim())):
        if shape[dim] > 1 and page.stride(dim) != run:
            return shape[: dim + 1], shape[dim + 1 :]
        run *= shape[dim]
    return (), shape


def _flat(tensor: torch.Tensor) -> Buffers:
    """Return the bytes of a contiguous tensor. Shared with it."""
    return [tensor.view(-1).view(torch.uint8).numpy().data]
