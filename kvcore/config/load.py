"""Loading of settings: sources, precedence, and messages about invalid settings.

    defaults  <  file  <  environment  <  overrides
    schema.py    TOML or YAML  KVCORE__A__B   the engine's own JSON, or the command line

A later source wins, key by key; a list replaces a list. The file is the one given, otherwise the
one that ``KVCORE_CONFIG`` names; no folder is searched. Every effective value knows its source.
This is the only module of kvcore that reads the environment.
"""

from __future__ import annotations

import base64
import difflib
import functools
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from kvcore.config.fields import DEFAULT, Source, expand_user, format_size
from kvcore.config.schema import Config
from kvcore.config.walk import Keys, Node, is_secret, is_size, known_paths, node_at, supported
from kvcore.errors import ConfigError
from kvcore.masking import MASK, mask_login

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "FORWARDED_VARIABLE",
    "SECRETS_VARIABLE",
    "Setting",
    "engine_environment",
    "explicit_settings",
    "forwarded_config",
    "load_config",
    "merge_tables",
    "missing_secrets",
    "names_settings",
    "parse_assignment",
    "read_key",
    "secret_settings",
    "secrets_in",
    "settings",
]

_log = logging.getLogger("kvcore.config")

CONFIG_VARIABLE = "KVCORE_CONFIG"
FORWARDED_VARIABLE = "TRTLLM_KVCORE_CONFIG"
"""TensorRT-LLM forwards only variables whose names begin like this to its MPI workers."""

SECRETS_VARIABLE = "KVCORE_SECRETS"
"""Secret settings as JSON, nested like the file. `kvcore serve` hands them to an engine in it."""

PREFIX = "KVCORE__"
"""Only names with both underscores are settings. Orchestrators set KVCORE_PORT and similar names
for a service called kvcore, and those must not stop an engine."""

Table = dict[str, Any]


class Layer(NamedTuple):
    """The settings of one source, as nested tables."""

    source: Source
    table: Table


class Setting(NamedTuple):
    """One effective value for display: secrets are masked, sizes and paths are text."""

    path: str
    value: Any
    source: Source
    description: str


