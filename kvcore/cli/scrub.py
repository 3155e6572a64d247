"""`kvcore scrub`: verify a folder of the disk tier, and report as a table or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from kvcore import log
from kvcore.cli.options import AsJson, Assignments, ConfigFile, load
from kvcore.cli.tables import print_table
from kvcore.config import format_size
from kvcore.errors import ConfigError, FormatError

if TYPE_CHECKING:
    from kvcore.tiers.disk.scrub import StoreReport, StoreState
    from kvcore.tiers.guard import BlockGuard

__all__ = ["Found", "as_json", "as_table", "exit_code", "run"]

CLEAN, DAMAGE, NOT_ALL = 0, 1, 3


class Segments(NamedTuple):
    """A segment file, with its counts of whole and corrupt records."""

    file: Path
    state: StoreState
    why: str = ""
    records: int = 0
    corrupt: int = 0


class Found(NamedTuple):
    """The contents of a folder, and whether damaged blocks were erased."""

    path: Path
    stores: list[StoreReport]
    segments: list[Segments]
    erased: bool


def run(
    path: Path,
    erase: bool,
    done: Callable[[int], object],
    guards: Sequence[BlockGuard] = (),
) -> Found:
    """Verify every store and segment file under ``path``, with these keys as well. Blocks.

    Raises TierUnavailable, and ConfigError if there is nothing to verify.
    """
    from kvcore.tiers.disk.scrub import scrub

    stores = list(scrub(path, erase=erase, done=done, guards=guards))
    files = sorted(file for file in path.glob("segments-*") if file.suffix != ".new")
    if not stores and not files:
        raise ConfigError(f"{path} holds nothing of kvcore: give the disk.path of an engine")
    return Found(path, stores, [_segments(file, erase) for file in files], erase)


def _segments(file: Path, erase: bool) -> Segments:
    from kvcore.fusion import _segment_file
    from kvcore.tiers.disk.scrub import StoreState

    try:
        counts = _segment_file.verify(file, repair=erase)
    except FormatError as error:
        return Segments(file, StoreState.NOT_READ, str(error))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}; run it as the engine's user") from error
    if counts is None:
        return Segments(
            file, StoreState.IN_USE, "an engine uses it: scrub it when that engine has ended"
        )
    state = StoreState.DAMAGED if counts.corrupt else StoreState.WHOLE
    return Segments(file, state, "", counts.records, counts.corrupt)


def exit_code(found: Found) -> int:
    """Return 0 if all is whole, 1 if anything was damaged, 3 if not all could be verified."""
    from kvcore.tiers.disk.scrub import StoreState

    states = {store.state for store in found.stores} | {each.state for each in found.segments}
    if StoreState.DAMAGED in states:
        return DAMAGE
    return NOT_ALL if states & {StoreState.IN_USE, StoreState.NOT_READ} else CLEAN


def as_json(found: Found) -> str:
    segments: list[dict[str, Any]] = [
        {
            "file": str(each.file),
            "state": each.state.value,
            "why": each.why,
            "records": each.records,
            "bad_records": each.corrupt,
        }
        for each in found.segments
    ]
    document = {
        "path": str(found.path),
        "changed": found.erased,
        "stores": [store.as_dict() for store in found.stores],
        "segments": segments,
    }
    return json.dumps(document, indent=1)


def as_table(found: Found) -> Table:
    caption = "damaged blocks are erased" if found.erased else "nothing was changed"
    table = Table(title=str(found.path), caption=caption)
    for name in ("", "state"):
        table.add_column(name, overflow="fold")
    for name in ("whole", "bad", "torn", "read"):
        table.add_column(name, justify="right")
    table.add_column("why", overflow="fold")
    for store in found.stores:
        name = str(store.folder.relative_to(found.path))
        why = store.why or (store.bad[0].why if store.bad else "")
        counts = map(str, (store.blocks, store.num_bad, store.torn))
        table.add_row(name, store.state.value, *counts, format_size(store.nbytes, exact=False), why)
    for each in found.segments:
        counts = map(str, (each.records, each.corrupt))
        table.add_row(each.file.name, each.state.value, *counts, "", "", each.why)
    return table


# -- the command --------------------------------------------------------------------------------


def scrub_stores(
    path: Annotated[
        Path | None, typer.Argument(help="Folder of the disk tier. Default: disk.path.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Change nothing. Default: erase damaged blocks.")
    ] = False,
    file: ConfigFile = None,
    assignments: Assignments = None,
    in_json: AsJson = False,
) -> None:
    """Read and verify every block on disk, while no engine runs there.

    Blocks with a MAC, and encrypted ones, are verified with the settings' secret and key.

    Exit codes: 0 if all is whole, 1 if anything was damaged, 3 if a store is in use or unreadable.
    """
    from kvcore.runtime.tiers import disk_guards

    config = load(file, assignments)
    folder = path or config.disk.path
    if folder is None:
        raise ConfigError("given no folder and no disk.path: name the folder of the disk tier")
    log.configure("error")
    with Console(stderr=True).status("reading") as status:
        total = [0]

        def done(nbytes: int) -> None:
            total[0] += nbytes
            status.update(f"read {format_size(total[0], exact=False)}")

        found = run(folder, not keep, done, disk_guards(config))
    if in_json:
        typer.echo(as_json(found))
    else:
        print_table(as_table(found))
    if code := exit_code(found):
        raise typer.Exit(code)
