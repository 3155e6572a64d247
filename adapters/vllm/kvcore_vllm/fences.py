"""The pages that a step of vLLM writes: saves that still read them must end before."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from kvcore.connector.page_table import PageUsers

__all__ = ["readers_of", "unknown_writers", "written_pages"]

_log = logging.getLogger("kvcore.vllm.scheduler")

KNOWN_FIELDS = frozenset(
    {
        "block_table_updates",
        "kv_cache_block_copies",
        "kv_connector_block_state",
        "new_block_ids_to_zero",
        "num_common_prefix_blocks",
    }
)
"""Fields of vLLM's SchedulerOutput about pages, in the versions that kvcore knows."""


@cache
def unknown_writers(output: type[Any]) -> tuple[str, ...]:
    """Return the fields of vLLM's output by which a step may write pages unknown to kvcore.

    If there are any, every step waits for every save.
    """
    names = {
        *getattr(output, "__dataclass_fields__", ()),
        *getattr(output, "__struct_fields__", ()),
    }
    about_pages = {name for name in names if "block" in name or "kv_cache" in name}
    found = tuple(sorted(about_pages - KNOWN_FIELDS))
    if found:
        _log.warning("every step waits for all saves, because vLLM has %s", ", ".join(found))
    return found


def written_pages(output: SchedulerOutput) -> set[int]:
    """Return the pages that a step gives away, zeroes, copies to, or puts into a table."""
    written = set(output.new_block_ids_to_zero or ())
    for new in output.scheduled_new_reqs:
        written.update(itertools.chain.from_iterable(new.block_ids))
    for block_ids in output.scheduled_cached_reqs.new_block_ids:
        if block_ids is not None:
            written.update(itertools.chain.from_iterable(block_ids))
    written.update(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
    tables = getattr(output, "block_table_updates", None) or {}  # vLLM 0.30 and 0.31
    for groups in tables.values():
        written.update(itertools.chain.from_iterable(groups))
    return written


def readers_of(users: PageUsers, output: SchedulerOutput, loaded: Iterable[int]) -> set[int]:
    """Return the saves of ``users`` that read a page written by a step, or one of ``loaded``."""
    readers, kind = set(users.graphs), cast("Any", type(output))
    if readers and not unknown_writers(kind):
        written = written_pages(output).union(loaded)
        readers = {graph_id for _, saves in users.among(written) for graph_id in saves}
    return readers
