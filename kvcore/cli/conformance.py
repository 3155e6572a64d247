"""`kvcore conformance`: results as a table, as JSON, and as docs/conformance.md."""

from __future__ import annotations

import fnmatch
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvcore import log
from kvcore.cli.options import AsJson
from kvcore.cli.tables import print_table
from kvcore.errors import ConfigError, FormatError

if TYPE_CHECKING:
    from kvcore.testing.conformance import Case, Driver, Result

__all__ = ["as_json", "as_table", "failures", "keep", "listing", "merged", "page", "run_engines"]

Record = dict[str, Any]
"""``{engine: {"about", "date", "partners", "results": [...]}}``, plain data for JSON."""

_MARKS = {"passed": "yes", "failed": "**NO**", "left out": "-"}
_STYLES = {"passed": "green", "failed": "bold red", "left out": "dim"}


def chosen(patterns: Sequence[str]) -> list[Case]:
    """Return the cases whose section or name matches a pattern, or all if none is given."""
    from kvcore.testing.conformance import CASES
    from kvcore.testing.conformance.kit import in_order

    found = [
        one
        for one in in_order(CASES)
        if not patterns
        or any(fnmatch.fnmatch(value, p) for value in (one.section, one.name) for p in patterns)
    ]
    if not found:
        raise ConfigError(f"no case matches {', '.join(patterns)}; --list shows all")
    return found


def interpreters(given: Sequence[str]) -> dict[str, Path]:
    """Return the interpreters that ``--python ENGINE=PATH`` gives, by engine."""
    found = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"--python: given {text!r}; it takes ENGINE=PATH")
        found[name] = Path(path).absolute()
    return found


def _case_column() -> Column:
    """Return a column that never cuts a name, because `--case` takes whole names."""
    from kvcore.testing.conformance import CASES

    return Column("case", no_wrap=True, min_width=max(len(one.name) for one in CASES))


def listing() -> Table:
    """Return a table of every case and the capabilities that it needs."""
    from kvcore.testing.conformance import CASES
    from kvcore.testing.conformance.kit import in_order

    table = Table("section", _case_column(), "", "needs", box=None, pad_edge=False)
    for one in in_order(CASES):
        needs = ", ".join(sorted(capability.value for capability in one.needs))
        table.add_row(one.section, one.name, one.about, needs)
    return table


def run_engines(
    engines: Sequence[str],
    partners: Sequence[str],
    model: Path | None,
    patterns: Sequence[str],
    on_result: Callable[[str, Result, Record], None],
    *,
    pythons: Mapping[str, Path] | None = None,
    store: str | None = None,
) -> Record:
    """Run the cases on every engine. Each also exchanges KV with the others and ``partners``.

    ``on_result(engine, result, record)`` is called for every result, with all results so far.
    ``pythons`` are interpreters for engines in other environments. ``store`` is the URL of a remote
    store. Raises ConfigError for an unknown name.
    """
    from kvcore.testing.conformance import Kit, find_driver, run
    from kvcore.testing.conformance.kit import store_plugin

    cases, pythons = chosen(patterns), pythons or {}
    if store is not None:
        store_plugin(store)
    drivers = {
        name: find_driver(name, pythons.get(name)) for name in dict.fromkeys([*engines, *partners])
    }
    if unused := pythons.keys() - drivers:
        raise ConfigError(f"--python: {', '.join(sorted(unused))} is none of the engines asked for")
    found: Record = {}
    for name in dict.fromkeys(engines):
        others = [other for other in drivers if other != name]
        with (
            tempfile.TemporaryDirectory(prefix="kvcore-conformance-") as scratch,
            Kit(
                drivers[name],
                Path(scratch),
                model=model,
                partners=[drivers[other] for other in others],
                store=store,
            ) as kit,
        ):
            run(kit, cases, partial(_take, found, drivers[name], others, on_result))
    return found


def _take(
    found: Record,
    driver: Driver,
    partners: list[str],
    on_result: Callable[[str, Result, Record], None],
    result: Result,
) -> None:
    """Add a result to ``found`` and report it."""
    before = found.get(driver.name, {"results": []})["results"]
    found[driver.name] = {
        "about": driver.about(),
        "date": date.today().isoformat(),
        "partners": partners,
        "results": [*before, result.to_dict()],
    }
    on_result(driver.name, result, found)


def failures(record: Record) -> int:
    """Return how many cases failed, over all engines."""
    return sum(r["outcome"] == "failed" for engine in record.values() for r in engine["results"])


def as_table(record: Record) -> Table:
    """Return a table with a row for each case and a column for each engine."""
    table = Table("section", _case_column(), *record, box=None, pad_edge=False)
    for section, name in _rows(record):
        cells = []
        for engine in record.values():
            result = _result(engine, name)
            said = "" if result is None else result["outcome"]
            if result is not None and result["why"]:
                said += f": {result['why']}"
            style = "" if result is None else _STYLES[result["outcome"]]
            cells.append(Text(said, style=style, overflow="fold"))
        table.add_row(section, name, *cells)
    return table


