"""The compatibility page: made of its record, and the record of the probes as they are."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from kvcore.engines.verdict import Standing
from tools import compat


def test_the_page_is_that_of_the_record() -> None:
    assert compat.page(compat.read()) == compat.PAGE.read_text(encoding="utf-8"), "make docs"


@pytest.mark.parametrize("name", compat.LISTED)
def test_the_record_is_of_these_probes_and_has_every_tried_release(name: str) -> None:
    record = compat.read()
    assert record[name]["digest"] == compat.digest(compat.engine(name).probes()), "make test-compat"
    assert [each["release"] for each in record[name]["releases"]] == list(compat.LISTED[name])
    assert compat.unserved(name, record) == []


def test_a_tried_release_that_is_not_served_is_found() -> None:
    record = compat.read()
    record["vllm"]["releases"][0]["standing"] = "not served"
    assert compat.unserved("vllm", record) == ["0.30.0"]


def test_a_wheel_is_probed_without_being_installed(tmp_path: Path) -> None:
    file = tmp_path / "vllm-0.99.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("vllm/__init__.py", "")
    found = compat.wheel("vllm", "0.99.0", tmp_path)
    verdict = compat.probe_wheel(compat.engine("vllm"), "0.99.0", found)
    assert verdict.standing is Standing.NOT_SERVED
    assert verdict.failed[0].probe.name == "registration"
