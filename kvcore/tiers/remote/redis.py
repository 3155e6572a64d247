"""Redis and Valkey: a value is a string. What is kept, and for how long, is the server's affair."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from kvcore.errors import (
    BlockMissing,
    ConfigError,
    CorruptBlock,
    TierError,
    TierUnavailable,
)
from kvcore.schema_base import FolderPath
from kvcore.tiers.remote.base import BlockStore, Item, fill
from kvcore.tiers.remote.options import StoreOptions, client_module
from kvcore.tiers.remote.tier import StoreKind

_UNLINK = 1000
"""Names in one command."""


class RedisOptions(StoreOptions):
    """Where the server is. A password belongs in ``password_file``, not in the URL."""

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
    """One round trip a call. ``client`` has a pool of connections, each with a timeout, and makes
    new ones when the server is back."""

    def __init__(self, client: Any, ttl_s: int = 0) -> None:
        self._client = client
        self._ttl = ttl_s or None
        self._refused = (client_module("redis").RedisError, OSError)

    def put(self, items: Sequence[Item]) -> list[TierError | None]:
        if not items:
            return []
        pipeline = self._client.pipeline(transaction=False)
        for item in items:
            pipeline.set(item.name, b"".join(item.parts), ex=self._ttl)
        return [self._stored(item, answer) for item, answer in self._run(pipeline, items)]

    def get(self, items: Sequence[Item]) -> list[TierError | None]:
        if not items:
            return []
        pipeline = self._client.pipeline(transaction=False)
        for item in items:
            pipeline.get(item.name)
        return [self._take(item, answer) for item, answer in self._run(pipeline, items)]

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
        self._client.close()

    def _run(self, pipeline: Any, asked: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Each of ``asked`` with its answer, an error among them. Raises TierUnavailable."""
        try:
            return list(zip(asked, pipeline.execute(raise_on_error=False), strict=True))
        except self._refused as error:
            raise TierUnavailable(f"redis: {error}") from error

    def _stored(self, item: Item, answer: Any) -> TierError | None:
        if isinstance(answer, Exception):
            return TierUnavailable(f"redis does not store {item.name}: {answer}")
        return None

    def _take(self, item: Item, answer: Any) -> TierError | None:
        if isinstance(answer, Exception):
            return TierUnavailable(f"redis does not give {item.name}: {answer}")
        if answer is None:
            return BlockMissing(f"redis holds no {item.name}")
        if not fill(item, memoryview(answer)):
            return CorruptBlock(f"redis holds {len(answer)} bytes as {item.name}")
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
