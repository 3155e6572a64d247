"""`python -m demo.router`: vLLM and SGLang behind a router, each with kvcore; then one is killed.

    Dynamo's router ─┐         ┌── vLLM ────┐
    vLLM's router ───┼── HTTP ─┤            ├── shared tier: Redis
    SGLang's router ─┘         └── SGLang ──┘
          ▲ block events (ZMQ) of both; SGLang's router reads none

Each router comes from the package index (tools/env_routers.py) and is asked three things:

    second turn   two users ask through the router, and ask again: does the same engine answer?
    events        an engine is asked directly, and then the router: does it find that engine?
    after a kill  an engine that holds a conversation is killed with SIGKILL. Does the other one
                  answer the next turn, with the KV from the shared tier, and with the same words?

Everything listens on 127.0.0.1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.console import Console
from rich.table import Table

from demo.conversations import Conversations
from kvcore._util.optional import client_module
from kvcore.errors import KVCoreError, TransferError, UnsupportedError
from kvcore.events import Subscriber
from kvcore.events.zmq_bus import ZmqSource
from kvcore.explain.file import read_records
from kvcore.harness.models import tiny_model
from kvcore_devtools.servers import free_port, redis_like, servers

ROOT = Path(__file__).resolve().parent.parent
ROUTERS_PYTHON = ROOT / ".venvs" / "routers" / "bin" / "python"
SGLANG_PYTHON = ROOT / ".venvs" / "sglang" / "bin" / "python"

MODEL = "demo"
"""The name under which both engines serve the model."""
TIER = "shared"
BLOCK = 16
ANSWER = 8
USERS = 2
ALIKE = 4
"""Blocks with which all documents begin. They are held already, and told once."""
LONGEST = 2048
START_S = 300.0
"""Seconds that an engine may take to start on a busy machine."""
WAIT_S = 120.0
HEAR_S = 1.0
"""Seconds in which a router has surely read what the demo's own consumer has."""
ENGINES = ("vllm", "sglang")


@dataclass(frozen=True)
class Answer:
    """One answer through a router, or by an engine that was asked directly (``router`` is "")."""

    router: str
    step: str
    holder: str
    """The engine that holds the conversation; "" before its first turn."""
    engine: str
    """The engine that answered."""
    prompt_tokens: int
    loaded: dict[str, int]
    """Tokens that kvcore loaded, by tier."""
    text: str
    expected: str = ""
    """The same turn's answer before the kill."""


FIRST, SECOND, PLANTED, KILLED = "first turn", "second turn", "by events", "after a kill"


@dataclass
class Conversation:
    """A document with a question, and who has answered."""

    text: str
    holder: str = ""
    second: str = ""
    """The second turn's answer, by its holder."""

    def follow(self, answer: str) -> None:
        """Append the answer and the next question."""
        self.text += f"{answer}\nName one rule that it states."


# -- engines --------------------------------------------------------------------------------------


