"""Two engines, one server: what one computed the other loads, and the answers stay the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore.config import Config
from kvcore.testing.served import RunningServer, serve, settings, until, words

Start = Callable[[Config], RunningServer]


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (1, 2), (2, 1)])
def test_what_one_engine_computes_the_other_loads(
    start: Start, engine: Any, plain: Any, folder: Path, ranks: tuple[int, int]
) -> None:
    config = settings(folder)
    server = start(config)
    first, second = (engine(config, ranks=count) for count in ranks)
    prompt = words(1, 100)
    assert serve(first, prompt) == (plain(prompt), {})
    until(lambda: server.idle)
    assert serve(second, prompt) == (plain(prompt), {"host": 96})
    longer = [*prompt, *words(2, 60)]
    assert serve(second, longer)[0] == plain(longer)
    until(lambda: server.idle)
    assert serve(first, longer)[1] == {"host": 63}, "96 are its own, the rest the other's"
