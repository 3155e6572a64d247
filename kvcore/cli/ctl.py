"""`kvcore ctl`: operate a running kvcore server, or an engine that has a control socket."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvcore.cli.options import AsJson, Assignments, ConfigFile, load
from kvcore.cli.probe import Listening
from kvcore.cli.tables import print_table
from kvcore.config import Config, format_size
from kvcore.errors import ConfigError, KVCoreError, TierUnavailable, UnsupportedError

if TYPE_CHECKING:
    from kvcore.admin.commands import BlockFilter, Command

__all__ = ["app", "as_tables", "ask", "parse_where"]

ANSWER_S = 10.0
"""Seconds within which a live server answers a status request."""

TERMS = ("tenant", "salt", "namespace", "key", "tokens", "prompt", "tier")

app = typer.Typer(no_args_is_help=True, help="Inspect and change what a running kvcore holds.")
quota_app = typer.Typer(no_args_is_help=True, help="Show and set the quotas of tenants.")
app.add_typer(quota_app, name="quota")


class Target(NamedTuple):
    """The process to ask. ``model``: first hex digits of a fingerprint; ``timeout``: seconds."""

    config: Config
    model: str
    tokenizer: Path | None
    timeout: float


Which = Annotated[
    list[str] | None,
    typer.Argument(
        help="Blocks that match all of tenant=NAME salt=FILE namespace=HEX key=HEX tokens=FILE "
        "prompt=FILE tier=NAME; or the word all. The FILE - of a salt is standard input.",
        show_default=False,
    ),
]


@app.callback()
def _target(
    context: typer.Context,
    address: Annotated[
        str | None,
        typer.Option("--address", help="Default: server.address, control.address, or local."),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="First digits of a model's fingerprint.")
    ] = "",
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="Tokenizer folder, for prompt=FILE.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait.")] = 600.0,
    file: ConfigFile = None,
    assignments: Assignments = None,
) -> None:
    extra = {} if address is None else {"server": {"address": address}}
    config = load(file, assignments, extra)
    if config.server.address is None:
        server = config.server.model_copy(update={"address": config.control.address or "local"})
        config = config.model_copy(update={"server": server})
    context.obj = Target(config, model, tokenizer, timeout)


@app.command("list")
def list_blocks(
    context: typer.Context,
    which: Which = None,
    prompts: Annotated[bool, typer.Option("--prompts", help="List prompts as well.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Lines at most.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List how much is held for each tenant and model, by tier."""
    from kvcore.admin.commands import ListBlocks

    target: Target = context.obj
    where = parse_where(which or ["all"], target.tokenizer)
    _show(ask(target, ListBlocks(where, prompts, limit)), as_json)