def load_config(
    path: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    env: Mapping[str, str] = os.environ,
    *,
    overrides_from: str = "",
) -> Config:
    """Return the effective settings. Reads at most one file.

    ``overrides`` is nested like the file, and ``overrides_from`` names it in messages. Raises
    ConfigError with one line for each key that is unknown, of the wrong type or out of range.
    """
    layers = [
        *_file_layers(path, env),
        *_environment_layers(env),
        Layer(Source("overrides", overrides_from), _plain(overrides or {})),
    ]
    problems = [line for layer in layers for line in _unknown(layer)]
    if problems:
        raise ConfigError("\n".join(problems))
    merged: Table = {}
    sources: dict[Keys, Source] = {}
    for layer in layers:
        merge_tables(merged, layer.table)
        sources.update((keys, layer.source) for keys, _ in _leaves(layer.table))
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        lines = [_explain(item, sources) for item in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None
    config._sources.update(sources)
    if problems := list(_conflicts(config)):
        raise ConfigError("\n".join(problems))
    return config


def names_settings(env: Mapping[str, str] = os.environ) -> bool:
    """Return True if a variable names a file of settings, or is a setting."""
    return bool(env.get(CONFIG_VARIABLE)) or any(name.startswith(PREFIX) for name in env)


def _conflicts(config: Config) -> Iterator[str]:
    """Yield a line for each combination of valid settings that is not supported."""
    if config.disk.to_device == "off":
        return
    place = f"disk.to_device ({config.source(('disk', 'to_device'))})"
    if config.disk.encrypted:
        yield (
            f"{place}: not supported with disk.key_env or disk.key_file, because blocks are "
            "decrypted in host memory: set it to off, or remove the key"
        )
    elif config.namespace.secret is not None and config.disk.authenticate:
        yield (
            f"{place}: not supported with namespace.secret, because blocks then have a MAC, which "
            "is verified in host memory: set it to off, or set disk.authenticate = false if nobody "
            "else can write to disk.path"
        )
    if config.server.address is not None:
        yield (
            f"{place}: not supported with server.address, because the disk tier is in the server's "
            "process: set it to off, or remove server.address"
        )


def forwarded_config(env: Mapping[str, str] = os.environ) -> Config:
    """Return the settings of a process that receives them in ``TRTLLM_KVCORE_CONFIG``.

    The variable holds the path of a file, or all settings as JSON, as `kvcore serve` writes them.
    With JSON nothing else is read. Without the variable this is `load_config`.
    """
    given = env.get(FORWARDED_VARIABLE, "").strip()
    if not given.startswith("{"):
        return load_config(given or None, env=env)
    overrides = _json_table(FORWARDED_VARIABLE, given)
    return load_config(overrides=overrides, env={}, overrides_from=FORWARDED_VARIABLE)


def settings(config: Config) -> list[Setting]:
    """Return every effective value in the order of the schema."""
    dump = config.model_dump(mode="json")
    return [_setting(config, keys, value) for keys, value in _leaves(dump)]


def _setting(config: Config, keys: Keys, value: Any) -> Setting:
    node = node_at(keys)
    if is_secret(keys) and value is not None:
        value = MASK
    elif node.field is not None and is_size(node.field):
        value = format_size(value)
    else:
        value = _masked(value)
    description = node.field.description if node.field else None
    return Setting(".".join(keys), value, config.source(keys), description or "")


def _masked(value: Any) -> Any:
    """Return a value for display, without the passwords of URLs in it."""
    if isinstance(value, str):
        return mask_login(value)
    if isinstance(value, list):
        return [_masked(item) for item in value]
    if isinstance(value, dict):
        return {key: _masked(item) for key, item in value.items()}
    return value


def explicit_settings(config: Config, *, secrets: bool = False) -> Table:
    """Return what file, environment or overrides have set, as a nested JSON-able dict.

    ``load_config(overrides=...)`` of the result with ``secrets`` alone equals ``config``. Without
    ``secrets``, what `secret_settings` returns is left out, so that a command line does not show
    it.
    """
    return _explicit(config, lambda keys, value: secrets or not _holds_secret(keys, value))


def secret_settings(config: Config) -> Table:
    """Return the secrets among the explicit settings, nested.

    They are the secret fields, a plugin's options whose names say that they are secret, and values
    that contain a URL with a password.
    """
    return _explicit(config, _holds_secret)


def _explicit(config: Config, wanted: Callable[[Keys, Any], bool]) -> Table:
    table: Table = {}
    for keys, value in _leaves(config.model_dump(mode="json")):
        if config.source(keys) != DEFAULT and wanted(keys, value):
            merge_tables(table, _nest(keys, value))
    return table


def missing_secrets(config: Config, env: Mapping[str, str]) -> list[str]:
    """Return the names of secrets that a process with this environment would not have."""
    layers = list(_environment_layers(env))
    if (given := env.get(FORWARDED_VARIABLE, "").strip()).startswith("{"):
        layers = [Layer(DEFAULT, _json_table(FORWARDED_VARIABLE, given))]
    there = {keys: value for layer in layers for keys, value in _leaves(layer.table)}
    wanted = _leaves(secret_settings(config))
    return [".".join(keys) for keys, value in wanted if there.get(keys) != value]


def parse_assignment(text: str) -> Table:
    """Return ``host.capacity=8GiB`` of a command line as a nested dict.

    Values are read as in environment variables.
    """
    name, equals, value = text.partition("=")
    keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(f"given {text!r}; supported is NAME=VALUE, as in host.capacity=8GiB")
    return _nest(keys, _decode(value, node_at(keys)))


def secrets_in(table: Mapping[str, Any]) -> list[str]:
    """Return the dotted names of the secrets in a nested table, as `secret_settings` finds them."""
    return [".".join(keys) for keys, value in _leaves(_plain(table)) if _holds_secret(keys, value)]


def _holds_secret(keys: Keys, value: Any) -> bool:
    return value is not None and (is_secret(keys) or _has_login(value))


def _has_login(value: Any) -> bool:
    """Return True if a text in a value has a URL with a login."""
    if isinstance(value, str):
        return mask_login(value) != value
    if isinstance(value, list):
        return any(map(_has_login, value))
    return isinstance(value, dict) and any(map(_has_login, value.values()))


def engine_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process to start: this one's, with ``more``."""
    return {**os.environ, **more}


def read_key(variable: str | None, file: str | None, env: Mapping[str, str] = os.environ) -> bytes:
    """Return the 32-byte key in an environment variable or a file, as hex digits or Base64.

    Raises ConfigError, which never shows the contents.
    """
    if variable is not None and file is not None:
        raise ConfigError("given both key_env and key_file; give one of them")
    if variable is not None:
        where, text = f"the variable {variable}", env.get(variable, "")
        if not text.strip():
            raise ConfigError(
                f"key_env: {where} is not set; set it to a key (openssl rand -hex 32)"
            )
    else:
        where, text = _key_file(file or "")
    try:
        text = text.strip()
        key = bytes.fromhex(text) if len(text) == 64 else base64.b64decode(text, validate=True)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigError(
            f"{where} holds {len(text)} characters, which are not a 32-byte key; supported are 64 "
            "hex digits (openssl rand -hex 32) or Base64 (openssl rand -base64 32)"
        )
    return key


def _key_file(name: str) -> tuple[str, str]:
    """Return the file's name for messages, and its text."""
    path = expand_user(name)
    try:
        with path.open(encoding="ascii") as file:
            return f"the file {path}", file.read(4096)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"key_file: {path} cannot be read as a key: {error}") from error


