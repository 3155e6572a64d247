"""The load of `benchmarks.load`: generators that others wrote, and what they are told.

| workload | generator | how requests arrive |
|---|---|---|
| prefix | ``vllm bench serve``, prefix_repetition | so many at once |
| fits | the same, with prefixes that fit the device's cache | so many at once |
| chat | ``vllm bench serve``, timed_trace: users in turns | at the trace's times |
| rag | the same: questions behind documents in new orders | at the trace's times |
| talk | ``aiperf``: conversations with the engine's own answers | so many at once |
| agents | ``aiperf synthesize agentic-code``: sessions that wait for tools | all sessions at once |
| documents | ``lmcache bench engine``, long-doc-qa | so many at once |

A workload has a seed, and asks the same of every contender. Each generator writes its numbers to a
file of its own kind, from which a `Served` is read.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks._load_servers import SERVED, Engine, Sizes, environment

CHUNK = 16
"""Tokens of one hash in a trace."""
AGENT_BLOCK = 64
"""The same, in the trace of the agents."""
TEMPLATE = 48
"""Tokens that a chat template adds to a turn, at most."""
HUB_NAME = "kvcore/smollm2"
"""The tokenizer's name for aiperf, which takes no folder."""
AIPERF_TICKS_S = 50
"""How often a second aiperf looks whether a session may go on."""
LIMIT_S = 1800.0


class Served(NamedTuple):
    """What a generator measured. Times are in milliseconds."""

    requests_s: float
    tokens_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float | None
    itl_p99: float | None
    failed: int
    texts: tuple[str, ...] = ()
    """Each request's answer in order, if the generator keeps them."""


class Generators(NamedTuple):
    """The interpreters of the environments with generators that are not in vLLM's."""

    aiperf: Path | None
    lmcache: Path | None


class Workload(Protocol):
    """One load that every contender is given."""

    @property
    def name(self) -> str: ...

    @property
    def rate(self) -> float | None:
        """Requests a second that arrive; None if a request is sent when another one has ended."""

    def run(self, engine: Engine, folder: Path, log: Path) -> Served:
        """Put the load on an engine. Blocks until the last answer."""


@dataclass(frozen=True)
class Prefixes:
    """``vllm bench serve`` with prompts of which many begin alike."""

    name: str
    model: Path
    seed: int
    prefixes: int
    prefix_tokens: int
    suffix_tokens: int
    answer_tokens: int
    requests: int
    at_once: int
    rate: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all prefixes together."""
        return self.prefixes * self.prefix_tokens

    def run(self, engine: Engine, folder: Path, log: Path) -> Served:
        options = [
            "--dataset-name", "prefix_repetition", "--num-prompts", str(self.requests),
            "--prefix-repetition-num-prefixes", str(self.prefixes),
            "--prefix-repetition-prefix-len", str(self.prefix_tokens),
            "--prefix-repetition-suffix-len", str(self.suffix_tokens),
            "--prefix-repetition-output-len", str(self.answer_tokens),
            "--max-concurrency", str(self.at_once),
        ]  # fmt: skip
        return _vllm_bench(self.model, self.seed, options, engine, folder, log)


@dataclass(frozen=True, kw_only=True)
class Trace(ABC):
    """``vllm bench serve`` with a trace in Mooncake's format: times, and prompts of hashes."""

    name: str
    model: Path
    seed: int
    shared_tokens: int
    """Tokens with which all prompts begin."""
    answer_tokens: int
    rate: float | None
    first_hash: int = 0
    """Traces with numbers far apart share no text."""

    @abstractmethod
    def prompts(self, picks: random.Random) -> Iterator[list[int]]:
        """Yield the hashes of each prompt's chunks behind the shared ones, counted from 0."""

    def trace(self) -> list[dict[str, Any]]:
        """Return the requests, times in seconds. Those between arrivals are exponential."""
        assert self.rate is not None
        picks, time_s, found = random.Random(self.seed), 0.0, []
        shared = _chunks(self.shared_tokens)
        for own in self.prompts(picks):
            hashes = [self.first_hash + n for n in (*range(shared), *(shared + n for n in own))]
            found.append(
                {
                    "timestamp": round(time_s, 3),
                    "input_length": len(hashes) * CHUNK,
                    "output_length": self.answer_tokens,
                    "hash_ids": hashes,
                }
            )
            time_s += picks.expovariate(self.rate)
        return found

    def run(self, engine: Engine, folder: Path, log: Path) -> Served:
        trace = self.trace()
        path = folder / "trace.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in trace))
        options = [
            "--dataset-name", "timed_trace", "--dataset-path", str(path),
            "--num-prompts", str(len(trace)), "--timed-trace-chunk-hash-size", str(CHUNK),
        ]  # fmt: skip
        return _vllm_bench(self.model, self.seed, options, engine, folder, log)


