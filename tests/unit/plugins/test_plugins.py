"""Discovery: built-ins and third parties by one door, and a broken plugin stops nobody else."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvcore.config import Config, load_config
from kvcore.engines.spec import installed
from kvcore.errors import ConfigError, PluginError, UnsupportedError
from kvcore.index.policy import BUILTIN_POINTS, BUILTIN_POLICIES, PointRequest
from kvcore.model.shape import BlockShape
from kvcore.plugins import EngineSpec, PluginManager, ServeCommand, TierContext
from kvcore.plugins import manager as manager_module
from kvcore.tiers.disk import Geometry

ADAPTERS = Path(__file__).parents[3] / "adapters" / "vllm"
MakePlugin = Callable[[str, str], EntryPoint]
GEOMETRY = Geometry(BlockShape(2, 2, 8, 4, "bfloat16"), b"model", ((0, 2),))

SHELF = """
from kvcore.plugins import TierPlugin, hookimpl

@hookimpl
def kvcore_tiers():
    return [TierPlugin("shelf", "remote", lambda context: ("tier", context.name))]
"""


def names(manager: PluginManager, kind: str) -> list[str]:
    return [found.name for found in manager.found(kind)]


def test_what_is_installed_is_read_once_and_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    real = manager_module.importlib.metadata.entry_points

    def entry_points(**of: str) -> Any:
        read.append(of)
        return real(**of)

    monkeypatch.setattr(manager_module.importlib.metadata, "entry_points", entry_points)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # the others may change at any time
    module = ModuleType("its_shelves")
    exec(SHELF, module.__dict__)
    monkeypatch.setitem(sys.modules, "its_shelves", module)
    assert "shelf" not in names(PluginManager(), "tier")
    PluginManager()
    assert len(read) == 1
    info = tmp_path / "shelves-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelves\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[kvcore.plugins]\nshelves = its_shelves\n")
    (found,) = (offer for offer in PluginManager().found("tier") if offer.name == "shelf")
    assert found.identity == "shelves==1.5:shelf"
    assert len(read) == 2
    assert "shelf" not in names(PluginManager(disable=["shelves"]), "tier")
    assert len(read) == 2


# -- built-ins ----------------------------------------------------------------------------------


def test_builtins_come_through_the_hooks() -> None:
    manager = PluginManager(entry_points=[])
    assert names(manager, "policy") == list(BUILTIN_POLICIES)
    for name, policy in BUILTIN_POLICIES.items():
        assert manager.policy(name) is policy
    assert names(manager, "point policy") == list(BUILTIN_POINTS)
    assert {"disk", "memory"} <= set(names(manager, "tier"))
    assert names(manager, "ops") == ["link", "native", "reference"]
    assert manager.failures == []


def test_building_a_manager_imports_nothing_heavy() -> None:
    code = """
        import sys
        from importlib.metadata import EntryPoint
        from kvcore.plugins import PluginManager
        manager = PluginManager(entry_points=[
            EntryPoint("vllm", "kvcore_vllm.plugin", "kvcore.plugins")
        ])
        assert manager.engine("vllm").name == "vllm", manager.failures
        heavy = {"torch", "vllm", "triton", "sglang", "numpy", "transformers"} & set(sys.modules)
        assert not heavy, heavy
    """
    root = ADAPTERS.parents[1]
    env = {"PYTHONPATH": f"{root}:{ADAPTERS}"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=env)


# -- third parties ------------------------------------------------------------------------------


def test_a_third_party_is_found_by_name(plugin: MakePlugin) -> None:
    manager = PluginManager(entry_points=[plugin("shelf", SHELF)])
    context = TierContext("books", GEOMETRY, capacity=1 << 20)
    assert manager.tier("shelf").factory(context) == ("tier", "books")
    assert [found.origin.plugin for found in manager.found("tier")][-1] == "shelf"


HALVES = """
from kvcore.index.policy import PointPolicy
from kvcore.plugins import PointPolicyPlugin, hookimpl

class Halves(PointPolicy):
    name = "halves"

    def __init__(self, first=0):
        self.first = first

    def take(self, request):
        return request.offered[self.first :: 2]

@hookimpl
def kvcore_point_policies():
    return [PointPolicyPlugin("halves", Halves)]
