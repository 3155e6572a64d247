"""Redis and Valkey: a value is a string. What is kept, and for how long, is the server's affair."""

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
from kvcore.errors import BlockMissing, ConfigError, CorruptBlock, TierError, TierUnavailable
from kvcore.memory.buffers import nbytes_of
from kvcore.tiers.remote.base import BlockStore, Item
from kvcore.tiers.remote.options import StoreOptions
from kvcore.tiers.remote.resp import ReplyError, RespConnection
from kvcore.tiers.remote.tier import StoreKind

_UNLINK = 1000
"""Names in one command."""


class RedisOptions(StoreOptions):
    """Where the server is. A password belongs in ``password_file``, not in the URL."""

    known_by = ("url",)

    url: Annotated[str, Field(min_length=1)] = Field(
        default="redis://localhost:6379/0",
        description="redis://HOST:PORT/DB, rediss:// with TLS, or unix:///path/of/socket.",
    )
    username: str | None = Field(default=None, description="User of the server's access list.")
    password_file: FolderPath | None = Field(
        default=None,
        description="File whose content, without white space around it, is the password.",
    )
    ttl_s: int = Field(
        default=0,
        ge=0,
        description="Seconds after which the server forgets a block; 0: when it evicts it.",
    )


class RedisStore(BlockStore):
    """One round trip a call. ``client`` has a pool of connections for questions, each with a
    timeout; values go over connections of their own, of the same kind. New ones are made when the
    server is back."""

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
            return [_stored(connection, item) for item in items]

    def get(self, items: Sequence[Item]) -> list[TierError | None]:
        if not items:
            return []
        with self._connection() as connection:
            connection.ask_get([item.name for item in items])
            return [_taken(connection, item) for item in items]

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
        """A connection, the caller's for this block. Raises TierUnavailable: then no other that
        rests is trusted either."""
        try:
            connection = self._resting() or RespConnection(
                self._client.connection_pool.make_connection()
            )
        except self._refused as error:
            self._drop_idle()
            raise TierUnavailable(f"redis: {error}") from error
        try:
            yield connection
        except BaseException as error:
            connection.close()  # what is still on its way answers nobody
            if not isinstance(error, self._refused):
                raise
            self._drop_idle()
            raise TierUnavailable(f"redis: {error}") from error
        with self._lock:
            self._idle.append(connection)

    def _resting(self) -> RespConnection | None:
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
        """Each of ``asked`` with its answer, an error among them. Raises TierUnavailable."""
        try:
            return list(zip(asked, pipeline.execute(raise_on_error=False), strict=True))
        except self._refused as error:
            raise TierUnavailable(f"redis: {error}") from error


def _stored(connection: RespConnection, item: Item) -> TierError | None:
    try:
        connection.read_ok()
    except ReplyError as error:
        return TierUnavailable(f"redis does not store {item.name}: {error}")
    return None


def _taken(connection: RespConnection, item: Item) -> TierError | None:
    try:
        size = connection.read_size()
    except ReplyError as error:
        return TierUnavailable(f"redis does not give {item.name}: {error}")
    if size is None:
        return BlockMissing(f"redis holds no {item.name}")
    if size != nbytes_of(item.parts):
        connection.skip_value(size)
        return CorruptBlock(f"redis holds {size} bytes as {item.name}")
    connection.read_value(item.parts)
    return None


def open_store(options: RedisOptions, rank: int | None = None) -> RedisStore:
    """Connects when first used."""
    redis = client_module("redis")
    password = _password(options.password_file) if options.password_file else None
    try:
        client = redis.Redis.from_url(
            options.url,
            username=options.username,
            password=password,
            socket_timeout=options.timeout_s,
            socket_connect_timeout=options.timeout_s,
            retry=None,  # who calls us repeats
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
