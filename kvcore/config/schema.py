"""What can be configured: one frozen pydantic model a table, one documented field a key.

The models are strict (no ``"4"`` for an integer) and refuse unknown keys. Every field has a
default, so ``Config()`` is valid. How files, the environment and an engine's JSON become a
``Config`` is told in ``kvcore.config``; the reference page is generated from here.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr

from kvcore.config.fields import (
    DEFAULT,
    FolderPath,
    Name,
    Options,
    SchemaModel,
    Seconds,
    Size,
    Source,
    expand_user,
    format_size,
    parse_size,
)
from kvcore.config.schema_cluster import ClusterConfig, EventsConfig
from kvcore.config.schema_control import ControlConfig, TenantConfig, tenant_name
from kvcore.errors import ConfigError

__all__ = [
    "BlockConfig",
    "ClusterConfig",
    "Config",
    "ControlConfig",
    "DiskConfig",
    "EventsConfig",
    "ExplainConfig",
    "FusionConfig",
    "HostConfig",
    "LogConfig",
    "MetricsConfig",
    "NamespaceConfig",
    "OpsConfig",
    "PlannerConfig",
    "PluginsConfig",
    "SchemaModel",
    "ServerConfig",
    "SglangConfig",
    "Size",
    "Source",
    "TenantConfig",
    "TierConfig",
    "TransferConfig",
    "TrtllmConfig",
    "VllmConfig",
    "expand_user",
    "format_size",
    "parse_size",
]

RESERVED_TIERS = ("device", "host", "disk")
"""Names a ``[tiers.NAME]`` table cannot take: they are kvcore's own tiers."""


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ConfigError(f"given {value}; supported is a power of two")
    return value


