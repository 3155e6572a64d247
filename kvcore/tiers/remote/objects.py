"""Object stores, through obstore: S3 and compatible, Google, Azure, or a folder that hosts share.

A value is an object. An object is either complete or absent, in a bucket and in a folder alike: in
a folder it is written under a temporary name and then renamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, Any, TypeVar

from pydantic import Field

from kvcore._util.optional import client_module
from kvcore._util.threads import GuardedThread
from kvcore.errors import BlockMissing, ConfigError, TierError, TierUnavailable
from kvcore.memory.buffers import nbytes_of
from kvcore.tiers.remote.base import BlockStore, Item, fill, wrong_size
from kvcore.tiers.remote.options import StoreOptions
from kvcore.tiers.remote.tier import StoreKind

T = TypeVar("T")

_SLACK_S = 5.0
"""Seconds that a caller waits for a loop that should have ended its requests by their timeout."""


class ObjectOptions(StoreOptions):
    """Where the objects are.

    Credentials come from the store's usual environment variables (AWS_ACCESS_KEY_ID and so on).
    """

    known_by = ("url", "config")

    url: Annotated[str, Field(min_length=1)] = Field(
        description="s3://BUCKET/PATH, gs://, az://, or file:///FOLDER, which every host mounts."
    )
    config: dict[str, str] = Field(
        default_factory=dict,
        description="Settings of the store's client by its own names, such as endpoint and region.",
    )
    requests: int = Field(
        default=32, ge=1, le=512, description="Parallel requests of a process to the store."
    )
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=5.0, description="Seconds after which a call to the store has failed."
    )


class ObjectStore(BlockStore):
    """An object store. ``store`` is an obstore client.

    Requests run on an event loop in a separate thread, at most ``requests`` at a time. A request
    fails if it has not ended after ``timeout_s`` seconds, the wait for its turn included.
    """

    def __init__(self, store: Any, *, requests: int = 32, timeout_s: float = 5.0) -> None:
        self._obstore = client_module("obstore")
        self._store = store
        self._timeout = timeout_s
        self._loop = asyncio.new_event_loop()
        self._gate = asyncio.Semaphore(requests)
        self._running: set[Future[Any]] = set()
        self._thread = GuardedThread("kvcore-objects", self._loop.run_forever, self._die)
        if not self._thread.start():
            self._loop.close()
            raise TierUnavailable(f"no thread for requests can be started: {self._thread.error}")

    def put(self, items: Sequence[Item]) -> list[TierError | None]:
        return self._all(items, self._put)

    def get(self, items: Sequence[Item]) -> list[TierError | None]:
        values = self._all(items, self._get)
        return [_get_result(item, value) for item, value in zip(items, values, strict=True)]

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
        with suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread.join(self._timeout + _SLACK_S):
            self._loop.close()

    def _die(self, error: BaseException) -> None:
        """Fail the requests under way: the loop runs no more."""
        for future in list(self._running):
            with suppress(InvalidStateError):  # it has just ended
                future.set_exception(_dead(error))

    # -- on the loop ------------------------------------------------------------------------

    async def _put(self, item: Item) -> TierError | None:
        return await self._try(
            item.name,
            lambda: self._obstore.put_async(self._store, item.name, b"".join(item.parts)),
            lambda _: None,
        )

    async def _get(self, item: Item) -> memoryview | TierError:
        """Read a value into separate memory, because a late one must not reach the caller's.

        The body of an object of another size is not read.
        """
        wanted = nbytes_of(item.parts)

        async def fetch() -> memoryview | TierError:
            found = await self._obstore.get_async(self._store, item.name)
            size = found.meta["size"]
            if size != wanted:
                return wrong_size(item, size)
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
        """Return the outcome of one request. Never raises, so that its batch goes on."""
        try:
            return good(await asyncio.wait_for(self._gated(call), self._timeout))
        except (FileNotFoundError, self._obstore.exceptions.NotFoundError):
            return BlockMissing(f"no object {name}")
        except asyncio.TimeoutError:
            return TierUnavailable(f"object {name}: no answer in {self._timeout} s")
        except (self._obstore.exceptions.BaseError, OSError) as error:
            return TierUnavailable(f"object {name}: {error}")

    def _all(self, asked: Sequence[Any], one: Callable[[Any], Coroutine[Any, Any, T]]) -> list[T]:
        """Run ``one`` for each of ``asked`` concurrently. Blocks until all have ended.

        Raises TierUnavailable if the thread of the loop has died, or if the loop hangs.
        """

        async def run() -> list[T]:
            tasks = [asyncio.ensure_future(one(item)) for item in asked]
            await asyncio.wait(tasks)  # all of them, because the caller may then reuse the parts
            return [task.result() for task in tasks]

        if not asked:
            return []
        if self._thread.error is not None:
            raise _dead(self._thread.error)
        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        self._running.add(future)
        try:
            return future.result(self._timeout + _SLACK_S)
        except (Late, CancelledError):
            future.cancel()
            raise TierUnavailable(f"no end in {self._timeout + _SLACK_S} s") from None
        finally:
            self._running.discard(future)


def _dead(error: BaseException) -> TierUnavailable:
    return TierUnavailable(f"the thread of this store's requests has stopped: {error!r}")


def _get_result(item: Item, value: memoryview | TierError) -> TierError | None:
    if isinstance(value, TierError):
        return value
    if not fill(item, value):
        return wrong_size(item, value.nbytes)
    return None


def open_store(options: ObjectOptions, rank: int | None = None) -> ObjectStore:
    """Open the store without contacting it, but create the folder of a ``file://`` URL."""
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
        retry_config={"max_retries": 0},  # the caller retries
    )


KIND = StoreKind(ObjectOptions, open_store)
