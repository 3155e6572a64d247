"""Whatever obstore reaches: S3 and its like, Google, Azure, a folder that hosts share.

A value is an object. Objects are whole or not there, in a bucket and in a folder alike (there one
is written beside its place and renamed).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Annotated, Any, TypeVar

from pydantic import Field

from kvcore._util.optional import client_module
from kvcore.errors import BlockMissing, ConfigError, CorruptBlock, TierError, TierUnavailable
from kvcore.tiers.remote.base import BlockStore, Item, fill
from kvcore.tiers.remote.options import StoreOptions
from kvcore.tiers.remote.tier import StoreKind

T = TypeVar("T")


class ObjectOptions(StoreOptions):
    """Where the objects are. Credentials come from the environment, as that kind of store has
    them (AWS_ACCESS_KEY_ID and so on)."""

    known_by = ("url", "config")

    url: Annotated[str, Field(min_length=1)] = Field(
        description="s3://BUCKET/PATH, gs://, az://, or file:///FOLDER that every host mounts."
    )
    config: dict[str, str] = Field(
        default_factory=dict,
        description="Settings of the store's client by its own names, such as endpoint and region.",
    )
    requests: int = Field(
        default=32, ge=1, le=512, description="Requests to the store at once, a process."
    )
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=5.0, description="Seconds after which a call to the store has failed."
    )


class ObjectStore(BlockStore):
    """``store`` is one of obstore's. Requests run on an event loop in a thread of its own, at most
    ``requests`` at once; what of a call has not ended after ``timeout_s`` seconds has failed."""

    def __init__(self, store: Any, *, requests: int = 32, timeout_s: float = 5.0) -> None:
        self._obstore = client_module("obstore")
        self._store = store
        self._timeout = timeout_s
        self._loop = asyncio.new_event_loop()
        self._gate = asyncio.Semaphore(requests)
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="kvcore-objects", daemon=True
        )
        self._thread.start()

    def put(self, items: Sequence[Item]) -> list[TierError | None]:
        return self._all(items, self._put)

    def get(self, items: Sequence[Item]) -> list[TierError | None]:
        values = self._all(items, self._get)
        return [_take(item, value) for item, value in zip(items, values, strict=True)]

    def exists(self, names: Sequence[str]) -> list[bool]:
        answers = self._all(names, self._exists)
        for answer in answers:
            if isinstance(answer, TierError):
                raise answer
        return [answer is True for answer in answers]

    def delete(self, names: Sequence[str]) -> None:
        for error in self._all(names, self._delete):
            if error is not None:
                raise error

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    # -- on the loop ------------------------------------------------------------------------

    async def _put(self, item: Item) -> TierError | None:
        return await self._try(
            item.name,
            lambda: self._obstore.put_async(self._store, item.name, b"".join(item.parts)),
            lambda _: None,
        )

    async def _get(self, item: Item) -> memoryview | TierError:
        """The value, in memory of its own: a late one must not reach the caller's."""

        async def fetch() -> memoryview:
            found = await self._obstore.get_async(self._store, item.name)
            return memoryview(await found.bytes_async())

        return await self._try(item.name, fetch, lambda value: value)

    async def _exists(self, name: str) -> bool | TierError:
        answer: bool | TierError = await self._try(
            name, lambda: self._obstore.head_async(self._store, name), lambda _: True
        )
        return False if isinstance(answer, BlockMissing) else answer

    async def _delete(self, name: str) -> TierError | None:
        answer: TierError | None = await self._try(
            name, lambda: self._obstore.delete_async(self._store, name), lambda _: None
        )
        return None if isinstance(answer, BlockMissing) else answer

    async def _gated(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        async with self._gate:
            return await call()

    async def _try(
        self, name: str, call: Callable[[], Coroutine[Any, Any, Any]], good: Callable[[Any], T]
    ) -> T | TierError:
        """What became of one request. Never raises: the others of its batch go on."""
        try:
            return good(await asyncio.wait_for(self._gated(call), self._timeout))
        except (FileNotFoundError, self._obstore.exceptions.NotFoundError):
            return BlockMissing(f"no object {name}")
        except asyncio.TimeoutError:
            return TierUnavailable(f"object {name}: no answer in {self._timeout} s")
        except (self._obstore.exceptions.BaseError, OSError) as error:
            return TierUnavailable(f"object {name}: {error}")

    def _all(self, asked: Sequence[Any], one: Callable[[Any], Coroutine[Any, Any, T]]) -> list[T]:
        """``one`` for each of ``asked``, at once. Blocks."""

        async def run() -> list[T]:
            tasks = [asyncio.ensure_future(one(item)) for item in asked]
            await asyncio.wait(tasks)  # all of them: the parts are the caller's again
            return [task.result() for task in tasks]

        if not asked:
            return []
        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()


def _take(item: Item, value: memoryview | TierError) -> TierError | None:
    if isinstance(value, TierError):
        return value
    if not fill(item, value):
        return CorruptBlock(f"object {item.name} has {value.nbytes} bytes")
    return None


def open_store(options: ObjectOptions, rank: int | None = None) -> ObjectStore:
    """Reaches nothing yet, but makes the folder of a ``file://`` URL."""
    obstore = client_module("obstore")
    try:
        store = _client(client_module("obstore.store"), options)
    except (obstore.exceptions.BaseError, ValueError, OSError) as error:
        raise ConfigError(f"url {options.url}: {error}") from error
    return ObjectStore(store, requests=options.requests, timeout_s=options.timeout_s)


def _client(module: Any, options: ObjectOptions) -> Any:
    if options.url.startswith("file:"):
        return module.from_url(options.url, mkdir=True)
    timeout = timedelta(seconds=options.timeout_s)
    return module.from_url(
        options.url,
        config=options.config,
        client_options={
            "timeout": timeout,
            "connect_timeout": timeout,
            "allow_http": options.config.get("endpoint", "").startswith("http://"),
        },
        retry_config={"max_retries": 0},  # who calls us repeats
    )


KIND = StoreKind(ObjectOptions, open_store)
