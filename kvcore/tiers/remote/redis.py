"""Redis and Valkey: a value is a string. The server decides what it evicts, and when."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from kvcore._util.optional import client_module
from kvcore.config.fields import FolderPath
from kvcore.errors import BlockMissing, ConfigError, TierError, TierUnavailable
from kvcore.memory.buffers import nbytes_of
from kvcore.tiers.remote.base import BlockStore, Item, wrong_size
from kvcore.tiers.remote.options import StoreOptions
from kvcore.tiers.remote.resp import ReplyError, RespConnection
from kvcore.tiers.remote.tier import StoreKind

_UNLINK = 1000
"""Most names in one UNLINK command."""


class RedisOptions(StoreOptions):
    """The server and how to log in. Put a password in ``password_file``, not in the URL."""

    known_by = ("url",)

    url: Annotated[str, Field(min_length=1)] = Field(
        default="redis://localhost:6379/0",
        description="redis://HOST:PORT/DB, rediss:// for TLS, or unix:///path/of/socket.",
    )
    username: str | None = Field(
        default=None, description="User name in the server's access control list."
    )
    password_file: FolderPath | None = Field(
        default=None,
        description="File with the password. Surrounding white space is ignored.",
    )
    ttl_s: int = Field(
        default=0,
        ge=0,
        description="Seconds after which the server drops a block. 0: only when it evicts it.",
    )


class RedisStore(BlockStore):
    """A Redis or Valkey server. Each call takes one round trip.

    Lookups and deletes use the connection pool of ``client``. Values use separate connections made
    with the same settings, timeouts included. Connections are reopened when the server is back.
    """

    def __init__(self, client: Any, ttl_s: int = 0) -> None:
        self._client = client
        self._ttl = ttl_s or None
        self._refused = (client_module("redis").RedisError, OSError)
        self._lock = threading.Lock()
        self._idle: list[RespConnection] = []

    def put(self, items: Sequence[Item]) -> list[TierError | None]:
        if not items:
            return []
        with self._connection() as connection:
            connection.ask_set(items, self._ttl)
            return [_put_result(connection, item) for item in items]

    def get(self, items: Sequence[Item]) -> list[TierError | None]:
        if not items:
            return []
        with self._connection() as connection:
            connection.ask_get([item.name for item in items])
            return [_get_result(connection, item) for item in items]

    def exists(self, names: Sequence[str]) -> list[bool]:
        if not names:
            return []
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.exists(name)
        answers = list(self._run(pipeline, names))
        for _, answer in answers:
            if isinstance(answer, Exception):
                raise TierUnavailable(f"redis: {answer}") from answer
        return [bool(answer) for _, answer in answers]

    def delete(self, names: Sequence[str]) -> None:
        try:
            for start in range(0, len(names), _UNLINK):
                self._client.unlink(*names[start : start + _UNLINK])
        except self._refused as error:
            raise TierUnavailable(f"redis: {error}") from error

    def close(self) -> None:
        self._drop_idle()
        self._client.close()

    @contextmanager
    def _connection(self) -> Iterator[RespConnection]:
        """Lend a connection to the caller for the duration of the block.

        Raises TierUnavailable on a failure, and then closes all idle connections too.
        """
        try:
            connection = self._idle_connection() or RespConnection(
                self._client.connection_pool.make_connection()
            )
        except self._refused as error:
            self._drop_idle()
            raise TierUnavailable(f"redis: {error}") from error
        try:
            yield connection
        except BaseException as error:
            connection.close()  # replies that are still on their way belong to nobody
            if not isinstance(error, self._refused):
                raise
            self._drop_idle()
            raise TierUnavailable(f"redis: {error}") from error
        with self._lock:
            self._idle.append(connection)

    def _idle_connection(self) -> RespConnection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            with suppress(*self._refused):  # the server has closed it
                if connection.is_idle():
                    return connection
            connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _run(self, pipeline: Any, asked: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Return each of ``asked`` with its answer, which may be an error.

        Raises TierUnavailable.
        """
        try:
            return list(zip(asked, pipeline.execute(raise_on_error=False), strict=True))
        except self._refused as error:
            raise TierUnavailable(f"redis: {error}") from error


def _put_result(connection: RespConnection, item: Item) -> TierError | None:
    try:
        connection.read_ok()
    except ReplyError as error:
        return TierUnavailable(f"redis refuses to store {item.name}: {error}")
    return None


def _get_result(connection: RespConnection, item: Item) -> TierError | None:
    try:
        size = connection.read_size()
    except ReplyError as error:
        return TierUnavailable(f"redis refuses to return {item.name}: {error}")
    if size is None:
        return BlockMissing(f"redis has no value {item.name}")
    if size != nbytes_of(item.parts):
        connection.skip_value(size)
        return wrong_size(item, size)
    connection.read_value(item.parts)
    return None


def open_store(options: RedisOptions, rank: int | None = None) -> RedisStore:
    """Open the store. It connects when it is first used."""
    redis = client_module("redis")
    password = _password(options.password_file) if options.password_file else None
    try:
        client = redis.Redis.from_url(
            options.url,
            username=options.username,
            password=password,
            socket_timeout=options.timeout_s,
            socket_connect_timeout=options.timeout_s,
            retry=None,  # the caller retries
            protocol=2,  # what `RespConnection` speaks
        )
    except ValueError as error:
        raise ConfigError(f"url: {error}") from error
    return RedisStore(client, options.ttl_s)


def _password(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"password_file: {os.fspath(file)} cannot be read: {error.strerror}"
        ) from error


KIND = StoreKind(RedisOptions, open_store)