# -- sources ------------------------------------------------------------------------------------


def _file_layers(path: str | os.PathLike[str] | None, env: Mapping[str, str]) -> Iterator[Layer]:
    named_by = ""
    if path is None:
        path = env.get(CONFIG_VARIABLE) or None
        named_by = f" (named by {CONFIG_VARIABLE})"
    if path is not None:
        file = expand_user(path)
        yield Layer(Source("file", str(file)), _read_file(file, named_by))


def _read_file(file: Path, named_by: str) -> Table:
    """Return the contents of a configuration file; an empty file is an empty table."""
    suffix = file.suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigError(f"{file}{named_by}: supported are files called .toml, .yaml or .yml")
    try:
        text = file.read_text(encoding="utf-8-sig")  # Windows' editors write a byte order mark
        table = tomllib.loads(text) if suffix == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{file}{named_by}: cannot be read: {error.strerror}") from error
    # Wrong encoding, invalid TOML, an invalid YAML date, or endless nesting.
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        kind = "TOML" if suffix == ".toml" else "YAML"
        raise ConfigError(f"{file}{named_by}: is not {kind}: {_where(error)}") from None
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise ConfigError(f"{file}{named_by}: given a {type(table).__name__}; supported is a table")
    # ``disk:`` with all its lines commented out reads as None; it means an empty table.
    return {
        key: value
        for key, value in _plain(table).items()
        if not (value is None and node_at((key,)).is_table)
    }


def _where(error: Exception) -> str:
    """Return where a parser failed, and nothing of what is written there: it may be a secret."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        return f"see line {mark.line + 1}, column {mark.column + 1}"
    place = re.search(r"\(at (line \d+, column \d+|end of document)\)$", str(error))
    return f"see {place[1]}" if place else "a value in it is malformed"


def _environment_layers(env: Mapping[str, str]) -> Iterator[Layer]:
    """Yield one layer per variable, so that each value knows its variable."""
    for name in sorted(env):
        if name.startswith(PREFIX):
            keys = tuple(name[len(PREFIX) :].lower().split("__"))
            source = Source("environment", name)
            yield Layer(source, _nest(keys, _decode(env[name], node_at(keys))))
        elif (right := _meant(name)) is not None:
            _tell_once(name, right)
    if given := env.get(SECRETS_VARIABLE):
        source = Source("environment", SECRETS_VARIABLE)
        yield Layer(source, _json_table(SECRETS_VARIABLE, given))


def _meant(name: str) -> str | None:
    """Return the variable that was meant by one that kvcore does not read, None if it is no such.

    Orchestrators set KVCORE_PORT and the like for a service of that name: those fit no setting.
    """
    if not name.startswith("KVCORE_") or name in (CONFIG_VARIABLE, SECRETS_VARIABLE):
        return None
    if name.removeprefix(CONFIG_VARIABLE) in ("_FILE", "_PATH"):
        return CONFIG_VARIABLE
    flat = name.removeprefix("KVCORE_").lower()
    for path in known_paths():
        if path.replace(".", "_") == flat and "NAME" not in path:
            return PREFIX + path.replace(".", "__").upper()
    return None


@functools.lru_cache
def _tell_once(name: str, right: str) -> None:
    _log.warning("the variable %s is not read: did you mean %s?", name, right)


def _json_table(variable: str, text: str) -> Table:
    """Return the table in a variable. Raises ConfigError, which does not show the text."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "it is nested too deeply")
        raise ConfigError(f"{variable} is not JSON: {reason}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{variable} is a {type(table).__name__}; supported is a table in JSON")
    return table


