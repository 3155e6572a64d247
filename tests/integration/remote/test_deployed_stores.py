"""The stores of `deploy/`, started as the manifests start them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from kvcore.errors import TierError
from kvcore.testing.store_contract import fetch, put
from kvcore.tiers.remote.mooncake import MooncakeOptions, MooncakeStore
from kvcore.tiers.remote.redis import RedisOptions, open_store
from kvcore_devtools.servers import Start, mooncake_master, need_client, program
from support.deployment import DEPLOY, documents

PASSWORD = "0123456789abcdef" * 4


def test_valkey_wants_the_password_of_the_secret(start_server: Start, tmp_path: Path) -> None:
    need_client("redis")
    [deployed] = [
        found
        for found in documents(DEPLOY / "kubernetes" / "valkey.yaml")
        if found["kind"] == "Deployment"
    ]
    [container] = deployed["spec"]["template"]["spec"]["containers"]
    [script] = container["args"]
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "valkey-server").symlink_to(program("valkey-server"))
    here = script.replace("/etc/kvcore-store/password", f"{tmp_path}/password")
    here = here.replace("/tmp/valkey.conf", f"{tmp_path}/valkey.conf").rstrip()
    path = f"PATH={tmp_path}/bin:{os.environ['PATH']}"
    server = start_server(
        lambda port: ["env", path, *container["command"], f"{here} --bind 127.0.0.1 --port {port}"]
    )

    url = f"redis://127.0.0.1:{server.port}/0"
    stranger = open_store(RedisOptions(url=url))
    with pytest.raises((TierError, AssertionError), match="uthentication"):
        put(stranger, {"forged": b"1234"})
    stranger.close()
    known = open_store(RedisOptions(url=url, password_file=tmp_path / "password"))
    put(known, {"a": b"1234"})
    assert fetch(known, "a", 4) == b"1234"
    known.close()
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert PASSWORD not in listed.stdout
    assert (tmp_path / "valkey.conf").stat().st_mode & 0o777 == 0o600


def listened(pid: int) -> set[int]:
    """Return the TCP ports at which a process listens."""
    sockets = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in sockets:
                ports.add(int(local.rpartition(":")[2], 16))
    return ports


def test_mooncakes_clients_listen_where_the_policy_lets_them_be_read(
    start_server: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_client("mooncake.store")
    text = (DEPLOY / "kubernetes" / "mooncake.yaml").read_text()
    variables = dict(re.findall(r'name: (MC_\w+), value: "(\d+)"', text))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    [access] = [
        found["spec"]
        for found in documents(DEPLOY / "kubernetes" / "mooncake.yaml")
        if found["kind"] == "NetworkPolicy" and "store-access" in found["metadata"]["name"]
    ]
    [opened] = access["ingress"][0]["ports"]
    before = listened(os.getpid())
    server = start_server(mooncake_master())
    store = MooncakeStore(
        MooncakeOptions(master=f"127.0.0.1:{server.port}", host="127.0.0.1", lend=64 << 20), rank=0
    )
    store.exists(["join"])
    ports = listened(os.getpid()) - before
    store.close()
    assert ports
    assert ports <= set(range(opened["port"], opened["endPort"] + 1))
