"""Releases of SGLang that take no linker, with kvcore as HiCache's storage.

`tests/engines/test_sglang_storage.py` has the release that takes one."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from kvcore.harness.compare import answers, assert_same_answers, small_engine
from kvcore.harness.engine_process import Generation
from kvcore.harness.prompts import windows
from kvcore.testing.faults import Fault, Rule, Seam, write_rules
from kvcore.testing.faults.plugin import FAULTY_DISK, write_plugin
from support.hicache import assert_from_storage, hicache, stored

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

OLDEST, *OTHERS = ("0.5.20", "0.5.21", "0.5.22")
ENVIRONMENTS = Path(__file__).parents[2] / ".venvs"
PAGE = 16


@pytest.mark.parametrize(
    "version", [OLDEST, *(pytest.param(other, marks=pytest.mark.exhaustive) for other in OTHERS)]
)
def test_what_was_stored_is_found_and_failed_reads_are_computed(
    version: str, model: Path, tmp_path: Path
) -> None:
    """A miss, hits after a restart and after a flush, and pages that
    are corrupt or cannot be read: the same tokens."""
    python = ENVIRONMENTS / f"sglang-{version}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {python}: tools/env.py sglang-{version} makes it")
    prompts = windows(model, 6, 300, 900, seed=11)
    found = [str(write_plugin(tmp_path / "plugin")), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(found)}
    engine = partial(small_engine, model, None, env, "sglang", python=python)
    with engine(disable_radix_cache=True) as process:
        expected = answers(process, prompts)
    rules, kept = tmp_path / "rules", tmp_path / "kv"
    write_rules(rules)
    options = {"path": str(kept), "rules": str(rules)}
    shelf = {"plugin": FAULTY_DISK, "capacity": "1GiB", "options": options}
    args = hicache({"tiers": {"shelf": shelf}}, page_size=PAGE)
    with engine(**args) as process:
        assert process.wait_ready()["version"] == version
        cold = answers(process, prompts)
        assert_same_answers(cold, expected)
        assert _cached(cold) == 0
        stored(kept, PAGE, prompts)
    with engine(**args) as process:
        for _ in range(2):
            warm = answers(process, prompts)
            assert_same_answers(warm, expected)
            assert_from_storage(warm, prompts, PAGE)
            process.reset_prefix_cache()
        write_rules(rules, Rule(Fault.BIT_FLIP, Seam.FILE_READ, rate=1 / 40))
        some = answers(process, prompts)
        assert_same_answers(some, expected)
        assert "a stored page is corrupt and was dropped" in process.log.read_text()
        assert 0 < _cached(some) < _cached(warm)
        process.reset_prefix_cache()
        write_rules(rules, Rule(Fault.ERROR, Seam.TIER_READ))
        failed = answers(process, prompts)
        assert_same_answers(failed, expected)
        assert _cached(failed) == 0
        assert "the tier shelf failed" in process.log.read_text()


def _cached(got: Sequence[Generation]) -> int:
    return sum(answer.cached_tokens for answer in got)


def test_the_stand_in_finds_the_slots_that_sglang_finds() -> None:
    """SGLang has a function of its own for this where it needs no Triton on a CPU."""
    from kvcore_sglang.testing.standins import install

    install()
    import torch
    from sglang.srt.mem_cache.allocator import paged

    from kvcore_sglang.testing.hicache import extend_slots, find_slots_in_python

    picks = random.Random(8)
    for _ in range(50):
        prefixes = [picks.randrange(40) for _ in range(picks.randint(1, 4))]
        lengths = [prefix + picks.randint(1, 60) for prefix in prefixes]
        # a prefix of n tokens ends in slot n - 1 of a page of its own
        last = [1000 * i * PAGE + prefix - 1 for i, prefix in enumerate(prefixes)]
        free = torch.tensor(picks.sample(range(5000, 6000), 40))
        given = [torch.tensor(values) for values in (prefixes, lengths, last)]
        count = sum(lengths) - sum(prefixes)
        ours, theirs = (torch.zeros(count, dtype=torch.int64) for _ in range(2))
        extend_slots(*given, free, ours, 4, PAGE)
        paged.alloc_extend_naive(*given, free, theirs, PAGE, "cpu")
        assert torch.equal(ours, theirs)
    kernel = paged.alloc_decode_kernel
    find_slots_in_python(paged)
    assert paged.alloc_decode_kernel is kernel, "this SGLang needs no stand-in"
