"""What the manifests and settings in `deploy/` and the sizing chapter say, against the code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcore.config import load_config
from kvcore.config.walk import node_at
from kvcore.model.shape import BlockShape
from kvcore.plugins import PluginManager
from support.deployment import (
    DEPLOY,
    MANIFESTS,
    ROOT,
    SETTINGS,
    WITH_PODS,
    check_parts,
    check_schema,
    documents,
)
from support.together import for_every
from tools.release import project

# -- settings -------------------------------------------------------------------------------


@for_every(SETTINGS)
def test_settings_are_of_the_schema_and_their_plugins_exist(path: Path) -> None:
    config = load_config(path, env={})
    PluginManager().check(config)
    assert config.disk.path is not None


def test_both_deployments_have_the_same_settings() -> None:
    assert len({path.read_text() for path in SETTINGS}) == 1


def environment() -> Iterator[str]:
    for path in sorted(DEPLOY.rglob("*.yaml")):
        yield from re.findall(r"\bKVCORE__\w+", path.read_text())


def test_variables_are_settings() -> None:
    names = set(environment())
    assert names
    for name in names:
        keys = tuple(name.removeprefix("KVCORE__").lower().split("__"))
        if "options" in keys:  # a plugin's own
            keys = keys[: keys.index("options") + 1]
        assert node_at(keys).field is not None, name


# -- formats --------------------------------------------------------------------------------


RESOURCES = {
    f"{number} of {path.name}, {found['kind']}": found
    for path in MANIFESTS
    if path.name != "kustomization.yaml"
    for number, found in enumerate(documents(path))
}


@for_every(RESOURCES)
def test_manifests_are_kubernetes(resource: dict[str, Any]) -> None:
    check_schema(resource)


def pods() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for path in MANIFESTS:
        for found in documents(path):
            if found["kind"] in WITH_PODS:
                yield found, found["spec"]["template"]


def test_parts_of_the_manifests_name_each_other() -> None:
    check_parts([found for path in MANIFESTS for found in documents(path)])


def test_the_kustomization_lists_what_is_there() -> None:
    [listed] = documents(DEPLOY / "kubernetes" / "kustomization.yaml")
    there = {path.name for path in MANIFESTS} - {"kustomization.yaml"}
    assert set(listed["resources"]) == there - {"mooncake.yaml"}
    for generator in listed["configMapGenerator"]:
        assert all((DEPLOY / "kubernetes" / name).is_file() for name in generator["files"])


def test_addresses_in_the_settings_are_those_of_services() -> None:
    config = load_config(SETTINGS[0], env={})
    host = re.fullmatch(r"redis://([\w-]+):6379/0", config.tiers["shared"].options["url"])
    assert host is not None
    [compose] = documents(DEPLOY / "compose" / "compose.yaml")
    services = {
        f["metadata"]["name"] for p in MANIFESTS for f in documents(p) if f["kind"] == "Service"
    }
    assert host[1] in services & set(compose["services"])
    ports = {config.events.endpoint, config.events.replay_endpoint}
    [engine] = [pod for found, pod in pods() if found["metadata"]["name"] == "engine"]
    listed = {p["name"]: p["containerPort"] for p in engine["spec"]["containers"][0]["ports"]}
    assert ports == {f"tcp://*:{listed['events']}", f"tcp://*:{listed['events-replay']}"}


def test_the_compose_file_is_one_and_its_files_are_there() -> None:
    folder = DEPLOY / "compose"
    [compose] = documents(folder / "compose.yaml")
    mounted = [
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", [])
    ]
    for source in mounted:
        assert (
            (folder / source).is_file() if source.startswith(".") else source in compose["volumes"]
        )
    for service in compose["services"].values():
        assert set(service.get("depends_on", {})) <= compose["services"].keys()
        assert "image" in service or (folder / service["build"]["context"] / "LICENSE").is_file()
        assert set(service["networks"]) <= compose["networks"].keys()


def test_the_machine_is_open_to_itself_alone() -> None:
    [compose] = documents(DEPLOY / "compose" / "compose.yaml")
    assert compose["networks"]["store"] == {"internal": True}
    near = {name for name, it in compose["services"].items() if "store" in it["networks"]}
    assert near == {"engine", "valkey"}, "the store has no password"
    for name, service in compose["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert not service.keys() & {"privileged", "ipc", "pid", "network_mode", "cap_add"}, name
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"]), name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert int(service["user"].split(":")[0]) > 0, name
        assert service["deploy"]["resources"]["limits"].keys() == {"memory", "cpus"}, name
        image = service.get("image", service.get("build", {}).get("args", {}).get("VLLM_IMAGE"))
        assert re.fullmatch(r"\$\{[A-Z]+_IMAGE:\?run deploy/pin-images\}", image), name
    engine, grafana = (compose["services"][name]["environment"] for name in ("engine", "grafana"))
    assert engine["VLLM_API_KEY"].startswith("${API_KEY:?")
    assert grafana["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")


FAKE_DOCKER = """#!/bin/sh
case $1 in
pull) echo "pulled $3" >&2 ;;
image) echo "${5%%:*}$AT" ;;
esac
"""


def pin_images(folder: Path, at: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the script with a Docker that names each image by ``at``."""
    (folder / "compose").mkdir(exist_ok=True)
    (folder / "docker").write_text(FAKE_DOCKER)
    (folder / "docker").chmod(0o755)
    script = shutil.copy(DEPLOY / "pin-images", folder / "pin-images")
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "AT": at}
    return subprocess.run(
        [script, *arguments], env=env, capture_output=True, text=True, check=False
    )