"""


def test_a_policy_of_points_is_made_with_its_options(plugin: MakePlugin) -> None:
    manager = PluginManager(entry_points=[plugin("halves", HALVES)])
    request = PointRequest([16, 32, 48], [48], [], 0, 16)
    assert manager.point_policy("halves", {"first": 1}).take(request) == [32]
    assert manager.point_policy("spaced", {"every": 0}).take(request) == [48]
    with pytest.raises(ConfigError, match=r"point policy 'halves' with options .*'last'"):
        manager.point_policy("halves", {"last": 1})
    with pytest.raises(ConfigError, match="share above 0"):
        manager.point_policy("spaced", {"share": 0})


def test_a_policy_of_points_that_is_not_there_is_named_with_those_that_are(
    plugin: MakePlugin,
) -> None:
    manager = PluginManager(entry_points=[plugin("halves", HALVES)])
    config = load_config(None, {"points": {"policy": "best"}})
    says = r"points\.policy .*no point policy called 'best'; found are: spaced, all, halves"
    with pytest.raises(ConfigError, match=says):
        manager.check(config)
    manager.check(load_config(None, {"points": {"policy": "halves"}}))
    with pytest.raises(ConfigError, match="did you mean 'spaced'"):
        manager.point_policy("spacd", {})


def test_operations_that_cannot_be_made_are_left_out(
    plugin: MakePlugin, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
        from kvcore.plugins import OpsPlugin, hookimpl

        @hookimpl
        def kvcore_ops():
            return [OpsPlugin("sad", lambda: 1 / 0), OpsPlugin("fast", lambda: "fast")]
    """
    manager = PluginManager(entry_points=[plugin("speed", source)])
    made = manager.ops()
    assert made[-1] == "fast"
    assert "reference" in [getattr(ops, "name", None) for ops in made]
    assert "ops=sad" in caplog.text


