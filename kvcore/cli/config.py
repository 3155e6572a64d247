"""`kvcore config`: the effective settings, and the reference of all settings as Markdown."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from rich.table import Table
from rich.text import Text

from kvcore.cli.options import AsJson, Assignments, ConfigFile, load
from kvcore.cli.tables import print_table
from kvcore.config import Config, SchemaModel, format_size, settings
from kvcore.config.walk import field_node, is_size, supported


def as_table(config: Config) -> Table:
    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for setting in settings(config):
        style = "dim" if setting.source.kind == "default" else "bold"
        cells = (setting.path, _value(setting.value), str(setting.source))
        table.add_row(*(Text(cell, style=style, overflow="fold") for cell in cells))
    return table


def as_json(config: Config) -> str:
    """Return ``{setting: {"value", "from"}}`` as JSON."""
    shown = {s.path: {"value": s.value, "from": str(s.source)} for s in settings(config)}
    return json.dumps(shown, indent=2)


def _value(value: Any) -> str:
    if value is None:
        return "unset"
    return value if isinstance(value, str) else json.dumps(value)


INTRODUCTION = """\
Every setting has a default. A setting is given, from weakest to strongest, by

1. a file, TOML or YAML: `kvcore serve -c kvcore.toml`, or the one that `KVCORE_CONFIG` names
   (no folder is searched);
2. the environment: `host.capacity` is `KVCORE__HOST__CAPACITY`. Lists are JSON or separated by
   commas, tables are JSON, empty text unsets what may be unset. Names are read in lower case;
3. the engine's own configuration (vLLM: `kv_connector_extra_config`, nested like the file), or
   `--set host.capacity=8GiB` of the command line.

A stronger one wins key by key; a list replaces a list. An unknown key, a wrong type or a value out
of range stops the start and is named, with its source and the nearest valid name. `kvcore config`
shows every effective value and where it came from.

Secrets are `namespace.secret`, the tenants' salts, options of plugins with names such as
`password`, and URLs with a login in them. Give them in a file or by the environment: `--set`
refuses them, because other users can read command lines. `kvcore serve` hands them to every engine
in the variable `KVCORE_SECRETS` (TensorRT-LLM: `TRTLLM_KVCORE_CONFIG`): JSON, nested like the file,
stronger than other variables. Set it yourself if you start an engine by hand, because an engine
may show and log its own configuration, and where an engine's workers run on other machines. kvcore
masks secrets in `kvcore config`, errors and logs.

Sizes are bytes, or text with a unit: `KiB`, `MiB`, `GiB`, `TiB` (powers of 1024), `KB`, `MB`, `GB`,
`TB` (powers of 1000). Capacities are hard limits.

```toml
engine = "vllm"

[host]
capacity = "16GiB"

[disk]
path = "/var/cache/kvcore"
capacity = "200GiB"
```
"""


def reference() -> str:
    """Return the reference of all settings as one page of Markdown."""
    return "\n".join(["# Configuration", "", INTRODUCTION, *tables()]) + "\n"


def tables(names: Collection[str] | None = None) -> Iterator[str]:
    """Yield the lines of the tables ``names``, in the schema's order. None means all.

    The settings that are in no table have the name ``""``.
    """
    if names is None or "" in names:
        top = [f for f in Config.model_fields.items() if field_node(f[1]).type and not _model(f[1])]
        yield from ("## Top level", "", *_rows(top))
    for name, field in Config.model_fields.items():
        model = _model(field)
        if model is None or (names is not None and name not in names):
            continue
        many = field_node(field).members is not None
        doc = " ".join((model.__doc__ or "").split())
        yield from ("", f"## [{name}.NAME]" if many else f"## [{name}]", "", doc, "")
        yield from _rows(model.model_fields.items())


def _model(field: FieldInfo) -> type[SchemaModel] | None:
    node = field_node(field)
    return node.model or node.members


def _rows(fields: Any) -> Iterator[str]:
    yield "| setting | default | takes | |"
    yield "|---|---|---|---|"
    for name, field in fields:
        cells = (f"`{name}`", _default(field), supported(field), field.description or "")
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "(required)"
    if value is None:
        return "unset"
    return f"`{format_size(value) if is_size(field) else json.dumps(value)}`"


# -- the command --------------------------------------------------------------------------------


def show_config(
    file: ConfigFile = None,
    assignments: Assignments = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the effective settings. This is the default.")
    ] = True,
    in_json: AsJson = False,
    docs: Annotated[
        bool, typer.Option("--docs", help="Print the reference of all settings as Markdown.")
    ] = False,
) -> None:
    """Show the effective settings and where each came from."""
    if docs:
        typer.echo(reference(), nl=False)
        return
    effective = load(file, assignments)
    if in_json:
        typer.echo(as_json(effective))
    else:
        print_table(as_table(effective))
