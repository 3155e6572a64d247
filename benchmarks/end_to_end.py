"""Time to first token on a GPU: computed, loaded from host memory or disk, and blended.

    python -m benchmarks.end_to_end [--tokens 4096 16384 32768] [--rounds 5] [--disk FOLDER]

The reference engine of `kvcore.testing.engine`, with random weights of Llama-3-8B's shape in
bfloat16, answers one request at a time. Each round has a prompt of its own, of 8 chunks. The ways:

    cold        the engine without kvcore computes everything
    own cache   the KV is still in the engine's pages: no other way can be faster
    miss        the engine with kvcore, which has nothing of the prompt and saves it
    host hit    the same prompt again, from host memory
    disk hit    the same prompt after host memory was emptied; reads bypass the page cache
    blend       kvcore has only the chunks, each computed on its own

Correctness is checked first. With four layers in float32, every exact way and a blend that
recomputes everything must answer with the tokens of ``cold``. The engine's attention in the model's
own dtype is compared with a naive one.

While times are taken, every way must reuse the tokens that it should, and a hit must answer as
``own cache`` does, which computes the same row over the same KV. Agreement with ``cold`` is only
counted then, because another number of rows means another order of sums.

`--dry-run` does all of this on a CPU with a tiny shape. It tests the script, and its times mean
nothing. The exit status is 1 if something was wrong.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from benchmarks._report import Report, Row
from kvcore.config import load_config
from kvcore.fusion.attend import Attention, naive_attend_rows
from kvcore.fusion.options import FusionOptions
from kvcore.fusion.plan import LayerKV
from kvcore.manager import HOST
from kvcore.testing.engine import EngineArgs, Llama, ReferenceEngine, random_llama
from kvcore.testing.engine.model import attend_last

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("tokens", "way", "ms", "to cold", "reused", "as cold", "rounds")
COLD, OWN, MISS, ON_HOST, ON_DISK = "cold", "own cache", "miss", "host hit", "disk hit"
EXACT = (COLD, OWN, MISS, ON_HOST, ON_DISK)
RATIO = 0.15
BLEND, WHOLE_BLEND = f"blend at {RATIO:.0%}", "blend at 100%"
BLOCK = 16
"""Tokens in a block, and in a page."""
QUESTION = 2 * BLOCK
"""Fewest tokens after the chunks."""
SHORTEST = 64
"""Tokens of the shortest chunk that is reused: `fusion.min_tokens`."""
PATIENCE_S = 600.0
NO_BLEND = FusionOptions(enabled=False)


@dataclass(frozen=True)
class Scale:
    """Sizes of a run.

    Args:
        shape: arguments of `random_llama`.
        dtype: type of weights and KV.
        tokens: lengths of the prompts in tokens, multiples of a block. Each prompt has one token
            more, which is computed when all tokens before it are cached.
        chunks: number of chunks in a prompt.
        step: tokens that the engine computes at once.
        batch: blocks that a copy moves at once.
    """

    shape: Mapping[str, Any]
    dtype: torch.dtype
    tokens: tuple[int, ...]
    chunks: int
    step: int
    batch: int

    @property
    def checked(self) -> Scale:
        """A smaller scale for comparing tokens: at most four layers, in float32."""
        shape = {**self.shape, "layers": min(4, self.shape["layers"])}
        tokens = min(2048, *self.tokens)
        step = min(self.step, tokens // 3)
        return replace(self, shape=shape, dtype=torch.float32, tokens=(tokens,), step=step)

    def chunk(self, tokens: int) -> int:
        """Return the tokens of a chunk, in whole blocks, in a prompt of ``tokens`` tokens."""
        return (tokens - BLOCK - QUESTION) // self.chunks // BLOCK * BLOCK

    @property
    def token_nbytes(self) -> int:
        """Bytes of KV of one token, over all layers."""
        shape = self.shape
        return 2 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * self.dtype.itemsize

    @property
    def kv_nbytes(self) -> int:
        """Bytes of the longest prompt's KV, in whole blocks."""
        return (max(self.tokens) + 2 * BLOCK) * self.token_nbytes

    @property
    def needs(self) -> dict[str, int]:
        """Bytes needed on the device (about), in host memory and on disk.

        Each tier has room for two prompts, and host memory also for blocks in transit. The device
        holds the weights, the pages of three engines, and a layer's activations for all rows.
        """
        shape = self.shape
        hidden, inner = shape["hidden"], shape["intermediate"]
        heads = (2 * shape["heads"] + 2 * shape["kv_heads"]) * shape["head_dim"]
        weights = hidden * (2 * shape["vocabulary"] + shape["layers"] * (heads + 3 * inner))
        rows = max(self.tokens) * (3 * inner + 16 * hidden)
        passing = 3 * self.batch * BLOCK * self.token_nbytes
        return {
            "device": (weights + rows) * self.dtype.itemsize + 4 * self.kv_nbytes,
            "host": 2 * self.kv_nbytes + passing,
            "disk": 2 * self.kv_nbytes,
        }

    def build(self, device: torch.device) -> Llama:
        return random_llama(**self.shape, device=str(device), dtype=self.dtype)


