"""`python -m demo.cluster`: one host computes KV, and another host answers from it.

    host a: engine ──┐
                     ├── switch ── host store: Mooncake's master, and a client that lends memory
    host b: engine ──┘

Hosts are network namespaces of this machine, each with an address of its own. If namespaces are not
permitted, everything runs on localhost. Host a computes every document (cold). Host b, which has
never seen them, answers from the store. Then b's engine empties its own cache, and b answers from
its host memory. All answers must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.conversations import Conversations
from kvcore._util.optional import client_module
from kvcore.errors import KVCoreError, TransferError, UnsupportedError
from kvcore.harness.compare import counted, engine_arguments, keep_on_reset
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.models import smollm2, token_nbytes
from kvcore_devtools.hosts import Host, Network
from kvcore_devtools.servers import Start, mooncake_lender, mooncake_master, redis_like, servers

COLD, FAR, LOCAL = "cold", "through the store", "local hit"
SAYS = {
    COLD: "host a, computes everything",
    FAR: "host b, from the store",
    LOCAL: "host b, from its own host memory",
}
TIER = "shared"
BLOCK = 16
ANSWER = 8
ALIKE = 64
"""Tokens of a prompt that may not be written to the store: a beginning that all prompts share, and
an end that fills no whole block."""
WARM = list(range(100, 400))
PUBLISH_S = 120.0
ENGINES = ("a", "b")


@dataclass(frozen=True)
class Answer:
    """The answer to one document in one phase. ``tiers``: tokens that kvcore loaded, by tier."""

    phase: str
    document: int
    prompt_tokens: int
    ttft_s: float
    tiers: dict[str, int]
    token_ids: list[int]
    text: str

    @property
    def expected(self) -> bool:
        """True if most of the KV came from the phase's source.

        The few tokens that all prompts begin with may come from elsewhere.
        """
        half = self.prompt_tokens / 2
        if self.phase == COLD:
            return sum(self.tiers.values()) < half
        if self.phase == FAR:
            return self.tiers.get(TIER, 0) > half
        return self.tiers.get("host", 0) > half and not self.tiers.get(TIER)


@dataclass(frozen=True)
class Setting:
    """Settings from the command line and the model's config."""

    model: Path | str
    dtype: str
    store: str
    longest: int
    token_nbytes: int
    results: Path

    def engine(self, name: str, host: Host | None, tier: Mapping[str, Any]) -> EngineProcess:
        """Start a vLLM on ``host``. Does not wait until it is ready."""
        kvcore = {"host": {"capacity": "1GiB"}, "block": {"tokens": BLOCK}, "tiers": {TIER: tier}}
        network = {"VLLM_HOST_IP": host.address, "GLOO_SOCKET_IFNAME": "eth0"} if host else {}
        return EngineProcess(
            self.model,
            kvcore=keep_on_reset("vllm", kvcore),
            within=host.command if host else (),
            env=network,
            log=self.results / f"cluster-{name}.log",
            **engine_arguments(
                "vllm",
                dtype=self.dtype,
                request_tokens=self.longest,
                cached_tokens=2 * (self.longest + 256),
                token_nbytes=self.token_nbytes,
            ),
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the demo. Return 0 if host b gave host a's answers, from the store and then from memory.

    Return 1 otherwise.
    """
    options = _parse(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=110)
    options.results.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        client_module(*_CLIENTS[options.store])
        setting, prompts = _settle(options)
        with network(console) as hosts:
            answers = list(run(setting, prompts, hosts, console))
    except KVCoreError as error:
        console.print(f"[red]{type(error).__name__}:[/red] {error}", highlight=False)
        return 1
    title = f"{_count(options.documents)} of {options.tokens} tokens, {os.cpu_count()} CPUs"
    console.print(table(title, answers))
    content = {"store": options.store, "answers": [asdict(answer) for answer in answers]}
    (options.results / "cluster.json").write_text(json.dumps(content, indent=1) + "\n")
    took = f"{time.monotonic() - began:.0f} s in all"
    console.print(f"{took}; {options.results}/cluster.json, cluster-*.log", highlight=False)
    wrong = problems(answers)
    for line in wrong:
        console.print(f"[red]{line}[/]", highlight=False)
    return 1 if wrong else 0


_CLIENTS = {
    "mooncake": ("mooncake.store", "mooncake-transfer-engine-non-cuda"),
    "redis": ("redis",),
}


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.cluster", description=__doc__)
    add = parser.add_argument
    add("--model", default=None, help="a folder or a hub name; by default SmolLM2-135M-Instruct")
    add("--dtype", default="float32", help="of the model (float32: rounding changes no token)")
    add("--store", default="mooncake", choices=sorted(_CLIENTS), help="the hosts' store (mooncake)")
    add("--documents", type=int, default=2, help="documents that each host answers (2)")
    add("--tokens", type=int, default=1024, help="length of a document (1024)")
    add("--results", type=Path, default=Path("results"), help="for JSON and logs (results)")
    options = parser.parse_args(arguments)
    for name in ("documents", "tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return options


def _settle(options: argparse.Namespace) -> tuple[Setting, list[list[int]]]:
    """Return the settings, with the sizes that the model's config gives, and the prompts."""
    from transformers import AutoConfig, AutoTokenizer

    model = options.model or smollm2()
    config = AutoConfig.from_pretrained(model).get_text_config()
    conversations = Conversations(
        AutoTokenizer.from_pretrained(model), options.documents, options.tokens
    )
    prompts = [conversations.first(number).token_ids for number in range(options.documents)]
    longest = max(map(len, prompts)) + ANSWER
    limit = getattr(config, "max_position_embeddings", longest)
    if longest > limit:
        raise UnsupportedError(
            f"prompts of up to {longest} tokens, but {Path(model).name} takes {limit}: "
            "lower --tokens"
        )
    width = token_nbytes(model, options.dtype)
    setting = Setting(
        model, options.dtype, options.store, max(longest, 512), width, options.results
    )
    return setting, prompts


@contextmanager
def network(console: Console) -> Iterator[dict[str, Host | None]]:
    """Yield the hosts by name. All are None (localhost) if there are no network namespaces."""
    names = (*ENGINES, "store")
    with ExitStack() as stack:
        hosts: dict[str, Host | None]
        try:
            made = stack.enter_context(Network(*names))
        except UnsupportedError as error:
            hosts = dict.fromkeys(names)
            console.print(f"everything runs on localhost: {error}", highlight=False)
        else:
            hosts = dict(made)
            where = ", ".join(f"{name} {host.address}" for name, host in made.items())
            console.print(f"hosts are network namespaces: {where}", highlight=False)
        yield hosts


def run(
    setting: Setting,
    prompts: Sequence[list[int]],
    hosts: Mapping[str, Host | None],
    console: Console,
) -> Iterator[Answer]:
    """Yield the answer to every document in every phase. Blocks for minutes."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcore-cluster-")))
        start = stack.enter_context(servers(folder))
        capacity = 2 * sum(map(len, prompts)) * setting.token_nbytes + (256 << 20)
        _say(console, f"starting {setting.store}, and a vLLM on each host: a minute or two")
        options = _open_store(setting.store, start, hosts["store"], capacity)
        engines: dict[str, EngineProcess] = {}
        for name in ENGINES:
            tier = {
                "plugin": setting.store,
                "capacity": capacity,
                "options": {**options, **_own(setting.store, hosts[name])},
            }
            engines[name] = setting.engine(name, hosts[name], tier)
            stack.callback(engines[name].kill)
        a, b = engines["a"], engines["b"]
        _warm(a, b)
        _say(console, f"{SAYS[COLD]}: {_count(len(prompts))}")
        for number, prompt in enumerate(prompts):
            yield _answer(COLD, number, prompt, a)
        _say(console, "host a finishes writing to the store")
        _published(a, sum(len(prompt) - ALIKE for prompt in prompts) * setting.token_nbytes)
        for phase in (FAR, LOCAL):
            _say(console, SAYS[phase])
            for number, prompt in enumerate(prompts):
                b.reset_prefix_cache()
                yield _answer(phase, number, prompt, b)


def _count(documents: int) -> str:
    return f"{documents} document{'s' if documents > 1 else ''}"


def _say(console: Console, line: str) -> None:
    """Print a line with the time, because some steps take long."""
    console.print(f"{time.strftime('%H:%M:%S')}  {line}", highlight=False)


def _open_store(kind: str, start: Start, host: Host | None, nbytes: int) -> dict[str, Any]:
    """Start the store. Return the tier's options, with timeouts long enough for a slow machine."""
    address = host.address if host else "127.0.0.1"
    patient = {"lookup_s": 10.0, "timeout_s": 10.0}
    if kind == "redis":
        server = start(redis_like("redis-server", bind=address), host)
        return {"url": f"redis://{server.address}/0", **patient}
    server = start(mooncake_master(), host)
    start(mooncake_lender(server.address, address, nbytes), host)
    return {"master": server.address, "lend": 0, **patient}


def _own(kind: str, host: Host | None) -> dict[str, Any]:
    """Return the options that differ by host: for Mooncake, the address of the engine's host."""
    if kind != "mooncake":
        return {}
    return {"host": host.address if host else "127.0.0.1"}


def _warm(a: EngineProcess, b: EngineProcess) -> None:
    """Ask each host one prompt, so that connections are open and code is loaded."""
    for engine in (a, b):
        engine.wait_ready()
    for engine in (a, b):
        engine.generate([WARM], max_tokens=2)
        engine.settle()


def _published(engine: EngineProcess, nbytes: int) -> None:
    """Block until the engine has written ``nbytes`` bytes to the store.

    vLLM reports its workers' counters with each step, so this asks small prompts meanwhile. Raises
    TransferError after `PUBLISH_S` seconds.
    """
    limit = time.monotonic() + PUBLISH_S
    while (done := counted(engine, "kvcore_transfer_bytes_total", path="h2remote")) < nbytes:
        if time.monotonic() > limit:
            raise TransferError(
                f"host a has written {done:.0f} of {nbytes} bytes in {PUBLISH_S:.0f} s: see its log"
            )
        time.sleep(0.2)
        engine.generate([[7, 8, 9]], max_tokens=1)


def _answer(phase: str, document: int, prompt: Sequence[int], engine: EngineProcess) -> Answer:
    got: Generation = engine.generate([prompt], max_tokens=ANSWER)[0]
    return Answer(phase, document, len(prompt), got.ttft_s, got.tiers, got.token_ids, got.text)


def problems(answers: Sequence[Answer]) -> list[str]:
    """Return what is wrong, one line each; empty if all is well."""
    right = {answer.document: answer.token_ids for answer in answers if answer.phase == COLD}
    found = []
    for answer in answers:
        what = f"document {answer.document + 1}, {SAYS[answer.phase]}"
        if answer.token_ids != right[answer.document]:
            found.append(f"{what}: {answer.token_ids}, but host a says {right[answer.document]}")
        if not answer.expected:
            found.append(f"{what}: its KV came from {answer.tiers or 'nowhere'}")
    return found


def table(title: str, answers: Sequence[Answer]) -> Table:
    """Return the table for the terminal: medians over the documents, TTFT in milliseconds."""
    result = Table(title=title, title_justify="left")
    result.add_column("")
    for heading in ("TTFT, ms", "faster than cold", "tokens loaded", "same tokens"):
        result.add_column(heading, justify="right")
    right = {answer.document: answer for answer in answers if answer.phase == COLD}
    for phase, says in SAYS.items():
        mine = [answer for answer in answers if answer.phase == phase]
        pairs = [(answer, right[answer.document]) for answer in mine]
        faster = statistics.median(cold.ttft_s / answer.ttft_s for answer, cold in pairs)
        brought = sum(sum(answer.tiers.values()) for answer in mine)
        same = sum(answer.token_ids == cold.token_ids for answer, cold in pairs)
        result.add_row(
            says,
            f"{statistics.median(answer.ttft_s for answer in mine) * 1000:.0f}",
            f"{faster:.1f}x",
            f"{brought} of {sum(answer.prompt_tokens for answer in mine)}",
            f"{same}/{len(mine)}",
        )
    return result


if __name__ == "__main__":
    sys.exit(main())
