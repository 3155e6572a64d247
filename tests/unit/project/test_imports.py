"""What importing kvcore costs and touches, and that the public API type-checks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "kvcore"
ENGINES = {"vllm", "sglang", "tensorrt_llm", "triton"}
HEAVY = ENGINES | {"torch", "transformers", "pydantic", "prometheus_client", "rich", "typer"}

SOURCES = sorted(PACKAGE.rglob("*.py"))


def loaded_after(code: str) -> set[str]:
    """Top-level modules of a fresh interpreter after ``code``."""
    code += "\nimport sys; print(' '.join({name.partition('.')[0] for name in sys.modules}))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return set(result.stdout.split())


def nodes(source: str, *names: str) -> list[ast.AST]:
    """The syntax of a source that has one of the names in its text; nothing of another."""
    return list(ast.walk(ast.parse(source))) if any(name in source for name in names) else []


def imported(source: str) -> set[str]:
    """Engines that ``source`` imports anywhere, also inside functions."""
    found: set[str] = set()
    for node in nodes(source, *ENGINES):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Call) and node.args and _imports_by_name(node.func):
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found.add(name.value.partition(".")[0])
    return found & ENGINES


def _imports_by_name(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def test_import_kvcore_is_light() -> None:
    assert not loaded_after("import kvcore") & HEAVY


@pytest.mark.slow
def test_the_command_line_starts_without_numpy_or_an_engine() -> None:
    heavy = ENGINES | {"torch", "transformers", "numpy", "zmq", "prometheus_client"}
    assert not loaded_after("import kvcore.cli.app") & heavy


@pytest.mark.slow
def test_the_control_plane_needs_no_torch() -> None:
    code = (
        "import kvcore.index, kvcore.model.keys, kvcore.config, kvcore.plugins, "
        "kvcore.telemetry.metrics"
    )
    assert not loaded_after(code) & (ENGINES | {"torch", "transformers"})


@pytest.mark.slow
def test_the_process_that_publishes_events_is_light() -> None:
    code = "import kvcore.events.publisher_process, kvcore.events.zmq_bus, kvcore.events.nats_bus"
    assert not loaded_after(code) & HEAVY


@pytest.mark.slow
def test_the_reference_engine_starts_without_torchs_compiler() -> None:
    """It would be half of a start, and tests start dozens of these processes."""
    code = "import sys, kvcore.testing.engine.driver; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_kvcore_imports_no_engine() -> None:
    found = {str(path.relative_to(ROOT)): imported(path.read_text()) for path in SOURCES}
    assert len(found) > 200, "the sources were not found"
    assert not {path: engines for path, engines in found.items() if engines}


@pytest.mark.parametrize(
    "source",
    [
        "import vllm",
        "def f():\n    from vllm.config import VllmConfig",
        "import importlib\nimportlib.import_module('vllm.config')",
        "try:\n    import triton.language as tl\nexcept ImportError: pass",
    ],
)
def test_the_walk_sees_every_kind_of_import(source: str) -> None:
    assert imported(source)


def test_only_the_config_reads_the_environment() -> None:
    """Nor does anything else in an engine's processes: the compiler's name is a build's affair."""
    readers = {
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        if not {"testing", "harness"} & set(path.parts)
        for node in nodes(path.read_text(), "environ", "getenv")
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"))
    }
    assert readers - {"memory/copy/build_native.py"} == {"config/load.py"}


@pytest.mark.parametrize("folder", ["kernels", "adapters", "adapters/vllm", "tests"])
def test_folders_that_would_shadow_other_packages_are_none(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.slow
def test_the_public_api_type_checks(tmp_path: Path) -> None:
    """That kvcore itself does is for `make lint`: here it is only asked for its types, and torch,
    the most of the work, for none. Hence a cache of its own."""
    pytest.importorskip("mypy")
    rules = tmp_path / "mypy.ini"
    rules.write_text(
        "[mypy]\nstrict = true\npython_version = 3.10\nexplicit_package_bases = true\n"
        "[mypy-kvcore.*]\nignore_errors = true\n"
        "[mypy-torch.*,numpy.*,transformers.*]\nfollow_imports = skip\n"
    )
    given = ["--config-file", str(rules), "--cache-dir", ".mypy_cache/public_api"]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *given, "tests/typing_api.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_map_of_the_packages_has_the_order_of_the_contract() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    wanted = [set(layer.split(" | ")) for layer in layers if layer != "kvcore_devtools"]
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("## Where things are")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `k")]
    assert [set(re.findall(r"`([\w.]+)`", row)) for row in rows] == wanted


def test_the_walk_of_one_block_names_functions_that_are_there() -> None:
    page = (ROOT / "docs" / "one-block.md").read_text()
    named = re.findall(r"`(kvcore[\w.]*):([\w.]+)`", page)
    assert len(named) > 20
    for module, path in named:
        folder = {"kvcore": ROOT, "kvcore_vllm": ROOT / "adapters" / "vllm"}[module.split(".")[0]]
        tree: ast.AST = ast.parse((folder / f"{module.replace('.', '/')}.py").read_text())
        for name in path.split("."):
            tree = next(
                one for one in ast.iter_child_nodes(tree) if getattr(one, "name", "") == name
            )
