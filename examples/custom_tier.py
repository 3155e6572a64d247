"""A tier of your own: a store that keeps blocks in an SQLite file.

    pip install ./examples      # its pyproject.toml names this module as a plugin of kvcore
    kvcore plugins              # lists the tier `sqlite`

    [tiers.mine]                # in kvcore.toml
    plugin = "sqlite"
    options = { path = "/var/cache/kvcore.sqlite" }

A store maps names to bytes. kvcore frames and checksums the blocks, asks the store in the
background, and stops asking a store that keeps failing. Test a store of your own with
`kvcore.testing.store_contract`.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing

from kvcore.errors import BlockMissing, CorruptBlock, TierError, TierUnavailable
from kvcore.plugins import TierPlugin, hookimpl, store_plugin
from kvcore.tiers.remote import BlockStore, Item, StoreKind, StoreOptions, fill

TABLE = "CREATE TABLE IF NOT EXISTS block (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID"


class SqliteOptions(StoreOptions):
    """`[tiers.NAME.options]` of this store."""

    path: str


class SqliteStore(BlockStore):
    """A store in the file ``path``. Each call has its own connection, so it is thread-safe."""

    def __init__(self, path: str, timeout_s: float = 2.0) -> None:
        self._path, self._timeout_s = path, timeout_s

    def put(self, items: Sequence[Item]) -> list[TierError | None]:
        rows = [(item.name, b"".join(item.parts)) for item in items]
        try:
            self._run("INSERT OR REPLACE INTO block VALUES (?, ?)", rows)
        except TierUnavailable as error:
            return [error] * len(items)
        return [None] * len(items)

    def get(self, items: Sequence[Item]) -> list[TierError | None]:
        return [self._get(item) for item in items]

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [bool(self._run("SELECT 1 FROM block WHERE name = ?", [(n,)])) for n in names]

    def delete(self, names: Sequence[str]) -> None:
        self._run("DELETE FROM block WHERE name = ?", [(name,) for name in names])

    def _get(self, item: Item) -> TierError | None:
        try:
            rows = self._run("SELECT value FROM block WHERE name = ?", [(item.name,)])
        except TierUnavailable as error:
            return error
        if not rows:
            return BlockMissing(f"no value {item.name}")
        if not fill(item, memoryview(rows[0][0])):
            return CorruptBlock(f"value {item.name} has another size")
        return None

    def _run(self, statement: str, rows: list[tuple]) -> list[tuple]:
        try:
            with closing(sqlite3.connect(self._path, self._timeout_s)) as db, db:
                db.execute(TABLE)
                return [found for row in rows for found in db.execute(statement, row)]
        except sqlite3.Error as error:
            raise TierUnavailable(f"{self._path}: {error}") from error


def make_kind() -> StoreKind:
    return StoreKind(SqliteOptions, lambda o, rank: SqliteStore(o.path, o.timeout_s))


@hookimpl
def kvcore_tiers() -> list[TierPlugin]:
    return [store_plugin("sqlite", make_kind)]