@dataclass(frozen=True, kw_only=True)
class Chat(Trace):
    """Users whose contexts grow turn by turn.

    As in Mooncake's traces, an answer is not fed back: what the user's next prompt has in its place
    is the trace's.
    """

    users: int
    turns: int
    turn_tokens: int
    """Tokens that each turn adds to a context, with the answer before it."""

    @property
    def tokens(self) -> int:
        """Tokens of all contexts together, at their longest."""
        return self.shared_tokens + self.users * self.turns * self.turn_tokens

    def prompts(self, picks: random.Random) -> Iterator[list[int]]:
        """Let all users ask their first question, in an order of chance, then their second one.

        A context is thus asked for again after all the others.
        """
        longest = _chunks(self.turns * self.turn_tokens)
        for turn in range(1, self.turns + 1):
            for user in picks.sample(range(self.users), self.users):
                yield [*range(user * longest, user * longest + _chunks(turn * self.turn_tokens))]


@dataclass(frozen=True, kw_only=True)
class Rag(Trace):
    """Questions behind documents that a search has found: the same ones in ever new orders."""

    documents: int
    document_tokens: int
    found: int
    """Documents in each prompt."""
    question_tokens: int
    requests: int

    def prompts(self, picks: random.Random) -> Iterator[list[int]]:
        length, question = _chunks(self.document_tokens), _chunks(self.question_tokens)
        for number in range(self.requests):
            documents = picks.sample(range(self.documents), self.found)
            texts = [n for each in documents for n in range(each * length, (each + 1) * length)]
            own = self.documents * length + number * question
            yield [*texts, *range(own, own + question)]


@dataclass(frozen=True)
class Talk:
    """``aiperf`` with conversations: each turn has the engine's own answers before it."""

    name: str
    model: Path
    seed: int
    python: Path
    users: int
    turns: int
    turn_tokens: int
    answer_tokens: int
    at_once: int
    rate: float | None = None

    def run(self, engine: Engine, folder: Path, log: Path) -> Served:
        options = [
            "--conversation-num", str(self.users),
            "--conversation-turn-mean", str(self.turns), "--conversation-turn-stddev", "0",
            "--synthetic-input-tokens-mean", str(self.turn_tokens - self.answer_tokens),
            "--synthetic-input-tokens-stddev", "0",
            "--output-tokens-mean", str(self.answer_tokens), "--output-tokens-stddev", "0",
            "--concurrency", str(self.at_once), "--random-seed", str(self.seed),
        ]  # fmt: skip
        return _aiperf(self.python, self.model, options, engine, folder, log)


