"""What tools/env.py does when: nothing, kvcore alone, or all of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "tools" / "env.py"


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script over a tree of its own, with steps that only say that they were done."""
    spec = importlib.util.spec_from_file_location("env_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "env_script", script)  # dataclasses look it up
    spec.loader.exec_module(script)
    root = tmp_path / "tree"
    (root / "kvcore" / "memory" / "copy").mkdir(parents=True)
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "kvcore" / "memory" / "copy" / "_copy.c").write_text("int one;\n")
    done: list[str] = []

    def create(target: object) -> None:
        done.append("create")
        target.path.mkdir(exist_ok=True)  # type: ignore[attr-defined]

    def step(name: str) -> object:
        return script.Step(name, lambda _: done.append(name))

    monkeypatch.setattr(script, "ROOT", root)
    script.created = script.Environment.create  # type: ignore[attr-defined]
    monkeypatch.setattr(script.Environment, "create", create)
    script.install_kvcore = script._kvcore  # type: ignore[attr-defined]
    monkeypatch.setattr(script, "_system", lambda _: done.append("system"))
    script.uv_installs = script.Environment._uv_installs  # type: ignore[attr-defined]
    monkeypatch.setattr(script.Environment, "_uv_installs", lambda *_: False)  # no downloads
    monkeypatch.setattr(script, "_kvcore", lambda _: done.append("kvcore"))
    monkeypatch.setattr(script, "recipe", lambda _engine, gpu: [step(f"engine, gpu={gpu}")])
    script.done = done  # type: ignore[attr-defined]
    return script


