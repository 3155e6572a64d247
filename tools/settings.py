"""Write docs/configuration*.md: the reference of all settings, on three pages.

    python -m tools.settings

`kvcore config --docs` prints the same reference as one page.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvcore.cli.config import INTRODUCTION, tables

DOCS = Path(__file__).resolve().parent.parent / "docs"
_MADE = "<!-- Made by `python -m tools.settings` from kvcore/config/schema.py; do not edit. -->"


class Page(NamedTuple):
    """A page: its heading, what stands before the tables, and the names of the tables."""

    title: str
    introduction: str
    tables: tuple[str, ...]


_CACHE = Page(
    "Configuration",
    f"""{INTRODUCTION}
This page has the settings of the cache itself. Two more have those of
[operation](configuration-operate.md) and of [each engine](configuration-engines.md). The options
of a remote store are on [its own page](remote.md).
""",
    ("", "block", "namespace", "host", "disk", "tiers", "points", "transfer", "fusion", "planner",
     "plugins", "ops"),
)  # fmt: skip
_OPERATE = Page(
    "Configuration: operation",
    """How kvcore is watched, shared, controlled and limited.
[Configuration](configuration.md) says how settings are given.
""",
    ("metrics", "log", "trace", "events", "cluster", "explain", "server", "control", "clients",
     "tenants"),
)  # fmt: skip
_ENGINES = Page(
    "Configuration: engines",
    """Settings of one engine each. [Configuration](configuration.md) says how settings are given.
""",
    ("vllm", "trtllm", "sglang"),
)
PAGES = {
    "configuration.md": _CACHE,
    "configuration-operate.md": _OPERATE,
    "configuration-engines.md": _ENGINES,
}


def text(page: Page) -> str:
    """Return a page as Markdown."""
    lines = "\n".join(tables(page.tables)).lstrip("\n")
    return f"{_MADE}\n# {page.title}\n\n{page.introduction}\n{lines}\n"


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(text(page))


if __name__ == "__main__":
    main()
