"""Navigation of the schema by keys: which setting is at ``host.capacity``, and its values.

("host",)             a table with its own model
("tiers",)            a table whose members, under names of the user's choice, have a model
("host", "policy_options", "x")   anything: it belongs to a plugin
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from kvcore.config.fields import SchemaModel, parse_size
from kvcore.config.schema import Config

__all__ = [
    "Keys",
    "Node",
    "field_node",
    "is_secret",
    "is_size",
    "known_paths",
    "node_at",
    "supported",
]

Keys = tuple[str, ...]


class Node(NamedTuple):
    """The schema's entry at some keys; ``type`` is None if anything is allowed, or if unknown."""

    known: bool
    type: Any = None
    optional: bool = False
    model: type[SchemaModel] | None = None
    members: type[SchemaModel] | None = None
    field: FieldInfo | None = None

    @property
    def is_table(self) -> bool:
        """True if the value is a table."""
        return self.model is not None or self.members is not None or self.type is dict

    @property
    def secret(self) -> bool:
        """True if the value must be masked."""
        extra = self.field.json_schema_extra if self.field else None
        return isinstance(extra, dict) and bool(extra.get("secret"))


UNKNOWN = Node(known=False)
ANYTHING = Node(known=True)


def node_at(keys: Keys) -> Node:
    """Return the node at ``keys``, from the root of the schema."""
    node = Node(known=True, model=Config)
    for key in keys:
        node = _child(node, key)
    return node


_SECRET_OPTION = re.compile(
    "passw|passphrase|secret|token$|credential|access_key$|account_key|api_key|sas_key",
    re.IGNORECASE,
)
_REFERENCE = re.compile(r"_(file|env|path)$", re.IGNORECASE)


def is_secret(keys: Keys) -> bool:
    """Return True if the value at ``keys`` must be masked and kept out of command lines.

    The options of plugins are unknown here, so their names decide.
    """
    node = node_at(keys)
    if node != ANYTHING:
        return node.secret
    return bool(_SECRET_OPTION.search(keys[-1])) and not _REFERENCE.search(keys[-1])


def _child(node: Node, key: str) -> Node:
    if node.model is not None:
        field = node.model.model_fields.get(key)
        return UNKNOWN if field is None else field_node(field)
    if node.members is not None:
        return Node(known=True, model=node.members)
    return ANYTHING if node.known and node.type in (None, dict) else UNKNOWN


def field_node(field: FieldInfo) -> Node:
    """Return the node of ``field``, without optional ``None`` and annotations."""
    kind = field.annotation
    optional = get_origin(kind) in (Union, UnionType)
    if optional:
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    origin = get_origin(kind) or kind
    members = _model(get_args(kind)[1]) if origin is dict else None
    return Node(True, None if members else origin, optional, _model(kind), members, field)


def _model(kind: Any) -> type[SchemaModel] | None:
    # Python 3.10 counts ``dict[str, Any]`` as a type, but it has no subclasses.
    plain = isinstance(kind, type) and get_origin(kind) is None
    return kind if plain and issubclass(kind, SchemaModel) else None


def known_paths(model: type[SchemaModel] = Config, above: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings; NAME in a path stands for any name."""
    for key, field in model.model_fields.items():
        node = field_node(field)
        path = f"{above}{key}"
        if node.model is not None:
            yield from known_paths(node.model, f"{path}.")
        elif node.members is not None:
            yield from known_paths(node.members, f"{path}.NAME.")
        else:
            yield path


def supported(field: FieldInfo) -> str:
    """Describe the values that a field accepts."""
    node = field_node(field)
    words = _kind_words(node)
    if low := next((m for m in _metadata(node) if isinstance(m, (Ge, Gt))), None):
        if isinstance(low, Ge):
            words += f" from {low.ge}"
        else:
            words += f" above {low.gt}"
    if high := next((m.le for m in _metadata(node) if isinstance(m, Le)), None):
        words += f" to {high}"
    return words + (", or unset" if node.optional else "")


def is_size(field: FieldInfo) -> bool:
    """Return True if ``field`` is a size in bytes."""
    return any(isinstance(m, BeforeValidator) and m.func is parse_size for m in field.metadata)


def _metadata(node: Node) -> list[Any]:
    return node.field.metadata if node.field else []


def _choices(kind: Any) -> Iterator[Any]:
    """Yield the values of the Literal in ``kind``, which may be optional."""
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    else:
        for part in get_args(kind):
            yield from _choices(part)


def _kind_words(node: Node) -> str:
    assert node.field is not None
    if node.type is Literal:
        return "one of " + ", ".join(f'"{value}"' for value in _choices(node.field.annotation))
    if is_size(node.field):
        return 'a size ("8GiB", or bytes)'
    if node.members is not None:
        return "tables"
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text, not empty",
        Path: "the path of a folder",
        list: "a list of names",
        dict: "a table",
    }
    return "a table" if node.model is not None else names[node.type]