FULL = Scale(
    {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128,
     "intermediate": 14336, "vocabulary": 128256, "theta": 5e5},
    torch.bfloat16, tokens=(4096, 16384, 32768), chunks=8, step=8192, batch=128,
)  # fmt: skip
"""Llama-3-8B's shape. Sized for one H200 (139 GiB) and 128 GiB of host memory."""

DRY = Scale(
    {"layers": 3, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16,
     "intermediate": 128, "vocabulary": 512, "theta": 1e4},
    torch.float32, tokens=(320, 448), chunks=4, step=256, batch=16,
)  # fmt: skip


class Prompt(NamedTuple):
    """A prompt: one block of fresh tokens, the ``chunks``, and the question."""

    tokens: list[int]
    chunks: list[list[int]]


def prompt_of(scale: Scale, tokens: int, seed: int) -> Prompt:
    """Return a prompt of ``tokens + 1`` tokens that begins like no other seed's prompt."""
    picks = random.Random(f"{tokens} {seed}")
    length = scale.chunk(tokens)
    every = [picks.randrange(1, scale.shape["vocabulary"]) for _ in range(tokens + 1)]
    chunks = [every[BLOCK + i * length :][:length] for i in range(scale.chunks)]
    return Prompt(every, chunks)


class Answer(NamedTuple):
    """The answer to one request. ``reused``: tokens that were not computed, by their source."""

    seconds: float
    tokens: tuple[int, ...]
    reused: dict[str, int]


class Setting(NamedTuple):
    """The device, the disk tier's folder, and the settings `ops.backend` and `disk.direct_io`."""

    device: torch.device
    disk: Path
    backend: str
    direct_io: str


class Contest:
    """Three engines of one scale: without a cache, with a prefix cache of its own, and with kvcore.

    To be closed after use.
    """

    def __init__(self, scale: Scale, setting: Setting, name: str) -> None:
        self.scale = scale
        model = scale.build(setting.device)
        args = EngineArgs(
            num_pages=max(scale.tokens) // BLOCK + 8,
            page_tokens=BLOCK,
            max_num_tokens=scale.step,
            prefix_cache=False,  # computing its keys would take time too
        )
        with ExitStack() as stack:
            self.plain = stack.enter_context(ReferenceEngine(model, args))
            self.own = stack.enter_context(ReferenceEngine(model, replace(args, prefix_cache=True)))
            self.kvcore = stack.enter_context(
                ReferenceEngine(model, args, self._config(setting, name))
            )
            self._stack = stack.pop_all()

    def _config(self, setting: Setting, name: str) -> Any:
        needs = self.scale.needs
        disk = {
            "path": str(setting.disk / name),
            "capacity": needs["disk"],
            "direct_io": setting.direct_io,
        }
        return load_config(
            None,
            {
                "block": {"tokens": BLOCK},
                "host": {"capacity": needs["host"]},
                "disk": disk,
                "ops": {"backend": setting.backend},
                "transfer": {"batch_blocks": self.scale.batch, "load_deadline_s": PATIENCE_S},
                "fusion": {"enabled": True, "min_tokens": SHORTEST},
            },
        )

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def round(self, prompt: Prompt, answer: int, ratios: Mapping[str, float]) -> dict[str, Answer]:
        """Return each way's answer of ``answer`` tokens, with a blend for each of ``ratios``.

        Afterwards the engines have nothing cached.
        """
        tokens, got = prompt.tokens, {}
        got[COLD] = self._ask(self.plain, tokens, answer)
        self._ask(self.own, tokens, 1)
        got[OWN] = self._ask(self.own, tokens, answer)
        self.own.forget()
        for way, ratio in ratios.items():
            for chunk in prompt.chunks:
                self._ask(self.kvcore, chunk, 1)
            got[way] = self._ask(self.kvcore, tokens, answer, FusionOptions(ratio=ratio))
            self._clear()
        got[MISS] = self._ask(self.kvcore, tokens, answer)
        got[ON_HOST] = self._ask(self.kvcore, tokens, answer)
        self.kvcore.leader.manager.index.removal.clear(tier=HOST)  # type: ignore[union-attr]
        got[ON_DISK] = self._ask(self.kvcore, tokens, answer)
        self._clear()
        return got

    def _ask(
        self,
        engine: ReferenceEngine,
        tokens: Sequence[int],
        answer: int,
        fusion: FusionOptions = NO_BLEND,
    ) -> Answer:
        """Answer one request, alone. When this returns, its saves are on disk."""
        began = time.perf_counter()
        request = engine.submit(tokens, answer, fusion=fusion)
        engine.run(PATIENCE_S)  # the tokens are then on the host, so the device is done too
        seconds = time.perf_counter() - began
        engine.settle(PATIENCE_S)
        reused = dict(request.reused)
        if request.cached_tokens:
            reused["pages"] = request.cached_tokens
        return Answer(seconds, tuple(request.answer), reused)

    def _clear(self) -> None:
        self.kvcore.leader.clear()  # type: ignore[union-attr]

    def expected(self, prompt: Prompt) -> dict[str, dict[str, int]]:
        """Return the tokens that each exact way must reuse, by their source."""
        before = len(prompt.tokens) - 1
        return {
            COLD: {}, OWN: {"pages": before}, MISS: {}, ON_HOST: {"host": before},
            ON_DISK: {"disk": before},
        }  # fmt: skip


