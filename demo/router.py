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
import json
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.conversations import Conversations
from demo.fleet import (
    BLOCK,
    LONGEST,
    TIER,
    WAIT_S,
    Completion,
    Engine,
    Router,
    complete,
    start_routers,
    wait_for,
)
from kvcore._util.optional import client_module
from kvcore.errors import KVCoreError
from kvcore.harness.models import tiny_model
from kvcore_devtools.servers import redis_like, servers

USERS = 2
ALIKE = 4
"""Blocks with which all documents begin. They are held already, and told once."""
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
            name, record = wait_for(
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
                wait_for(partial(self._tells, name, held[name], blocks), what)
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

        model = options.model or tiny_model(
            "llama", layers=4, heads=4, kv_heads=2, head_dim=64, vocabulary=None
        )
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