def _tier_name(value: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", value) or value in RESERVED_TIERS:
        raise ConfigError(
            f"given the tier name {value!r}; supported are lower-case letters, digits, _ and -, "
            f"starting with a letter, and not {', '.join(RESERVED_TIERS)}"
        )
    return value


class BlockConfig(SchemaModel):
    """The unit of identity, placement and eviction."""

    tokens: Annotated[int, Field(ge=8, le=1024), AfterValidator(_power_of_two)] = Field(
        default=16,
        description="Tokens in a token block, a power of two. Smaller blocks reuse more of a "
        "shared prefix and cost more bookkeeping. KV stored with another value is not reused.",
    )


class NamespaceConfig(SchemaModel):
    """What separates KV that must not be shared."""

    secret: Name | None = Field(
        default=None,
        description="Key mixed into every hash, so that block keys cannot be guessed from the "
        "text. Every process that shares stored KV needs the same one. Set it through the "
        "environment: it is masked wherever kvcore prints its settings.",
        json_schema_extra={"secret": True},
        repr=False,
    )
    salt: Name | None = Field(
        default=None,
        description="Tenant of requests that bring no salt of their own. Tenants never share KV.",
    )


class HostConfig(SchemaModel):
    """The host-memory tier."""

    capacity: Size = Field(
        default=parse_size("4GiB"),
        gt=0,
        description="Bytes of host memory for KV, the total over all ranks of this engine.",
    )
    arrangement: Literal["blockwise", "layerwise"] = Field(
        default="blockwise",
        description="Order of bytes in the arena: all layers of a block together (fewest, largest "
        "disk requests), or all blocks of a layer together.",
    )
    policy: Name = Field(
        default="lru", description="Eviction policy: any registered one (see `kvcore plugins`)."
    )
    policy_options: Options = Field(default_factory=dict, description="Arguments of the policy.")
    huge_pages: bool = Field(
        default=True, description="Ask for 2 MiB pages where the system allows them."
    )
    pin: bool = Field(
        default=True,
        description="Lock the arena for the GPU's DMA where there is a GPU. Reported, not fatal, "
        "when the limit on locked memory forbids it.",
    )
    prefault: Size = Field(
        default=parse_size("512MiB"),
        ge=0,
        description="Bytes of each rank's arena that the kernel is asked for ahead of use, in the "
        "background, so that a load does not wait for it. As much as `capacity`: all at the "
        "start. 0: memory is taken as blocks come, which is slower the first time.",
    )


class BackingConfig(SchemaModel):
    """What every tier below host memory has."""

    capacity: Size = Field(
        default=parse_size("32GiB"),
        gt=0,
        description="Bytes the tier may hold, the total over all ranks; for a folder on disk, over "
        "all models in it. A remote store has a limit of its own: this is how much of it the "
        "engine keeps in mind.",
    )
    policy: Name = Field(default="lru", description="Eviction policy: any registered one.")
    policy_options: Options = Field(default_factory=dict, description="Arguments of the policy.")
    write: Literal["write_through", "write_back", "selective"] = Field(
        default="write_through",
        description="When a block goes there: when it is saved, when host memory evicts it, or "
        "at its `admit_after`-th use. What only host memory holds is gone when the engine ends.",
    )
    admit_after: int = Field(
        default=2,
        ge=1,
        le=255,
        description="Uses before a block is written, for `write = selective`.",
    )


class DiskConfig(BackingConfig):
    """The disk tier. Off unless `path` is set."""

    path: FolderPath | None = Field(
        default=None,
        description="Folder of the disk tier on a local disk, made if missing; `~` is expanded. "
        "Unset: no disk tier.",
    )
    direct_io: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Bypass the page cache (O_DIRECT): where the file system can, always (refuse "
        "to start otherwise), or never.",
    )
    io_threads: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Threads reading and writing, a rank, where the kernel's asynchronous I/O "
        "cannot be had; and threads decrypting.",
    )
    sync_interval_s: Seconds = Field(
        default=5.0,
        description="Seconds between flushes to the medium. A crash of the machine loses at most "
        "this much; a crash of the engine loses nothing.",
    )
    key_env: Name | None = Field(
        default=None,
        description="Encrypt blocks on disk (AES-256-GCM) with the key in this environment "
        "variable: 32 bytes as 64 hex digits or Base64. Every worker needs it. KV that another "
        "key, or none, wrote is not used. Needs the package cryptography.",
    )
    key_file: Name | None = Field(
        default=None,
        description="Encrypt blocks on disk with the key in this file, as for `key_env`.",
    )
    to_device: Literal["off", "on"] = Field(
        default="off",
        description="Read blocks straight into device memory (GPUDirect Storage, through NIXL) "
        "where a load goes from disk to the engine's pages, past host memory, which then does not "
        "keep them. Not with encryption, nor with a `kvcore server`. Used by vLLM's adapter: the "
        "others bring blocks to host memory before they know the pages.",
    )
    device_staging: Size = Field(
        default=parse_size("64MiB"),
        gt=0,
        description="Bytes of device memory, a rank, that `to_device` reads into.",
    )

    @property
    def encrypted(self) -> bool:
        """Whether blocks are encrypted on disk."""
        return self.key_env is not None or self.key_file is not None


class TierConfig(BackingConfig):
    """A backing tier of a plugin, one table `[tiers.NAME]` for each, read in order of name."""

    plugin: Name = Field(description="Name of the tier plugin (see `kvcore plugins`).")
    options: Options = Field(default_factory=dict, description="Arguments of the plugin.")