@dataclass(frozen=True)
class Agents:
    """``aiperf`` with coding agents: many turns, between which they wait for tools and people.

    All sessions begin with one system prompt, those of a group with one repository, and each goes
    on with files of its own. A turn has the engine's own answers before it. All sessions are open
    at the same time, so the engine sees each of them again after many of the others.
    """

    name: str
    model: Path
    seed: int
    python: Path
    sessions: int
    turn_tokens: int
    max_tokens: int
    """The most tokens of a prompt. A session ends when its context has so many."""
    answer_tokens: int
    rate: float | None = None

    def config(self) -> dict[str, Any]:
        """Return what `aiperf synthesize` is told. Waits are of real agents, in milliseconds."""
        start, answer = self.max_tokens // 8, self.answer_tokens
        return {
            "new_tokens_per_turn": _around(self.turn_tokens) | {"bias": 1.0},
            "generation_length": _around(answer),
            "inter_turn_delay": {
                "agentic_fraction": 0.7,
                "agentic_delay": {"mean": 250, "median": 180, "max": 1000},
                "human_delay": {"mean": 3000, "median": 2000, "max": 6000},
                "max": None,
            },
            "reset": {"base_probability": 0.01, "context_scaling": 1.5},
            "max_prompt_tokens": self.max_tokens,
            "block_size": AGENT_BLOCK,
            "cache": {
                "layer1_tokens": _blocks(start),
                "layer1_5_tokens": _blocks(start),
                "layer2": _around(start),
                "layer1_5_groups": {"num_groups": 3, "zipf_alpha": 0.6},
            },
        }

    def run(self, engine: Engine, folder: Path, log: Path) -> Served:
        config = folder / "agents.json"
        config.write_text(json.dumps(self.config()))
        command = [
            str(self.python.parent / "aiperf"), "synthesize", "agentic-code",
            "--config", str(config), "--num-sessions", str(self.sessions),
            "--seed", str(self.seed), "--output", str(folder / "synthesized"),
        ]  # fmt: skip
        _run(command, log, {})
        [trace] = (folder / "synthesized").rglob("dataset.jsonl")
        options = [
            "--input-file", str(trace), "--custom-dataset-type", "mooncake_trace",
            "--isl-block-size", str(AGENT_BLOCK), "--random-seed", str(self.seed),
            "--no-fixed-schedule", "--concurrency", str(self.sessions),
            "--conversation-num", str(self.sessions),  # it would end after ten requests
        ]  # fmt: skip
        return _aiperf(self.python, self.model, options, engine, folder, log)


@dataclass(frozen=True)
class Documents:
    """``lmcache bench engine`` with documents, each of which is asked about several times."""

    name: str
    model: Path
    seed: int
    python: Path
    documents: int
    document_tokens: int
    questions: int
    answer_tokens: int
    at_once: int
    rate: float | None = None

    def run(self, engine: Engine, folder: Path, log: Path) -> Served:
        # It takes the number of documents from a volume of KV and the tokens in a GB.
        command = [
            str(self.python.parent / "lmcache"), "bench", "engine", "--no-interactive", "-q",
            "--engine-url", engine.address, "--model", SERVED, "--workload", "long-doc-qa",
            "--tokens-per-gb-kvcache", str(self.documents * self.document_tokens),
            "--kv-cache-volume", "1", "--seed", str(self.seed),
            "--ldqa-document-length", str(self.document_tokens),
            "--ldqa-query-per-document", str(self.questions),
            "--ldqa-num-inflight-requests", str(self.at_once),
            "--ldqa-max-output-length", str(self.answer_tokens),
            "--ignore-eos", "--json", "--output-dir", str(folder / "lmcache"),
        ]  # fmt: skip
        _run(command, log, {})
        [path] = (folder / "lmcache").rglob("*.json")
        return of_lmcache(json.loads(path.read_text()))


