"""Write docs/identity.md: everything that makes KV differ, and what each engine does with it.

    python -m tools.identity > docs/identity.md

The ingredients come from `kvcore.model.ingredients`, which the adapters fill in.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvcore.model.ingredients import (
    OTHER,
    Ingredient,
    MediaIdentity,
    ModelIdentity,
    ingredients,
)

HEAD = """\
<!-- Made by `python -m tools.identity` from the code; do not edit. -->
# What KV is shared

A block of KV is reused only where it is what the engine would compute. Whatever changes KV is
therefore part of what a block is stored under. This page lists all of it, and what kvcore does with
it on each engine.

| word | meaning |
|---|---|
| shared | found by every engine whose ingredients are equal, of any kind and on any host |
| alone | found by this engine only, and not after its restart; one line in the log says why |
| left alone | the request is answered without kvcore: nothing is loaded or saved |
| runs untouched | kvcore stands aside from the engine |

Two engines share KV if they apply the same to it. Where they compute something differently, such
as a rope that depends on the served length, or a window that one of them ignores, the engine's own
rule is an ingredient, and they do not share. What kvcore cannot tell apart is alone.

Tests change each ingredient alone and expect to find nothing.
"""

COST = """\
## What the digest of the weights costs

kvcore does not read all weights. Of every tensor it reads the start, the end, and 4 KiB of each
MiB, beside the file's header. It reads tensors of up to 8 KiB whole, and files whose tensors it
cannot tell apart (`.bin` that is no zip archive, `.tensors`). Each process reads a folder once. The
digest depends on names and content, not on times or on the folder's place, so copies are equal.
Symlinks are followed.

{measured}

A fine-tune, a merge or another quantisation changes nearly all numbers of a tensor, and is always
noticed. An edit of less than one MiB inside a large tensor, such as one row of an embedding, may
not be. After such an edit, set another `namespace.salt` or clear the cache.

A LoRA adapter is digested in the same way, together with its `adapter_config.json`, and again
whenever one of its files changed. kvcore looks at the files on threads of its own: before a request
is looked up, and before its blocks are saved. A request whose files do not answer in time is left
alone.
"""

MODEL = "An engine has these in common for all its requests.\n"
MEDIA = "They change the KV of a prompt from its first medium on. Text before it stays shared.\n"
MEASURED = """\
Measured on two cores of a virtual machine with a virtual disk, files just written:

| files | from memory | from disk |
|---|---|---|
| 4.2 GB in 40 tensors | 0.03 s | 0.11 s |
| 2.0 GB in 20,000 tensors | 0.4 s | 1.0 s |

That is 0.7 to 2.6 s for each 100 GB in large tensors, and 20 to 50 us for each small one. By that
measure a dense model of 140 GB takes 1 to 4 s, and a model of 90,000 tensors 2 to 5 s more. From a
network folder that answers a read in 1 ms, 140 GB take about 9 s, because 16 reads run at once. The
last three numbers are computed, not measured."""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _table(rows: Sequence[Ingredient]) -> list[str]:
    lines = [
        _row("ingredient", "what it is", "vLLM", "SGLang", "TensorRT-LLM"),
        "|---|---|---|---|---|",
    ]
    for name, what, *engines in rows:
        lines.append(_row(name.replace("_", " "), what, *engines))
    return lines


def page() -> str:
    """Return docs/identity.md."""
    rows = [HEAD, "## In the model's fingerprint", "", MODEL, *_table(ingredients(ModelIdentity))]
    rows += ["", "## In the keys of media", "", MEDIA, *_table(ingredients(MediaIdentity))]
    rows += ["", "## By request", "", *_table(OTHER), "", COST.format(measured=MEASURED).rstrip()]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