class Engine:
    """An engine's own HTTP server, started by `kvcore serve`."""

    def __init__(self, name: str, model: Path, store: str, folder: Path, results: Path) -> None:
        """Start it. Does not wait until it is ready."""
        self.name = name
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.events, self.replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        self._records = folder / f"explain-{name}"
        self._log = results / f"router-{name}.log"
        config = folder / f"{name}.toml"
        config.write_text(_config(store, self._records, self.events, self.replay))
        python = Path(sys.executable) if name == "vllm" else SGLANG_PYTHON
        if not python.exists():
            raise UnsupportedError(f"no {python}: run tools/env.py {name}")
        options, env = _OPTIONS[name]
        command = [str(python.with_name("kvcore")), "serve", "--engine", name, str(model)]
        listen = ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", MODEL]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "-c", str(config), "--", *listen, *options.split()],
                env={**os.environ, "HF_HUB_OFFLINE": "1", **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.held = Subscriber(ZmqSource(self.events, self.replay))

    def wait_ready(self) -> None:
        """Block until the server is healthy. Raises TransferError with the end of its log."""
        limit = time.monotonic() + START_S
        while not _healthy(self.address):
            if self._process.poll() is not None or time.monotonic() > limit:
                tail = self._log.read_text(errors="replace")[-2000:]
                raise TransferError(f"{self.name} does not start: {tail}")
            time.sleep(0.5)

    def kill(self) -> None:
        """End the engine with all its processes, as a crash would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def record_of(self, request: str) -> dict[str, Any] | None:
        """Return kvcore's record of a request that has ended here."""
        if not self._records.is_dir():
            return None
        return next((r for r in read_records(self._records) if request in r["request"]), None)

    def blocks(self) -> tuple[int, int]:
        """Return how many blocks the events so far tell of host memory, and of the shared tier."""
        while self.held.poll(0.05):
            pass
        tiers = self.held.tiers()
        return len(tiers.get("CPU", ())), len(tiers.get("STORAGE", ()))


def _config(store: str, records: Path, events: str, replay: str) -> str:
    """Return kvcore's settings as TOML."""
    return f"""
[host]
capacity = "512MiB"
[block]
tokens = {BLOCK}
[tiers.{TIER}]
plugin = "redis"
capacity = "512MiB"
options = {{ url = "{store}", lookup_s = 10.0, timeout_s = 10.0 }}
[events]
format = "vllm"
token_ids = true
endpoint = "@{events}"
replay_endpoint = "{replay}"
[explain]
path = "{records}"
[sglang]
prefetch = "wait"
"""


_OPTIONS: Mapping[str, tuple[str, dict[str, str]]] = {
    # vLLM's router has an engine turn text into tokens, which --enable-scale-out allows.
    "vllm": (
        f"--dtype float32 --max-model-len {LONGEST} --enforce-eager --enable-scale-out",
        {"VLLM_CPU_KVCACHE_SPACE": "1"},
    ),
    "sglang": (
        f"--dtype float32 --context-length {LONGEST} --max-total-tokens {8 * LONGEST} "
        "--device cpu --attention-backend torch_native --sampling-backend pytorch "
        "--grammar-backend none --disable-cuda-graph --skip-server-warmup",
        {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
    ),
}
"""Arguments and variables with which each engine serves a tiny model on a CPU."""


def _healthy(address: str) -> bool:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"{address}/health", timeout=5).close()
        return True
    return False


def _call(url: str, body: Mapping[str, Any]) -> Any:
    """Return the JSON that a POST is answered with. Raises OSError, also for an error status."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return json.load(answer)


class Completion(NamedTuple):
    """An engine's answer, with the id under which kvcore records the request."""

    id: str
    text: str


def complete(address: str, prompt: str) -> Completion:
    """Return a completion. Raises OSError if nobody answers, or with an error."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER, "temperature": 0}
    told = _call(f"{address}/v1/completions", body)
    return Completion(told["id"], told["choices"][0]["text"])


# -- routers --------------------------------------------------------------------------------------


class Router(Protocol):
    """A way to an engine. ``reads_events`` says if it follows kvcore's events."""

    name: str
    reads_events: bool

    def ask(self, prompt: str) -> Completion:
        """Return an engine's answer. Raises OSError as `complete` does."""

    def close(self) -> None: ...


class HttpRouter:
    """A router that forwards requests itself."""

    def __init__(self, name: str, command: Sequence[str], port: int, log: Path) -> None:
        self.name = name
        self.reads_events = "kv_aware" in command
        self._address = f"http://127.0.0.1:{port}"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        limit = time.monotonic() + WAIT_S
        while not _healthy(self._address):
            if self._process.poll() is not None or time.monotonic() > limit:
                self.close()
                tail = log.read_text(errors="replace")[-2000:]
                raise TransferError(f"{name} does not start: {tail}")
            time.sleep(0.2)

    def add(self, addresses: Sequence[str]) -> None:
        """Add engines by the router's API, with the model's name. Closes the router if that fails.

        SGLang's router does not ask a vLLM for it, and would have the engine serve another model.
        """
        try:
            for address in addresses:
                _call(f"{self._address}/workers", {"url": address, "model_id": MODEL})
            what = f"{self.name} does not take the engines"
            _wait_for(lambda: self._taken() == len(addresses), what)
        except BaseException:
            self.close()
            raise

    def _taken(self) -> int:
        with urllib.request.urlopen(f"{self._address}/workers", timeout=WAIT_S) as answer:
            workers = json.load(answer)["workers"]
        return sum(worker["is_healthy"] for worker in workers)

    def ask(self, prompt: str) -> Completion:
        return complete(self._address, prompt)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Dynamo:
    """Dynamo's router selects an engine, and this class forwards the request.

    It forgets an engine that does not answer, as whoever uses the service has to.
    """

    name = "ai-dynamo-runtime"
    reads_events = True

    def __init__(self, engines: Sequence[Engine], encode: Callable[[str], list[int]], log: Path):
        self._encode = encode
        self._lock = threading.Lock()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(ROUTERS_PYTHON), str(ROOT / "demo" / "dynamo_selector.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        self.call(
            {
                "workers": [
                    {
                        "worker_id": number,
                        "endpoint": engine.address,
                        "events": engine.events,
                        "replay": engine.replay,
                        "block": BLOCK,
                    }
                    for number, engine in enumerate(engines)
                ]
            }
        )

    def ask(self, prompt: str) -> Completion:
        name = uuid.uuid4().hex
        chosen = self.call({"token_ids": self._encode(prompt), "selection_id": name})
        try:
            done = complete(chosen["endpoint"], prompt)
        except OSError:
            self.call({"gone": chosen["worker_id"]})
            raise
        self.call({"done": name})
        return done

    def call(self, request: dict[str, Any]) -> Any:
        """Send a line to `demo.dynamo_selector`, and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise TransferError("Dynamo's router has ended: see router-ai-dynamo-runtime.log")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def start_routers(
    engines: Sequence[Engine], encode: Callable[[str], list[int]], results: Path
) -> Iterator[Router]:
    """Yield the routers, one after another, each in front of all engines."""
    if not ROUTERS_PYTHON.exists():
        raise UnsupportedError(f"no {ROUTERS_PYTHON}: run python3 -m tools.env_routers")
    yield Dynamo(engines, encode, results / "router-ai-dynamo-runtime.log")
    addresses = [engine.address for engine in engines]
    python = str(ROUTERS_PYTHON)
    for name in ("vllm-router", "sglang-router"):
        port = free_port(2)
        module = f"{name.replace('-', '_')}.launch_router"
        command = [python, "-m", module, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(port + 1)]
        if name == "vllm-router":
            command += ["--policy", "kv_aware", "--worker-startup-check-interval", "1"]
            command += ["--kv-event-block-size", str(BLOCK), "--kv-event-model", MODEL]
            for engine in engines:
                command += ["--kv-event-source", f"{engine.address}={engine.events}"]
                command += ["--kv-event-replay-source", f"{engine.address}={engine.replay}"]
            command += ["--worker-urls", *addresses]
        else:
            command += ["--policy", "cache_aware"]
        router = HttpRouter(name, command, port, results / f"router-{name}.log")
        if name == "sglang-router":
            router.add(addresses)
        yield router


# -- the demo -------------------------------------------------------------------------------------


@dataclass
class Demo:
    """The engines, the routers, and the conversations of each router."""

    engines: dict[str, Engine]
    routers: list[Router]
    documents: Iterator[str]
    victim: str
    kept: dict[str, Conversation] = field(default_factory=dict)
    """By router, a conversation that the victim holds."""

    @property
    def survivor(self) -> str:
        [name] = set(self.engines) - {self.victim}
        return name

    def turns(self, router: Router) -> Iterator[Answer]:
        """Two users ask through the router at the same time, and ask again, one after the other."""
        users = [Conversation(next(self.documents)) for _ in range(USERS)]
        answers = self.ask(FIRST, users, router.name, router.ask)
        yield from answers
        for user, answer in zip(users, answers, strict=True):
            user.holder = answer.engine
            user.follow(answer.text)
        for user in users:
            yield self.second(SECOND, user, router)

    def planted(self, router: Router) -> Iterator[Answer]:
        """Each engine is asked directly, then the router, which has not seen the text."""
        for engine in self.engines.values():
            user = Conversation(next(self.documents))
            self.plant(user, engine)
            yield self.second(PLANTED, user, router)

    def second(self, step: str, user: Conversation, router: Router) -> Answer:
        [answer] = self.ask(step, [user], router.name, router.ask)
        if answer.engine == user.holder:
            user.second = answer.text
            if user.holder == self.victim:
                self.kept.setdefault(router.name, user)
        return answer

    def plant(self, user: Conversation, engine: Engine) -> None:
        """Ask an engine directly, and append its answer."""
        [answer] = self.ask(FIRST, [user], "", lambda it: complete(engine.address, it))
        user.holder = answer.engine
        user.follow(answer.text)

    def ensure_kept(self) -> None:
        """Have the victim hold a conversation for each router that has sent it none."""
        engine = self.engines[self.victim]
        for router in self.routers:
            if router.name not in self.kept:
                user = self.kept[router.name] = Conversation(next(self.documents))
                self.plant(user, engine)
                [direct] = self.ask(SECOND, [user], "", lambda it: complete(engine.address, it))
                user.second = direct.text

    def killed(self, router: Router) -> Answer:
        """Ask for the turn that the victim has answered, until somebody answers."""
        users = [self.kept[router.name]]
        [answer] = self.ask(KILLED, users, router.name, lambda it: _until_answered(router, it))
        return answer

    def ask(
        self,
        step: str,
        users: Sequence[Conversation],
        router: str,
        send: Callable[[str], Completion],
    ) -> list[Answer]:
        """Ask for all users at once, and find who answered and what was loaded in kvcore's records.

        Blocks until the events tell that prompts that nobody held are stored.
        """
        held = {name: engine.blocks() for name, engine in self.engines.items()}
        with ThreadPoolExecutor(len(users)) as pool:
            done = list(pool.map(lambda user: send(user.text), users))
        answers = []
        stored = dict.fromkeys(self.engines, 0)
        for user, completion in zip(users, done, strict=True):
            name, record = _wait_for(
                partial(self._find, completion.id), f"no record of {completion.id}, a {step}"
            )
            tokens, loaded = record["tokens"], dict(record.get("loaded", {}))
            answers.append(
                Answer(
                    router, step, user.holder, name, tokens, loaded, completion.text, user.second
                )
            )
            if not user.holder:
                stored[name] += tokens // BLOCK - ALIKE
        for name, blocks in stored.items():
            if blocks > 0:
                what = f"the events of {name} do not tell of {blocks} blocks of a {step}"
                _wait_for(partial(self._tells, name, held[name], blocks), what)
                time.sleep(HEAR_S)
        return answers

    def _find(self, request: str) -> tuple[str, dict[str, Any]] | None:
        for name, engine in self.engines.items():
            if record := engine.record_of(request):
                return name, record
        return None

    def _tells(self, name: str, before: tuple[int, int], blocks: int) -> bool:
        """Return True once events tell of so many more blocks in host memory, and in the tier."""
        now = self.engines[name].blocks()
        return all(at >= was + blocks for was, at in zip(before, now, strict=True))


def _wait_for(look: Callable[[], Any], what: str) -> Any:
    """Return what ``look`` finds. Raises TransferError if it finds nothing in `WAIT_S`."""
    limit = time.monotonic() + WAIT_S
    while not (found := look()):
        if time.monotonic() > limit:
            raise TransferError(f"{what} in {WAIT_S:.0f} s")
        time.sleep(0.1)
    return found


def _until_answered(router: Router, prompt: str) -> Completion:
    """Ask again until a router has noticed that an engine is gone."""
    limit = time.monotonic() + WAIT_S
    while True:
        try:
            return router.ask(prompt)
        except OSError:  # noqa: PERF203  the router has not noticed yet
            if time.monotonic() > limit:
                raise
            time.sleep(1.0)


def run(
    model: Path, tokenizer: Any, options: argparse.Namespace, console: Console
) -> Iterator[Answer]:
    """Yield the answers through the routers. Blocks for minutes."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcore-router-")))
        store = stack.enter_context(servers(folder))(redis_like("redis-server"))
        _say(console, "starting vLLM and SGLang: a minute or two")
        engines: dict[str, Engine] = {}
        for name in ENGINES:
            url = f"redis://{store.address}/0"
            engines[name] = Engine(name, model, url, folder, options.results)
            stack.callback(engines[name].held.close)
            stack.callback(engines[name].kill)
        for engine in engines.values():
            engine.wait_ready()
        routers: list[Router] = []
        for router in start_routers(list(engines.values()), encode, options.results):
            stack.callback(router.close)
            routers.append(router)
        demo = Demo(engines, routers, _documents(tokenizer, options.tokens), options.kill)
        for router in routers:
            _say(console, f"{router.name}: first and second turns")
            yield from demo.turns(router)
            if router.reads_events:
                _say(console, f"{router.name}: what engines were asked directly")
                yield from demo.planted(router)
        demo.ensure_kept()
        _say(console, f"{demo.victim} is killed")
        engines[demo.victim].kill()
        for router in routers:
            yield demo.killed(router)


