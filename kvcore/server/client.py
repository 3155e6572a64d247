"""The leader's side of a server: `RemoteManager` answers as a manager of its own would.

While there is no server (`SessionKeeper` says when) nothing is found and nothing is saved, at once. What
was planned before goes on: the workers have the memory mapped.

A load that the server does not plan is given to the workers as a graph that they refuse, so that
the engine computes, in the way that it would had the copy failed.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from kvcore.config import Config
from kvcore.control.messages import Refused
from kvcore.errors import CapacityError, TierUnavailable
from kvcore.manager.base import (
    Backing,
    Hit,
    Manager,
    PreparedLoad,
    Promise,
    Readiness,
    Room,
    Source,
    Transport,
)
from kvcore.model.keys import pack_tokens
from kvcore.model.shape import BlockShape
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
    NO_PARENT,
    OpReport,
    Path,
    RowError,
    Span,
    TransferGraph,
    UnitTable,
)
from kvcore.transfer.plan import Chain, build_load

__all__ = ["RemoteManager", "join_server"]

_log = logging.getLogger("kvcore.server.client")

BLOCKS_A_MESSAGE = 1024
"""Blocks whose tokens go into one message: 4 MiB of them at the largest blocks."""
_NO_ROOM = Room(full=True, free=0, staging=False, lent=False)


class RemoteManager(Manager):
    """`kvcore.manager.KVManager`, asked of a server. One thread, the leader's, but for `close`.

    Every call is answered in the server's deadline, or as if nothing were held.
    """

    index: RemoteIndex

    def __init__(
        self, keeper: SessionKeeper, transport: Transport, shape: BlockShape, metrics: Metrics
    ) -> None:
        self.keeper = keeper
        self.segments = RemoteSegments(keeper, shape.block_tokens)
        self._block_tokens = shape.block_tokens
        self.transport = transport
        self.index = RemoteIndex(self)
        self._metrics = metrics
        self._room = _NO_ROOM
        self._coming = b""  # last key of a prompt of which the server awaits what was promised
        self._owed: set[bytes] | None = set()  # namespaces to clear; None: all
        self._note = PendingClears(keeper.folder, keeper.model)
        self._refused = itertools.count(1)  # ids of graphs of no session
        self._left: dict[int, set[int]] = {}
        self._host: dict[int, tuple[bytes, int]] = {}
        """By load that is on its way: the last of the blocks that it keeps in host memory, and how
        many they are from the prompt's start on."""
        self._mapped = 0  # the session whose memory every worker is known to have
        self._on_end: dict[int, Callable[[], object]] = {}

    # -- lookup -------------------------------------------------------------------------------

    @property
    def backings(self) -> tuple[Backing, ...]:
        """The server's tiers below the host, as far as an engine cares."""
        member = self.keeper.member
        tiers = [] if member is None else member.welcome.tiers
        return tuple(Backing(name, read_path=Path(path)) for name, path in tiers)

    @property
    def node(self) -> str:
        """The server's: this engine has none of its own."""
        member = self.keeper.member
        return "" if member is None else member.welcome.node

    def get_match(self, keys: Sequence[bytes], namespace: bytes) -> Hit:
        """What the server holds of ``keys``; nothing when it does not answer in time."""
        found = self._match(keys, namespace, 0, ask=False)
        if found is None:
            self._coming = b""
            return Hit(keys, namespace, ())
        self._coming = keys[-1] if found.asking else b""
        self._room = Room(found.full, found.free, found.staging, found.lent, found.moving)
        return Hit(keys, namespace, tuple(Source(*source) for source in found.sources))

    def _match(
        self,
        keys: Sequence[bytes],
        namespace: bytes,
        computed: int,
        *,
        ask: bool,
        promise: Promise | None = None,
    ) -> MatchReply | None:
        member = self.keeper.member
        if not keys or member is None or not self._is_clear():
            return None
        told = promise and (promise.blocks, min(promise.wait_s, MAX_WAIT_S), promise.node)
        reply = self.keeper.ask(
            MatchRequest(self._ref(), member.number, join(keys), namespace, computed, ask, told),
            MatchReply,
        )
        return reply if isinstance(reply, MatchReply) else None

    def ask_stores(self, hit: Hit, computed: int = 0, promise: Promise | None = None) -> bool:
        """As `KVManager.ask_stores`, behind a `get_match` of the same prompt. What is promised may
        come to the server's stores, or to its host memory from another of its engines."""
        member = self.keeper.member
        if member is None or max(hit.depth, computed) >= len(hit.keys):
            return False
        if promise is None and not member.welcome.stores:
            return hit.keys[-1] == self._coming
        found = self._match(hit.keys, hit.namespace, computed, ask=True, promise=promise)
        if found is None:
            return False
        # What came between the two questions is told with this answer, and is asked for no more.
        depth = found.sources[-1][2] if found.sources else 0
        return found.asking or depth > hit.depth

    def wait_stores(self, timeout: float) -> bool:
        """The server does not call: wait a moment, then ask again."""
        time.sleep(min(timeout, RETRY_S / 100))
        return False

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """Blocks used and slots by tier, as the last heartbeat said. Empty without a session."""
        member = self.keeper.member
        return {} if member is None else member.tiers

    def path_of(self, key: bytes) -> PathReply:
        """The chain that ends with a block. Raises TierUnavailable when no tier holds it, or the
        server does not answer."""
        member, reply = self.keeper.member, None
        if member is not None:
            reply = self.keeper.ask(PathRequest(self._ref(), member.number, key), PathReply)
        if not isinstance(reply, PathReply):
            why = reply.message if isinstance(reply, Refused) else "the server does not answer"
            raise TierUnavailable(f"a stored block cannot be had: {why}")
        return reply

    def held(self, tier: str, keys: Sequence[bytes]) -> int:
        """Leading blocks that a tier holds or is receiving."""
        member = self.keeper.member
        if not keys or member is None:
            return 0
        reply = self.keeper.ask(
            HeldRequest(self._ref(), member.number, tier, join(keys)), CountReply
        )
        return reply.value if isinstance(reply, CountReply) else 0

    def can_load(self, hit: Hit, start: int, stop: int) -> Readiness:
        """As of the last match."""
        tiers = hit.blocks_by_tier(start, stop)
        return self._room.admits(sum(n for tier, n in tiers.items() if tier != "host"))

    # -- launching ----------------------------------------------------------------------------

    def launch_load(
        self,
        hit: Hit,
        start: int,
        stop: int,
        units: Sequence[UnitTable],
        *,
        layers: Sequence[Span] = (),
        deadline_s: float | None = None,
        on_end: Callable[[], object] | None = None,
    ) -> TransferGraph:
        """As `KVManager.launch_load`; a load that the server does not plan is one that fails.

        Raises CapacityError when the server has no slots for it.
        """
        reply = self._ask_load(hit, start, stop, layers, deadline_s)
        if isinstance(reply, Refused) and reply.kind == "capacity":
            raise CapacityError(reply.message)
        if not isinstance(reply, LaunchReply) or reply.graph is None:
            graph = self._failing(hit, start, stop, units, layers)
            self._launch(graph, on_end)
            return graph
        return self._launch_planned(reply.graph, hit, stop, units, on_end)

    @property
    def certain(self) -> bool:
        """Whether every worker has copied out of, or into, the memory of this session: then it has
        it mapped, and a load that the server planned needs the server no more."""
        member = self.keeper.member
        return member is not None and member.number == self._mapped

    def prepare_load(
        self, hit: Hit, start: int, stop: int, *, layers: Sequence[Span] = ()
    ) -> PreparedLoad:
        """As `Manager.prepare_load`: the server plans the load now, and its plan keeps the blocks.

        Raises TierUnavailable where the server does not answer, or finds them no more.
        """
        reply = self._ask_load(hit, start, stop, layers, None)
        if not isinstance(reply, LaunchReply) or reply.graph is None:
            why = reply.message if isinstance(reply, Refused) else "it does not answer"
            raise TierUnavailable(f"the server keeps no blocks {start}..{stop} for a load: {why}")
        return PreparedLoad(hit, start, stop, tuple(layers), graph=reply.graph)

    def launch_prepared(
        self,
        prepared: PreparedLoad,
        units: Sequence[UnitTable],
        *,
        on_end: Callable[[], object] | None = None,
    ) -> TransferGraph:
        assert prepared.graph is not None
        return self._launch_planned(prepared.graph, prepared.hit, prepared.stop, units, on_end)

    def drop_prepared(self, prepared: PreparedLoad) -> None:
        assert prepared.graph is not None
        reports = undone(prepared.graph, RowError.CANCELLED)
        self._report_ended(prepared.graph.graph_id, reports)

    def _ask_load(
        self,
        hit: Hit,
        start: int,
        stop: int,
        layers: Sequence[Span],
        deadline_s: float | None,
    ) -> LaunchReply | Refused | None:
        member = self.keeper.member
        if member is None or not self._is_clear():
            return None
        request = LoadRequest(
            self._ref(),
            member.number,
            join(hit.keys[:stop]),
            hit.namespace,
            [(source.tier, source.start, source.stop) for source in hit.sources],
            start,
            stop,
            list(layers),
            deadline_s,
        )
        return self.keeper.ask(request, LaunchReply)

    def _failing(
        self, hit: Hit, start: int, stop: int, units: Sequence[UnitTable], layers: Sequence[Span]
    ) -> TransferGraph:
        """A load of no session, which every worker refuses."""
        parent = hit.keys[start - 1] if start else NO_PARENT
        chain = Chain(hit.namespace, parent, tuple(hit.keys[start:stop]))
        slots = [0] * (stop - start)
        return build_load(
            next(self._refused), chain, slots, (), units, batch_rows=stop - start, layers=layers
        )

    def launch_save(
        self,
        keys: Sequence[bytes],
        namespace: bytes,
        stop: int,
        units_of: Callable[[int, int], Sequence[UnitTable] | None],
        tokens: Sequence[int] | None = None,
    ) -> TransferGraph | None:
        """As `KVManager.launch_save`; nothing is saved while the server does not answer.

        What a load on its way reads from host memory needs no save, and the server is not asked:
        a request that waits for its first token is spared the question.
        """
        member = self.keeper.member
        if member is None or not stop or self._is_kept(keys, stop):
            return None
        reply = self.keeper.ask(
            SaveRequest(self._ref(), member.number, join(keys[:stop]), namespace), LaunchReply
        )
        if not isinstance(reply, LaunchReply) or reply.graph is None:
            if not isinstance(reply, LaunchReply):
                self._metrics.save_skipped(SaveSkip.BUSY, stop)
            return None
        rows = reply.graph.num_rows
        units = units_of(reply.first, reply.first + rows)
        if units is None:
            self._metrics.save_skipped(SaveSkip.ABORTED, rows)
            self._report_ended(reply.graph.graph_id, undone(reply.graph, RowError.CANCELLED))
            return None
        if tokens is not None and member.welcome.wants_tokens:
            self._publish_tokens(member, keys, reply.first, reply.first + rows, tokens)
        graph = msgspec.structs.replace(reply.graph, units=tuple(units))
        self._launch(graph)
        return graph

    @property
    def wants_tokens(self) -> bool:
        member = self.keeper.member
        return member is not None and member.welcome.wants_tokens

    def _publish_tokens(
        self,
        member: JoinedSession,
        keys: Sequence[bytes],
        start: int,
        stop: int,
        tokens: Sequence[int],
    ) -> None:
        """Tell the tokens of blocks [start, stop) of a chain, before their save can end."""
        block = self._block_tokens
        for first in range(start, stop, BLOCKS_A_MESSAGE):
            last = min(first + BLOCKS_A_MESSAGE, stop)
            text = pack_tokens(tokens[first * block : last * block])
            self.keeper.link.tell(
                PublishTokens(self._ref(), member.number, join(keys[first:last]), text)
            )

    def _launch_planned(
        self,
        planned: TransferGraph,
        hit: Hit,
        stop: int,
        units: Sequence[UnitTable],
        on_end: Callable[[], object] | None,
    ) -> TransferGraph:
        """A load of the first ``stop`` blocks of ``hit``, or the last of them."""
        graph = msgspec.structs.replace(planned, units=tuple(units))
        kept = min(hit.in_host, stop)
        if kept > stop - graph.num_rows:  # else it reads, and pins, nothing there
            self._host[graph.graph_id] = hit.keys[kept - 1], kept
        self._launch(graph, on_end)
        return graph

    def _launch(self, graph: TransferGraph, on_end: Callable[[], object] | None = None) -> None:
        if on_end is not None:
            self._on_end[graph.graph_id] = on_end
        self._left[graph.graph_id] = {op.op_id for op in graph.ops}
        self.transport.submit(graph)

    def _is_kept(self, keys: Sequence[bytes], stop: int) -> bool:
        """Whether a load that has not ended, nor failed, keeps these blocks in host memory."""
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
            _log.warning("report of an unknown op graph=%d op=%d", report.graph_id, report.op_id)
            return
        left.discard(report.op_id)
        if not report.failed:
            self._mapped = session_of(report.graph_id)
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

    def _member_of(self, graph_id: int) -> JoinedSession | None:
        member = self.keeper.member
        return member if member is not None and member.number == session_of(graph_id) else None

    # -- upkeep -------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Graphs of this engine launched and not ended; the server's own are not among them."""
        return len(self._left)

    def is_in_flight(self, graph_id: int) -> bool:
        return graph_id in self._left

    def maintain(self) -> None:
        """The server keeps room by itself."""

    def clear(self, namespace: bytes | None = None) -> int:
        """Forget every block (of a namespace), for every engine with this model.

        While the server does not confirm it, nothing is found, and nothing that was found before is
        loaded; it is asked again before each. Should this engine end first, the next server finds
        it written down in its folder.
        """
        everything = namespace is None or self._owed is None
        self._owed = None if everything else {*(self._owed or ()), namespace}  # type: ignore[arg-type]
        self._note.write(self._owed)
        return self._clear_owed()

    def _is_clear(self) -> bool:
        """Whether the server has forgotten all that it should have; it is asked again if not."""
        if self._owed != set():
            self._clear_owed()
        return self._owed == set()

    def _clear_owed(self) -> int:
        """Have the server forget what it has not yet confirmed."""
        count = 0
        for namespace in [None] if self._owed is None else list(self._owed):
            member, reply = self.keeper.member, None
            if member is not None:
                reply = self.keeper.ask(
                    ClearRequest(self._ref(), member.number, namespace), CountReply
                )
            if not isinstance(reply, CountReply):
                return count
            count += reply.value
        self._owed = set()
        self._note.remove()
        return count

    def check_integrity(self) -> None:
        """Everything in flight waits for something."""
        assert all(self._left.values()), "a graph that waits for nothing is in flight"

    def _ref(self) -> int:
        return self.keeper.link.ref()

    def close(self) -> None:
        """Leave the server. The workers have closed before."""
        self.keeper.close()


def join_server(
    config: Config, model: ModelDescription, transport: Transport, metrics: Metrics
) -> RemoteManager:
    """A manager behind the server of ``config``. Blocks while that prepares the model.

    Raises UnsupportedError when the server refuses the engine; ConfigError for settings that cannot
    be.
    """
    keeper = SessionKeeper(config.server, model)
    keeper.start()
    return RemoteManager(keeper, transport, model.shape, metrics)
