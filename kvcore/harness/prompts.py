"""Prompts as token ids: random ones, and windows of the standard library's source text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

SOURCES = (
    "argparse",
    "ast",
    "calendar",
    "codecs",
    "configparser",
    "copy",
    "csv",
    "difflib",
    "doctest",
    "enum",
    "fractions",
    "heapq",
    "inspect",
    "ipaddress",
    "locale",
    "mailbox",
    "optparse",
    "pickle",
    "random",
    "shutil",
    "statistics",
    "string",
    "tarfile",
    "textwrap",
    "threading",
    "typing",
    "uuid",
    "zipfile",
)


def words(seed: int, count: int, ids: range = range(1, 512)) -> list[int]:
    """Return random token ids without 0, which is padding. Different seeds share no prefix."""
    picks = random.Random(seed)
    return [picks.randrange(ids.start, ids.stop) for _ in range(count)]


@cache
def tokens(model: Path) -> list[int]:
    """Return many tokens of the source text of Python's standard library.

    A model with a smaller vocabulary than its tokenizer gets the remainders.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    library = Path(random.__file__).parent
    found: list[int] = []
    for name in SOURCES:
        path = library / f"{name}.py"
        if path.exists():
            found += tokenizer(path.read_text())["input_ids"]
    config = json.loads((model / "config.json").read_text())
    size = config.get("text_config", config)["vocab_size"]
    return [each if each < size else each % (size - 1) + 1 for each in found]


def windows(model: Path, count: int, shortest: int, longest: int, seed: int) -> list[list[int]]:
    """Return ``count`` windows of source text, of random length and from different places."""
    text, picks = tokens(model), random.Random(seed)
    stride = (len(text) - longest) // count
    return [text[i * stride : i * stride + picks.randint(shortest, longest)] for i in range(count)]


def mixed(model: Path, chunks: Sequence[Sequence[int]], count: int, seed: int) -> list[list[int]]:
    """Return ``count`` prompts of three random chunks each, with other tokens between them."""
    picks, words = random.Random(seed), windows(model, 4 * count, 5, 40, seed=seed)
    made = []
    for number in range(count):
        chosen = picks.sample(range(len(chunks)), 3)
        own = words[4 * number : 4 * number + 4]
        prompt = list(own[0])
        for gap, chunk in zip(own[1:], chosen, strict=True):
            prompt += [*chunks[chunk], *gap]
        made.append(prompt)
    return made