def _documents(tokenizer: Any, tokens: int) -> Iterator[str]:
    conversations = Conversations(tokenizer, 100, tokens)
    for number in range(100):
        yield tokenizer.decode(conversations.first(number).token_ids)


def _say(console: Console, line: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')}  {line}", highlight=False)


# -- the result -----------------------------------------------------------------------------------


def problems(answers: Sequence[Answer], survivor: str) -> list[str]:
    """Return what is wrong, one line each; empty if all is well."""
    found = []
    for answer in answers:
        what = f"{answer.router}, {answer.step}"
        if answer.step in (SECOND, PLANTED) and answer.engine != answer.holder:
            found.append(f"{what}: {answer.holder} holds it, and {answer.engine} was asked")
        if answer.step != KILLED:
            continue
        if answer.engine != survivor:
            found.append(f"{what}: {answer.engine} answered")
        if answer.loaded.get(TIER, 0) <= answer.prompt_tokens / 2:
            found.append(f"{what}: of {answer.prompt_tokens} tokens {answer.loaded} were loaded")
        if answer.text != answer.expected:
            found.append(f"{what}: {answer.text!r}, but before it was {answer.expected!r}")
    return found


def table(title: str, answers: Sequence[Answer], versions: Mapping[str, str]) -> Table:
    """Return a row for each router."""
    result = Table(title=title, title_justify="left")
    for heading in ("router", "second turn", "by events", "after a kill", "from the shared tier"):
        result.add_column(heading)
    for router in dict.fromkeys(answer.router for answer in answers):
        mine = [answer for answer in answers if answer.router == router]
        cells = [f"{router} {versions.get(router, '')}"]
        for step in (SECOND, PLANTED):
            turns = [answer.engine == answer.holder for answer in mine if answer.step == step]
            cells.append(f"{sum(turns)} of {len(turns)} to the holder" if turns else "reads none")
        after = [answer for answer in mine if answer.step == KILLED]
        cells.append(", ".join(_after(answer) for answer in after))
        cells.append(", ".join(f"{a.loaded.get(TIER, 0)} of {a.prompt_tokens}" for a in after))
        result.add_row(*cells)
    return result


def _after(answer: Answer) -> str:
    same = "same" if answer.text == answer.expected else "other"
    return f"{answer.engine}, {same} words"


def main(arguments: list[str] | None = None) -> int:
    """Run the demo. Return 0 if every router did what it is expected to, else 1."""
    options = _parse(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    options.results.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        client_module("redis")
        from transformers import AutoTokenizer

        from tools.env_routers import ROUTERS

        model = options.model or tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64)
        answers = list(run(model, AutoTokenizer.from_pretrained(model), options, console))
    except (KVCoreError, urllib.error.URLError) as error:
        console.print(f"[red]{type(error).__name__}:[/red] {error}", highlight=False, markup=True)
        return 1
    [survivor] = set(ENGINES) - {options.kill}
    console.print(table(f"{options.kill} was killed", answers, ROUTERS))
    content = [asdict(answer) for answer in answers]
    (options.results / "router.json").write_text(json.dumps(content, indent=1) + "\n")
    took = f"{time.monotonic() - began:.0f} s in all"
    console.print(f"{took}; {options.results}/router.json, router-*.log", highlight=False)
    wrong = problems(answers, survivor)
    for line in wrong:
        console.print(f"[red]{line}[/]", highlight=False)
    return 1 if wrong else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m demo.router",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, default=None, help="a folder; by default a tiny random model")
    add("--tokens", type=int, default=640, help="length of a document (640)")
    add("--kill", choices=ENGINES, default="vllm", help="the engine that is killed (vllm)")
    add("--results", type=Path, default=Path("results"), help="for JSON and logs (results)")
    options = parser.parse_args(arguments)
    if not BLOCK <= options.tokens <= LONGEST // 2:
        parser.error(f"--tokens must be between {BLOCK} and {LONGEST // 2}")
    return options


if __name__ == "__main__":
    sys.exit(main())
