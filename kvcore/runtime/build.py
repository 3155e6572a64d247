"""Composition of one process from a config: a leader's manager, or the worker of a rank.

    config + model ── build_manager ──▶ ManagerParts   index, lower tiers, manager
    config + model ── build_worker ───▶ WorkerParts   arena, copies, tiers to open     (each rank)
             pages ──┘

Both compute the size of the arena from the same numbers, so that a slot of the index is a slot of
every rank. An engine's adapter uses `kvcore.connector.build`, in which a server may take the place
of the manager.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any, NamedTuple

from kvcore.admin.audit import AuditLog
from kvcore.admin.open import make_admin, open_endpoint
from kvcore.admin.tenants import Tenants
from kvcore.cluster import Directory, register
from kvcore.config import Config
from kvcore.config.fields import forgotten_unit
from kvcore.errors import ConfigError, KVCoreError, Mismatch, UnsupportedError
from kvcore.events import Feed
from kvcore.events.open import RunningPublisher, endpoints, open_events
from kvcore.fusion.segments import SegmentBook, Segments
from kvcore.index import BlockIndex, Event, TierSpec
from kvcore.manager import HOST, KVManager, Manager, TokenPublisher, TransferOptions, Transport
from kvcore.memory.arena import HostArena, slot_bytes
from kvcore.memory.copy import DeviceOps, select_ops
from kvcore.memory.device import device_of
from kvcore.memory.device_group import DeviceGroup
from kvcore.memory.layout import Arrangement, KVView
from kvcore.memory.points import (
    NO_POINTS,
    PointCopies,
    RawPages,
    StatePages,
    WindowPages,
    point_copies,
)
from kvcore.memory.runs import PagesInBlock, SlotPlace
from kvcore.model.keys import pack_tokens
from kvcore.model.points import PointRows, is_point_row, without_rows
from kvcore.model.spec import ModelDescription
from kvcore.plugins import PluginManager
from kvcore.runtime.tiers import (
    BackingOpener,
    PreparedBacking,
    hold_backings,
    prepare_backings,
)
from kvcore.telemetry.metrics import Metrics
from kvcore.telemetry.timeline import FileTracer, Tracer
from kvcore.tiers.disk import Geometry
from kvcore.tiers.guard import key_of_secret
from kvcore.tiers.held import Held
from kvcore.transfer.graph import COPY_BYTES, Path
from kvcore.worker import EnginePages, KVWorker, WorkerLimits
from kvcore.worker.lifecycle import RankParts

__all__ = [
    "HostSlots",
    "ManagerParts",
    "WorkerParts",
    "arena_arrangement",
    "build_manager",
    "build_segments",
    "build_worker",
    "device_slots",
    "enter_directory",
    "geometry",
    "hold_tiers",
    "host_slots",
    "load_plugins",
    "segments_of",
    "with_admin",
]

_log = logging.getLogger("kvcore.connector")


class HostSlots(NamedTuple):
    """Slots of every rank's arena: first those of the index, then those for staging."""

    indexed: int
    staging: int

    @property
    def total(self) -> int:
        return self.indexed + self.staging


