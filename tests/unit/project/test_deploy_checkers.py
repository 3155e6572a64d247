"""Checkers of others, over what `deploy/` makes. They are in the environment `release`."""

from __future__ import annotations

import json
import os
import subprocess
from copy import deepcopy
from pathlib import Path

import pytest
import yaml

from support.chart import DIGEST, VARIANTS, rendered
from support.deployment import DEPLOY, MANIFESTS, release_tool

COMPOSE = DEPLOY / "compose" / "compose.yaml"

NOT_OURS = {
    "CKV_K8S_11": "a CPU limit makes the kernel halt an engine in the middle of a step",
    "CKV_K8S_21": "the namespace is the installer's choice: helm -n, kustomize",
    "CKV_K8S_35": "vLLM and kvcore read these secrets from the environment",
    "CKV_DOCKER_2": "Compose and Kubernetes have probes of their own",
    "CKV_DOCKER_7": "the base image is an argument, with a digest",
}
"""Rules of checkov that are left out, and why."""


def run(name: str, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [release_tool(name), *arguments], capture_output=True, text=True, check=False, env=env,
        timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout


def checkov(framework: str, *arguments: str) -> tuple[list[str], int]:
    """Return the rules that are broken, with the resource, and how many checks passed."""
    # A variable of pytest's run would change which Python modules checkov sees.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    _, told = run(
        "checkov", *arguments, "--framework", framework, "--skip-check", ",".join(NOT_OURS),
        "--skip-download", "--output", "json", "--quiet", env=env,
    )  # fmt: skip
    found = json.loads(told)
    failed = [
        f"{each['check_id']} {each['check_name']}: {each['resource']} in {each['file_path']}"
        for each in found["results"]["failed_checks"]
    ]
    return failed, found["summary"]["passed"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_checkov_finds_no_fault_with_what_is_installed(tmp_path: Path) -> None:
    for name, values in VARIANTS.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(rendered(values)))
    for path in MANIFESTS:
        (tmp_path / f"plain-{path.name}").write_text(path.read_text())
    failed, passed = checkov("kubernetes", "--directory", str(tmp_path))
    assert failed == []
    assert passed > 50 * len(VARIANTS)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_checkov_finds_a_fault_where_there_is_one(tmp_path: Path) -> None:
    [engine] = [deepcopy(found) for found in rendered({}) if found["kind"] == "StatefulSet"]
    pod = engine["spec"]["template"]["spec"]
    pod["containers"][0]["securityContext"]["capabilities"] = {}
    (tmp_path / "engine.yaml").write_text(yaml.safe_dump(engine))
    failed, _ = checkov("kubernetes", "--directory", str(tmp_path))
    assert {told.split()[0] for told in failed} >= {"CKV_K8S_37", "CKV2_K8S_6"}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_checkov_and_hadolint_find_no_fault_with_the_image() -> None:
    failed, passed = checkov("dockerfile", "--file", str(DEPLOY / "Dockerfile"))
    assert failed == []
    assert passed > 20
    assert run("hadolint", "--no-color", str(DEPLOY / "Dockerfile")) == (0, "")


@pytest.mark.slow
def test_compose_lint_finds_no_fault_with_the_machine(tmp_path: Path) -> None:
    """Its remaining finding is of low severity: /tmp of the engine may hold compiled kernels."""
    here = tmp_path / "compose.yaml"
    here.write_text(COMPOSE.read_text())
    images = ("VLLM", "VALKEY", "PROMETHEUS", "GRAFANA")
    (tmp_path / ".env").write_text(
        "".join(f"{i}_IMAGE=registry/{i.lower()}@{DIGEST}\n" for i in images)
    )
    code, told = run("compose-lint", "check", "--fail-on", "medium", str(here))
    assert code == 0, told
    here.write_text(COMPOSE.read_text().replace("127.0.0.1:8000", "8000"))
    code, told = run("compose-lint", "check", "--fail-on", "medium", str(here))
    assert (code, "CL-0005" in told) == (1, True)
