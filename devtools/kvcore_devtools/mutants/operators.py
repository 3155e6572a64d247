"""Mutants of one Python file: each differs from it in one place.

    negate     a condition is taken for its opposite          drop     a call, or +=, is left out
    compare    < and <=, == and !=, is and is not swapped     return   a function returns early
    constant   a number is one larger                         swap     and for or, + for -

Messages, logs, annotations, code that only checks or describes, and code that runs at import have
none.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Mutant", "mutants_of"]

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip
_LEFT_ALONE = frozenset({"check_integrity", "__repr__", "__str__"})
_TELLS = frozenset({"_log", "_metrics", "metrics", "recorder", "tracer"})


class Mutant(NamedTuple):
    """A change of one line. ``source`` is the whole file with it."""

    line: int
    kind: str
    before: str
    source: str


def mutants_of(source: str) -> list[Mutant]:
    """Return every mutant of a file, from its first line to its last."""
    tree, lines = ast.parse(source), source.splitlines()
    sites = list(_sites_in(tree))
    made = []
    for number, (kind, node) in enumerate(sites):
        changed = copy.deepcopy(tree)
        _, there = list(_sites_in(changed))[number]
        if kind == "drop":
            _Without(there).visit(changed)
        else:
            _change(there)
        text = ast.unparse(ast.fix_missing_locations(changed))
        line = node.body[-1].lineno if isinstance(node, ast.FunctionDef) else _line(node)
        made.append(Mutant(line, kind, lines[line - 1].strip(), text))
    return sorted(made, key=lambda mutant: mutant.line)


def _line(node: ast.AST) -> int:
    return int(node.lineno)  # type: ignore[attr-defined]  # every site is an expression or statement


def _sites_in(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield (kind, node) for every change that can be made in functions and methods, in order."""
    waiting: list[ast.stmt] = list(tree.body)
    for node in waiting:
        if isinstance(node, ast.FunctionDef):
            yield from _sites(node)
        elif isinstance(node, ast.ClassDef) and node.name not in _LEFT_ALONE:
            waiting += node.body


def _sites(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield (kind, node) for every change that can be made in or below ``node``."""
    if _is_left_alone(node):
        return
    if (kind := _kind(node)) is not None:
        yield kind, node
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield "negate", node
    for child in _children(node):
        yield from _sites(child)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr():
            return True
        case ast.FunctionDef() | ast.ClassDef():
            return node.name in _LEFT_ALONE
        case ast.Expr():
            return not isinstance(node.value, ast.Call) or _tells(node.value)
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return False


def _kind(node: ast.AST) -> str | None:
    match node:
        case ast.Expr() | ast.AugAssign():
            return "drop"
        case ast.Compare():
            return "compare" if type(node.ops[0]) in _COMPARED else None
        case ast.BoolOp() | ast.BinOp():
            return "swap" if type(node.op) in _SWAPPED else None
        case ast.Constant():
            return "constant" if type(node.value) is int else None
        case ast.FunctionDef():
            return "return" if _may_return(node) else None
    return None


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is below a node, without annotations, defaults and decorators."""
    match node:
        case ast.FunctionDef():
            yield from node.body
        case ast.AnnAssign():
            yield from [node.value] if node.value is not None else []
        case _:
            yield from ast.iter_child_nodes(node)


def _tells(call: ast.Call) -> bool:
    """Return True if a call only logs or counts."""
    parts: ast.AST = call.func
    while isinstance(parts, ast.Attribute):
        if parts.attr in _TELLS:
            return True
        parts = parts.value
    return isinstance(parts, ast.Name) and parts.id in _TELLS


def _may_return(node: ast.FunctionDef) -> bool:
    """Return True if a function of several statements does something after its first."""
    plain = not any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in ast.walk(node))
    return plain and len(node.body) > 2 and not isinstance(node.body[-1], ast.FunctionDef)


class _Without(ast.NodeTransformer):
    """Replaces one statement by nothing."""

    def __init__(self, statement: ast.AST) -> None:
        self._statement = statement

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.Pass() if node is self._statement else self.generic_visit(node)


def _change(node: ast.AST) -> None:
    """Change ``node`` in place."""
    match node:
        case ast.If() | ast.While() | ast.IfExp():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Compare():
            node.ops[0] = _COMPARED[type(node.ops[0])]()
        case ast.BoolOp() | ast.BinOp():
            node.op = _SWAPPED[type(node.op)]()  # type: ignore[assignment]
        case ast.Constant():
            node.value = int(node.value) + 1  # type: ignore[arg-type]
        case ast.FunctionDef():
            node.body.insert(-1, ast.Return(None))
        case _:
            raise AssertionError(f"no change is known for {node}")