def test_an_environment_can_be_replaced_by_its_own_python(
    env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ran = tmp_path / "venv", []
    path.mkdir()
    (path / "pyvenv.cfg").touch()
    monkeypatch.setattr(sys, "executable", str(path / "bin" / "python"))
    monkeypatch.setattr(env.Environment, "logged", lambda _, command: ran.append(command))
    env.created(env.Environment(path, tmp_path / "log"))
    assert not path.exists()
    [[python, *_]] = ran
    assert Path(python).exists()


def made(env: ModuleType, path: Path, gpu: bool = False) -> list[str]:
    env.done.clear()
    env.make("vllm", path, gpu)
    return list(env.done)


ALL = ["system", "create", "engine, gpu=False", "kvcore"]


def test_it_is_made_once(env: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "venvs" / "vllm"
    assert env.main(["vllm", "--path", str(path), "--device", "cpu", "--check"]) == 1
    assert made(env, path) == ALL
    assert made(env, path) == []
    assert env.main(["vllm", "--path", str(path), "--device", "cpu", "--check"]) == 0


@pytest.mark.parametrize("file", ["pyproject.toml", "kvcore/memory/copy/_copy.c"])
def test_a_changed_build_file_installs_kvcore_alone(
    env: ModuleType, tmp_path: Path, file: str
) -> None:
    made(env, tmp_path / "vllm")
    (env.ROOT / file).write_text("changed\n")
    assert made(env, tmp_path / "vllm") == ["kvcore"]


def test_another_device_makes_it_anew(env: ModuleType, tmp_path: Path) -> None:
    made(env, tmp_path / "vllm")
    assert made(env, tmp_path / "vllm", gpu=True)[1:3] == ["create", "engine, gpu=True"]


def test_a_failed_step_is_told_and_not_taken_for_done(
    env: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "vllm"

    def fails(target: object) -> None:
        target.logged([sys.executable, "-c", "exit('no space left')"])  # type: ignore[attr-defined]

    with monkeypatch.context() as broken:
        broken.setattr(env, "_kvcore", fails)
        assert env.main(["vllm", "--path", str(path), "--device", "cpu"]) == 1
        assert "no space left" in capsys.readouterr().err
    assert made(env, path) == ["kvcore"], "the engine was installed: that is not done again"


def test_one_environment_at_a_time_builds_kvcore(env: ModuleType) -> None:
    """`make test` creates two at once, and both compile C code into the same checkout."""
    building: list[int] = []
    seen: list[int] = []

    class Target:
        def pip(self, *arguments: str) -> None:
            building.append(1)
            time.sleep(0.05)
            seen.append(len(building))
            building.pop()

    threads = [threading.Thread(target=env.install_kvcore, args=(Target(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1, 1, 1]


def test_a_folder_that_is_no_environment_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "vllm", "--path", str(tmp_path), "--device", "cpu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert (tmp_path / "precious").read_text() == "data"


def test_requirements_are_read_from_a_wheel(env: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "thing-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "thing-1.dist-info/METADATA",
            "Name: thing\n"
            "Requires-Dist: numpy>=1\n"
            'Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"\n'
            'Requires-Dist: never; python_version < "3"\n'
            'Requires-Dist: plotly; extra == "bench"\n'
            'Requires-Dist: fastapi[standard]<1; python_version > "3"\n'
            "\nRequires-Dist: not-a-header\n",
        )
    done = subprocess.run(
        [sys.executable, "-c", env.READ_REQUIREMENTS, str(wheel), "torch"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["numpy>=1", "fastapi[standard]<1"]


@pytest.mark.slow
def test_vllm_s_cpu_build_gets_the_name_that_its_command_asks_for(
    env: ModuleType, tmp_path: Path
) -> None:
    wheel = env.empty_wheel(tmp_path, "vllm", "0.32.0+cpu", "a name")
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(wheel)], check=True)
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(target)])
    assert found.version == "0.32.0+cpu"
    assert not found.entry_points


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real environment with pip, of which a test takes a copy: to make it takes seconds."""
    made = tmp_path_factory.mktemp("real") / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(made)], check=True)
    return made


@pytest.mark.slow
def test_a_layer_holds_a_version_s_python_and_links_to_what_its_base_compiled(
    env: ModuleType, real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, path = tmp_path / "vllm", tmp_path / "vllm-0.33"
    command = ["vllm-0.33", "--path", str(path), "--base", str(base), "--device", "cpu"]
    monkeypatch.undo()  # the environments and the steps are real here
    assert env.main(command) == 1, "there is no base"
    shutil.copytree(real, base, symlinks=True)
    below = env.Environment(base, tmp_path / "log")
    (below.site / "vllm").mkdir()
    (below.site / "vllm" / "_C.abi3.so").write_bytes(b"compiled")
    (below.site / "torch.py").touch()
    below.stamp({"engine": "one"})
    its_pip = env.Environment.pip

    def pip(self: object, *arguments: str) -> None:
        if arguments[0] != "download":
            its_pip(self, *arguments)
            return
        wheel = Path(arguments[arguments.index("--dest") + 1]) / "vllm-0.33.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("vllm/__init__.py", "import torch\n")
            archive.writestr("vllm/_cuda.so", "much")

    monkeypatch.setattr(env.Environment, "pip", pip)
    assert env.main([*command, "--check"]) == 1
    assert env.main(command) == 0
    assert env.main([*command, "--check"]) == 0
    layer = env.Environment(path, tmp_path / "log", base)
    said = layer.output("import vllm, importlib.metadata as m; print(m.version('vllm'))")
    assert said.strip() == "0.33.0+cpu"
    assert sorted(file.name for file in (layer.site / "vllm").glob("*.*")) == [
        "_C.abi3.so",
        "__init__.py",
    ]
    below.stamp({"engine": "another"})
    assert env.main([*command, "--check"]) == 1, "its base is not the one that it was made over"


@pytest.mark.slow
def test_a_layer_of_sglang_is_its_wheel_over_sglang_s_environment(
    env: ModuleType, real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the environments and the steps are real here
    monkeypatch.setattr(env, "ROOT", tmp_path)
    base = tmp_path / ".venvs" / "sglang"
    command = ["sglang-0.5.20", "--device", "cpu"]
    assert env.main(command) == 1, "there is no base"
    shutil.copytree(real, base, symlinks=True)
    below = env.Environment(base, tmp_path / "log")
    (below.site / "torch.py").write_text("version = 'of the base'\n")
    below.stamp({"engine": "one"})
    its_pip = env.Environment.pip

    def pip(self: object, *arguments: str) -> None:
        if arguments[0] != "download":
            its_pip(self, *arguments)
            return
        assert arguments[-1] == "sglang==0.5.20"
        folder = Path(arguments[arguments.index("--dest") + 1])
        env.empty_wheel(folder, "sglang", "0.5.20", "an older one")

    compiled: list[Path] = []
    monkeypatch.setattr(env.Environment, "pip", pip)
    monkeypatch.setattr(env, "_sglang_extensions", lambda target: compiled.append(target.path))
    assert env.main(command) == 0
    layer = env.Environment(tmp_path / ".venvs" / "sglang-0.5.20", tmp_path / "log", base)
    assert compiled == [layer.path], "its sources are not those of the base"
    code = "import torch, importlib.metadata as m; print(torch.version, m.version('sglang'))"
    assert layer.output(code).strip() == "of the base 0.5.20"
    assert not list(layer.site.glob("vllm*"))


def test_stand_ins_are_let_be_until_kvcore_is_there(env: ModuleType, tmp_path: Path) -> None:
    """Python runs the file at each start, and pip's is before kvcore is installed."""
    (tmp_path / env.STAND_INS).write_text(env.INSTALL_STAND_INS)
    code = "import site, sys; site.addsitedir(sys.argv[1]); print(__builtins__.__import__)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("<built-in function __import__>")
    assert done.stderr == ""
    adapter = str(SCRIPT.parents[1] / "adapters" / "sglang")
    core = str(SCRIPT.parents[1])
    (tmp_path / "paths.pth").write_text(f"{adapter}\n{core}\n")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "_Import" in done.stdout, done.stderr


def test_the_environment_for_releases_is_made_once_and_has_no_engine(
    env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[str] = []
    monkeypatch.setattr(env.Environment, "pip", lambda _, *packages: installed.extend(packages))
    arguments = ["release", "--path", str(tmp_path / "release")]
    assert env.main([*arguments, "--check"]) == 1
    assert env.main(arguments) == 0
    assert installed == ["install", *env.RELEASE]
    assert env.done == ["create"]
    assert env.main([*arguments, "--check"]) == 0
    assert env.main(arguments) == 0
    assert env.done == ["create"]
    names = [package.partition(";")[0].partition("=")[0] for package in env.RELEASE]
    assert not {"torch", "kvcore"} & set(names)


def test_uv_is_told_what_pip_is_told(env: ModuleType) -> None:
    """The environment's variables come last in pip's list, and count."""
    told = "\n".join(
        [
            "global.index-url='https://one.example/simple'",
            "global.extra-index-url='file:///a/simple\\nfile:///b/simple'",
            "install.constraint='/etc/constraints.txt'",
            ":env:.index-url='https://two.example/simple'",
            ":env:.disable-pip-version-check='1'",
            "a line of another kind",
        ]
    )
    found = env.uv_settings(told)
    assert found.pop("UV_INDEX_STRATEGY") == "unsafe-best-match", "as pip chooses"
    assert found.pop("UV_LINK_MODE") == "copy", "no file is another environment's too"
    assert found == {
        "UV_DEFAULT_INDEX": "https://two.example/simple",
        "UV_INDEX": "file:///a/simple file:///b/simple",
        "UV_CONSTRAINT": "/etc/constraints.txt",
    }


@pytest.mark.slow
@pytest.mark.parametrize("works", [True, False])
def test_pip_installs_what_uv_does_not(
    env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    run: list[list[str]] = []

    def logged(_: Any, command: list[str], settings: Any = None) -> None:
        run.append(command)
        if settings is not None and not works:
            raise env.EnvError("no such option")

    monkeypatch.setattr(env.Environment, "logged", logged)
    monkeypatch.setattr(env.Environment, "_uv_installs", env.uv_installs)
    monkeypatch.setattr(env, "ROOT", tmp_path)
    made = env.Environment(tmp_path / "made", tmp_path / "log")
    made.python.parent.mkdir(parents=True)
    made.python.symlink_to(sys.executable)
    made.pip("install", "--no-deps", "a-package")
    python, uv = str(made.python), str(tmp_path / ".venvs" / "uv")
    expected = [
        [python, "-m", "pip", "--no-input", "install", "--no-deps", "--target", uv, env.UV],
        [f"{uv}/bin/uv", "pip", "install", "--python", python, "--no-deps", "a-package"],
    ]
    if not works:
        expected.append([python, "-m", "pip", "--no-input", "install", "--no-deps", "a-package"])
    assert run == expected