class TransferConfig(SchemaModel):
    """How bytes are moved."""

    copy_threads: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Threads copying between device pages and host memory, a rank.",
    )
    batch_blocks: int = Field(
        default=16,
        ge=1,
        le=4096,
        description="Token blocks moved by one operation of a transfer graph.",
    )
    queue_depth: int = Field(
        default=16384,
        ge=1,
        le=65536,
        description="Operations in flight, a rank. A save that does not fit is skipped and "
        "counted; a load that does not fit is recomputed.",
    )
    load_deadline_s: Seconds = Field(
        default=30.0,
        description="Seconds after which a load is abandoned and its tokens recomputed.",
    )
    sync_load_max: Size = Field(
        default=parse_size("512MiB"),
        description="Largest load, in bytes over all ranks, done inside the engine's step, layer "
        "by layer. A larger one, or one from disk, is loaded before the request is scheduled.",
    )


Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class FusionConfig(SchemaModel):
    """Selective recomputation: cached text reused where it is not a prefix. Off by default."""

    enabled: bool = Field(
        default=False,
        description="Reuse stored chunks at other positions and recompute the few tokens that "
        "matter most. Answers then are close to the engine's own, not equal to them.",
    )
    ratio: Share = Field(
        default=0.15,
        description="Share of the reused tokens that is recomputed; 0 reuses all of them as they "
        "are, 1 recomputes everything. A request may ask for another.",
    )
    adaptive: bool = Field(
        default=True,
        description="Decide request by request, from measured rates: blend only where that is "
        "clearly faster than computing what stands behind the prefix, and recompute as much as "
        "hides behind loading, from `ratio` to `ratio_max`. A request that asks for a ratio gets "
        "it.",
    )
    ratio_max: Share = Field(
        default=0.5, description="Most that is recomputed because it is free; see `adaptive`."
    )
    spread: Share = Field(
        default=0.5,
        description="The share falls over the layers from `ratio * (1 + spread)` to "
        "`ratio * (1 - spread)`.",
    )
    gate: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Quality gate: how far off recomputed rows may be found at a quarter of the "
        "layers (squared distance of V as a share of the square, times the share of rows not "
        "recomputed). Past it the request takes a larger share, or is computed in full. Unset: no "
        "gate.",
    )
    selector: Name = Field(
        default="runs", description="Chooses the tokens: any registered one (see `kvcore plugins`)."
    )
    selector_options: Options = Field(
        default_factory=dict, description="Arguments of the selector."
    )
    min_tokens: int = Field(
        default=64,
        ge=16,
        description="Fewest tokens of a stored chunk worth reusing at another position, and fewest "
        "of all chunks together worth a blend.",
    )
    unmarked: bool = Field(
        default=True,
        description="Look for stored chunks anywhere in a prompt. Otherwise only chunks that the "
        "request marks, or the separator cuts out, are reused.",
    )
    separator: list[int] = Field(
        default_factory=list,
        description="Token ids that stand between chunks, for prompts that mark theirs this way.",
    )
    behind: list[int] = Field(
        default_factory=list,
        description="Token ids that chunks are computed behind when they are warmed, such as a "
        "begin-of-text token or a system prompt, and under which marked chunks are looked up.",
    )
    staging_max: Size = Field(
        default=parse_size("1GiB"),
        description="Most memory, in bytes over all ranks, for chunks on their way into prompts of "
        "one step, beside the engine's own. A prompt whose chunks need more keeps those that fit.",
    )


class PlannerConfig(SchemaModel):
    """Whether what is held of a prompt is loaded at all."""

    enabled: bool = Field(
        default=False,
        description="Load only what is expected to be there before the engine would have computed "
        "it, from measured rates of loads and of prefill, and give a load up when waiting for it "
        "costs more than computing. Until both were measured everything held is loaded. Rates come "
        "from the metrics: `metrics.enabled` has to be on.",
    )


class PluginsConfig(SchemaModel):
    """Discovery of plugins."""

    disable: list[Name] = Field(
        default_factory=list, description="Names of entry points that are not loaded."
    )
    strict: bool = Field(
        default=False,
        description="Stop when a plugin cannot be loaded, instead of naming it and going on.",
    )


class OpsConfig(SchemaModel):
    """Device operations."""

    backend: Name = Field(
        default="auto",
        description="Implementation of the copies and of what a blend does beside the model: "
        '"auto" takes the fastest that serves the memory, "native" (C; torch blends), "reference" '
        '(torch), or the name of a plugin\'s ("triton").',
    )


class MetricsConfig(SchemaModel):
    """Counters and timings."""

    enabled: bool = Field(default=True, description="Collect metrics and give them to the engine.")


