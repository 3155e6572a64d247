"""Errors planted in methods of kvcore, to see that they reach no engine."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvcore.connector import guard

__all__ = ["Part", "methods"]


class Part(NamedTuple):
    """A method of a class, or a function of a module, that raises.

    It does so instead of its work or ``after`` it, once or whenever it is called.
    """

    owner: Any
    name: str
    after: bool = False
    always: bool = False

    def __str__(self) -> str:
        when = " after" * self.after + " always" * self.always
        return f"{self.owner.__name__}.{self.name}{when}"

    @contextlib.contextmanager
    def planted(self, *, harmless: bool = False) -> Iterator[list[bool]]:
        """Plant the error, unless ``harmless``. The list is empty until the method was called."""
        found, raised = inspect.getattr_static(self.owner, self.name), list[bool]()
        shown = isinstance(found, property)
        inner = found.fget if shown else getattr(found, "__func__", found)
        cover = _cover(inner)
        boundary = None if cover is None else cover.__wrapped__
        method = boundary or inner

        @functools.wraps(method)
        def fails(*args: Any, **kwargs: Any) -> Any:
            if harmless or (raised and not self.always):
                raised.append(True)
                return method(*args, **kwargs)
            if self.after:
                method(*args, **kwargs)
            raised.append(True)
            raise RuntimeError(f"planted in {self}")

        if boundary is not None:  # inside of what covers it
            [cell] = [c for c in cover.__closure__ or () if c.cell_contents is boundary]
            cell.cell_contents = fails
        else:
            own = self.name in vars(self.owner)
            setattr(self.owner, self.name, property(fails) if shown else fails)
        try:
            yield raised
        finally:
            if boundary is not None:
                cell.cell_contents = boundary
            elif own:
                setattr(self.owner, self.name, found)
            else:
                delattr(self.owner, self.name)


def _cover(method: Any) -> Any:
    """Return what covers a method (`kvcore.connector.guard.covered`); None if nothing does."""
    while method is not None and method.__globals__["__name__"] != guard.__name__:
        method = getattr(method, "__wrapped__", None)
    return method


def methods(owner: type) -> list[str]:
    """Return the names of the public methods and properties of a class that are kvcore's."""
    found = []
    for name in dir(owner):
        part = inspect.getattr_static(owner, name)
        method = part.fget if isinstance(part, property) else part
        own = inspect.isfunction(method) and inspect.unwrap(method).__module__
        if not name.startswith("_") and own and own.startswith("kvcore"):
            found.append(name)
    return found