def test_operations_that_do_not_serve_this_machine_are_no_warning(
    plugin: MakePlugin, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
        from kvcore.errors import UnsupportedError
        from kvcore.plugins import OpsPlugin, hookimpl

        def make():
            raise UnsupportedError("no such device")

        @hookimpl
        def kvcore_ops():
            return [OpsPlugin("elsewhere", make)]
    """
    caplog.set_level(logging.INFO)
    manager = PluginManager(entry_points=[plugin("speed", source)])
    assert "reference" in [ops.name for ops in manager.ops()]
    (line,) = [record for record in caplog.records if "ops=elsewhere" in record.getMessage()]
    assert line.levelno == logging.INFO
    assert "no such device" in line.getMessage()


BROKEN = {
    "raises_on_import": ("raise RuntimeError('no such luck')", "no such luck"),
    "import_error": ("import surely_not_installed", "surely_not_installed"),
    "syntax": ("def (", "SyntaxError"),
    "unknown_hook": (
        "from kvcore.plugins import hookimpl\n@hookimpl\ndef kvcore_tires(): return []",
        "kvcore_tires",
    ),
    "wrong_arguments": (
        "from kvcore.plugins import hookimpl\n@hookimpl\ndef kvcore_tiers(colour): return []",
        "colour",
    ),
    "hook_raises": (
        "from kvcore.plugins import hookimpl\n@hookimpl\ndef kvcore_tiers(): return 1 / 0",
        "ZeroDivisionError",
    ),
    "wrong_value": (
        "from kvcore.plugins import hookimpl\n@hookimpl\ndef kvcore_tiers(): return ['shelf']",
        "kvcore_tiers returned 'shelf'; supported is a list of TierPlugin",
    ),
    "not_a_list": (
        "from kvcore.plugins import hookimpl\n@hookimpl\ndef kvcore_tiers(): return 3",
        "TypeError",
    ),
    "name_of_a_builtin": (
        SHELF.replace('"shelf"', '"disk"'),
        "tier 'disk' is offered by plugin 'builtin' already",
    ),
    "half_good": (
        SHELF.replace('"shelf"', '"half"')
        + "@hookimpl\ndef kvcore_policies(): raise ValueError('other half')",
        "other half",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_named_and_the_others_load(
    plugin: MakePlugin, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    source, reason = BROKEN[name]
    caplog.set_level(logging.WARNING, "kvcore")
    manager = PluginManager(entry_points=[plugin(name, source), plugin("shelf", SHELF)])
    (failure,) = manager.failures
    assert failure.origin.plugin == name
    assert reason in f"{type(failure.error).__name__} {failure.error}"
    assert names(manager, "tier") == [*names(PluginManager(entry_points=[]), "tier"), "shelf"]
    (line,) = caplog.messages
    assert line.startswith(f"plugin_left_out plugin={name}")


def test_a_missing_module_or_attribute_is_named() -> None:
    points = [
        EntryPoint("gone", "no_such_module_here", "kvcore.plugins"),
        EntryPoint("lost", "kvcore.errors:NoSuchThing", "kvcore.plugins"),
    ]
    manager = PluginManager(entry_points=points)
    assert [failure.origin.plugin for failure in manager.failures] == ["gone", "lost"]


def test_strict_stops_at_the_first(plugin: MakePlugin) -> None:
    broken = plugin("broken", "raise RuntimeError('no such luck')")
    with pytest.raises(PluginError, match=r"'broken'.*no such luck.*plugins\.disable"):
        PluginManager(entry_points=[broken], strict=True)


def test_a_disabled_plugin_is_not_imported(plugin: MakePlugin) -> None:
    broken = plugin("broken", "raise RuntimeError('no such luck')")
    manager = PluginManager(entry_points=[broken], disable=["broken"], strict=True)
    assert manager.failures == []


def test_the_same_entry_point_twice_is_one(plugin: MakePlugin) -> None:
    shelf = plugin("shelf", SHELF)
    manager = PluginManager(entry_points=[shelf, shelf])
    assert manager.failures == []
    assert names(manager, "tier").count("shelf") == 1


def test_two_plugins_of_one_name(plugin: MakePlugin) -> None:
    other = EntryPoint("shelf", plugin("other", "").value, "kvcore.plugins")
    manager = PluginManager(entry_points=[plugin("shelf", SHELF), other])
    assert [failure.origin.plugin for failure in manager.failures] == ["shelf"]
    assert "shelf" in names(manager, "tier")
    assert manager._pluggy.get_plugin("shelf").__name__.endswith("_shelf")


# -- names --------------------------------------------------------------------------------------


def test_an_unknown_name_is_told_the_nearest(plugin: MakePlugin) -> None:
    broken = plugin("s3", "raise RuntimeError('no credentials')")
    manager = PluginManager(entry_points=[broken])
    with pytest.raises(ConfigError, match=r"no tier called 'dsk'; did you mean 'disk'\?"):
        manager.tier("dsk")
    with pytest.raises(ConfigError, match=r"could not be loaded: s3 \(no credentials\)"):
        manager.tier("s3")
    with pytest.raises(ConfigError, match="no engine called 'vllm'; none found"):
        manager.engine("vllm")
    with pytest.raises(ConfigError, match="did you mean 's3fifo'"):
        manager.policy("s3-fifo")


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ({"host": {"policy": "lruu"}}, r"^host\.policy \(overrides\): there is no policy called"),
        ({"disk": {"policy": "zzz"}}, r"^disk\.policy .* found are: lru, lfu"),
        ({"ops": {"backend": "nativ"}}, r"^ops\.backend .* did you mean 'native'\?"),
        ({"tiers": {"far": {"plugin": "dosk"}}}, r"^tiers\.far\.plugin .* did you mean 'disk'\?"),
        ({"engine": "vlm"}, r"^engine \(overrides\)"),
    ],
)
def test_a_setting_that_names_nothing_is_refused(table: dict[str, Any], line: str) -> None:
    manager = PluginManager(entry_points=[])
    manager.check(Config())
    with pytest.raises(ConfigError, match=line):
        manager.check(load_config(overrides=table, env={}))


# -- engines ------------------------------------------------------------------------------------


def spec_of(*distributions: str) -> EngineSpec:
    return EngineSpec("e", distributions, lambda *_: ServeCommand([], {}), lambda: "")


def test_the_first_installed_distribution_counts() -> None:
    assert installed(spec_of("no-such-engine", "pytest")).distribution == "pytest"


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The vLLM adapter's plugin module."""
    monkeypatch.syspath_prepend(ADAPTERS)
    import kvcore_vllm.plugin

    return kvcore_vllm.plugin


def test_serving_vllm(adapter: ModuleType) -> None:
    table = {
        "engine": "vllm",
        "namespace": {"secret": "hunter2-hunter2-"},
        "disk": {"path": "/kv", "capacity": "1GiB"},
    }
    config = load_config(overrides=table, env={})
    argv, env = adapter.ENGINE.serve("org/model", config, ["--max-model-len", "4096"])
    assert Path(argv[0]).name == "vllm"
    assert argv[1:4] == ["serve", "org/model", "--kv-transfer-config"]
    assert argv[5:] == ["--max-model-len", "4096"]
    transfer = json.loads(argv[4])
    assert transfer == {
        "kv_connector": "KVCoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"disk": {"path": "/kv", "capacity": 2**30}},
    }
    assert env["KVCORE_CONFIG"] == ""  # else a file would be merged in a second time
    again = load_config(overrides=transfer["kv_connector_extra_config"], env=env)
    assert again == config.model_copy(update={"engine": None})


@pytest.mark.parametrize("flag", ["--kv-transfer-config", "--kv_transfer_config={}"])
def test_serving_vllm_twice_configured_is_refused(adapter: ModuleType, flag: str) -> None:
    with pytest.raises(ConfigError, match="writes --kv-transfer-config itself"):
        adapter.ENGINE.serve("m", Config(), [flag])


def _fake_factory(monkeypatch: pytest.MonkeyPatch, factory: object) -> None:
    name = "vllm.distributed.kv_transfer.kv_connector.factory"
    parts = name.split(".")
    for n in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:n]), ModuleType(parts[n - 1]))
    sys.modules[name].KVConnectorFactory = factory  # type: ignore[attr-defined]


