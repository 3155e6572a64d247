"""Hooks of the docs site: pages from the top of the repository, and links out of docs/.

    index, contributing, releasing, reporting, changelog   made from README.md and the like
    links to other files of the repository                 to the repository's page of that file if
                                                           `repo_url` is set, else plain text

Each page is thus kept once, and its links work both in the repository and on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "releasing.md": "RELEASING.md",
    "reporting.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
"""Pages of the site that are files at the top of the repository."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


class LinkError(Exception):
    """A page of docs/ links to a file that is not there."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are outside docs/."""
    from mkdocs.structure.files import File

    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of ``page`` to their targets on the site."""
    source = PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return relinked(markdown, source, config.repo_url)


def relinked(markdown: str, source: str, repo_url: str | None) -> str:
    """Rewrite the links of the repository's file ``source`` for the site.

    Raises LinkError for a relative link to a file that does not exist.
    """
    parts = _CODE.split(markdown)  # every second part is code
    for at in range(0, len(parts), 2):
        parts[at] = _LINK.sub(lambda link: _link(link, source, repo_url), parts[at])
    return "".join(parts)


def _link(link: re.Match[str], source: str, repo_url: str | None) -> str:
    image, text, target = link.groups()
    path, hash_sign, anchor = target.partition("#")
    if not path or "://" in target or target.startswith("mailto:"):
        return link.group()
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (ROOT / file).exists():
        raise LinkError(f"{source} links to {target}, which does not exist")
    site = {top: page for page, top in PAGES.items()}.get(file)
    if site is None and file.startswith("docs/"):
        site = file.removeprefix("docs/")
    if site is not None and Path(site).suffix != ".json":
        return f"{image}[{text}]({site}{hash_sign}{anchor})"
    return f"[{text}]({repo_url.rstrip('/')}/blob/main/{file})" if repo_url else text
