"""Settings: sizes, sources and their order, and what a wrong one is told."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvcore.config import (
    AdapterConfig,
    Config,
    explicit_settings,
    format_size,
    load_config,
    parse_assignment,
    parse_size,
    settings,
)
from kvcore.config.fields import forgotten_unit
from kvcore.config.load import secrets_in
from kvcore.config.walk import known_paths, node_at
from kvcore.errors import ConfigError


def load(overrides: dict[str, Any] | None = None, **env: str) -> Config:
    return load_config(overrides=overrides, env=env)


def message(overrides: dict[str, Any] | None = None, **env: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(overrides, **env)
    return str(caught.value)


# -- sizes --------------------------------------------------------------------------------------


@given(st.integers(0, 2**60))
def test_sizes_round_trip(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes
    assert parse_size(nbytes) == nbytes
    assert abs(parse_size(format_size(nbytes, exact=False)) - nbytes) <= 0.02 * nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("1KiB", 1024),
        ("1kb", 1000),
        (" 8 GiB ", 8 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("10GB", 10**10),
        ("2TiB", 2**41),
        ("0.3KiB", 307),
    ],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("wrong", ["", "GiB", "8 apples", "-1GiB", "1e9", "1,5GiB", -1, True, 1.5])
def test_wrong_sizes_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="supported is a size such as") as caught:
        parse_size(wrong)
    assert repr(wrong) in str(caught.value)


def test_an_ambiguous_size_is_told_both_readings() -> None:
    with pytest.raises(ConfigError, match=r"write 8GiB \(of 1024\) or GB \(of 1000\)"):
        parse_size("8g")


def test_sizes_are_short_for_reading() -> None:
    assert format_size(1_234_567_890, exact=False) == "1.15GiB"
    assert format_size(8 * 2**30, exact=False) == "8GiB"
    assert format_size(100 * 2**20, exact=False) == "100MiB"


# -- order and sources --------------------------------------------------------------------------


def test_later_sources_win_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "kvcore.toml"
    file.write_text(
        '[host]\ncapacity = "1GiB"\npolicy = "arc"\npin = false\n[plugins]\ndisable = ["a", "b"]\n'
    )
    env = {
        "KVCORE__HOST__CAPACITY": "2GiB",
        "KVCORE__HOST__POLICY": "lfu",
        "KVCORE__PLUGINS__DISABLE": "c",
    }
    config = load_config(file, {"host": {"capacity": "3GiB"}}, env, overrides_from="engine JSON")
    assert config.host.capacity == 3 * 2**30
    assert config.host.policy == "lfu"
    assert config.host.pin is False
    assert config.plugins.disable == ["c"]
    assert config.host.huge_pages is True
    assert str(config.source("host.capacity")) == "overrides engine JSON"
    assert str(config.source("host.policy")) == "environment KVCORE__HOST__POLICY"
    assert str(config.source("host.pin")) == f"file {file}"
    assert str(config.source("host.huge_pages")) == "default"


def test_the_file_is_the_one_given_else_the_one_the_environment_names(tmp_path: Path) -> None:
    given_file, named = tmp_path / "given.yaml", tmp_path / "named.yml"
    given_file.write_text("block: {tokens: 32}\n")
    named.write_text("block:\n  tokens: 64\ndisk:\n")
    env = {"KVCORE_CONFIG": str(named)}
    assert load_config(given_file, env=env).block.tokens == 32
    assert load_config(env=env).block.tokens == 64
    assert load_config(env={"KVCORE_CONFIG": ""}).block.tokens == 16


def test_variables_are_read_by_the_type_of_their_field() -> None:
    config = load(
        KVCORE__BLOCK__TOKENS="32",
        KVCORE__HOST__PIN="off",
        KVCORE__HOST__CAPACITY="1048576",
        KVCORE__HOST__POLICY_OPTIONS__RATIO="0.5",
        KVCORE__HOST__POLICY_OPTIONS__KIND="small",
        KVCORE__DISK__PATH="",
        KVCORE__DISK__POLICY_OPTIONS='{"a": [1]}',
        KVCORE__NAMESPACE__SALT="007",
        KVCORE__TRANSFER__LOAD_DEADLINE_S="2",
        KVCORE__PLUGINS__DISABLE="one, two",
        KVCORE__TIERS__SHELF__PLUGIN="cupboard",
        KVCORE_PORT="tcp://10.0.0.1:80",
    )
    assert config.block.tokens == 32
    assert config.host.pin is False
    assert config.host.capacity == 2**20
    assert config.host.policy_options == {"ratio": 0.5, "kind": "small"}
    assert config.disk.path is None
    assert config.disk.policy_options == {"a": [1]}
    assert config.namespace.salt == "007"
    assert config.transfer.load_deadline_s == 2.0
    assert config.plugins.disable == ["one", "two"]
    assert config.tiers["shelf"].plugin == "cupboard"


def test_a_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert load({"disk": {"path": "~/kv"}}).disk.path == Path("/somewhere/kv")
    assert "write the whole path" in message({"disk": {"path": "~no-such-user-here/kv"}})


# -- round trips --------------------------------------------------------------------------------

names = st.text(string.ascii_lowercase, min_size=1, max_size=8)
sizes = st.integers(1, 2**45)
tables = st.fixed_dictionaries(
    {},
    optional={
        "engine": names,
        "block": st.fixed_dictionaries({"tokens": st.sampled_from([8, 16, 128, 1024])}),
        "namespace": st.fixed_dictionaries(
            {}, optional={"secret": names.map(lambda n: n * 16), "salt": names}
        ),
        "host": st.fixed_dictionaries(
            {},
            optional={
                "capacity": sizes | sizes.map(format_size),
                "policy_options": st.dictionaries(names, st.integers() | names, max_size=2),
                "pin": st.booleans(),
            },
        ),
        "disk": st.fixed_dictionaries(
            {}, optional={"path": names.map(lambda n: f"/{n}"), "admit_after": st.integers(1, 255)}
        ),
        "tiers": st.dictionaries(
            names.filter(lambda n: n not in ("device", "host", "disk")),
            st.fixed_dictionaries({"plugin": names}, optional={"capacity": sizes}),
            max_size=2,
        ),
        "plugins": st.fixed_dictionaries({"disable": st.lists(names, max_size=2)}),
    },
)


@given(tables)
def test_what_was_set_explicitly_makes_the_same_config_again(table: dict[str, Any]) -> None:
    config = load(table)
    again = load(json.loads(json.dumps(explicit_settings(config, secrets=True))))
    assert again == config


@given(tables)
def test_files_and_dicts_are_read_alike(
    tmp_path_factory: pytest.TempPathFactory, table: dict[str, Any]
) -> None:
    file = tmp_path_factory.mktemp("config") / "kvcore.yaml"
    file.write_text(yaml.safe_dump(table))
    assert load_config(file, env={}) == load(table)


@given(tables)
def test_variables_and_dicts_are_read_alike(table: dict[str, Any]) -> None:
    env = {
        f"KVCORE__{name.upper()}": json.dumps(value) if isinstance(value, dict) else str(value)
        for name, value in table.items()
    }
    assert load(**env) == load(table)


# -- what is wrong ------------------------------------------------------------------------------


@given(st.data())
def test_a_misspelt_key_is_told_the_right_one(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([p for p in known_paths() if len(p.split(".")[-1]) > 4]))
    *above, last = path.replace("NAME", "shelf").split(".")
    drop = data.draw(st.integers(1, len(last) - 1))
    wrong = last[:drop] + last[drop + 1 :]
    if node_at((*above, wrong)).known:
        return
    table: dict[str, Any] = {wrong: 1}
    for key in reversed(above):
        table = {key: table}
    line = message(table)
    assert f"did you mean {'.'.join([*above, last])}?" in line
    assert line.startswith(f"{'.'.join([*above, wrong])} (overrides)")


@pytest.mark.parametrize(
    ("table", "advice"),
    [
        ({"capacity": "1GiB"}, "did you mean host.capacity?"),
        ({"host.capacity": "1GiB"}, "did you mean host.capacity?"),
        ({"Host": {}}, "did you mean host?"),
        ({"host": {"tokens": 3}}, "did you mean block.tokens?"),
        ({"block": {"zzz": 3}}, "[block] has tokens"),
        ({"zzz": 3}, "there are engine, block,"),
    ],
)
def test_advice_for_an_unknown_key(table: dict[str, Any], advice: str) -> None:
    assert advice in message(table)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (
            {"block": {"tokens": 4}},
            "block.tokens (overrides): given 4; supported is a whole number from 8 to 1024",
        ),
        ({"block": {"tokens": 24}}, "given 24; supported is a power of two"),
        ({"block": {"tokens": "16"}}, "given '16'; supported is a whole number from 8 to 1024"),
        ({"block": {"tokens": 16.0}}, "given 16.0; supported is a whole number"),
        ({"block": 16}, "block (overrides): given an int; supported is a table of settings"),
        ({"host": {"capacity": "8 apples"}}, "host.capacity (overrides): given '8 apples'"),
        ({"host": {"capacity": 0}}, "given 0; supported is a size"),
        ({"host": {"pin": 1}}, "given 1; supported is true or false"),
        ({"host": {"policy": ""}}, "given ''; supported is text, not empty"),
        ({"host": {"policy_options": [1]}}, "given a list; supported is a table of settings"),
        ({"disk": {"write": "later"}}, 'one of "write_through", "write_back", "selective"'),
        ({"disk": {"path": 3}}, "given 3; supported is the path of a folder, or unset"),
        ({"disk": {"path": "a\0b"}}, "supported is the path of a folder"),
        ({"disk": None}, "given nothing; supported is a table of settings"),
        ({"transfer": {"load_deadline_s": 0}}, "given 0; supported is a number above 0"),
        ({"transfer": {"load_deadline_s": float("inf")}}, "given inf; supported is a number"),
        ({"plugins": {"disable": ["a", 3]}}, "plugins.disable (overrides): given 3; supported is"),
        ({"tiers": {"shelf": {}}}, "tiers.shelf.plugin (overrides): is missing"),
        ({"tiers": {"host": {"plugin": "p"}}}, "given the tier name 'host'; supported are"),
        ({"engine": 3}, "engine (overrides): given 3; supported is text, not empty, or unset"),
        (
            {"tenants": {"search": {"salt": "", "report": "all"}}},
            'given \'all\'; supported is one of "off", "tokens", "explain", or unset',
        ),
    ],
)
def test_a_wrong_value_is_told_what_is_supported(table: dict[str, Any], expected: str) -> None:
    assert expected in message(table)


def test_a_wrong_value_names_its_source(tmp_path: Path) -> None:
    file = tmp_path / "kvcore.toml"
    file.write_text("[block]\ntokens = 4\n")
    with pytest.raises(ConfigError, match=r"block\.tokens \(file .*kvcore\.toml\): given 4"):
        load_config(file, env={})
    line = message(KVCORE__HOST__CAPACTY="1GiB")
    assert line.startswith("host.capacty (environment KVCORE__HOST__CAPACTY)")
    assert "did you mean host.capacity?" in line
    assert "(environment KVCORE__HOST__PIN): given 'maybe'" in message(KVCORE__HOST__PIN="maybe")
    assert "host (environment KVCORE__HOST): given a str" in message(KVCORE__HOST="big")


def test_every_problem_is_named_at_once() -> None:
    lines = message({"block": {"tokens": 3}, "host": {"capacity": "x", "pin": 3}}).splitlines()
    assert [line.split()[0] for line in lines] == ["block.tokens", "host.capacity", "host.pin"]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.toml", "x = [", "is not TOML"),
        ("a.yaml", "x: [", "is not YAML"),
        ("b.yaml", "x: 2020-13-45", "is not YAML"),
        ("c.yaml", "- 1", "given a list; supported is a table"),
        ("a.ini", "", "supported are files called .toml, .yaml or .yml"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, text: str, expected: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        load_config(tmp_path / name, env={})
    assert str(tmp_path / name) in str(caught.value)


def test_a_missing_file_says_who_named_it(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    with pytest.raises(ConfigError, match=r"none\.toml \(named by KVCORE_CONFIG\): cannot be read"):
        load_config(env={"KVCORE_CONFIG": str(missing)})
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path / "folder.toml", env={})


# -- secrets, showing, assignments --------------------------------------------------------------


def test_a_secret_is_never_shown() -> None:
    config = load({"namespace": {"secret": "hunter2-hunter2-"}, "host": {"pin": False}})
    assert config.namespace.secret == "hunter2-hunter2-"
    assert "hunter2-hunter2-" not in repr(config)
    assert "hunter2-hunter2-" not in str(settings(config))
    assert explicit_settings(config) == {"host": {"pin": False}}
    assert "hunter2-hunter2-" not in message({"namespace": {"secret": ["hunter2-hunter2-"]}})


def test_every_effective_value_is_shown() -> None:
    named = {
        "tiers": {"shelf": {"plugin": "p"}},
        "cluster": {"members": {"shelf": {}}},
        "tenants": {"shelf": {"salt": "s"}},
    }
    shown = {s.path: s for s in settings(load(named))}
    expected = {path.replace("NAME", "shelf") for path in known_paths()}
    assert set(shown) == expected
    assert shown["host.capacity"].value == "4GiB"
    assert shown["tiers.shelf.plugin"].source.kind == "overrides"
    assert all(s.description for s in shown.values())


def test_assignments_of_a_command_line() -> None:
    assert parse_assignment("host.capacity=2GiB") == {"host": {"capacity": "2GiB"}}
    assert parse_assignment("block.tokens=32") == {"block": {"tokens": 32}}
    assert parse_assignment("disk.path=") == {"disk": {"path": None}}
    for wrong in ("host.capacity", "=3", "host..pin=true"):
        with pytest.raises(ConfigError, match="NAME=VALUE"):
            parse_assignment(wrong)


def test_settings_are_values() -> None:
    assert load({"host": {"pin": True}}) == Config()
    assert load({"host": {"pin": False}}) != Config()
    with pytest.raises(ValueError, match="frozen"):
        Config().host.pin = False


@pytest.mark.parametrize(("table", "engine"), [("vllm", "vLLM"), ("trtllm", "TensorRT-LLM")])
def test_adapters_share_their_settings(table: str, engine: str) -> None:
    made: AdapterConfig = getattr(Config(), table)
    assert (made.min_load_tokens, made.save_decode, made.layerwise) == (64, True, True)
    assert f"beyond what {engine} holds" in str(
        type(made).model_fields["min_load_tokens"].description
    )
    with pytest.raises(ConfigError, match=f"{table}.min_load_tokens"):
        load_config(overrides={table: {"min_load_tokens": -1}}, env={})


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"disk": {"key_file": "key"}}, "decrypted in host"),
        ({"server": {"address": "ipc:///tmp/kvcore"}}, "in the server's process"),
    ],
)
def test_reading_to_the_device_is_refused_where_it_cannot_be(
    more: dict[str, dict[str, str]], why: str
) -> None:
    disk = {"path": "kv", "to_device": "on"}
    assert load_config(overrides={"disk": disk}, env={}).disk.to_device == "on"
    with pytest.raises(ConfigError, match=why) as refused:
        load_config(overrides={**more, "disk": {**disk, **more.get("disk", {})}}, env={})
    assert str(refused.value).startswith("disk.to_device (overrides")


def test_endless_nesting_in_a_variable_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="KVCORE__HOST"):
        load_config(env={"KVCORE__HOST": '{"a":' * 200_000})
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_config(env={"KVCORE_SECRETS": "[" * 200_000})


# -- secrets stay secret --------------------------------------------------------------------------

SECRET = "s3cr3t-of-ours"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", f'namespace:\n  secret: "{SECRET}\n'),
        ("a.yaml", f"namespace: {SECRET}\n"),
        ("a.yaml", f"namespace:\n  secret: [{SECRET}\n"),
        ("a.yaml", f"namespace:\n  secret: *{SECRET}\n"),
        ("a.yaml", f"namespace:\n  secret: !{SECRET} x\n"),
        ("a.yaml", f"namespace:\n\tsecret: {SECRET}\n"),
        ("a.toml", f'namespace = "{SECRET}"\n'),
        ("a.toml", f'[namespace]\nsecret = "{SECRET}\n'),
        ("a.toml", f"[namespace]\nsecret = {SECRET}\n"),
        ("a.toml", f'[namespace]\nsecret = ["{SECRET}"]\n'),
    ],
)
def test_no_error_of_a_file_shows_what_is_written_there(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / name, env={})
    assert SECRET not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    "env",
    [
        {"KVCORE__NAMESPACE": SECRET},
        {"KVCORE_SECRETS": SECRET},
        {"KVCORE_SECRETS": f'"{SECRET}"'},
        {"KVCORE_SECRETS": f'{{"namespace": "{SECRET}"}}'},
        {"KVCORE_SECRETS": f'{{"namespace": {{"secret": ["{SECRET}"]}}}}'},
        {"KVCORE__TENANTS": SECRET},
    ],
)
def test_no_error_of_a_variable_shows_its_value(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(env=env)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{SECRET}@host:6379/0",
        f"redis://user:a/{SECRET}@host:6379/0",
        f"redis://user:a?{SECRET}@host:6379/0",
        f"redis://user:a#{SECRET}@host:6379/0",
        f"redis://user:a '{SECRET}@host:6379/0",
        f"redis://user:a@{SECRET}@host:6379/0",
        f"redis://{SECRET}@host",
        f"redis://host/0?password={SECRET}",
        f"redis://host/0?a=1&pwd={SECRET}&b=2",
        f"https://account.blob/container?se=1&sig={SECRET}%3D",
        f"redis://host/0?password=#/ {SECRET}",
    ],
)
def test_a_login_is_masked_whatever_characters_it_has(url: str) -> None:
    config = load_config(
        overrides={
            "tiers": {"shelf": {"plugin": "redis", "capacity": "1GiB", "options": {"url": url}}}
        },
        env={},
    )
    shown = str([setting.value for setting in settings(config)])
    assert SECRET not in shown
    assert "host" in shown or "account.blob" in shown
    assert SECRET not in str(explicit_settings(config)), "it would be in a command line"
    with pytest.raises(ConfigError) as refused:
        load_config(overrides={"disk": {"path": url}}, env={})
    assert SECRET not in str(refused.value)


# -- values that people write --------------------------------------------------------------------


def test_a_number_that_is_none_is_refused_as_a_number() -> None:
    assert secrets_in(parse_assignment("fusion.ratio=nan")) == []
    with pytest.raises(ConfigError, match=r"fusion\.ratio.*given nan"):
        load_config(overrides=parse_assignment("fusion.ratio=nan"), env={})


@pytest.mark.parametrize("path", ["file:///mnt/kv", "s3://bucket/kv", "$HOME/kv", "${HOME}/kv"])
def test_a_path_that_is_a_url_or_has_a_variable_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"disk\.path"):
        load_config(overrides={"disk": {"path": path}}, env={})


def test_the_path_of_a_file_url_is_offered() -> None:
    with pytest.raises(ConfigError, match="write '/mnt/kv'"):
        load_config(overrides={"disk": {"path": "file:///mnt/kv"}}, env={})


def test_a_path_from_the_environment_loses_its_blanks() -> None:
    config = load_config(env={"KVCORE__DISK__PATH": " /mnt/kv\n"})
    assert config.disk.path == Path("/mnt/kv")


@pytest.mark.parametrize(
    ("given", "hint"),
    [("10Gi", r"write 10GiB \(of 1024\)$"), ("10g", r"write 10GiB \(of 1024\) or GB")],
)
def test_a_size_with_half_a_unit_gets_a_hint(given: Any, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        load_config(overrides={"host": {"capacity": given}}, env={})


def test_a_number_of_bytes_that_nobody_means_gets_a_hint() -> None:
    assert 'write "10GiB"' in forgotten_unit(10)
    for meant in (0, 1024, 1 << 30, True):
        assert forgotten_unit(meant) == ""


@pytest.mark.parametrize("name", ["a.toml", "a.yaml"])
def test_a_byte_order_mark_is_read_over(tmp_path: Path, name: str) -> None:
    text = '[host]\ncapacity = "2GiB"\n' if name == "a.toml" else "host:\n  capacity: 2GiB\n"
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_config(tmp_path / name, env={}).host.capacity == 2 << 30


def test_a_variable_that_nearly_fits_a_setting_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = {"KVCORE_HOST_CAPACITY": "1GiB", "KVCORE_CONFIG_FILE": "/a", "KVCORE_PORT": "tcp://a:1"}
    for _ in range(2):
        load_config(env=env)
    assert sorted(caplog.messages) == [
        "the variable KVCORE_CONFIG_FILE is not read: did you mean KVCORE_CONFIG?",
        "the variable KVCORE_HOST_CAPACITY is not read: did you mean KVCORE__HOST__CAPACITY?",
    ]