class TraceConfig(SchemaModel):
    """Timelines of transfers and blends."""

    path: FolderPath | None = Field(
        default=None,
        description="Folder for one file a worker, to be opened in Perfetto or Chrome: which bytes "
        "moved while which layers computed. Unset: no trace.",
    )


class ExplainConfig(SchemaModel):
    """Records of requests: what matched, what was planned and why, what else there was."""

    path: FolderPath | None = Field(
        default=None,
        description="Folder for records of the requests that ended last, for `kvcore explain`. "
        "They are for operators: they tell that text was seen under another salt. Unset: none.",
    )
    capacity: Size = Field(
        default=parse_size("16MiB"),
        ge=1 << 16,
        description="Bytes of all records in the folder.",
    )
    spans: bool = Field(
        default=False,
        description="Make an OpenTelemetry span of each request, with the tracer provider of the "
        "engine's process. Needs the package opentelemetry-api.",
    )


def _address(value: str) -> str:
    if value == "local" or re.fullmatch(r"ipc://.+|tcp://[^/]+:[0-9]+", value):
        return value
    raise ConfigError(
        f'given {value!r}; supported are "local", "ipc://SOCKET" and "tcp://HOST:PORT"'
    )


def _listener(value: str) -> str:
    port = re.fullmatch(r".+:([0-9]{1,5})", value)
    if port is None or int(port[1]) > 65535:
        raise ConfigError(f'given {value!r}; supported is "HOST:PORT"')
    return value


class ServerConfig(SchemaModel):
    """`kvcore server`: one process that keeps KV for every engine of the machine. The server and
    its clients read the same table."""

    address: Annotated[str, AfterValidator(_address)] | None = Field(
        default=None,
        description='Where the server listens, and engines reach it: "local" (a socket in '
        '`folder`), "ipc://SOCKET", or "tcp://HOST:PORT" (with `keys`). Set, an engine has no '
        "tiers of its own; unset, it needs no server.",
    )
    folder: FolderPath | None = Field(
        default=None,
        description="Folder in memory (tmpfs) that holds the host tier and that only its owner may "
        "enter; every client needs it. Unset: `/dev/shm/kvcore-UID`.",
    )
    keys: FolderPath | None = Field(
        default=None,
        description="Folder of CURVE keys, made by `kvcore server --keygen FOLDER`; TCP needs it.",
    )
    models: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Models that are served side by side; each gets an equal share of "
        "`host.capacity`. Engines with the same model share its KV.",
    )
    deadline_s: Seconds = Field(
        default=0.1,
        description="Longest time an engine waits for an answer. Past it the engine computes, and "
        "leaves the server alone until that has answered a heartbeat.",
    )
    lease_s: Seconds = Field(
        default=5.0,
        description="Seconds of silence after which server and client hold each other for gone. "
        "A client whose process lives keeps what its copies use.",
    )
    metrics: Annotated[str, AfterValidator(_listener)] | None = Field(
        default=None,
        description='Where the server shows its metrics to Prometheus: "HOST:PORT". Without '
        "authentication, so bind it where scrapers alone are. Unset: nowhere.",
    )