def host_slots(config: Config, model: ModelDescription) -> HostSlots:
    """Return how many slots every rank's arena has.

    All ranks together stay below ``host.capacity``. Raises UnsupportedError if it does not hold one
    block.
    """
    per_slot = sum(slot_bytes(model.rank_shape(rank)) for rank in range(model.world_size))
    total = config.host.capacity // per_slot
    if total < 1:
        raise UnsupportedError(
            f"host.capacity of {config.host.capacity} bytes does not hold one block of {per_slot}"
            f"{forgotten_unit(config.host.capacity)}"
        )
    below = config.disk.path is not None or config.tiers  # staging holds what comes from there
    staging = min(2 * config.transfer.batch_blocks, total // 4) if below else 0
    return HostSlots(total - staging, staging)


def arena_arrangement(config: Config, points: PointRows | None, *, packed: bool) -> Arrangement:
    """Return how slots lie in an arena.

    They are one run of bytes each if they hold resume points, or pages of the engine's own format.
    """
    plain = points is None and not packed
    return Arrangement(config.host.arrangement) if plain else Arrangement.BLOCKWISE


def copy_blocks(model: ModelDescription) -> int:
    """Return how many blocks of the largest rank `COPY_BYTES` hold, at least one."""
    largest = max(slot_bytes(model.rank_shape(rank)) for rank in range(model.world_size))
    return max(1, COPY_BYTES // largest)


def device_slots(config: Config, model: ModelDescription, points: PointRows | None) -> int:
    """Return how many blocks every rank's staging on the device holds.

    0 if no tier is read directly to the device. ``points`` are the resume points of the model.
    """
    disk = config.disk
    if disk.path is None or disk.to_device == "off" or config.server.address is not None:
        return 0
    if points is not None:
        _log.info("disk.to_device has no effect: rows of resume points go through host memory")
        return 0
    largest = max(slot_bytes(model.rank_shape(rank)) for rank in range(model.world_size))
    slots = disk.device_staging // largest
    if not slots:
        _log.warning(
            "disk.device_staging of %d bytes does not hold one block of %d: raise it; until then "
            "loads from disk go through host memory",
            disk.device_staging,
            largest,
        )
    return slots


def geometry(model: ModelDescription, rank: int = 0) -> Geometry:
    """Return what a stored block of the model is, and which heads and layers each rank holds.

    A disk on the machine of ``rank`` has the shards of the ranks there. The leader is with rank 0.
    """
    ranks, beside = range(model.world_size), model.beside(rank)
    heads = tuple(model.head_range(rank) for rank in ranks)
    layers = tuple(model.layer_range(rank) for rank in ranks)
    held = (beside.start, beside.stop)
    return Geometry(model.shape, model.fingerprint, heads, layers=layers, held=held)


def load_plugins(config: Config) -> PluginManager:
    """Load the plugins that ``[plugins]`` does not disable."""
    return PluginManager(disable=config.plugins.disable, strict=config.plugins.strict)


# -- leader ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ManagerParts:
    """A leader's manager, and the parts that live as long as it.

    ``backings`` are its own lower tiers, restored; a server's client has none. The owner calls each
    of ``releases`` once, after the workers have closed.
    """

    manager: Manager
    metrics: Metrics
    backings: Sequence[PreparedBacking]
    plugins: PluginManager
    releases: list[Callable[[], None]]
    events: RunningPublisher | None = None
    directory: Directory | None = None
    tenants: Tenants | None = None

    @property
    def open_tiers(self) -> dict[str, dict[str, Any]]:
        """The options that every worker needs before its first graph, by tier name."""
        return {found.spec.name: found.rank_options for found in self.backings}

    @property
    def read_paths(self) -> dict[str, str]:
        """The transfer path of each tier's reads, by tier."""
        backing = {tier.name: tier.load_path.value for tier in self.manager.backings}
        return {HOST: Path.H2D.value, **backing}


def enter_directory(
    config: Config,
    model: ModelDescription,
    parts: ManagerParts,
    kind: str,
    data_parallel_rank: int | None = None,
) -> ManagerParts:
    """Register this process and the endpoints of its events in the directory of ``[cluster]``.

    Returns ``parts`` with a release that leaves the directory, or unchanged if there is no
    directory. If it raises ConfigError, ``parts`` have been released.
    """
    entry = {"fingerprint": model.fingerprint.hex(), "block_tokens": str(config.block.tokens)}
    if parts.events is not None:
        entry |= endpoints(config, data_parallel_rank)
    try:
        directory = register(config, kind, entry, data_parallel_rank)
    except ConfigError:
        for release in parts.releases:
            release()
        raise
    if directory is None:
        return parts
    return replace(parts, directory=directory, releases=[directory.close, *parts.releases])


def with_admin(
    config: Config, model: ModelDescription, parts: ManagerParts, data_parallel_rank: int | None
) -> ManagerParts:
    """Return ``parts`` with an endpoint for operators' commands, if ``config`` names a socket.

    ``parts`` are those of `build_manager`. If the endpoint cannot be opened, they are released and
    a KVCoreError is raised.
    """
    if config.control.address is None:
        return parts
    assert isinstance(parts.manager, KVManager)
    assert parts.tenants is not None
    try:
        audit = AuditLog(config.control.audit)
        admin = make_admin(config, model, parts.manager, parts.tenants, parts.metrics, audit)
        endpoint = open_endpoint(config, model, admin, data_parallel_rank)
    except KVCoreError:
        for release in parts.releases:
            release()
        raise
    parts.manager.upkeep.append(endpoint.step)
    return replace(parts, releases=[endpoint.close, audit.close, *parts.releases])


def build_manager(
    config: Config,
    model: ModelDescription,
    transport: Transport,
    *,
    on_event: Callable[[Event], None] | None = None,
    data_parallel_rank: int | None = None,
    write_through_in_save: bool = True,
    points: PointRows | None = None,
    elsewhere: Sequence[Mapping[str, Held]] = (),
) -> ManagerParts:
    """Build a manager over tiers of this process. Does I/O: a disk tier scans its records.

    ``write_through_in_save`` is as in `TransferOptions`. ``on_event``
    gets what the feed of ``[events]`` gets; see `BlockIndex.watch`. ``data_parallel_rank``
    distinguishes the leaders of one engine if there are several. ``points`` are the model's resume
    points, by default those that it describes. ``elsewhere`` is what the other machines of the
    model's ranks hold (`hold_tiers`), in order.

    A tier that cannot be used is named in the log and left out. Raises ConfigError for settings
    that name no plugin or do not fit one, UnsupportedError if host memory does not hold one block.
    """
    points = model.point if points is None else points
    plugins = load_plugins(config)
    plugins.check(config)
    slots = host_slots(config, model)
    backings = prepare_backings(config, geometry(model), plugins, elsewhere=elsewhere)
    policy = plugins.policy(config.host.policy)
    host = TierSpec(HOST, slots.indexed, policy, config.host.policy_options)
    index = BlockIndex([host, *(found.spec for found in backings)])
    metrics = Metrics("leader", enabled=config.metrics.enabled)
    not_taken = {found.spec.name: _restore(index, found, metrics) for found in backings}
    events = _open_events(config, index, metrics, data_parallel_rank, points, on_event)
    feed = None if events is None else events.feed
    manager = KVManager(
        index,
        transport,
        backing=[found.backing for found in backings],
        options=TransferOptions(
            staging_slots=range(slots.indexed, slots.total),
            device_slots=device_slots(config, model, points),
            batch_blocks=config.transfer.batch_blocks,
            copy_blocks=copy_blocks(model),
            write_through_in_save=write_through_in_save,
        ),
        metrics=metrics,
        publish_tokens=_token_publisher(feed, config.block.tokens),
        points=points,
    )
    manager.invalidation.not_taken.update(not_taken)
    tenants = Tenants(config, model.fingerprint, index, model.shape.nbytes, metrics)
    if feed is not None:
        manager.upkeep.append(feed.tick)
    if config.tenants or config.clients.unnamed_quota:
        manager.upkeep.append(tenants.tick)
    manager.tiers.share_lookups(tenants.name_of)
    _log.info(
        "kvcore leads: block_tokens=%d block_bytes=%d page_tokens=%s host_blocks=%d tiers=%s",
        config.block.tokens,
        model.shape.nbytes,
        ",".join(str(group.page_tokens) for group in model.groups),
        slots.indexed,
        ",".join(index.tiers),
    )
    outside = [] if events is None else [events.close]
    releases = [*outside, *(found.prepared.release for found in backings)]
    return ManagerParts(manager, metrics, backings, plugins, releases, events, tenants=tenants)


def _open_events(
    config: Config,
    index: BlockIndex,
    metrics: Metrics,
    data_parallel_rank: int | None,
    points: PointRows | None,
    on_event: Callable[[Event], None] | None,
) -> RunningPublisher | None:
    """Have the index's events told to ``on_event`` and, if ``[events]`` says so, to the publisher.

    Returns the publisher, started.
    """
    chosen = {} if points is None else {"told": without_rows}
    events = open_events(config, index, metrics, data_parallel_rank, **chosen)
    listener = _both(on_event, None if events is None else events.feed)
    if listener is not None:
        index.watch(listener if points is None else partial(_tell_blocks, listener))
    return events


def _tell_blocks(tell: Callable[[Event], None], event: Event) -> None:
    """Pass on an event without the rows of resume points, which are no blocks of tokens.

    A removal is passed on as it is: nobody was told of those rows.
    """
    keys = event.keys
    if event.stored:
        parents = (event.parent, *keys)
        rows = [is_point_row(key, parent) for key, parent in zip(keys, parents, strict=False)]
        keys = keys[: rows.index(True)] if True in rows else keys
    if keys:
        tell(event._replace(keys=keys))


def _token_publisher(feed: Feed | None, block_tokens: int) -> TokenPublisher | None:
    if feed is None or not feed.wants_tokens:
        return None
    tell = feed.publish_tokens

    def publish_tokens(keys: Sequence[bytes], start: int, stop: int, tokens: Sequence[int]) -> None:
        tell(keys[start:stop], pack_tokens(tokens[start * block_tokens : stop * block_tokens]))

    return publish_tokens


def _both(
    on_event: Callable[[Event], None] | None, feed: Feed | None
) -> Callable[[Event], None] | None:
    if on_event is None or feed is None:
        return on_event if feed is None else feed.note
    tell, note = on_event, feed.note

    def both(event: Event) -> None:
        tell(event)
        note(event)

    return both


def _restore(index: BlockIndex, found: PreparedBacking, metrics: Metrics) -> list[int]:
    """Add the blocks that a lower tier still holds to the index, and count those that are torn.

    Returns the slots of dropped records that lie beyond the tier's present size.
    """
    if found.prepared.torn:
        metrics.refused_block(found.spec.name, Mismatch.CORRUPT.value, found.prepared.torn)
    lost = index.admin.restore(found.spec.name, found.prepared.records)
    _log.info(
        "tier restored name=%s blocks=%d dropped=%d slots=%d",
        found.spec.name,
        index.num_used(found.spec.name),
        len(lost),
        found.spec.num_slots,
    )
    return [record.slot for record in lost if record.slot >= found.spec.num_slots]


def hold_tiers(
    config: Config, model: ModelDescription, rank: int
) -> tuple[dict[str, Held], Callable[[], None]]:
    """Prepare the disks of the machine of ``rank``, whose leader is on another one. Does I/O.

    One rank of each such machine calls it, before the leader is built. Returns what the leader has
    to know, by tier, and what to call after the machine's ranks have closed. Raises ConfigError for
    options that do not fit.
    """
    held, releases = hold_backings(config, geometry(model, rank), load_plugins(config))
    return held, releases.close


def build_segments(config: Config, model: ModelDescription) -> Segments:
    """Build the book of the stored blocks' tokens.

    With a disk tier it is a file in the tier's folder, which outlives the engine as the blocks do.
    If blocks have a MAC, the file's records have one too, with a key of their own. If the blocks
    are encrypted, the book stays in memory, because tokens are the user's text.
    """
    path, key, secret = None, b"", config.namespace.secret
    if config.disk.path is not None and config.disk.path.is_dir() and not config.disk.encrypted:
        name = f"segments-{model.fingerprint.hex()[:16]}-{config.block.tokens}"
        if secret and config.disk.authenticate:
            key = key_of_secret(secret, f"segments {model.fingerprint.hex()} {config.block.tokens}")
            name += f"-{hashlib.sha256(key).hexdigest()[:16]}"
        path = config.disk.path / name
    return Segments(config.block.tokens, min_tokens=config.fusion.min_tokens, path=path, key=key)


def segments_of(config: Config, model: ModelDescription, manager: Manager) -> SegmentBook:
    """Return the book in which a leader finds chunks: the server's, or one of its own."""
    return manager.segments or build_segments(config, model)


# -- worker ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerParts(RankParts):
    """The parts of a rank that executes graphs, with the plugins that its blends use."""

    worker: KVWorker
    plugins: PluginManager


def build_worker(
    config: Config,
    model: ModelDescription,
    rank: int,
    views: Sequence[KVView],
    served: Callable[..., KVWorker] | None = None,
    states: StatePages | None = None,
    windows: WindowPages | None = None,
    pages: RawPages | None = None,
) -> WorkerParts:
    """Build the worker of ``rank`` and allocate its arena.

    ``views`` are the rank's pages: one view for each of the model's groups that has layers on this
    rank, and no others. ``states``, ``windows`` and ``pages`` are its pages of resume points, if
    the model keeps any.
    ``served`` makes a worker that copies to and from another process's memory
    instead; its own arena then has one slot.

    Raises UnsupportedError or LayoutError if KV cannot be moved correctly. Nothing is left open
    then, and the caller must store nothing.
    """
    device = views[0].tensors[0].device
    own = served is None
    points = NO_POINTS
    if (point := model.rank_point(rank)) is not None:
        points = point_copies(point, states or {}, windows or {}, pages)
    arena = HostArena(
        model.rank_shape(rank),
        host_slots(config, model).total if own else 1,
        arrangement=arena_arrangement(config, model.point, packed=model.packed is not None),
        huge_pages=config.host.huge_pages and own,
        pin=device_of(device) if config.host.pin and own else None,
        prefault=config.host.prefault if own else 0,
    )
    metrics = Metrics(f"rank{rank}", enabled=config.metrics.enabled)
    try:
        arena_view = KVView(arena.layout(), [arena.tensor()])
        plugins = load_plugins(config)
        ops = select_ops(views[0], arena_view, plugins.ops(), config.ops.backend)
        worker = (served or KVWorker)(
            arena=arena,
            arena_view=arena_view,
            ops=ops,
            pages=EnginePages(
                _groups(model, rank, views), model.layer_range(rank)[0], device, points
            ),
            limits=WorkerLimits(
                config.transfer.copy_threads,
                queue_depth=config.transfer.queue_depth,
                device_slots=device_slots(config, model, model.point),
            ),
            metrics=metrics,
            tracer=_tracer(config, rank),
        )
    except BaseException:
        arena.close()
        raise
    try:
        _prepare(ops, worker, arena_view, config, points)
    except BaseException:
        worker.close()
        raise
    _log.info(
        "kvcore works: rank=%d host_bytes=%d huge_pages=%s pinned=%s copies=%s",
        rank,
        arena.nbytes,
        arena.huge_pages,
        arena.pinned,
        ops.name,
    )
    return WorkerParts(
        worker, metrics, BackingOpener(config, geometry(model, rank), rank, plugins), plugins
    )


def _prepare(
    ops: DeviceOps,
    worker: KVWorker,
    arena: KVView,
    config: Config,
    points: PointCopies,
) -> None:
    """Compile and allocate what copies of the engine's pages will need, before it captures graphs.

    Raises UnsupportedError if the device has no room for it.
    """
    import torch

    place, block_tokens = SlotPlace(worker.arena.slot_nbytes), config.block.tokens
    copied = [
        (
            group.view,
            group.memory(arena, place, worker.first_layer),
            gcd(group.view.layout.page_tokens, block_tokens),
        )
        for group in worker.groups
        if group.layers
    ]
    if config.fusion.enabled:  # a chunk of a blend may begin at any token
        copied += [(pages, memory, 1) for pages, memory, _ in copied]
    rows = points.in_memory(arena, place)
    copied += [
        (part.pages, memory, 1)
        for part, memory in (
            *zip(points.states, rows.states, strict=True),
            *zip(points.pages, rows.pages, strict=True),
        )
    ]
    copied += [
        (part.pages, memory, gcd(part.pages.layout.page_tokens, block_tokens))
        for part, memory in zip(points.windows, rows.windows, strict=True)
    ]
    try:
        for pages, memory, unit in copied:
            ops.prepare(pages, memory, unit)
    except torch.OutOfMemoryError as error:
        raise UnsupportedError(
            f"the device has no room for kvcore's copies ({error}): give the engine less memory"
        ) from error


def _groups(model: ModelDescription, rank: int, views: Sequence[KVView]) -> list[DeviceGroup]:
    """Return the model's groups on a rank, in the order of a graph's tables."""
    groups, nothing = model.rank_groups(rank), views[0].select_layers(())
    given = dict(zip([group.index for group in groups if group.layers], views, strict=True))
    packed, block, first = model.packed, model.shape.block_tokens, model.layer_range(rank)[0]
    return [
        DeviceGroup(
            group.layers,
            given.get(group.index, nothing),
            group.page_tokens,
            PagesInBlock.of(packed, block, group.layers, first) if packed is not None else None,
        )
        for group in groups
    ]


def _tracer(config: Config, rank: int) -> Tracer:
    """Open this rank's trace file.

    Returns a tracer that discards its spans if no folder is set or it cannot be written.
    """
    if config.trace.path is None:
        return Tracer()
    try:
        return FileTracer(config.trace.path, f"rank{rank}")
    except OSError as error:
        _log.warning("no trace is written: %s", error)
        return Tracer()