# --- right ----------------------------------------------------------------------------------------


def wrong_reuse(contest: Contest, prompt: Prompt, got: Mapping[str, Answer]) -> Iterator[str]:
    """Yield the ways that did not reuse what they should. Their times would mean nothing."""
    expected = contest.expected(prompt)
    chunks = {"blend": sum(map(len, prompt.chunks))}
    for way, answer in got.items():
        wanted = expected.get(way, chunks)
        if answer.reused != wanted:
            yield f"{way} of {len(prompt.tokens)} tokens reused {answer.reused}, not {wanted}"


def wrong_tokens(got: Mapping[str, Answer], ways: Sequence[str], right: str) -> Iterator[str]:
    """Yield those of ``ways`` whose answer differs from that of the way ``right``."""
    for way in ways:
        if got[way].tokens != got[right].tokens:
            yield f"{way} answered {got[way].tokens}, {right} {got[right].tokens}"


def wrong_attention(scale: Scale, device: torch.device) -> Iterator[str]:
    """Yield where the engine's attention differs from the naive one, in the model's own dtype."""
    shape = scale.shape
    generator = torch.Generator(device).manual_seed(0)

    def draw(rows: int, heads: int) -> torch.Tensor:
        size = rows, heads, shape["head_dim"]
        return torch.randn(size, device=device, generator=generator).to(scale.dtype)

    attention = Attention(shape["head_dim"] ** -0.5)
    tolerance = 1e-5 if scale.dtype is torch.float32 else 2e-2  # half an ulp of bfloat16, twice
    for rows, tokens in ((130, 130), (63, 500), (1, 500)):
        queries = draw(rows, shape["heads"])
        kv = LayerKV(*(draw(tokens, shape["kv_heads"]) for _ in range(2)))
        positions = torch.arange(tokens - rows, tokens, device=device)
        right = naive_attend_rows(queries, positions, kv.keys, kv.values, attention)
        got = attend_last(queries, kv, attention)
        if not torch.allclose(got, right, rtol=tolerance, atol=tolerance):
            error = float((got - right).abs().max())
            yield f"attention of the last {rows} of {tokens} rows is off by {error:.2g}"


def checked(scale: Scale, setting: Setting) -> list[str]:
    """Check all ways before anything is measured. Return what is wrong, in words."""
    bad = list(wrong_attention(scale, setting.device))
    small = scale.checked
    with Contest(small, setting, "checked") as contest:
        prompt = prompt_of(small, small.tokens[0], seed=0)
        got = contest.round(prompt, 8, {WHOLE_BLEND: 1.0})
        bad += wrong_reuse(contest, prompt, got)
        bad += wrong_tokens(got, (*EXACT, WHOLE_BLEND), COLD)
    return bad


# --- then fast ------------------------------------------------------------------------------------


def measured(contest: Contest, report: Report, rounds: int) -> list[str]:
    """Fill the report. Return what was wrong, in words.

    The first round of each length does not count: it compiles kernels and touches memory.
    """
    bad: list[str] = []
    for tokens in contest.scale.tokens:
        counted: list[dict[str, Answer]] = []
        for number in range(rounds + 1):
            prompt = prompt_of(contest.scale, tokens, seed=number)
            got = contest.round(prompt, 1, {BLEND: RATIO})
            bad += wrong_reuse(contest, prompt, got)
            bad += wrong_tokens(got, (ON_HOST, ON_DISK), OWN)
            counted += [got] if number else []
        for way in (*EXACT, BLEND):
            report.add(**row_of(tokens, way, counted))
        print(f"{tokens} tokens measured", flush=True)
    return bad