class LogConfig(SchemaModel):
    """kvcore's own log lines."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="Least severe line that is written; debug has one line a decision.",
    )
    format: Literal["text", "json"] = Field(
        default="text", description="Lines as `event key=value ...`, or as one JSON object each."
    )


class AdapterConfig(SchemaModel):
    """What every engine's adapter has; an adapter says in its own words what depends on its
    engine."""

    min_load_tokens: int
    save_decode: bool = Field(
        default=True,
        description="Save generated tokens too, so that the next turn finds its answer.",
    )
    layerwise: bool


def _min_load_tokens(engine: str) -> Any:
    """The field of that name, for ``engine``."""
    return Field(
        default=64,
        ge=0,
        description=f"Fewest tokens worth loading beyond what {engine} holds itself; fewer are "
        "recomputed.",
    )


class VllmConfig(AdapterConfig):
    """The vLLM adapter."""

    min_load_tokens: int = _min_load_tokens("vLLM")
    layerwise: bool = Field(
        default=True,
        description="Load layer by layer under the forward. Waiting inside the forward needs "
        "piecewise CUDA graphs: on a GPU with full graphs kvcore waits before the forward instead, "
        "unless this is set to true in `kv_connector_extra_config`.",
    )
    promise_s: Seconds = Field(
        default=5.0,
        description="Longest time, in seconds, that a request waits for KV that a prefill instance "
        "has promised; what has not come by then is computed.",
    )


class TrtllmConfig(AdapterConfig):
    """The TensorRT-LLM adapter."""

    min_load_tokens: int = _min_load_tokens("TensorRT-LLM")
    layerwise: bool = Field(
        default=True,
        description="Load layer by layer under the forward. With CUDA graphs or torch.compile the "
        "engine may skip the hooks that wait for a layer: kvcore then waits before the forward, "
        "whatever is set here.",
    )
    stage_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.1,
        description="Longest time, in seconds, that a lookup waits for blocks on their way from "
        "disk or a remote store into host memory. TensorRT-LLM takes no word back, so only what "
        "has arrived and was verified is reported; the rest serves the next request. With tensor "
        "parallelism a lookup does not wait.",
    )


class SglangConfig(SchemaModel):
    """The SGLang adapter."""

    min_load_tokens: int = _min_load_tokens("SGLang")
    layerwise: bool = Field(
        default=True,
        description="Load layer by layer under the forward. Otherwise a batch waits for its loads "
        "before its forward.",
    )
    prefetch: Literal["best_effort", "timeout", "wait"] = Field(
        default="timeout",
        description="How long a request stays in SGLang's queue for its blocks, on their way from "
        "disk or a remote store into host memory since it came: not at all, at most "
        "`prefetch_timeout_s` in all, or until they are there (at most "
        "`transfer.load_deadline_s`). Others go first meanwhile.",
    )
    prefetch_timeout_s: Seconds = Field(
        default=0.5, description='Seconds, for `prefetch = "timeout"`.'
    )
    keep_on_flush: bool = Field(
        default=False,
        description="Let SGLang's `/flush_cache` empty its own cache only. Otherwise it makes "
        "kvcore forget every block in every tier too, which changing weights in place needs.",
    )


class Config(SchemaModel):
    """Every setting of kvcore. A value: equal settings compare equal, wherever they came from."""

    engine: Name | None = Field(
        default=None,
        description='Engine that `kvcore serve` starts: "vllm" or the name of a plugin\'s.',
    )
    block: BlockConfig = BlockConfig()
    namespace: NamespaceConfig = NamespaceConfig()
    host: HostConfig = HostConfig()
    disk: DiskConfig = DiskConfig()
    tiers: dict[Annotated[str, AfterValidator(_tier_name)], TierConfig] = Field(
        default_factory=dict
    )
    transfer: TransferConfig = TransferConfig()
    fusion: FusionConfig = FusionConfig()
    planner: PlannerConfig = PlannerConfig()
    plugins: PluginsConfig = PluginsConfig()
    ops: OpsConfig = OpsConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()
    trace: TraceConfig = TraceConfig()
    events: EventsConfig = EventsConfig()
    cluster: ClusterConfig = ClusterConfig()
    explain: ExplainConfig = ExplainConfig()
    server: ServerConfig = ServerConfig()
    control: ControlConfig = ControlConfig()
    tenants: dict[Annotated[str, AfterValidator(tenant_name)], TenantConfig] = Field(
        default_factory=dict
    )
    vllm: VllmConfig = VllmConfig()
    trtllm: TrtllmConfig = TrtllmConfig()
    sglang: SglangConfig = SglangConfig()

    _sources: dict[tuple[str, ...], Source] = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]  # holds dicts of options

    def source(self, path: str | tuple[str, ...]) -> Source:
        """Where the value at ``path`` ("host.capacity") came from."""
        keys = tuple(path.split(".")) if isinstance(path, str) else path
        return self._sources.get(keys, DEFAULT)
