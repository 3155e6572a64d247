"""The leader's side of a server: `RemoteManager` answers as a manager of its own would.

While there is no server (`SessionKeeper` tracks that) nothing is found and nothing is saved,
without any delay. What was planned before goes on, because the workers have the memory mapped.

A load that the server does not plan is refused, and its leader has those tokens computed.

Workers refuse the graphs of a new session until they have pinned its memory. In that time nothing
is found and nothing is saved either, except for one try a second.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kvcore.admin.messages import Refused
from kvcore.config import Config
from kvcore.errors import CapacityError, TierUnavailable, TransferError
from kvcore.manager.base import (
    Backing,
    Hit,
    Lane,
    Manager,
    Planned,
    Promise,
    Readiness,
    Room,
    Source,
    Transport,
)
from kvcore.model.identity import settings_digest
from kvcore.model.keys import pack_tokens
from kvcore.model.spec import ModelDescription
from kvcore.server.messages import (
    MAX_WAIT_S,
    ClearRequest,
    CountReply,
    HeldRequest,
    LaunchReply,
    LoadRequest,
    MatchReply,
    MatchRequest,
    PathReply,
    PathRequest,
    PublishTokens,
    SaveRequest,
    WithdrawRequest,
    join,
)
from kvcore.server.pending_clears import PendingClears
from kvcore.server.remote_index import RemoteIndex
from kvcore.server.runtime_dir import session_of
from kvcore.server.segments import RemoteSegments
from kvcore.server.session import RETRY_S, JoinedSession, SessionKeeper, undone
from kvcore.telemetry.metrics import Metrics, SaveSkip
from kvcore.transfer.graph import (
    OpReport,
    Path,
    Priority,
    RowError,
    Span,
    TransferGraph,
    UnitTable,
)

__all__ = ["RemoteManager", "join_server"]

_log = logging.getLogger("kvcore.server.client")

NOT_READY_S = 1.0
"""Seconds in which nothing is looked up or saved after a worker was not ready: each try costs a
request a failed load, and the workers pin tens of GiB for tens of seconds."""
BLOCKS_A_MESSAGE = 1024
"""Blocks whose tokens go into one message: 4 MiB of tokens for the largest blocks."""
_NO_ROOM = Room(full=True, free=0, staging=False, lent=False)


class RemoteManager(Manager):
    """A `kvcore.manager.KVManager` that is in the server. For one thread, the leader's.

    Only `close` may be called from another thread. Every call returns within the server's deadline,
    and as if nothing were held if the server does not answer by then.
    """

    index: RemoteIndex

    def __init__(
        self,
        keeper: SessionKeeper,
        transport: Transport,
        model: ModelDescription,
        metrics: Metrics,
    ) -> None:
        self.keeper = keeper
        self._block_tokens = model.shape.block_tokens
        self.points = model.point
        self.segments = RemoteSegments(keeper, self._block_tokens)
        self.transport = transport
        self.index = RemoteIndex(self)
        self._metrics = metrics
        self._room = _NO_ROOM
        self._coming = b""  # last key of a prompt whose promised blocks the server waits for
        self._pending_clears: set[bytes] | None = set()  # namespaces to clear; None: all
        self._clear_file = PendingClears(keeper.folder, keeper.model)
        self._left: dict[int, set[int]] = {}
        self._host: dict[int, tuple[bytes, int]] = {}
        """Loads: the last block that each keeps in host memory, and its depth."""
        self._mapped = 0  # the session whose memory every worker is known to have
        self._held_off = 0, 0.0  # the session whose workers were not ready, and until when
        self._on_end: dict[int, Callable[[], object]] = {}

    # -- lookup -------------------------------------------------------------------------------

    @property
    def backings(self) -> tuple[Backing, ...]:
        """Return the server's tiers below the host."""
        member = self.keeper.member
        tiers = [] if member is None else member.welcome.tiers
        return tuple(Backing(name, read_path=Path(path)) for name, path in tiers)

    @property
    def node(self) -> str:
        """Return the server's node; this engine has none of its own."""
        member = self.keeper.member
        return "" if member is None else member.welcome.node

    def get_match(self, keys: Sequence[bytes], namespace: bytes, limit: int | None = None) -> Hit:
        """Return what the server holds of ``keys``; an empty hit if it does not answer in time."""
        if self.points is not None:
            keys = keys[:limit]
        found = self._match(keys, namespace, 0, ask=False)
        if found is None:
            self._coming = b""
            return Hit(keys, namespace, ())
        self._coming = keys[-1] if found.asking else b""
        self._room = Room(found.full, found.free, found.staging, found.lent, found.moving)
        sources = tuple(Source(*source) for source in found.sources)
        if self.points is None:
            return Hit(keys, namespace, sources)
        beside = Hit(keys, namespace, tuple(Source(*source) for source in found.beside))
        if not found.blocks:
            return Hit(keys, namespace, (), beside=beside)
        point = self.points.rows(found.blocks)
        return Hit(self.points.chain(keys, found.blocks), namespace, sources, point, beside)

    def _match(
        self,
        keys: Sequence[bytes],
        namespace: bytes,
        computed: int,
        *,
        ask: bool,
        promise: Promise | None = None,
    ) -> MatchReply | None:
        member = self._ready_member()
        if not keys or member is None or not self._is_clear():
            return None
        told = promise and (promise.blocks, min(promise.wait_s, MAX_WAIT_S), promise.node)
        reply = self.keeper.ask(
            MatchRequest(self._ref(), member.number, join(keys), namespace, computed, ask, told),
            MatchReply,
        )
        return reply if isinstance(reply, MatchReply) else None

    def ask_stores(self, hit: Hit, computed: int = 0, promise: Promise | None = None) -> bool:
        """Ask the server's stores for more of a prompt, as `Manager.ask_stores` does.

        Call it after `get_match` for the same prompt. Promised blocks may come to the server's
        stores, or to its host memory from another of its engines.
        """
        member, keys = self.keeper.member, hit.held.keys
        if member is None or max(hit.blocks, computed) >= len(keys):
            return False
        if promise is None and not member.welcome.stores:
            return keys[-1] == self._coming
        found = self._match(keys, hit.namespace, computed, ask=True, promise=promise)
        if found is None:
            return False
        # This reply also reports what came between the two requests; it is not asked for again.
        depth = found.sources[-1][2] if found.sources else 0
        return found.asking or (depth if self.points is None else found.blocks) > hit.blocks

    def wait_stores(self, timeout: float) -> bool:
        """Wait a moment, then let the caller ask again: the server does not notify its clients."""
        time.sleep(min(timeout, RETRY_S / 100))
        return False

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """Return blocks used and slots by tier.

        As of the last heartbeat; empty without a session.
        """
        member = self.keeper.member
        return {} if member is None else member.tiers

    def path_of(self, key: bytes) -> PathReply:
        """Return the chain that ends with a block.

        Raises TierUnavailable if no tier holds the block, or if the server does not answer.
        """
        member, reply = self.keeper.member, None
        if member is not None:
            reply = self.keeper.ask(PathRequest(self._ref(), member.number, key), PathReply)
        if not isinstance(reply, PathReply):
            why = reply.message if isinstance(reply, Refused) else "the server does not answer"
            raise TierUnavailable(f"the stored block cannot be read: {why}")
        return reply

    def held(self, tier: str, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks a tier holds or is receiving."""
        return self._held(tier, keys, point=False)

    def expected_in(self, tier: str, keys: Sequence[bytes]) -> int:
        return self._held(tier, keys, point=self.points is not None)

    def _held(self, tier: str, keys: Sequence[bytes], *, point: bool) -> int:
        member = self.keeper.member
        if not keys or member is None:
            return 0
        reply = self.keeper.ask(
            HeldRequest(self._ref(), member.number, tier, join(keys), point), CountReply
        )
        return reply.value if isinstance(reply, CountReply) else 0

    def can_load(self, hit: Hit, start: int, stop: int) -> Readiness:
        """Return whether a load can be planned, as of the last match."""
        tiers = hit.blocks_by_tier(start, stop)
        return self._room.admits(sum(n for tier, n in tiers.items() if tier != "host"))

    # -- plans --------------------------------------------------------------------------------

    @property
    def certain(self) -> bool:
        """Return True if every worker has the session's memory mapped.

        That is known once a copy to or from it has ended on all of them. A load that the server has
        planned then needs the server no more.
        """
        member = self.keeper.member
        return member is not None and member.number == self._mapped

    def plan_load(
        self,
        hit: Hit,
        blocks: Span,
        *,
        layers: Sequence[Span] = (),
        deadline_s: float | None = None,
    ) -> Planned:
        """Have the server plan a load, as `Manager.plan_load` does.

        Raises CapacityError if it has no slots, and TierUnavailable if it does not answer, or no
        longer holds the blocks.
        """
        planned = self._ask_load(hit, blocks, layers, deadline_s)
        if planned is None:
            raise TierUnavailable(f"the server plans no load of blocks {blocks[0]}..{blocks[1]}")
        kept = min(hit.in_host, blocks.stop)
        if kept > blocks.start:  # else it reads and pins nothing in host memory
            self._host[planned.graph.graph_id] = hit.keys[kept - 1], kept
        return planned

    def plan_fetch(
        self,
        hit: Hit,
        stop: int | None = None,
        *,
        deadline_s: float | None = None,
        background: bool = False,
    ) -> Planned | None:
        """Have the server plan a fetch, as `Manager.plan_fetch` does.

        A fetch in the background is an operator's, who asks the server itself.
        """
        stop = hit.depth if stop is None else stop
        if hit.in_host >= stop:
            return None
        return self._ask_load(hit, Span(hit.in_host, stop), (), deadline_s, fetch=True)

    def plan_save(
        self,
        keys: Sequence[bytes],
        namespace: bytes,
        stop: int,
        tokens: Sequence[int] | None = None,
        *,
        point: bool = False,
    ) -> Planned | None:
        """Have the server plan a save, as `Manager.plan_save` does.

        Nothing is saved while the server does not answer. Blocks that a load in flight reads from
        host memory need no save. The server is then not asked, so that a request that waits for its
        first token is spared the round trip.
        """
        member, blocks = self._ready_member(), keys[:stop]
        if point:
            assert self.points is not None, "a resume point of a model that has none"
            keys = self.points.chain(keys, stop)
            stop = len(keys)
        if member is None or not stop or self._is_kept(keys, stop):
            return None
        reply = self.keeper.ask(
            SaveRequest(self._ref(), member.number, join(blocks), namespace, point), LaunchReply
        )
        if not isinstance(reply, LaunchReply):
            self._metrics.save_skipped(SaveSkip.BUSY, stop)
            return None
        return _planned(reply, keys, tokens)

    def launch(
        self,
        planned: Planned,
        units: Sequence[UnitTable] = (),
        *,
        lane: Lane | None = None,
        on_end: Callable[[], object] | None = None,
    ) -> TransferGraph:
        try:
            graph = planned.graph.bind(units)
        except TransferError:
            self.drop(planned)
            raise
        member = self._member_of(graph.graph_id)
        if planned.tokens is not None and member is not None and member.welcome.wants_tokens:
            (start, stop), point = planned.blocks, graph.point
            with_tokens = Span(start, stop if point is None else start + point)
            self._publish_tokens(member, planned.keys, with_tokens, planned.tokens)
        if on_end is not None:
            self._on_end[graph.graph_id] = on_end
        self._left[graph.graph_id] = {op.op_id for op in graph.ops}
        self.transport.submit(graph, lane)
        return graph

    def drop(self, planned: Planned) -> None:
        graph = planned.graph
        if graph.priority is Priority.SAVE:
            self._metrics.save_skipped(SaveSkip.ABORTED, planned.blocks.size)
        self._host.pop(graph.graph_id, None)
        self._report_ended(graph.graph_id, undone(graph, RowError.CANCELLED))

    def _ask_load(
        self,
        hit: Hit,
        blocks: Span,
        layers: Sequence[Span],
        deadline_s: float | None,
        *,
        fetch: bool = False,
    ) -> Planned | None:
        """Ask for a load or a fetch of ``blocks``.

        Returns None if there is nothing to do. Raises as `plan_load` does.
        """
        what = f"blocks {blocks.start}..{blocks.stop}"
        member = self.keeper.member
        if member is None or not self._is_clear():
            raise TierUnavailable(f"no server that could load {what} is there")
        request = LoadRequest(
            self._ref(),
            member.number,
            join(hit.keys[: blocks.stop]),
            hit.namespace,
            [(source.tier, source.start, source.stop) for source in hit.sources],
            *blocks,
            list(layers),
            deadline_s,
            fetch,
            hit.point if blocks.stop == hit.depth else 0,
        )
        reply = self.keeper.ask(request, LaunchReply)
        if isinstance(reply, Refused):
            refusal = CapacityError if reply.kind == "capacity" else TierUnavailable
            raise refusal(f"the server does not load {what}: {reply.message}")
        if not isinstance(reply, LaunchReply):
            raise TierUnavailable(f"the server did not answer in time about {what}")
        return _planned(reply, hit.keys)

    @property
    def wants_tokens(self) -> bool:
        member = self.keeper.member
        return member is not None and member.welcome.wants_tokens

    def _publish_tokens(
        self,
        member: JoinedSession,
        keys: Sequence[bytes],
        blocks: Span,
        tokens: Sequence[int],
    ) -> None:
        """Send the tokens of ``blocks`` of a chain, before their save can end."""
        block = self._block_tokens
        for first in range(*blocks, BLOCKS_A_MESSAGE):
            last = min(first + BLOCKS_A_MESSAGE, blocks.stop)
            text = pack_tokens(tokens[first * block : last * block])
            self.keeper.link.tell(
                PublishTokens(self._ref(), member.number, join(keys[first:last]), text)
            )

    def _is_kept(self, keys: Sequence[bytes], stop: int) -> bool:
        """Return True if a load that has not failed keeps these blocks in host memory."""
        return any(
            stop <= kept <= len(keys) and keys[kept - 1] == last and self._member_of(graph_id)
            for graph_id, (last, kept) in self._host.items()
        )

    def cancel(self, graph_id: int) -> None:
        if graph_id in self._left:
            self.transport.cancel(graph_id)
            if (member := self._member_of(graph_id)) is not None:
                self.keeper.link.tell(WithdrawRequest(self._ref(), member.number, graph_id))

    # -- completion ---------------------------------------------------------------------------

    def complete(self, report: OpReport) -> None:
        left = self._left.get(report.graph_id)
        if left is None or report.op_id not in left:
            _log.warning(
                "ignored the report of an unknown op graph=%d op=%d", report.graph_id, report.op_id
            )
            return
        left.discard(report.op_id)
        if not report.failed:
            self._mapped = session_of(report.graph_id)
        elif RowError.NOT_READY in report.failed.values():
            self._held_off = session_of(report.graph_id), time.monotonic() + NOT_READY_S
        if report.failed or not left:
            self._host.pop(report.graph_id, None)
        self._report_ended(report.graph_id, [report])
        if not left:
            del self._left[report.graph_id]
            self._on_end.pop(report.graph_id, lambda: None)()

    def _report_ended(self, graph_id: int, reports: list[OpReport]) -> None:
        member = self._member_of(graph_id)
        if member is not None:  # else the server that planned it is gone
            self.keeper.report_ended(member, reports)

    def _ready_member(self) -> JoinedSession | None:
        """Return the session; None for `NOT_READY_S` after a worker had not yet mapped its memory.

        What is asked afterwards tries the workers again.
        """
        member, (session, until) = self.keeper.member, self._held_off
        held_off = member is not None and member.number == session and time.monotonic() < until
        return None if held_off else member

    def _member_of(self, graph_id: int) -> JoinedSession | None:
        member = self.keeper.member
        return member if member is not None and member.number == session_of(graph_id) else None

    # -- upkeep -------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Return this engine's graphs that have not ended, without the server's own."""
        return len(self._left)

    def is_in_flight(self, graph_id: int) -> bool:
        return graph_id in self._left

    def maintain(self) -> None:
        """Do nothing: the server keeps room by itself."""

    def clear(self, namespace: bytes | None = None) -> int:
        """Forget every block (of one namespace) for every engine with this model.

        Until the server acknowledges the clear, nothing is found, and nothing that was found before
        is loaded. The server is asked again before each lookup. If this engine ends first, the next
        server finds the request in its runtime directory.
        """
        everything = namespace is None or self._pending_clears is None
        self._pending_clears = None if everything else {*(self._pending_clears or ()), namespace}  # type: ignore[arg-type]
        self._clear_file.write(self._pending_clears)
        return self._clear_pending()

    def _is_clear(self) -> bool:
        """Return True if the server has acknowledged every clear; ask it again if not."""
        if self._pending_clears != set():
            self._clear_pending()
        return self._pending_clears == set()

    def _clear_pending(self) -> int:
        """Ask the server for the clears that it has not acknowledged; return the copies dropped."""
        count = 0
        for namespace in [None] if self._pending_clears is None else list(self._pending_clears):
            member, reply = self.keeper.member, None
            if member is not None:
                reply = self.keeper.ask(
                    ClearRequest(self._ref(), member.number, namespace), CountReply
                )
            if not isinstance(reply, CountReply):
                return count
            count += reply.value
        self._pending_clears = set()
        self._clear_file.remove()
        return count

    def check_integrity(self) -> None:
        """Assert that every graph in flight waits for some op."""
        assert all(self._left.values()), "a graph that waits for nothing is in flight"

    def _ref(self) -> int:
        return self.keeper.link.ref()

    def close(self) -> None:
        """Leave the server. The workers must have been closed before."""
        self.keeper.close()


def _planned(
    reply: LaunchReply, keys: Sequence[bytes], tokens: Sequence[int] | None = None
) -> Planned | None:
    if reply.graph is None:
        return None
    blocks = Span(reply.first, reply.first + reply.graph.num_rows)
    return Planned(reply.graph, keys, blocks, tokens)


def join_server(
    config: Config, model: ModelDescription, transport: Transport, metrics: Metrics
) -> RemoteManager:
    """Return a manager in the server of ``config``. Blocks while the server prepares the model.

    Raises UnsupportedError if the server refuses the engine, and ConfigError for settings that
    cannot be used.
    """
    keeper = SessionKeeper(config.server, model, settings_digest(config.namespace))
    keeper.start()
    return RemoteManager(keeper, transport, model, metrics)
