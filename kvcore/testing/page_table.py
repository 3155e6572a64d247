"""A simple page table of an engine: allocation, prefix reuse and LRU eviction.

It does what the block managers of engines do. A page without users stays in a table of prefixes
until its room is needed; the least recently used page is evicted first. Only full pages are reused.
Each in-process engine of this package has its own page table.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence

from kvcore.errors import CapacityError

__all__ = ["PageTable"]


class PageTable:
    """A page table of ``num_pages`` pages of ``page_tokens`` tokens. Not thread-safe."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.evicted = 0
        self._free = list(range(num_pages))
        self._users: Counter[int] = Counter()
        self._stored: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._name_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Number of pages that can be allocated: free pages, and stored pages without users."""
        return self.num_pages - len(self._users)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def claim(self, tokens: Sequence[int], salt: str) -> list[int]:
        """Take the stored pages of the longest prefix of ``tokens``, without the last token."""
        found = []
        for name in self._names(tokens[: len(tokens) - 1], salt):
            if name not in self._stored:
                break
            self._stored.move_to_end(name)
            found.append(self._stored[name])
        self._users.update(found)
        return found

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` fresh pages. Raises CapacityError if fewer are available."""
        if count > self.available:
            raise CapacityError(f"{count} pages requested, {self.available} available")
        while len(self._free) < count:
            self._evict()
        taken, self._free = self._free[:count], self._free[count:]
        self._users.update(taken)
        return taken

    def store(self, tokens: Sequence[int], salt: str, pages: Sequence[int]) -> None:
        """Publish the full pages of ``tokens`` for reuse. Their KV must be complete."""
        for name, page in zip(self._names(tokens, salt), pages):  # noqa: B905 - tail left out
            if name not in self._stored and page not in self._name_of:
                self._stored[name] = page
                self._name_of[page] = name

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back. Stored pages stay reusable."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                if page not in self._name_of:
                    self._free.append(page)

    def forget(self) -> None:
        """Forget all stored prefixes."""
        self._free += [page for page in self._name_of if page not in self._users]
        self._stored.clear()
        self._name_of.clear()

    def check_integrity(self) -> None:
        """Assert that every page is free, in use or stored, and that no free page is either."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & set(self._users), "a page is free and in use"
        assert not free & set(self._name_of), "a page is free and stored"
        assert free | set(self._users) | set(self._name_of) == set(range(self.num_pages))

    def _evict(self) -> None:
        name, page = next((n, p) for n, p in self._stored.items() if p not in self._users)
        del self._stored[name], self._name_of[page]
        self._free.append(page)
        self.evicted += 1

    def _names(self, tokens: Sequence[int], salt: str) -> list[bytes]:
        names, name = [], salt.encode()
        for start in range(0, len(tokens) - self.page_tokens + 1, self.page_tokens):
            block = str(list(tokens[start : start + self.page_tokens])).encode()
            name = hashlib.sha256(name + b"|" + block).digest()
            names.append(name)
        return names
