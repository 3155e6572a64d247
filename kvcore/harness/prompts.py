"""Prompts as token ids: random ones, and windows of the standard library's source text."""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kvcore.harness.models import TOKENIZER_FILES, made_once, model_cache

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
    config = json.loads((model / "config.json").read_text())
    size = config.get("text_config", config)["vocab_size"]
    return [each if each < size else each % (size - 1) + 1 for each in _text(model)]


def _text(model: Path) -> Sequence[int]:
    """Return the text in tokens of the model's tokenizer, which many models may have.

    It is kept beside the models: tokenizing takes some seconds of a core.
    """
    library = Path(random.__file__).parent
    texts = [path.read_text() for name in SOURCES if (path := library / f"{name}.py").exists()]
    files = [file for name in TOKENIZER_FILES if (file := model / name).exists()]
    if not files:  # a tokenizer of another kind
        return _tokenized(model, texts)
    digest = hashlib.sha256()
    for part in (*(file.read_bytes() for file in files), *map(str.encode, texts)):
        digest.update(hashlib.sha256(part).digest())
    folder = made_once(
        model_cache() / f"text-{digest.hexdigest()[:16]}",
        lambda folder: (folder / "tokens").write_bytes(array("i", _tokenized(model, texts))),
    )
    found = array("i")
    found.frombytes((folder / "tokens").read_bytes())
    return found


def _tokenized(model: Path, texts: Sequence[str]) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [token for text in texts for token in tokenizer(text)["input_ids"]]


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
