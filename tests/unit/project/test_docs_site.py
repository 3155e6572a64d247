"""The documentation as a site: links out of docs/ and pages that lie elsewhere. `make docs-site` is
the rest: mkdocs is strict there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs_hooks import PAGES, ROOT, LinkError, relinked

DOCS = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize(
    ("source", "written", "on_site"),
    [
        ("README.md", "[a](docs/vllm.md#start)", "[a](vllm.md#start)"),
        ("README.md", "![a](docs/assets/tiers.svg)", "![a](assets/tiers.svg)"),
        ("README.md", "[a](CONTRIBUTING.md)", "[a](contributing.md)"),
        ("README.md", "[a](examples/README.md)", "a"),
        ("docs/vllm.md", "[a](top.md#ttft-saved)", "[a](top.md#ttft-saved)"),
        ("docs/vllm.md", "[a](../CHANGELOG.md)", "[a](changelog.md)"),
        (
            "docs/vllm.md",
            "[a](#here), [b](https://example.org)",
            "[a](#here), [b](https://example.org)",
        ),
        ("docs/vllm.md", "`[a](nowhere.md)`", "`[a](nowhere.md)`"),
        ("docs/vllm.md", "```\n[a](nowhere.md)\n```\n", "```\n[a](nowhere.md)\n```\n"),
    ],
)
def test_links_lead_to_the_page_of_the_site(source: str, written: str, on_site: str) -> None:
    assert relinked(written, source, None) == on_site


def test_other_files_are_links_where_the_repository_has_an_address() -> None:
    link = relinked("[a](../tools/env.py)", "docs/vllm.md", "https://example.org/kvcore/")
    assert link == "[a](https://example.org/kvcore/blob/main/tools/env.py)"


def test_a_link_to_nothing_is_an_error() -> None:
    with pytest.raises(LinkError, match=r"docs/vllm.md links to gone.md"):
        relinked("[a](gone.md)", "docs/vllm.md", None)


@pytest.mark.parametrize("source", [*PAGES.values(), *(f"docs/{page.name}" for page in DOCS)])
def test_every_link_of_every_page_leads_somewhere(source: str) -> None:
    relinked((ROOT / source).read_text(), source, None)


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    assert [page.name for page in DOCS if f"- {page.name}" not in nav] == []


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_a_page_has_one_subject_and_can_be_read_at_one_sitting(page: Path) -> None:
    """Two may be longer: one is searched, the other is tables."""
    if page.name not in ("troubleshooting.md", "benchmarks.md"):
        assert len(page.read_text().split()) <= 3500, "give a subject of this page one of its own"


def test_the_site_is_built_so_that_a_warning_fails() -> None:
    """With `--quiet` mkdocs hides warnings from `--strict` too: a broken anchor passed."""
    [line] = [line for line in (ROOT / "Makefile").read_text().splitlines() if "mkdocs" in line]
    assert "--strict" in line
    assert "--quiet" not in line