def test_registering_with_vllm_is_idempotent(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registered: list[tuple[str, ...]] = []

    def register_connector(*args: str) -> None:
        if registered:
            raise ValueError("Connector 'KVCoreConnector' is already registered.")
        registered.append(args)

    _fake_factory(monkeypatch, SimpleNamespace(register_connector=register_connector))
    adapter.register()
    adapter.register()
    assert registered == [("KVCoreConnector", "kvcore_vllm.plugin", "KVCoreConnector")]
    assert caplog.messages == []


def test_registering_never_raises_into_vllm(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvcore")
    _fake_factory(monkeypatch, None)  # has no register_connector: vLLM has moved on
    adapter.register()
    (line,) = caplog.messages
    assert line.startswith("connector_not_registered connector=KVCoreConnector")


def test_a_vllm_that_names_the_connector_fails_with_the_probe(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "emptied"
    package.mkdir()
    emptied = replace(adapter.ENGINE, distributions=("pytest",), package="emptied")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys.modules[adapter.verdict.__module__], "ENGINE", emptied)
    for name in [each for each in sys.modules if each.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)  # what another test loaded would be read
    adapter.verdict.cache_clear()
    with pytest.raises(UnsupportedError, match=r"probe '\w+' and \d+ more failed.*0.33.0"):
        adapter.KVCoreConnector  # noqa: B018 - what vLLM's factory does
    adapter.verdict.cache_clear()


def test_hooks_around_attention_are_made_for_a_model_or_left_out(
    plugin: Callable[[str, str], EntryPoint],
) -> None:
    source = """
        from kvcore.plugins.attention import AttentionHook
        from kvcore.errors import UnsupportedError
        from kvcore.plugins import AttentionPlugin, hookimpl

        class Hook(AttentionHook):
            def __init__(self, shape, rank):
                self.name = f"{shape} of rank {rank}"

        def declines(shape, rank):
            raise UnsupportedError("not for this model")

        def breaks(shape, rank):
            raise RuntimeError("broken")

        @hookimpl
        def kvcore_attention():
            return [AttentionPlugin(f.__name__, f) for f in (Hook, declines, breaks)]
    """
    manager = PluginManager(entry_points=[plugin("hooks", source)])
    shape: Any = "a shape"
    assert [hook.name for hook in manager.attention(shape, 3)] == ["a shape of rank 3"]
    assert PluginManager(entry_points=[]).attention(shape, 0) == []
