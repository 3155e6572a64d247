"""Tokens of blocks, kept for as long as events may need them.

    added ──▶ spare ──stored──▶ held by a tier ──removed from the last──▶ spare ──▶ forgotten

Tokens of blocks that no tier holds are spare: of a save that has not ended, or of a block on its
way from one tier to the next. The oldest spare ones are forgotten; the events of such a block then
carry no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvcore.errors import FormatError

__all__ = ["SPARE_BLOCKS", "TokenCache"]

SPARE_BLOCKS = 65_536


class TokenCache:
    """Tokens of blocks by key, as `kvcore.model.keys.pack_tokens` packs them.

    Not thread-safe.
    """

    def __init__(self, block_nbytes: int, spare_blocks: int = SPARE_BLOCKS) -> None:
        self._block_nbytes = block_nbytes
        self._limit = spare_blocks
        self._held: dict[bytes, bytes] = {}
        self._spare: dict[bytes, bytes] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._held) + len(self._spare)

    def get(self, key: bytes) -> bytes | None:
        """Return a block's packed tokens; None if they are not known."""
        return self._held.get(key) or self._spare.get(key)

    def add(self, keys: Sequence[bytes], tokens: bytes) -> None:
        """Add the tokens of ``keys``, in order. Raises FormatError unless they are whole blocks."""
        step = self._block_nbytes
        if len(tokens) != step * len(keys):
            raise FormatError(
                f"{len(tokens)} bytes of tokens for {len(keys)} blocks; a block has {step}"
            )
        for i, key in enumerate(keys):
            if key not in self._held:
                self._spare[key] = tokens[i * step : (i + 1) * step]
        self._bound()

    def stored(self, keys: Iterable[bytes]) -> None:
        """Note that a tier holds these blocks."""
        for key in keys:
            text = self._spare.pop(key, None)
            if text is not None:
                self._held[key] = text

    def removed(self, keys: Iterable[bytes], holds: Callable[[bytes], bool]) -> None:
        """Note that a tier no longer holds these blocks; ``holds`` says if another one does."""
        for key in keys:
            if key in self._held and not holds(key):
                self._spare[key] = self._held.pop(key)
        self._bound()

    def settle(self, holds: Callable[[bytes], bool]) -> None:
        """Sort all tokens by what is held now. O(blocks)."""
        every = self._spare | self._held
        self._held = {key: text for key, text in every.items() if holds(key)}
        self._spare = {key: text for key, text in every.items() if key not in self._held}
        self._bound()

    def _bound(self) -> None:
        while len(self._spare) > self._limit:
            del self._spare[next(iter(self._spare))]