@app.command("pin")
def pin(
    context: typer.Context,
    which: Which = None,
    ttl: Annotated[
        float | None,
        typer.Option("--ttl", help="Seconds after which the pin ends by itself. Default: never."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Protect blocks from eviction, until unpin, the end of --ttl or the end of the process."""
    from kvcore.admin.commands import MAX_TTL_S, PinBlocks

    if ttl is not None and not 0 < ttl <= MAX_TTL_S:
        raise ConfigError(f"given --ttl {ttl:g}; supported are seconds above 0, up to {MAX_TTL_S}")
    result = _order(context, lambda where: PinBlocks(where, ttl), which)
    if ttl is not None and result.get("ttl_s") != ttl:
        raise UnsupportedError(
            "the other side is an older kvcore, which has no --ttl: it has pinned the blocks "
            "without an end; undo that with `kvcore ctl unpin`"
        )
    _show(result, as_json)


@app.command("unpin")
def unpin(context: typer.Context, which: Which = None, as_json: AsJson = False) -> None:
    """Undo pin: blocks may be evicted again."""
    from kvcore.admin.commands import UnpinBlocks

    _show(_order(context, lambda where: UnpinBlocks(where), which), as_json)


@app.command("move")
def move(
    context: typer.Context,
    to: Annotated[str, typer.Option("--to", help="Target tier. tier= of WHICH is the source.")],
    which: Which = None,
    as_json: AsJson = False,
) -> None:
    """Move blocks from one tier to another. Blocks that others need also stay in the first."""
    from kvcore.admin.commands import MoveBlocks

    _show(_order(context, lambda where: MoveBlocks(where, to), which), as_json)


@app.command("prefetch")
def prefetch(context: typer.Context, which: Which = None, as_json: AsJson = False) -> None:
    """Load blocks into host memory."""
    from kvcore.admin.commands import PrefetchBlocks

    _show(_order(context, lambda where: PrefetchBlocks(where), which), as_json)


@app.command("clear")
def clear(context: typer.Context, which: Which = None, as_json: AsJson = False) -> None:
    """Drop blocks and all that continue them, even if pinned. An engine's own cache stays."""
    from kvcore.admin.commands import ClearBlocks

    _show(_order(context, lambda where: ClearBlocks(where), which), as_json)


@quota_app.command("set")
def set_quota(
    context: typer.Context,
    tenant: Annotated[str, typer.Argument(help="Name of the tenant.")],
    tier: Annotated[str, typer.Argument(help="Tier: host, disk, ...")],
    quota: Annotated[str, typer.Argument(help='A size ("8GiB"), a share ("25%"), or none.')],
    salt: Annotated[
        Path | None,
        typer.Option(
            "--salt", metavar="FILE", help="The tenant's salt, if no setting names it; - is stdin."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Limit a tenant's share of a tier until the process ends. Excess blocks are evicted now."""
    from kvcore.admin.commands import SetQuota

    wanted = None if quota == "none" else quota
    given = None if salt is None else _salt(salt)
    _show(ask(context.obj, SetQuota(tenant, tier, wanted, given)), as_json)


@quota_app.command("show")
def show_quotas(context: typer.Context, as_json: AsJson = False) -> None:
    """Show what tenants hold, and their quotas."""
    from kvcore.admin.commands import ShowQuotas

    _show(ask(context.obj, ShowQuotas()), as_json)


# -- asking ---------------------------------------------------------------------------------------


def _order(context: typer.Context, make: Any, which: list[str] | None) -> dict[str, Any]:
    target: Target = context.obj
    if not which:
        raise ConfigError(f"given no blocks; give one of {', '.join(TERMS)} as NAME=VALUE, or: all")
    return ask(target, make(parse_where(which, target.tokenizer)))


def ask(target: Target, order: Command) -> dict[str, Any]:
    """Send a command and return its result. Blocks until the command has ended.

    Raises TierUnavailable if nobody listens, stops listening, or does not answer in time, and
    KVCoreError if the command is refused.
    """
    from kvcore.admin.messages import ControlReply, ControlRequest
    from kvcore.server.messages import StatusRequest
    from kvcore.server.rpc import Link
    from kvcore.server.runtime_dir import address_of

    link = Link(target.config.server)
    address = address_of(target.config.server)
    listening = Listening(address)

    def alive() -> bool:
        return link.refused is None and not link.distrusted and listening.holds()

    try:
        if address.startswith("tcp://"):
            # Only a server listens there, and it answers this whatever else it does.
            seconds = min(target.timeout, ANSWER_S)
            if link.ask(StatusRequest(link.ref()), seconds, alive=alive) is None and alive():
                raise TierUnavailable(
                    f"what listens at {address!r} does not answer: it hangs, or has other keys "
                    f"than {target.config.server.keys}"
                )
        reply = None
        if alive():
            request = ControlRequest(link.ref(), order, _hex(target.model, "--model"))
            reply = link.ask(request, target.timeout, alive=alive)
        reply = reply or link.refused
    finally:
        link.close()
    if link.distrusted:
        raise TierUnavailable(f"nothing is sent, because of other users: {link.distrusted}")
    if reply is None and listening.why:
        raise TierUnavailable(
            f"nobody listens at {address!r} ({listening.why}): start a server (`kvcore server`) or "
            "an engine whose control.address it is, or name another by -c or --address"
        )
    if reply is None:
        raise TierUnavailable(
            f"nobody answers at {target.config.server.address!r} in {target.timeout:g} s. An idle "
            "engine answers with its next step; what was begun goes on"
        )
    if not isinstance(reply, ControlReply):
        raise KVCoreError(getattr(reply, "message", str(reply)))
    return reply.result


def parse_where(terms: Iterable[str], tokenizer: Path | None = None) -> BlockFilter:
    """Parse ``name=value`` terms, reading the files that they name. Raises ConfigError."""
    from kvcore.admin.commands import BlockFilter

    found: dict[str, Any] = {}
    for term in terms:
        if term == "all":
            continue
        name, equals, value = term.partition("=")
        if name not in TERMS or not equals or name in found:
            raise ConfigError(
                f"given {term!r}; supported are {', '.join(TERMS)}, once, as NAME=VALUE; or all"
            )
        found[name] = value
    if "tokens" in found and "prompt" in found:
        raise ConfigError("given tokens and prompt; give one of them")
    if found.get("salt"):  # "salt=" selects the requests without a salt
        found["salt"] = _salt(Path(found["salt"]))
    if "namespace" in found:
        found["namespace"] = _hex(found["namespace"], "namespace", whole=16)
    if "key" in found:
        found["prefix"] = _hex(found.pop("key"), "key")
    if "tokens" in found:
        found["tokens"] = _pack(_tokens(Path(found["tokens"])))
    if "prompt" in found:
        found["tokens"] = _pack(_tokenized(Path(found.pop("prompt")), tokenizer))
    return BlockFilter(**found)


def _hex(text: str, name: str, whole: int | None = None) -> bytes:
    value: bytes | None
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = None
    if value is None or len(value) > 64 or (whole is not None and len(value) != whole):
        size = f"{2 * whole}" if whole else "an even number of"
        raise ConfigError(f"given {name} {text!r}; supported are {size} hex digits")
    return value


def _pack(tokens: list[int]) -> bytes:
    from kvcore.admin.commands import MAX_TOKENS
    from kvcore.model.keys import pack_tokens

    if len(tokens) > MAX_TOKENS:
        raise ConfigError(f"given {len(tokens)} tokens; supported are {MAX_TOKENS}: give less")
    return pack_tokens(tokens)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _salt(path: Path) -> str:
    """Return the salt in a file, or on standard input for ``-``, without a newline at its end.

    A salt is not taken from the command line, because other users can read it there. For the same
    reason an error does not repeat what was given.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(
            f"the salt's file cannot be read: {reason}; give the name of a file that holds the "
            "salt, or - for standard input"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def _tokens(path: Path) -> list[int]:
    """Return the token ids in a file: a JSON list, or numbers separated by spaces."""
    text = _read(path).strip()
    try:
        found = json.loads(text) if text.startswith("[") else [int(word) for word in text.split()]
    except ValueError as error:
        raise ConfigError(
            f"{path}: {error}; supported are token ids, as a JSON list or in words"
        ) from error
    return list(found)


def _tokenized(path: Path, tokenizer: Path | None) -> list[int]:
    if tokenizer is None or not tokenizer.is_dir():
        raise ConfigError(
            f"prompt=FILE with --tokenizer {tokenizer or 'unset'}; give its folder, or tokens=FILE"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UnsupportedError("prompt=FILE needs transformers: install it") from error
    try:
        made = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer {tokenizer}: {error}") from error
    return list(made(_read(path))["input_ids"])


# -- showing --------------------------------------------------------------------------------------


def _show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        print_table(as_tables(result))


def as_tables(result: Mapping[str, Any]) -> Group:
    """Return the result of a command for the terminal: numbers in a line, lists as tables."""
    parts: list[Any] = []
    for name, columns in _TABLES.items():
        if name in result:
            parts.append(_table(result[name], columns))
    numbers = [f"{name} {_cell(name, value)}" for name, value in result.items()
               if isinstance(value, (int, float))]  # fmt: skip
    return Group(*parts, Text(", ".join(numbers)))


_TABLES = {
    "rows": ("tenant", "namespace", "tier", "blocks", "bytes"),
    "prompts": ("key", "tenant", "namespace", "blocks", "tiers", "pinned", "left_s"),
    "quotas": ("tenant", "tier", "blocks", "bytes", "quota"),
}


def _table(rows: Any, columns: tuple[str, ...]) -> Any:
    if not isinstance(rows, list):  # a number of that name
        return Text("")
    table = Table(*columns, box=None)
    for row in rows:
        cells = (_cell(name, row.get(name)) for name in columns)
        table.add_row(*(Text(cell, overflow="fold") for cell in cells))
    return table


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "none" if name == "quota" else ""
    if name in ("bytes", "block_bytes", "quota"):
        return format_size(value, exact=False)
    if isinstance(value, dict):
        return ", ".join(f"{key} {count}" for key, count in value.items())
    return ", ".join(value) if isinstance(value, list) else str(value)
