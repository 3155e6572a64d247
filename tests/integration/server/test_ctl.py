"""`kvcore ctl` as it is used: a server's process, an engine's socket, TCP. Answers stay right."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from kvcore._util.curve import make_keys
from kvcore.admin import commands as o
from kvcore.cli import ctl as ctl_module
from kvcore.cli import probe
from kvcore.cli.app import app
from kvcore.cli.ctl import Target, ask, parse_where
from kvcore.config import Config, load_config
from kvcore.errors import ConfigError, KVCoreError, TierUnavailable
from kvcore.server import messages as m
from kvcore.server.server import Server
from kvcore.testing.engine import ReferenceEngine
from kvcore.testing.waiting import until
from kvcore_devtools.server_fixture import RunningServer, settings, words
from kvcore_devtools.servers import free_port

Start = Callable[[Config], RunningServer]
LONG_S = 60.0
ME = f"uid {os.getuid()} pid {os.getpid()}"
runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


def serve(
    engine: ReferenceEngine, prompt: Sequence[int], salt: str
) -> tuple[list[int], dict[str, int]]:
    request = engine.submit(prompt, 6, salt=salt)
    engine.run()
    engine.settle()
    return request.answer, request.reused


@pytest.fixture
def file(folder: Path, tmp_path: Path) -> Path:
    """Settings of a server, its engine and `kvcore ctl` alike."""
    path = tmp_path / "kvcore.yaml"
    tables = {
        "server": {
            "address": "local", "folder": str(folder), "deadline_s": 20.0, "lease_s": 20.0,
            "metrics": f"127.0.0.1:{free_port()}",
        },
        "host": {"capacity": "16MiB", "huge_pages": False},
        "disk": {"path": str(tmp_path / "disk"), "capacity": "64MiB"},
        "control": {"audit": str(tmp_path / "audit.jsonl")},
        "tenants": {"ann": {"salt": "a"}, "bob": {"salt": "b"}},
    }  # fmt: skip
    path.write_text(json.dumps(tables))
    return path


@pytest.fixture
def process(file: Path) -> Iterator[subprocess.Popen[str]]:
    code = "from kvcore.cli import main; main()"
    command = [sys.executable, "-c", code, "server", "-c", str(file)]
    made = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None
    assert "listens" in made.stdout.readline()
    yield made
    made.send_signal(signal.SIGTERM)
    assert made.wait(60) == 0


def ctl(file: Path, *args: str) -> dict[str, Any]:
    result = runner.invoke(app, ["ctl", "-c", str(file), *args, "--json"])
    assert result.exit_code == 0, result.output
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def test_answers_are_the_same_through_every_order(
    process: Any, file: Path, engine: Any, plain: Any, tmp_path: Path
) -> None:
    config = load_config(file)
    serving = engine(config, prefix_cache=False)
    prompt = words(1, 100)
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(prompt))
    for salt in "ab":
        assert serve(serving, prompt, salt) == (plain(prompt), {})

    def loaded(salt: str) -> dict[str, int]:
        answer, reused = serve(serving, prompt, salt)
        assert answer == plain(prompt)
        return reused

    def idle() -> bool:
        [model] = json.loads(runner.invoke(app, ["server", "-c", str(file), "--status"]).stdout)[
            "models"
        ]
        return not model["background"] and not any(s["graphs"] for s in model["sessions"])

    until(idle)
    mine = ["tenant=ann", f"tokens={tokens}"]
    assert ctl(file, "pin", *mine)["prompts"] == 2
    assert ctl(file, "quota", "set", "ann", "host", "0")["evicted"] == 0, "they are pinned"
    assert ctl(file, "pin", *mine, "--ttl", "90")["ttl_s"] == 90
    listed = ctl(file, "list", *mine, "--prompts")["prompts"]
    left = [seconds for prompt in listed for seconds in prompt["left_s"].values()]
    assert left
    assert all(60 < seconds <= 90 for seconds in left)
    assert ctl(file, "unpin", "all")["prompts"] == 2
    assert ctl(file, "quota", "set", "ann", "host", "0")["evicted"] == 6
    assert loaded("a") == {"disk": 96}
    assert loaded("b") == {"host": 96}
    ctl(file, "quota", "set", "ann", "host", "none")
    until(idle)
    assert ctl(file, "prefetch", *mine)["blocks"] == 6
    assert loaded("a") == {"host": 96}
    assert ctl(file, "move", *mine, "tier=host", "--to", "disk")["kept"] == 0
    assert loaded("a") == {"disk": 96}
    until(idle)
    assert ctl(file, "clear", "tenant=ann")["blocks"] == 12
    assert loaded("b") == {"host": 96}
    assert loaded("a") == {}
    written = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert {line["who"] for line in written} == {ME}
    assert [line["state"] for line in written] == ["begun", "done"] * 9
    assert [line["order"] for line in written[::2]] == [
        "pin", "quota", "pin", "unpin", "quota", "quota", "prefetch", "move", "clear",
    ]  # fmt: skip
    assert str(prompt[0]) not in json.dumps([line.get("key") for line in written])
    _scraped(config)


def _scraped(config: Config) -> None:
    def shown() -> dict[tuple[str, ...], float]:
        page = urllib.request.urlopen(f"http://{config.server.metrics}/metrics").read().decode()
        samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
        return {(s.name, *s.labels.values()): s.value for s in samples}

    until(lambda: shown().get(("kvcore_control_orders_total", "clear", "done")))
    found = until(lambda: (s := shown()).get(("kvcore_tenant_used_bytes", "bob", "host")) and s)
    assert [found[at] for at in found if at[0] == "kvcore_server_sessions"] == [1]
    assert found["kvcore_control_orders_total", "clear", "done"] == 1
    assert (
        found["kvcore_tier_used_bytes", "host"] >= found["kvcore_tenant_used_bytes", "bob", "host"]
    )
    assert found["kvcore_transfer_bytes_total", "disk2h"] > 0
    assert {name for name, *_ in found if name.startswith("kvcore_tenant")} == {
        "kvcore_tenant_used_bytes", "kvcore_tenant_quota_bytes",
    }  # fmt: skip


def test_tables_are_for_people(process: Any, file: Path, engine: Any) -> None:
    refused = runner.invoke(app, ["ctl", "-c", str(file), "list"])
    assert (refused.exit_code, "before an engine joins" in refused.output) == (2, True)
    serving = engine(load_config(file))
    serve(serving, words(1, 100), "a")
    shown = runner.invoke(app, ["ctl", "-c", str(file), "list", "--prompts"]).stdout
    assert "ann" in shown
    assert "KiB" in shown
    shown = runner.invoke(app, ["ctl", "-c", str(file), "quota", "show"]).stdout
    assert shown.count("none") == 4
    for args in (["clear"], ["clear", "tenant"], ["pin", "tenant=nobody"], ["list", "key=x"]):
        refused = runner.invoke(app, ["ctl", "-c", str(file), *args])
        assert refused.exit_code == 2
        assert "kvcore: error:" in refused.output
    refused = runner.invoke(app, ["ctl", "-c", str(file), "--model", "ffff", "list"])
    assert "0 models are meant" in refused.output


def test_over_tcp_the_audit_names_the_clients_key(
    start: Start, engine: Any, folder: Path, tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys")
    audit = tmp_path / "audit.jsonl"
    address = f"tcp://127.0.0.1:{free_port()}"
    tcp = {"address": address, "keys": str(tmp_path / "keys"), "admins": ["client"]}
    config = settings(folder, server=tcp, control={"audit": str(audit)})
    start(config)
    serve(engine(config), words(1, 40), "")
    ask(Target(config, "", None, 60.0), o.ClearBlocks())
    key = (tmp_path / "keys" / "clients" / "client.key").read_text()
    line = audit.read_text().splitlines()[-1]
    who, _, public = json.loads(line)["who"].rpartition(" ")
    assert who == "curve key"
    assert f'"{public}"' in key


def test_other_keys_are_named_and_not_waited_for(
    start: Start, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctl_module, "ANSWER_S", 0.5)
    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "others")
    tcp = {"address": f"tcp://127.0.0.1:{free_port()}", "keys": str(tmp_path / "keys")}
    start(settings(folder, server=tcp))
    stranger = settings(folder, server=tcp | {"keys": str(tmp_path / "others")})
    with pytest.raises(TierUnavailable, match="does not answer: it hangs, or has other keys"):
        ask(Target(stranger, "", None, LONG_S), o.ShowQuotas())


def test_who_does_not_answer_is_given_up_in_time(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(folder / "server.sock"))
        silent.listen()
        with pytest.raises(TierUnavailable, match=r"in 0\.2 s"):
            ask(Target(settings(folder), "", None, 0.2), o.ShowQuotas())


def test_where_nobody_listens_that_is_said_and_not_waited_for(folder: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    tcp = {"address": f"tcp://127.0.0.1:{free_port()}", "keys": str(tmp_path / "keys")}
    config = settings(folder)
    with pytest.raises(TierUnavailable, match=r"server\.sock' \(No such file"):
        ask(Target(config, "", None, LONG_S), o.ShowQuotas())
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(folder / "server.sock"))
    for left in (config, settings(folder, server=tcp)):
        with pytest.raises(TierUnavailable, match="Connection refused"):
            ask(Target(left, "", None, LONG_S), o.ShowQuotas())


def test_a_server_that_is_killed_during_an_order_is_missed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "AGAIN_S", 0.01)
    folder.mkdir(mode=0o700)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / "server.sock"))
    server.listen()

    def take_one_and_end() -> None:
        server.accept()[0].close()
        server.close()

    thread = threading.Thread(target=take_one_and_end)
    thread.start()
    with pytest.raises(TierUnavailable, match="Connection refused"):
        ask(Target(settings(folder), "", None, LONG_S), o.ShowQuotas())
    thread.join()


# -- an engine with tiers of its own --------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Config:
    tables = {
        "host": {"capacity": "16MiB", "huge_pages": False},
        "disk": {"path": str(tmp_path / "disk"), "capacity": "64MiB"},
        "control": {"address": f"ipc://{tmp_path}/ctl", "audit": str(tmp_path / "audit.jsonl")},
        "tenants": {"ann": {"salt": "a", "quota": {"host": "50%"}}},
    }
    return load_config(None, tables)


def target(config: Config) -> Target:
    """As `kvcore ctl` makes it."""
    server = config.server.model_copy(update={"address": config.control.address})
    return Target(config.model_copy(update={"server": server}), "", None, 60.0)


def ordered(engine: ReferenceEngine, config: Config, order: Any) -> dict[str, Any]:
    """Ask from another thread while the engine idles."""
    told: list[Any] = []

    def run() -> None:
        try:
            told.append(ask(target(config), order))
        except KVCoreError as error:
            told.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def step() -> bool:
        engine.step()
        return bool(told)

    until(step)
    thread.join()
    if isinstance(told[0], Exception):
        raise told[0]
    found: dict[str, Any] = told[0]
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engines_own_socket_takes_the_same_orders(
    own: Config, engine: Any, plain: Any, tmp_path: Path, ranks: int
) -> None:
    serving = engine(own, prefix_cache=False, ranks=ranks)
    assert stat.S_IMODE((tmp_path / "ctl").stat().st_mode) == 0o600
    prompt = words(1, 100)
    assert serve(serving, prompt, "a") == (plain(prompt), {})
    where = parse_where(["tenant=ann", "tier=host"])
    assert ordered(serving, own, o.MoveBlocks(where, "disk"))["kept"] == 0
    assert serve(serving, prompt, "a") == (plain(prompt), {"disk": 96})
    assert ordered(serving, own, o.MoveBlocks(parse_where(["tier=disk"]), "host"))["kept"] == 0
    assert serve(serving, prompt, "a") == (plain(prompt), {"host": 96})
    with pytest.raises(KVCoreError, match="nothing is held of requests without a salt, among 1"):
        ordered(serving, own, o.ClearBlocks(parse_where(["salt="])))
    assert serve(serving, prompt, "a") == (plain(prompt), {"host": 96})
    with pytest.raises(KVCoreError, match="no tenant 'eve'"):
        ordered(serving, own, o.PinBlocks(parse_where(["tenant=eve"])))
    written = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    ended = [(line["order"], line["state"]) for line in written if line["state"] != "begun"]
    assert ended == [("move", "done"), ("move", "done"), ("clear", "refused"), ("pin", "refused")]
    assert {line["who"] for line in written} == {ME}


def test_garbage_at_an_engines_socket_harms_nothing(
    own: Config, engine: Any, plain: Any, caplog: pytest.LogCaptureFixture
) -> None:
    serving = engine(own)
    client: Any = zmq.Context.instance().socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    client.connect(own.control.address)
    garbage = [m.HEADER, b"\xc1"]
    for parts in (*[garbage] * 50, [b"x"], [b"", b"", b""], m.frames(m.StatusRequest(7))):
        client.send_multipart(parts)
        assert client.poll(60_000)
        reply = m.decode_reply(client.recv_multipart())
        assert isinstance(reply, m.Refused)
    assert caplog.text.count("refused what is no order") == 1, "it does not fill the log"
    for ref in range(30):
        client.send_multipart(m.frames(m.ControlRequest(ref, o.ShowQuotas())))
    prompt = words(1, 100)
    assert serve(serving, prompt, "a")[0] == plain(prompt)
    assert ordered(serving, own, o.ShowQuotas())["quotas"][0]["quota"]
    client.close(0)


def test_a_socket_that_cannot_be_had_stops_the_start_by_name(own: Config, engine: Any) -> None:
    control = own.control.model_copy(update={"address": "ipc:///no/such/folder/ctl"})
    with pytest.raises(ConfigError, match=r"control\.address"):
        engine(own.model_copy(update={"control": control}))


# -- words ----------------------------------------------------------------------------------------


def test_terms_are_a_selection(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("1 2 3")
    assert parse_where(["all"]) == o.BlockFilter()
    found = parse_where([f"tokens={path}", "salt=", "tier=disk"])
    assert found == o.BlockFilter(salt="", tokens=b"\1\0\0\0\2\0\0\0\3\0\0\0", tier="disk")
    assert parse_where([f"namespace={'0a' * 16}", "key=ff"]).prefix == b"\xff"
    path.write_text("[1, -2]")
    for terms in (["x=1"], ["tier"], ["tier=a", "tier=b"], ["namespace=00"], ["key=0"],
                  [f"tokens={path}"], ["tokens=/nowhere"], ["prompt=x"]):  # fmt: skip
        with pytest.raises(ConfigError):
            parse_where(terms)


def test_a_prompt_is_cut_by_its_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 5, "b": 7, "?": 0}, unk_token="?")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    text = tmp_path / "prompt.txt"
    text.write_text("a b a")
    found = parse_where([f"prompt={text}"], tmp_path)
    assert found.tokens == bytes([5, 0, 0, 0, 7, 0, 0, 0, 5, 0, 0, 0])
    with contextlib.suppress(FileNotFoundError):
        (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="--tokenizer"):
        parse_where([f"prompt={text}"], tmp_path / "none")


def test_the_keys_of_an_engine_send_no_commands(start: Start, folder: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", "engine-a")
    address = f"tcp://127.0.0.1:{free_port()}"
    tcp = {"address": address, "keys": str(tmp_path / "keys")}
    start(settings(folder, server=tcp))
    with pytest.raises(KVCoreError, match="may not send commands"):
        ask(Target(settings(folder, server=tcp), "", None, 60.0), o.ClearBlocks())
    with pytest.raises(ConfigError, match="operator"):
        Server(settings(tmp_path / "else", server=tcp | {"admins": ["operator"]})).open()
