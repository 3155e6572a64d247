"""Commands that run a module without importing anything from the current folder.

``python -m`` puts the current folder first in ``sys.path``: in a folder that others can write, such
as /tmp, a planted ``json.py`` would run as this user. ``-P`` is Python's answer from 3.11 on.
"""

from __future__ import annotations

import sys

__all__ = ["module_command"]

_WITHOUT_FOLDER = (
    "import sys; sys.path[:] = filter(None, sys.path); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""With ``-c`` the current folder is the entry "" of ``sys.path``; ``sys`` itself is built in."""


def module_command(
    module: str, python: str = "", version: tuple[int, ...] = sys.version_info[:2]
) -> list[str]:
    """Return the start of a command line that runs ``module``; its arguments may follow.

    ``python`` is by default this interpreter, and ``version`` is that of ``python``. Processes that
    the module starts itself by the same interpreter look in the current folder again before 3.11.
    """
    python = python or sys.executable
    if version >= (3, 11):
        return [python, "-P", "-m", module]
    return [python, "-c", _WITHOUT_FOLDER, module]
