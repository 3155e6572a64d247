"""Reads an engine's interfaces from its Python sources, without importing it.

    Sources("vllm").find("vllm.v1.request:Request._hash") ──▶ Definition

An import of an engine takes seconds, needs its devices, and may change how it starts. Its sources
say the same about names, parameters and fields. They can also be read from a wheel that is not
installed, or that is for another machine.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeGuard

from kvcore.errors import UnsupportedError

__all__ = ["Definition", "Missing", "Sources"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ABSTRACT = {"abstractmethod", "abstractproperty"}
_MOST_HOPS = 8
"""Re-exports that are followed for one name."""


class Missing(UnsupportedError):
    """A name that the engine's sources do not define."""


class Definition(NamedTuple):
    """Where a name is defined: the module, and the node in its syntax tree."""

    module: str
    node: ast.AST


class Sources:
    """The sources of one package.

    ``root`` is the folder of the package. Without it the package is looked up as an import would,
    and not imported.
    """

    def __init__(self, package: str, root: Path | None = None) -> None:
        self.package = package
        self._root = root
        self._modules: dict[str, dict[str, ast.AST]] = {}
        self._classes: dict[Definition, dict[str, Definition]] = {}

    @cached_property
    def roots(self) -> tuple[Path, ...]:
        """The folders of the package; empty if it was not found."""
        if self._root is not None:
            return (self._root,)
        if self.package in sys.modules:
            return tuple(map(Path, getattr(sys.modules[self.package], "__path__", ())))
        try:
            spec = importlib.util.find_spec(self.package)
        except (ImportError, ValueError):
            return ()
        places = spec.submodule_search_locations if spec is not None else None
        return tuple(Path(place) for place in places or ())

    @property
    def exists(self) -> bool:
        """True if the package can be imported here, or is imported already."""
        return self.package in sys.modules or bool(self.roots)

    # -- names ------------------------------------------------------------------------------

    def find(self, target: str) -> Definition:
        """Return the definition of ``module:Name`` or ``module:Name.member``.

        ``module`` may be several, separated by "|": the first that exists counts. Raises `Missing`
        if there is none.
        """
        modules, _, path = target.partition(":")
        module = next((name for name in modules.split("|") if self.file(name)), None)
        if module is None:
            raise Missing(f"{' and '.join(modules.split('|'))}: no such module")
        name, _, member = path.partition(".")
        found = self._resolve(module, name)
        if found is None:
            raise Missing(f"{module} has no {name}")
        if not member:
            return found
        inside = self._member(found, member)
        if inside is None:
            raise Missing(f"{module}:{name} has no {member}")
        return inside

    def members(self, owner: Definition) -> dict[str, Definition]:
        """Return what instances of a class have, those of bases in the package included.

        These are methods, fields, and what its methods assign to ``self``.
        """
        known = self._classes.get(owner)
        if known is None:
            known = self._classes[owner] = {}
            for at in self.lineage(owner):
                for name, node in _members(at.node):
                    known.setdefault(name, Definition(at.module, node))
        return known

    def fields(self, owner: Definition) -> list[tuple[str, ast.AnnAssign]]:
        """Return the annotated fields of a class in order, those of bases first."""
        found: dict[str, ast.AnnAssign] = {}
        for at in reversed(list(self.lineage(owner))):
            for node in getattr(at.node, "body", ()):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found[node.target.id] = node
        return list(found.items())

    def _member(self, owner: Definition, name: str) -> Definition | None:
        return self.members(owner).get(name)

    def lineage(self, owner: Definition, seen: tuple[ast.AST, ...] = ()) -> Iterator[Definition]:
        """Yield a class and its bases, as far as the package defines them."""
        yield owner
        for base in getattr(owner.node, "bases", ()):
            word = base.value if isinstance(base, ast.Subscript) else base
            found = self._resolve(owner.module, ast.unparse(word).rpartition(".")[2])
            if found is not None and found.node is not owner.node and found.node not in seen:
                yield from self.lineage(found, (*seen, owner.node))

    def _resolve(self, module: str, name: str, hops: int = _MOST_HOPS) -> Definition | None:
        """Return where ``name`` of ``module`` is defined, through its imports."""
        names = self.names(module)
        node = names.get(name)
        if node is None:
            return self._submodule(module, name) or self._starred(module, names, name, hops)
        if not isinstance(node, ast.ImportFrom):
            return Definition(module, node)
        source = self._imported_from(module, node)
        original = next(a.name for a in node.names if (a.asname or a.name) == name)
        if not hops or self.file(source) is None:
            return Definition(module, node)  # another package's: it exists, and that is all
        return self._resolve(source, original, hops - 1)

    def _submodule(self, module: str, name: str) -> Definition | None:
        found = self.file(f"{module}.{name}")
        return None if found is None else Definition(f"{module}.{name}", ast.Pass())

    def _starred(
        self, module: str, names: dict[str, ast.AST], name: str, hops: int
    ) -> Definition | None:
        for key, node in names.items():
            if key.startswith("*") and isinstance(node, ast.ImportFrom) and hops:
                found = self._resolve(self._imported_from(module, node), name, hops - 1)
                if found is not None:
                    return found
        return None

    def _imported_from(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        file = self.file(module)
        up = node.level - (file is not None and file.name == "__init__.py")
        parts = module.split(".")
        base = ".".join(parts[: len(parts) - up])
        return f"{base}.{node.module}" if node.module else base

    # -- files ------------------------------------------------------------------------------

    @property
    def read(self) -> list[str]:
        """The modules that were read so far."""
        return list(self._modules)

    def file(self, module: str) -> Path | None:
        """Return the file of a module. A loaded module is read where it was loaded from."""
        loaded = getattr(sys.modules.get(module), "__file__", None)
        if self._root is None and isinstance(loaded, str) and loaded.endswith(".py"):
            return Path(loaded)
        package, *inside = module.split(".")
        for root in self.roots if package == self.package else ():
            place = root.joinpath(*inside)
            for file in (place / "__init__.py", place.with_suffix(".py")):
                if file.is_file():
                    return file
        return None

    def names(self, module: str) -> dict[str, ast.AST]:
        """Return the names that a module defines or imports, with their nodes."""
        if module not in self._modules:
            file = self.file(module)
            text = "" if file is None else file.read_text(encoding="utf-8")
            self._modules[module] = dict(_top(ast.parse(text).body)) if file else {}
        return self._modules[module]


# -- signatures -------------------------------------------------------------------------------


def parameters(node: ast.AST) -> tuple[str, ...]:
    """Return the names of a function's parameters; without stars."""
    if not isinstance(node, _FUNCTIONS):
        raise Missing("not a function")
    given = node.args
    named = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return tuple(argument.arg for argument in named if argument is not None)


def signature(node: ast.AST, *, bound: bool) -> inspect.Signature:
    """Return the signature of a function; of a ``bound`` one without its first parameter."""
    if not isinstance(node, _FUNCTIONS):
        raise Missing("not a function")
    given = node.args
    places = [*given.posonlyargs, *given.args]
    required = len(places) - len(given.defaults)
    made = [
        _parameter(argument.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, index >= required)
        for index, argument in enumerate(places)
    ]
    made = made[1:] if bound and "staticmethod" not in _decorators(node) else made
    if given.vararg is not None:
        made.append(_parameter(given.vararg.arg, inspect.Parameter.VAR_POSITIONAL, False))
    made += [
        _parameter(argument.arg, inspect.Parameter.KEYWORD_ONLY, default is not None)
        for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg is not None:
        made.append(_parameter(given.kwarg.arg, inspect.Parameter.VAR_KEYWORD, False))
    return inspect.Signature(made)


def of_fields(fields: Sequence[tuple[str, ast.AnnAssign]]) -> inspect.Signature:
    """Return how a class with these fields and no ``__init__`` is constructed."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    made = [_parameter(name, kind, node.value is not None) for name, node in fields]
    return inspect.Signature(made, __validate_parameters__=False)


def is_abstract(node: ast.AST) -> bool:
    """Return True for a method that a subclass must define."""
    return bool(_ABSTRACT & _decorators(node))


def _parameter(name: str, kind: inspect._ParameterKind, optional: bool) -> inspect.Parameter:
    default = None if optional else inspect.Parameter.empty
    return inspect.Parameter(name, kind, default=default)


def _decorators(node: ast.AST) -> set[str]:
    found = getattr(node, "decorator_list", ())
    return {ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in found}


# -- syntax trees -----------------------------------------------------------------------------


def _top(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names of a module's body, those in branches included; the last one counts."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name
                yield (f"*{node.module}" if name == "*" else name), node
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            if not _for_types(node):
                yield from _top(node.body)
            for branch in getattr(node, "handlers", ()):
                yield from _top(branch.body)
            yield from _top(getattr(node, "orelse", []))
        else:
            yield from _named(node)


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _named(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, (ast.ClassDef, *_FUNCTIONS)):
        yield node.name, node
    elif isinstance(node, ast.Assign):
        yield from ((each.id, node) for each in node.targets if isinstance(each, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, node


def _members(owner: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield a class's names, and then what its methods assign to ``self``."""
    body = getattr(owner, "body", ())
    yield from _top(body)
    for method in body:
        if isinstance(method, _FUNCTIONS):
            yield from ((node.attr, node) for node in ast.walk(method) if _is_set_on_self(node))


def _is_set_on_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "self"