def as_json(record: Record) -> str:
    return json.dumps(record, indent=1) + "\n"


def keep(page_path: Path, record: Record) -> None:
    """Write the page, and the results beside it, merged with those of earlier runs."""
    beside = page_path.with_suffix(".json")
    everything = merged(beside, record)
    beside.write_text(as_json(everything))
    page_path.write_text(page(everything))


def merged(path: Path, record: Record) -> Record:
    """Return the results in ``path``, updated with ``record``.

    Results of engines and cases that were not run stay. Raises FormatError for any other file.
    """
    try:
        before: Record = json.loads(path.read_text()) if path.exists() else {}
        for name, engine in record.items():
            ran = {result["case"] for result in engine["results"]}
            old = {**record, **before}[name]
            kept = [result for result in old["results"] if result["case"] not in ran]
            before[name] = {**_head(old, engine), "results": [*kept, *engine["results"]]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path} holds no results of the conformance kit: {error}") from error
    return dict(sorted(before.items()))


def _head(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return what the page says of an engine beside its results.

    It describes the last run that started the engine. Its partners are those of the last run in
    which it exchanged KV.
    """
    from kvcore.testing.conformance import CASES

    ran = {result["case"] for result in new["results"] if result["outcome"] != "left out"}
    crossed = any(case.pairs and case.name in ran for case in CASES)
    partners = new["partners"] if crossed else old["partners"]
    return {**(new if ran else old), "partners": partners}


def _rows(record: Record) -> list[tuple[str, str]]:
    """Return (section, case) of every case for which any engine has a result."""
    from kvcore.testing.conformance import CASES
    from kvcore.testing.conformance.kit import in_order

    ran = {result["case"] for engine in record.values() for result in engine["results"]}
    return [(one.section, one.name) for one in in_order(CASES) if one.name in ran]


def _result(engine: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    return next((result for result in engine["results"] if result["case"] == name), None)


_LEGEND = (
    "*yes*: passed. *NO*: failed. *-*: left out, because the engine cannot do what the case needs,",
    "or there was nothing to run it with. *not run*: no result for this engine.",
)

_VARIANTS = (
    "*sync*: Model Runner V1 with synchronous scheduling. *v2*: Model Runner V2 with asynchronous",
    "scheduling, its kernels in Triton's interpreter. Otherwise: V1 with asynchronous scheduling.",
)

_HEAD = """\
<!-- Made by `kvcore conformance --page`; do not edit: the words are in kvcore/cli/conformance.py,
     the results beside this page in conformance.json. -->
# Conformance

The conformance kit runs the same cases on every engine that kvcore supports. Use it to see what is
verified on which engine, and to test an adapter of your own.

    kvcore conformance --engine reference                   # a table; --json, --list, --case GLOB
    kvcore conformance --engine vllm --with trtllm          # exchange KV with another engine
    kvcore conformance --engine sglang --with vllm --python vllm=.venvs/vllm/bin/python
    kvcore conformance --engine NAME --with OTHER --store redis://localhost:6379/0
    kvcore conformance --engine vllm:0.33-v2 --python vllm:0.33-v2=.venvs/vllm-0.33/bin/python
    kvcore conformance --engine NAME --page docs/conformance.md

Each engine is driven by a small driver; the code of a case is the same for all. The right answers
come from the same engine without kvcore. Cases also count reused tokens, so a case cannot pass
because nothing was reused.

- `--python` names the interpreter of the environment that has an engine. With it, engines that
  cannot be installed together still exchange KV.
- A colon and a variant after the name choose a version and a configuration of the engine (vLLM).
- `--store` names a remote store. Its client must be installed in the environment of every engine.
- The exit code is 1 if a case fails.

"""

_TAIL = """\

## Testing another engine

The adapter package of an engine has a module `kvcore_<engine>.testing.conformance` with a function
`driver()`. `kvcore conformance --engine <engine>` finds it by its name; nothing else has to be
registered.

```python
class MyDriver(Driver):
    name = "mine"
    capabilities = frozenset({Capability.CHUNKED_PREFILL, Capability.SALT})

    def start(self, setup: Setup) -> Engine: ...  # blocks until requests are taken


class MyEngine(Engine):
    def ask(self, asks, timeout_s=600.0): ...  # all at once, greedy -> Answers
    def settle(self): ...  # every save is published
    def forget(self): ...  # the engine's own prefix cache is empty
    def clear(self): ...  # and so are kvcore's tiers
    def counted(self, name, **labels): ...  # one of kvcore's metrics
    def check(self): ...  # AssertionError if something is left over
    def stop(self): ...
```

- `kvcore.testing.conformance.reference` is the shortest driver.
- An engine in its own process subclasses `ProcessDriver` of `kvcore.testing.conformance.process`,
  as `kvcore_vllm.testing.conformance` does. `kvcore.harness.engine_process` carries the calls. The
  process may use the interpreter of another environment.
- `Setup.kvcore` is kvcore's config. None starts the engine without kvcore, for the right answers.
- `Setup.dtype` is the type in which the model is computed and its KV is stored: float32, except in
  one case.
- `Setup.path` lists folders to search for plugins. Faults come as a tier plugin, which works in any
  process.
- `Answer.reused` says how many prompt tokens kvcore loaded. Without it most cases fail.
- The driver says how many tokens must be reused, and neither more nor fewer may be:
  `Driver.stores` (of a request's tokens), `reuses` (of a prompt whose start is in the tiers) and
  `looks_up`. An engine that stores every computed token and takes any whole block needs none of
  them.
- Omit from `capabilities` what the engine cannot do. Cases that need it are left out, and the
  matrix says so. No case passes by doing less.
- Under pytest, subclass `kvcore.testing.conformance.suite.ConformanceSuite` and return the driver
  from `make_driver`. Every case becomes a test.

## How the kit itself is tested

`tests/unit/testing/test_conformance_mutations.py` plants adapters with one mistake each in the
reference engine, and the cases must catch them: a slot off by one, blocks published before they are
written, a salt or LoRA weights left out, models that are not told apart, two layers swapped, K that
is not rotated, and a row that sees the token after it.
"""


def page(record: Record) -> str:
    """Return the text of docs/conformance.md."""
    from kvcore.testing.conformance import CASES

    lines = [
        _HEAD.rstrip("\n"),
        "",
        "## Engines",
        "",
        "| engine | what ran | date | KV exchanged with |",
    ]
    lines.append("|---|---|---|---|")
    for name, engine in record.items():
        partners = ", ".join(engine["partners"]) or "-"
        lines.append(f"| {name} | {engine['about']} | {engine['date']} | {partners} |")
    engines = {name: engine for name, engine in record.items() if ":" not in name}
    variants = {name: engine for name, engine in record.items() if ":" in name}
    about = {one.name: one.about for one in CASES}
    lines += ["", "## Matrix", "", *_LEGEND, "", *_matrix(engines, about)]
    if variants:
        lines += ["", "## Versions and configurations", "", *_VARIANTS, "", *_matrix(variants, {})]
    lines += ["", _left_out(record)]
    return "\n".join(lines) + "\n" + _TAIL


def _matrix(record: Record, about: Mapping[str, str]) -> list[str]:
    """Return a table with a column for each engine, and one for ``about`` if that has texts."""
    head = ["case", *record, *(["what it shows"] if about else [])]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    section = ""
    for of, name in _rows(record):
        if of != section:
            section = of
            lines.append(f"| **{of}** |" + " |" * (len(head) - 1))
        cells = [name, *(_mark(_result(engine, name)) for engine in record.values())]
        lines.append(f"| {' | '.join([*cells, *([about[name]] if about else [])])} |")
    return lines


def _mark(result: Mapping[str, Any] | None) -> str:
    return "not run" if result is None else _MARKS[result["outcome"]]


def _left_out(record: Record) -> str:
    """Return a sentence that explains every dash."""
    said = {
        f"{name}: {result['why']}": None
        for name, engine in record.items()
        for result in engine["results"]
        if result["outcome"] == "left out"
    }
    return f"Cases left out: {'; '.join(said)}." if said else "No case was left out."


# -- the command --------------------------------------------------------------------------------


def check_conformance(
    engines: Annotated[
        list[str] | None, typer.Option("--engine", help="Engine to test. May be repeated.")
    ] = None,
    partners: Annotated[
        list[str] | None,
        typer.Option("--with", help="Another engine to exchange KV with."),
    ] = None,
    pythons: Annotated[
        list[str] | None,
        typer.Option(
            "--python",
            metavar="ENGINE=PATH",
            help="Interpreter of the environment that has the engine.",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Remote store to exchange KV through: redis://, s3://, file://."
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder of a Llama. Default: make a tiny one.")
    ] = None,
    cases: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="GLOB", help="Run only cases or sections that match."),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the cases and exit.")] = False,
    page: Annotated[
        Path | None,
        typer.Option("--page", help="Markdown page to update; results go to a .json beside it."),
    ] = None,
    in_json: AsJson = False,
) -> None:
    """Test an adapter with the cases that every engine runs. Exit code 1 if one fails."""
    if show:
        print_table(listing())
        return
    log.configure("error")
    progress = Console(stderr=True)

    def on_result(engine: str, result: Result, so_far: Record) -> None:
        line = f"{engine} {result.section} {result.case}: {result.outcome} {result.why}"
        progress.print(line, markup=False, highlight=False)
        if page is not None:
            keep(page, so_far)  # a run may take an hour, and be interrupted

    record = run_engines(
        engines or ["reference"],
        partners or [],
        model,
        cases or [],
        on_result,
        pythons=interpreters(pythons or []),
        store=store,
    )
    if in_json:
        typer.echo(as_json(record), nl=False)
    else:
        print_table(as_table(record))
    if failures(record):
        raise typer.Exit(1)