def row_of(tokens: int, way: str, rounds: Sequence[Mapping[str, Answer]]) -> Row:
    """Return medians of one way over the rounds of one length.

    ``to cold`` is the median of the rounds' ratios.
    """
    answers = [got[way] for got in rounds]
    return {
        "tokens": tokens,
        "way": way,
        "ms": median(answer.seconds for answer in answers) * 1e3,
        "to cold": median(got[way].seconds / got[COLD].seconds for got in rounds),
        "reused": median(sum(answer.reused.values()) for answer in answers),
        "as cold": sum(got[way].tokens == got[COLD].tokens for got in rounds),
        "rounds": len(rounds),
    }


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Plot every way's time relative to cold's, over the lengths."""
    axes = figure.subplots()
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        axes.plot([row["tokens"] for row in own], [row["to cold"] for row in own], "o-", label=way)
    axes.set_yscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel("time to first token, by that of cold")
    axes.legend()


def described(scale: Scale, setting: Setting) -> dict[str, Any]:
    """Return what the numbers depend on, besides the machine."""
    device, folder = setting.device, os.statvfs(setting.disk)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "dtype": str(scale.dtype),
        "shape": dict(scale.shape),
        "chunks": scale.chunks,
        "tokens of a step": scale.step,
        "bytes needed": scale.needs,
        "bytes free on disk": folder.f_bavail * folder.f_frsize,
        "direct_io": setting.direct_io,
        "attention": attention_path(scale, device),
    }


def attention_path(scale: Scale, device: torch.device) -> str:
    """Return which of torch's kernels computes a prompt's attention."""
    shape = scale.shape
    q, kv = (
        torch.empty(1, shape[name], 64, shape["head_dim"], device=device, dtype=scale.dtype)
        for name in ("heads", "kv_heads")
    )
    flash = can_use_flash_attention(SDPAParams(q, kv, kv, None, 0.0, False, True))
    return "flash" if flash else "with a mask of rows by keys"


def run(scale: Scale, setting: Setting, rounds: int, out: Path) -> int:
    """Check, measure and write the report. Return 1 if something was wrong, else 0."""
    report = Report(
        "end_to_end", COLUMNS, "cold: the engine without kvcore", described(scale, setting)
    )
    wrong = checked(scale, setting)
    print(f"checked: {len(wrong)} wrong", *wrong, sep="\n  ", flush=True)
    gc.collect()  # the model that was checked
    try:
        with Contest(scale, setting, "measured") as contest:
            report.notes |= contest.kvcore.implementations
            print(*(f"{what}: {who}" for what, who in report.notes.items()), sep="\n")
            wrong += measured(contest, report, rounds)
    finally:  # what was measured before something failed is worth keeping
        report.notes["wrong"] = wrong
        report.finish(out, draw)
    print(f"{len(wrong)} wrong", *wrong, sep="\n  ")
    return int(bool(wrong))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        prog="python -m benchmarks.end_to_end",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of prompts, multiples of 16")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, for each length")
    parser.add_argument("--disk", type=Path, help="a folder on the disk to measure")
    parser.add_argument(
        "--buffered", action="store_true", help="for a file system without direct I/O"
    )
    parser.add_argument("--backend", default="triton", help="kvcore's ops.backend")
    parser.add_argument("--dry-run", action="store_true", help="run on a CPU; times mean nothing")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    os.environ.setdefault("COLUMNS", "120")  # of the table, where nothing tells its width
    dry = options.dry_run
    if not dry and not torch.cuda.is_available():
        print("torch sees no GPU: `--dry-run` proves the script on a CPU", file=sys.stderr)
        return 2
    scale = DRY if dry else FULL
    if options.tokens:
        scale = replace(scale, tokens=tuple(options.tokens))
    if any(tokens % BLOCK or scale.chunk(tokens) < SHORTEST for tokens in scale.tokens):
        parser.error(
            f"--tokens {options.tokens}: give multiples of {BLOCK}, of which {scale.chunks} chunks "
            f"have {SHORTEST} tokens or more"
        )
    with tempfile.TemporaryDirectory(prefix="kvcore-", dir=options.disk) as folder:
        setting = Setting(
            torch.device("cpu" if dry else "cuda"),
            Path(folder),
            "auto" if dry else options.backend,
            "auto" if dry or options.buffered else "on",
        )
        return run(scale, setting, options.rounds, options.out)


if __name__ == "__main__":
    sys.exit(main())
