"""How TensorRT-LLM is started with kvcore, and the script that verifies it on a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

torch = pytest.importorskip("torch")

from kvcore.config import Config, forwarded_config, load_config  # noqa: E402
from kvcore.errors import ConfigError  # noqa: E402
from kvcore_trtllm import plugin  # noqa: E402  # after the skip

ROOT = Path(__file__).parents[3]


# --- configuration and start ------------------------------------------------------------------


def test_settings_come_through_the_forwarded_variable(tmp_path: Path) -> None:
    file = tmp_path / "kvcore.toml"
    file.write_text('[host]\ncapacity = "2GiB"\n')
    name = "TRTLLM_KVCORE_CONFIG"
    from_file = forwarded_config({name: str(file), "KVCORE__BLOCK__TOKENS": "32"})
    assert (from_file.host.capacity, from_file.block.tokens) == (2 << 30, 32)
    given = {name: '{"host": {"capacity": "3GiB"}}', "KVCORE__BLOCK__TOKENS": "32"}
    whole_config = forwarded_config(given)
    assert (whole_config.host.capacity, whole_config.block.tokens) == (3 << 30, 16)
    assert forwarded_config({}) == Config()
    with pytest.raises(ConfigError, match="is not JSON"):
        forwarded_config({name: "{"})
    with pytest.raises(ConfigError, match=r"host\.capacity"):
        forwarded_config({name: '{"host": {"capacty": 1}}'})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


def test_serve_writes_the_engines_options(home: Path) -> None:
    mine = home / "options.yaml"
    mine.write_text("kv_cache_config: {dtype: fp8}\nmax_num_tokens: 512\n")
    config = load_config(
        overrides={"host": {"capacity": "2GiB"}, "namespace": {"secret": "s" * 16}}, env={}
    )
    command = plugin.serve("m", config, ["--tp_size", "2", "--extra_llm_api_options", str(mine)])
    assert command.argv[1:4] == ["m", "--tp_size", "2"]
    assert command.argv[4] == "--extra_llm_api_options"
    options = yaml.safe_load(Path(command.argv[5]).read_text())
    assert options["max_num_tokens"] == 512
    assert options["kv_cache_config"] == {"dtype": "fp8", **plugin.CACHE}
    assert options["kv_connector_config"] == plugin.CONNECTOR
    assert forwarded_config(command.env) == config
    assert "s" not in command.argv
    assert plugin.serve("m", config, []).argv[2] == "--extra_llm_api_options"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("kv_connector_config: {connector: lmcache}", "kv_connector_config"),
        ("kv_cache_config: {enable_partial_reuse: true}", "enable_partial_reuse"),
        ("[]", "a table"),
        ("{", "cannot be read"),
    ],
)
def test_serve_refuses_options_that_do_not_fit(home: Path, text: str, named: str) -> None:
    mine = home / "options.yaml"
    mine.write_text(text)
    with pytest.raises(ConfigError, match=named):
        plugin.serve("m", Config(), [f"--config={mine}"])
    with pytest.raises(ConfigError, match="without a file"):
        plugin.serve("m", Config(), ["--config"])


def test_the_plugin_is_light() -> None:
    code = (
        "import sys, kvcore_trtllm.plugin as p; p.status(); "
        "print([n for n in ('torch', 'transformers', 'tensorrt_llm') if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_connector_named_is_the_one_there_is() -> None:
    source = (ROOT / "adapters/trtllm/kvcore_trtllm/connector.py").read_text()
    for name in ("connector_scheduler_class", "connector_worker_class"):
        assert f"class {plugin.CONNECTOR[name]}(" in source


# --- the script for a GPU ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def verify() -> Any:
    spec = importlib.util.spec_from_file_location(
        "verify_on_gpu", ROOT / "adapters/trtllm/verify_on_gpu.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["verify_on_gpu"] = module
    spec.loader.exec_module(module)
    return module


def engine(answer: Callable[[bool], int], log: str) -> Callable[..., Any]:
    """Stands for engines in processes: ``answer(with kvcore)`` is the token they give."""

    def process(order: dict[str, Any]) -> tuple[dict[str, Any], str]:
        with_kvcore = order["kvcore"] is not None
        rounds = [[[answer(with_kvcore)]] for _ in order["salts"]]
        return {"answers": rounds}, log if with_kvcore else ""

    return process


def test_verifying_finds_what_is_wrong(verify: Any, tmp_path: Path) -> None:
    right = engine(lambda _: 1, "load request=1\nblend request=1")
    for case in verify.CASES:
        process = right if case.finds else engine(lambda _: 1, "")
        assert verify.run(case, "m", 1, tmp_path, process).passed, case.name
    hit, apart = verify.CASES[0], next(case for case in verify.CASES if not case.finds)
    blend = next(case for case in verify.CASES if case.ratio == 0.15)
    wrong = [
        (hit, engine(lambda kvcore: 1 + kvcore, "load request=1"), "answers differ"),
        (hit, engine(lambda _: 1, ""), "0 found"),
        (blend, engine(lambda _: 1, "load request=1"), "0 found"),
        (blend, engine(lambda kvcore: 1 + kvcore, "blend request=1"), "round 1"),
        (hit, engine(lambda _: 1, "load request=1\nkvcore stands aside: x"), "stands aside"),
        (apart, right, "expected none"),
    ]
    for case, process, named in wrong:
        outcome = verify.run(case, "m", 1, tmp_path, process)
        assert not outcome.passed
        assert named in outcome.detail
        assert "FAIL" in verify.table([outcome])


def test_orders_to_engines_are_plain_data(verify: Any, tmp_path: Path) -> None:
    seen: list[str] = []

    def process(order: dict[str, Any]) -> tuple[dict[str, Any], str]:
        seen.append(json.dumps(order))
        return {"answers": [[[1]] for _ in order["salts"]]}, "load request=1"

    for case in verify.CASES:
        verify.run(case, "m", 1, tmp_path, process)
    assert len(seen) >= 2 * len(verify.CASES)