def _decode(text: str, node: Node) -> Any:
    """Return a variable's text as its field's type, or unchanged if it does not fit.

    Empty text is None where None is allowed. Lists are JSON or separated by commas, tables are
    JSON, and the options of plugins are JSON or otherwise text.
    """
    if not text and node.optional:
        return None
    if node.type is Path:
        return text.strip()
    if node.type is list and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    if node.type is bool:
        return _WORDS.get(text.strip().lower(), text)
    try:
        if node.type in (int, float):
            return node.type(text)
        if node.is_table or node.type in (None, list):
            return json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text


_WORDS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


# -- nested tables ------------------------------------------------------------------------------


def _plain(table: Mapping[Any, Any]) -> Table:
    """Return a copy with text keys."""
    return {
        str(key): _plain(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
    }


def _nest(keys: Keys, value: Any) -> Table:
    table: Table = {keys[-1]: value}
    for key in reversed(keys[:-1]):
        table = {key: table}
    return table


def merge_tables(into: Table, table: Table) -> None:
    """Write ``table`` over ``into``, key by key; the two share nothing afterwards."""
    for key, value in table.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge_tables(into[key], value)
        else:
            into[key] = _plain(value) if isinstance(value, dict) else value


def _leaves(table: Table, above: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield all values except non-empty tables, with their keys."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


# -- problems -----------------------------------------------------------------------------------


def _unknown(layer: Layer) -> Iterator[str]:
    for keys, value in _walk(layer.table, ()):
        node, parent = node_at(keys), node_at(keys[:-1])
        place = f"{'.'.join(keys)} ({layer.source})"
        if not node.known:
            yield f"{place}: there is no such setting; {_nearest(keys, parent)}"
        elif node.is_table and not isinstance(value, dict):
            # Not the value: it may be the secret that belongs into the table.
            yield f"{place}: given {_kind(value)}; supported is a table of settings"


def _kind(value: Any) -> str:
    """Return what a value is, without the value."""
    return {"NoneType": "nothing", "int": "an int"}.get(
        type(value).__name__, f"a {type(value).__name__}"
    )


def _walk(table: Table, above: Keys) -> Iterator[tuple[Keys, Any]]:
    """Yield the keys of all tables and values; unknown keys are not descended into."""
    for key, value in table.items():
        keys = (*above, key)
        yield keys, value
        if isinstance(value, dict) and node_at(keys).is_table:
            yield from _walk(value, keys)


def _nearest(keys: Keys, parent: Node) -> str:
    """Suggest a sibling, a setting of another table, or all choices for an unknown key."""
    assert parent.model is not None
    above = "".join(f"{key}." for key in keys[:-1])
    name = keys[-1].lower()
    siblings = list(parent.model.model_fields)
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.6):
        return f"did you mean {above}{close[0]}?"
    everywhere = list(known_paths())
    last = {path.rpartition(".")[2]: path for path in reversed(everywhere)}
    if close := difflib.get_close_matches(name, last, n=1, cutoff=0.8):
        return f"did you mean {last[close[0]]}?"
    if close := difflib.get_close_matches(".".join(keys).lower(), everywhere, n=1, cutoff=0.6):
        return f"did you mean {close[0]}?"
    return f"{f'[{above[:-1]}] has' if above else 'there are'} {', '.join(siblings)}"


def _explain(item: Any, sources: Mapping[Keys, Source]) -> str:
    """Return one line for one error of pydantic."""
    keys = tuple(str(part) for part in item["loc"] if part != "[key]")
    while not node_at(keys).known:  # the position of an item in a list
        keys = keys[:-1]
    node = node_at(keys)
    place = f"{'.'.join(keys)} ({_source_of(keys, sources)})"
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return f"{place}: {cause}"
    assert node.field is not None
    if item["type"] == "missing":
        return f"{place}: is missing; supported is {supported(node.field)}"
    given = item["input"]
    shown = MASK if is_secret(keys) else repr(_masked(given))
    return f"{place}: given {shown}; supported is {supported(node.field)}"


def _source_of(keys: Keys, sources: Mapping[Keys, Source]) -> Source:
    """Return the source at ``keys``, or of the nearest value above or below."""
    for n in range(len(keys), 0, -1):
        if keys[:n] in sources:
            return sources[keys[:n]]
    below = (source for at, source in sources.items() if at[: len(keys)] == keys)
    return next(below, DEFAULT)
