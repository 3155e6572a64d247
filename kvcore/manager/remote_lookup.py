"""The leader's view of what a shared store holds. Answers come late, and may be out of date.

    get_match ─▶ settle ─── an answer has come: its blocks enter the index
    ask_stores ─▶ ask ───── worth asking: look up again ──▶ Finder's thread

Other hosts write to the store. A block that one of them wrote is found by asking. A block that the
store has dropped is found missing when it is read, and leaves the index then. Beliefs obey the
index's rule: it holds a block only with all blocks before it.

Of a model with resume points a store is asked for blocks, and then for the longest point within
those that it holds. Only a point enters the index, with all before it. A promised point is waited
for row by row, and a shorter one is looked for only if it did not come.

A query ends at its deadline whatever the store does. The block after the last one found is not
asked for again for a while, so that no prompt waits for a store twice in a row.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from kvcore._util.circuit_breaker import Breaker
from kvcore.index import BlockIndex, Evicted
from kvcore.model.points import PointRows, ascending, has_row_among
from kvcore.tiers.finder import MAX_OPEN, Finder, Promise, StoreQuery

ABSENT_KEPT = 65536
"""The most keys remembered as absent; the oldest are forgotten first."""
PROMISED_KEPT = 65536
"""The most keys remembered with the node that promised them; the oldest are forgotten first."""


class Believed(NamedTuple):
    """Blocks [start, stop) of a prompt that have entered the index after an answer.

    ``evicted`` made room for them. ``outcome`` is "found", "absent", "late" or "failed".
    """

    start: int
    stop: int
    evicted: list[Evicted]
    outcome: str


class _Wanted(NamedTuple):
    """What a query is to find: ``keys`` from ``start`` on, as far as ``promise`` covers them.

    ``ends`` are those of `_Asked`; None for a model without points.
    """

    keys: Sequence[bytes]
    start: int
    promise: Promise | None
    ends: dict[bytes, int] | None = None


class _Asked(NamedTuple):
    """A query from block ``start`` on.

    ``ends`` has the number of blocks before each resume point that is looked for, by its last row.
    ``promised`` are the blocks that are waited for, from the prompt's first.
    """

    query: StoreQuery
    start: int
    limit: float
    owner: str
    ends: dict[bytes, int]
    promised: int


class StoreLookup:
    """The leader's view of one store. Leader thread only; only `wait` blocks.

    ``breaker`` guards the queries. The store is not asked either while it is not ``readable``.
    Blocks that a node has promised are asked for at that node, whatever the breaker's state, and
    the outcome does not change that state: a node that does not answer tells nothing about the
    store, and the store itself stops asking such a node.

    ``points`` are the resume points of the model, if it has any.

    ``owner_of`` names the owner of a namespace. If all lookups are taken, one of the owner that has
    most gives way to an owner that has fewer, so that nobody can keep others from the store.
    """

    def __init__(
        self,
        tier: str,
        index: BlockIndex,
        breaker: Breaker,
        finder: Finder,
        *,
        points: PointRows | None = None,
        readable: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._index = index
        self._breaker = breaker
        self._finder = finder
        self._points = points
        self._readable = readable
        self._clock = clock
        self.owner_of: Callable[[bytes], str] = lambda namespace: ""
        self._asked: dict[bytes, _Asked] = {}  # by the last key of the prompt
        self._absent: dict[bytes, float] = {}  # key -> time until which it is not asked for
        self._nodes: dict[bytes, str] = {}  # key -> node that promised and holds it

    def ask(
        self,
        keys: Sequence[bytes],
        promise: Promise | None = None,
        namespace: bytes = b"",
        beyond: int = 0,
    ) -> bool:
        """Return True if an answer about this prompt is pending; send a query if it is worth one.

        Promised blocks are asked for even if they were absent a moment ago. Of a model with resume
        points, those behind block ``beyond`` are. A promise takes the place of a query that does
        not wait for it. A query is given up once all that was promised has come another way: the
        first ``beyond`` blocks are there.
        """
        if not keys:
            return False
        if (pending := self._asked.get(keys[-1])) is not None:
            awaited = pending.promised > 0
            other = promise is not None and not (awaited and pending.query.node == promise.node)
            if not other and not (awaited and pending.promised <= beyond):
                return True
            self._give_up(keys[-1])
        if self._points is None:
            wanted = self._wanted_blocks(keys, promise)
        else:
            wanted = self._promised_point(self._points, keys, promise, beyond)
            wanted = wanted or self._wanted_points(self._points, keys, beyond)
        if wanted is None:
            return False
        node_only = self._finder.is_node_only(wanted.promise)
        owner = self.owner_of(namespace)
        if not self._may_ask(node_only, owner):
            return False
        promised = 0 if promise is None or wanted.promise is None else promise.blocks
        start, promise, ends = wanted.start, wanted.promise, wanted.ends
        look_for = None if ends is None else partial(_within, ends, start)
        query = self._finder.ask(wanted.keys[start:], promise, look_for)
        if query is None:
            return False
        patience = self._finder.lookup_s + (0.0 if promise is None else promise.wait_s)
        if not node_only:
            self._breaker.started()
        limit = self._clock() + patience
        self._asked[keys[-1]] = _Asked(query, start, limit, owner, ends or {}, promised)
        return True

    def _wanted_blocks(self, keys: Sequence[bytes], promise: Promise | None) -> _Wanted | None:
        """Return what to ask about a prompt; None if nothing is worth a query."""
        start = self._index.held(self._tier, keys)
        promise = promise and promise.beyond(start)
        if start == len(keys) or (promise is None and self._is_absent(keys[start])):
            return None
        return _Wanted(keys, start, promise)

    def _wanted_points(
        self, points: PointRows, keys: Sequence[bytes], beyond: int
    ) -> _Wanted | None:
        """Return what to ask about a prompt of which only resume points are of use."""
        start, ends = self._index.held(self._tier, keys), self._ends(points, keys, beyond)
        if not ends or (start < len(keys) and self._is_absent(keys[start])):
            return None
        return _Wanted(keys, min(start, beyond), None, ends)

    def _promised_point(
        self, points: PointRows, keys: Sequence[bytes], promise: Promise | None, beyond: int
    ) -> _Wanted | None:
        """Return what to ask about the chain that ends in a promised point.

        None if the promise is of no use: the model cannot go on there, or all of it is known.
        """
        if promise is None or promise.blocks <= beyond or not points.has(keys, promise.blocks):
            return None
        chain = points.chain(keys, promise.blocks)
        held = self._index.held(self._tier, chain)
        if held == len(chain):
            return None
        start, shorter = min(held, beyond), keys[: promise.blocks - points.every]
        ends = {chain[-1]: promise.blocks, **self._ends(points, shorter, beyond)}
        return _Wanted(chain, start, promise._replace(blocks=len(chain) - start), ends)

    def _ends(self, points: PointRows, keys: Sequence[bytes], beyond: int) -> dict[bytes, int]:
        """Return the blocks before each point worth looking for, by its last row, longest first.

        They are behind block ``beyond``. None is worth it if the longest was not there a moment
        ago, and a point is not of which a row could not be read.
        """
        found: dict[bytes, int] = {}
        self._forget_expired()
        unread = ascending(self._absent)  # there can be many points, of many rows
        for end in range(points.boundary(len(keys)), beyond, -points.every):
            last = points.last_row(keys, end)
            if self._is_absent(last):
                if not found:
                    return {}
            elif not (unread and has_row_among(keys[end - 1], points.rows(end), unread)):
                found[last] = end
        return found

    def settle(self, keys: Sequence[bytes], namespace: bytes) -> Believed | None:
        """Apply the answer about this prompt, if it has come or is late; else return None."""
        asked = self._asked.get(keys[-1]) if keys else None
        if asked is None or not (asked.query.ended or self._is_late(asked)):
            return None
        del self._asked[keys[-1]]
        outcome = self._judge(asked)
        if self._points is None:
            found = min(asked.start + asked.query.found, len(keys))
            believed = self._believe(asked, keys, found, namespace, outcome)
            if believed.stop < len(keys):
                self.absent(keys[believed.stop])
            return believed
        longest, end = next(iter(asked.ends)), asked.query.end
        if end != longest:
            self.absent(longest)
            if asked.query.promised:  # no prompt waits twice in a row
                self.absent(self._points.last_row(keys, self._points.boundary(len(keys))))
        if end is None:
            start = self._index.held(self._tier, keys)
            return Believed(start, start, [], "absent" if outcome == "found" else outcome)
        chain = self._points.chain(keys, asked.ends[end])
        believed = self._believe(asked, chain, len(chain), namespace, outcome)
        if believed.stop < len(chain):  # there is no room: the prompt would be asked for for ever
            self.absent(end)
        return believed

    def _believe(
        self, asked: _Asked, keys: Sequence[bytes], found: int, namespace: bytes, outcome: str
    ) -> Believed:
        """Let the first ``found`` of ``keys`` enter the index, of a resume point all or none.

        Nothing enters if other blocks have come meanwhile with which the keys are no chain.
        """
        start, whole = self._index.held(self._tier, keys), self._points is not None
        evicted: list[Evicted] = []
        if (
            asked.start <= start < found
            and not (whole and found > self._index.most(self._tier, namespace))
            and self._index.is_chain(keys[:found], start, namespace)
        ):
            reservation = self._index.lifecycle.reserve(self._tier, keys, start, found, namespace)
            evicted = reservation.evicted
            if whole and len(reservation) and reservation.stop < found:
                self._index.lifecycle.abort(reservation)
            else:
                self._index.lifecycle.commit(reservation)
                if asked.query.node:
                    self._remember(keys[start:found], asked.query.node)
        return Believed(start, self._index.held(self._tier, keys), evicted, outcome)

    def nodes(self, keys: Sequence[bytes]) -> set[str]:
        """Return the nodes that promised these blocks and were found to hold them."""
        return {self._nodes[key] for key in keys if key in self._nodes}

    def _remember(self, keys: Sequence[bytes], node: str) -> None:
        for key in keys:
            self._nodes.pop(key, None)
            self._nodes[key] = node
        while len(self._nodes) > PROMISED_KEPT:
            del self._nodes[next(iter(self._nodes))]

    def absent(self, key: bytes) -> None:
        """Note that the store lacks this block, and do not ask for it for a while."""
        self._absent.pop(key, None)
        self._absent[key] = self._clock() + self._finder.absent_s
        self._forget_expired()
        if len(self._absent) > ABSENT_KEPT:
            del self._absent[next(iter(self._absent))]

    def _forget_expired(self) -> None:
        """Forget the keys that may be asked for again, which are the oldest ones."""
        now = self._clock()
        while self._absent and self._absent[oldest := next(iter(self._absent))] <= now:
            del self._absent[oldest]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Remove blocks from the store, for everyone, in the background."""
        self._finder.delete(keys)

    def wait(self, timeout: float) -> bool:
        """Block until an answer comes, at most ``timeout`` seconds."""
        return self._finder.wait(timeout)

    def _judge(self, asked: _Asked) -> str:
        """Tell the breaker whether the store answered; return the outcome in one word."""
        query = asked.query
        if late := not query.ended:
            self._finder.cancel(query)
        failed = query.failed or (late and not query.found)  # else slow, not dead
        if not query.node_only:
            (self._breaker.failed if failed else self._breaker.succeeded)()
        if late or failed:
            return "late" if late else "failed"
        return "found" if query.found else "absent"

    def _is_late(self, asked: _Asked) -> bool:
        return self._clock() >= asked.limit

    def _is_absent(self, key: bytes) -> bool:
        until = self._absent.get(key)
        return until is not None and self._clock() < until

    def _make_room(self, owner: str) -> None:
        """Give up the longest lookup of the owner that has most, if it has two more than ``owner``.

        What it found is lost, and its prompt is not asked for again for now.
        """
        counts = Counter(asked.owner for asked in self._asked.values())
        most, count = max(counts.items(), key=itemgetter(1))
        if count < counts[owner] + 2:
            return
        mine = [key for key, asked in self._asked.items() if asked.owner == most]
        key = max(mine, key=lambda key: self._asked[key].limit)
        self._give_up(key)

    def _give_up(self, last: bytes) -> None:
        """Forget the query about the prompt that ends in block ``last``, with what it has found."""
        given_up = self._asked.pop(last)
        self._finder.cancel(given_up.query)
        if not given_up.query.node_only:
            self._breaker.undecided()

    def _may_ask(self, node_only: bool, owner: str) -> bool:
        """Return True if a query may be sent; only one of the store itself needs the breaker.

        Requests may have ended without settling their queries. Late ones are judged first if they
        could stand in the way.
        """
        if len(self._asked) >= MAX_OPEN or not (node_only or self._breaker.allows()):
            for key in [key for key, asked in self._asked.items() if self._is_late(asked)]:
                self._judge(self._asked.pop(key))
        allowed = node_only or self._breaker.allows()
        if allowed and len(self._asked) >= MAX_OPEN:
            self._make_room(owner)
        return len(self._asked) < MAX_OPEN and allowed and self._readable()


def _within(ends: Mapping[bytes, int], start: int, found: int) -> list[bytes]:
    """Return those of ``ends`` with at most ``found`` blocks from ``start`` on before them."""
    return [row for row, end in ends.items() if end <= start + found]
