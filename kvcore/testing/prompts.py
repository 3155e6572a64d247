"""Prompts of real text: windows of the standard library's sources, as token ids."""

from __future__ import annotations

import random
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


@cache
def tokens(model: Path) -> list[int]:
    """A long run of tokens of Python's own standard library."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    library = Path(random.__file__).parent
    found: list[int] = []
    for name in SOURCES:
        path = library / f"{name}.py"
        if path.exists():
            found += tokenizer(path.read_text())["input_ids"]
    return found


def windows(model: Path, count: int, shortest: int, longest: int, seed: int) -> list[list[int]]:
    """``count`` prompts of random length, all from different places."""
    text, picks = tokens(model), random.Random(seed)
    stride = (len(text) - longest) // count
    return [text[i * stride : i * stride + picks.randint(shortest, longest)] for i in range(count)]