AT = "@sha256:" + "ab" * 32


def test_the_images_of_a_machine_are_pinned_by_one_command(tmp_path: Path) -> None:
    assert pin_images(tmp_path, "", "VLLM_IMAGE").returncode, "nothing is written yet"
    assert pin_images(tmp_path, AT).returncode == 0
    written = (tmp_path / "compose" / ".env").read_text()
    pins = dict(line.split("=") for line in written.splitlines() if not line.startswith("#"))
    assert all(re.fullmatch(r"[\w/-]+@sha256:(ab){32}", image) for image in pins.values())
    wanted = re.findall(r"\$\{([A-Z]+_IMAGE)", (DEPLOY / "compose" / "compose.yaml").read_text())
    assert pins.keys() == set(wanted)
    assert pin_images(tmp_path, "", "VLLM_IMAGE").stdout == f"{pins['VLLM_IMAGE']}\n"
    assert "ARG VLLM_IMAGE\n" in (DEPLOY / "Dockerfile").read_text(), "no default: it has no digest"


def test_an_image_without_a_digest_changes_no_pin(tmp_path: Path) -> None:
    assert pin_images(tmp_path, AT).returncode == 0
    before = (tmp_path / "compose" / ".env").read_text()
    assert pin_images(tmp_path, "").returncode == 1
    assert (tmp_path / "compose" / ".env").read_text() == before


def test_the_image_is_built_from_what_the_wheel_needs_alone() -> None:
    listed = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in listed if line and not line.startswith("#")]
    assert rules[0] == "*", "everything else stays out"
    kept = {line.removeprefix("!") for line in rules if line.startswith("!")}
    assert all((ROOT / name).exists() for name in kept)
    table = project()
    wheel = table["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    used = {"pyproject.toml", table["project"]["readme"], *table["project"]["license-files"],
            table["tool"]["hatch"]["build"]["hooks"]["custom"]["path"],
            "deploy/requirements.txt", "deploy/requirements-build.txt",
            *(package.split("/")[0] for package in wheel)}  # fmt: skip
    assert kept == used


# -- sizing ---------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "deploy.md").read_text()
SIZES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.fullmatch(r"(\|[^|]+){8}\|", line) and re.search(r"\| \d+ \|", line)
]


@for_every({row[0]: row for row in SIZES})
def test_bytes_of_a_token_are_those_of_the_layout(row: list[str]) -> None:
    layers, heads, dim, parts = map(int, row[1:5])
    shape = BlockShape(layers, heads, dim, 16, row[5], kv_factor=parts)
    assert int(row[6]) * 16 == shape.nbytes
    assert int(row[7]) == (16 << 30) // int(row[6])


def test_the_sizing_chapter_computes_right() -> None:
    of = {row[0]: int(row[6]) for row in SIZES}
    assert len(of) >= 6
    llama = of["Llama-3.1-8B"]
    assert f"{1000 * 8000 * llama / 1e9:,.0f} GB" == "1,049 GB"
    assert "that is 1,049 GB" in PAGE
    assert (16 << 30) // (8000 * llama) == 16, "the last 16 of them"
    assert f"{10_000 * llama / 1e9:.2f} GB/s" == "1.31 GB/s"
    assert "1.31 GB/s" in PAGE
    assert 16 * llama == 2 << 20, "a block of 16 tokens has 2 MiB"