def _vllm_bench(
    model: Path, seed: int, options: Sequence[str], engine: Engine, folder: Path, log: Path
) -> Served:
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve",
        "--backend", "openai", "--base-url", engine.address, "--endpoint", "/v1/completions",
        "--model", SERVED, "--tokenizer", str(model), "--seed", str(seed),
        "--temperature", "0", "--ignore-eos", "--disable-tqdm",
        "--percentile-metrics", "ttft,itl", "--metric-percentiles", "99",
        "--save-result", "--save-detailed", "--result-dir", str(folder),
        "--result-filename", "served.json", *options,
    ]  # fmt: skip
    # A trace's tokens come from Python's hash of a string. Without a fixed seed, every contender
    # would be asked something else.
    _run(command, log, {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"})
    return of_vllm(json.loads((folder / "served.json").read_text()))


def _aiperf(
    python: Path, model: Path, options: Sequence[str], engine: Engine, folder: Path, log: Path
) -> Served:
    home = hub_of(model, folder / "hub")
    command = [
        str(python.parent / "aiperf"), "profile", "--model", SERVED, "--url", engine.address,
        "--endpoint-type", "chat", "--streaming", "--tokenizer", HUB_NAME,
        "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0",
        "--output-artifact-dir", str(folder / "aiperf"), "--ui-type", "none",
        # It spins without a rate, and its own metrics take a tenth of a core.
        "--request-rate", str(AIPERF_TICKS_S), "--no-server-metrics", "--no-gpu-telemetry",
        *options,
    ]  # fmt: skip
    _run(command, log, {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"})
    [path] = (folder / "aiperf").rglob("profile_export_aiperf.json")
    return of_aiperf(json.loads(path.read_text()))


def _run(command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
    """Run a generator. Raises SystemExit with the end of its log if it fails."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=environment(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(LIMIT_S)
        finally:
            process.kill()
            process.wait()
    if code:
        tail = log.read_text(errors="replace")[-3000:]
        raise SystemExit(f"{' '.join(command[:6])} ended with exit code {code}:\n{tail}")


def hub_of(model: Path, home: Path) -> Path:
    """Write a hub's cache that has the model's tokenizer as `HUB_NAME`, and return its folder."""
    revision = "0" * 40
    folder = home / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    for path in model.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, snapshot)
    return home


def _chunks(tokens: int) -> int:
    return math.ceil(tokens / CHUNK)


def _blocks(tokens: int) -> int:
    """Round tokens up to whole blocks of an agent's trace."""
    return math.ceil(tokens / AGENT_BLOCK) * AGENT_BLOCK


def _around(tokens: int) -> dict[str, float]:
    """Return a distribution of lengths in `aiperf`'s terms: skewed, and at most twice the mean."""
    return {"mean": tokens, "median": max(1, tokens * 7 // 8), "max": 2 * tokens}


# -- reading what generators write -----------------------------------------------------------------


def of_vllm(result: Mapping[str, Any]) -> Served:
    """Read the result of ``vllm bench serve``."""
    return Served(
        result["request_throughput"],
        result["output_throughput"],
        result["median_ttft_ms"],
        result["p99_ttft_ms"],
        result["median_itl_ms"],
        result["p99_itl_ms"],
        result["failed"],
        tuple(result.get("generated_texts", ())),
    )


def of_aiperf(result: Mapping[str, Any]) -> Served:
    """Read the summary of ``aiperf``. It has times in milliseconds."""
    ttft, itl = result["time_to_first_token"], result["inter_token_latency"]
    errors = result.get("error_request_count") or {"avg": 0}
    return Served(
        result["request_throughput"]["avg"],
        result["output_token_throughput"]["avg"],
        ttft["p50"],
        ttft["p99"],
        itl["p50"],
        itl["p99"],
        int(errors["avg"]),
    )


def of_lmcache(result: Mapping[str, Any]) -> Served:
    """Read the summary of ``lmcache bench engine``. It has no times between tokens."""
    found = result["results"]
    return Served(
        found["successful_requests"] / found["elapsed_time"],
        found["output_throughput"],
        found["p50_ttft_ms"],
        found["p99_ttft_ms"],
        None,
        None,
        found["failed_requests"],
    )


# -- the workloads ---------------------------------------------------------------------------------

WORKLOADS = ("fits", "prefix", "chat", "rag", "talk", "agents", "documents")


class Scale(NamedTuple):
    """How much load there is. The sizes of the caches follow from the chat's contexts."""

    users: int
    turns: int
    turn_tokens: int
    answer_tokens: int
    at_once: int
    rates: tuple[float, ...]
    requests: int
    """Requests of each closed workload of ``vllm bench serve``."""
    seed: int = 0
    shared_tokens: int = 64
    to_device: float = 4.0
    """All contexts of the chat together, in caches of the device."""
    to_host: float = 1.5
    """The same, in caches in host memory."""

    @property
    def longest(self) -> int:
        """Tokens of a user's last prompt and its answer."""
        return self.shared_tokens + self.turns * self.turn_tokens + self.answer_tokens

    def sizes(self, model: Path, dtype: str, arguments: Sequence[str] = ()) -> Sizes:
        """Return the caches. The device's holds at least two of the longest prompts.

        A chat template adds tokens to each turn of a conversation.
        """
        contexts = self._chat(model, None, 0).tokens
        most = self.longest + (self.turns + 1) * TEMPLATE
        return Sizes(
            model,
            max(math.ceil(contexts / self.to_device), 2 * most),
            math.ceil(contexts / self.to_host),
            most,
            self.at_once,
            dtype,
            (*arguments,),
        )

    def workloads(
        self, names: Sequence[str], model: Path, generators: Generators
    ) -> Iterator[Workload]:
        """Yield the named workloads. Raises SystemExit for one whose generator is not given."""
        for name in names:
            if name == "chat":
                yield from (self._chat(model, rate, n) for n, rate in enumerate(self.rates))
            elif name == "rag":
                yield self._rag(model)
            elif name in ("talk", "agents"):
                if generators.aiperf is None:
                    raise SystemExit(f"{name} needs --aiperf-python: run python3 -m tools.env_load")
                make = self._talk if name == "talk" else self._agents
                yield make(model, generators.aiperf)
            elif name == "documents":
                if generators.lmcache is None:
                    raise SystemExit("documents needs --peer-python: run python3 -m tools.env_load")
                yield self._documents(model, generators.lmcache)
            else:
                yield self._prefixes(name, model)

    def _chat(self, model: Path, rate: float | None, number: int) -> Chat:
        return Chat(
            name="chat",
            model=model,
            seed=self.seed + number,
            users=self.users,
            turns=self.turns,
            turn_tokens=self.turn_tokens,
            shared_tokens=self.shared_tokens,
            answer_tokens=self.answer_tokens,
            rate=rate,
            first_hash=number * 1_000_000,
        )

    def _rag(self, model: Path) -> Rag:
        """Return prompts of three documents. All documents are half as long as all contexts."""
        length = (self.longest - self.shared_tokens - self.answer_tokens) * 2 // 7 // CHUNK * CHUNK
        return Rag(
            name="rag",
            model=model,
            seed=self.seed + 200,
            documents=max(6, self.users * self.turns * self.turn_tokens // length // 2),
            document_tokens=length,
            found=3,
            question_tokens=length // 4,
            requests=self.requests,
            shared_tokens=self.shared_tokens,
            answer_tokens=self.answer_tokens,
            rate=self.rates[0],
            first_hash=900_000_000,
        )

    def _prefixes(self, name: str, model: Path) -> Prefixes:
        """Return prompts whose prefixes take half of the device's cache, or twice as much."""
        device = self.sizes(model, "float32").device_tokens
        length = (self.longest - self.answer_tokens) * 4 // 5 // CHUNK * CHUNK
        part = 0.5 if name == "fits" else 2.0
        count = max(1, round(part * device / length))
        requests = max(self.requests // count, 2) * count
        return Prefixes(
            name, model, self.seed + 100, count, length, length // 8, self.answer_tokens,
            requests, self.at_once,
        )  # fmt: skip

    def _talk(self, model: Path, python: Path) -> Talk:
        return Talk(
            "talk", model, self.seed, python, self.users, self.turns, self.turn_tokens,
            self.answer_tokens, self.at_once,
        )  # fmt: skip

    def _agents(self, model: Path, python: Path) -> Agents:
        """Return as many sessions as the chat has users, with smaller turns.

        A quarter of the longest context is left for what a template adds to each turn.
        """
        return Agents(
            "agents", model, self.seed, python, self.users, self.turn_tokens // 2,
            self.longest * 3 // 4, self.answer_tokens,
        )  # fmt: skip

    def _documents(self, model: Path, python: Path) -> Documents:
        length = self.longest - self.answer_tokens - 64
        count = max(2, self.users * self.turns * self.turn_tokens // length // 2)
        return Documents(
            "documents", model, self.seed, python, count, length, 2, self.answer_tokens,
            self.at_once,
        )  # fmt: skip
