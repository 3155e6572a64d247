"""The mistakes: ten that were made here, each as an edit of today's sources.

A mistake names the tests of `make test` that find it, the cheapest first, where it can in two
layers: the code itself, and an engine. Add one when a fault gets past the suite.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["MISTAKES", "Mistake"]


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """An edit that puts a mistake back. ``commit`` is the one that mended it, or told of it."""

    name: str
    breaks: str
    commit: str
    file: str
    old: str
    new: str
    found_by: tuple[str, ...]

    def applied(self, root: Path) -> str:
        """Return the text of the file with the mistake.

        Raises ValueError unless the file has the old text exactly once.
        """
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.name}: {self.file} has the text that the mistake replaces {count} times; "
                "write the mistake anew for the sources as they are"
            )
        return text.replace(self.old, self.new)


MISTAKES = (
    Mistake(
        name="a-wrong-key",
        breaks="An adapter is known by its name alone, so KV of other LoRA weights is served.",
        commit="b346e187",
        file="kvcore/model/identity.py",
        old='    return f"{name}:{_adapter(path, lora_stamp(path)).hex()}"\n',
        new="    return name\n",
        found_by=(
            "tests/unit/model/test_identity.py::"
            "test_an_adapter_is_known_by_name_weights_and_configuration",
            "tests/unit/testing/test_reference_engine.py::"
            "test_adapters_of_one_name_are_told_apart_by_their_weights",
        ),
    ),
    Mistake(
        name="an-unfenced-page",
        breaks="A step of vLLM writes to pages that a save still reads.",
        commit="0796890d",
        file="adapters/vllm/kvcore_vllm/worker.py",
        old="        self._worker.follow(*plan.fence)\n",
        new="",
        found_by=(
            "tests/adapters/vllm/test_waits.py::"
            "test_a_fence_reaches_a_save_that_waits_in_the_queue",
            "tests/adapters/orders/test_vllm_orders.py::"
            "test_every_order_of_vllm_has_the_right_kv[1-piecewise-1-0]",
        ),
    ),
    Mistake(
        name="published-early",
        breaks="Blocks of a step are saved before the forward that computes them, and then found.",
        commit="dd9c9d92",
        file="adapters/vllm/kvcore_vllm/worker.py",
        old="        self._submit_saves(plan.early_saves)\n",
        new=(
            "        early, plan.late_saves = [*plan.early_saves, *plan.late_saves], []\n"
            "        self._submit_saves(early)\n"
        ),
        found_by=(
            "tests/adapters/orders/test_vllm_orders.py::"
            "test_every_order_of_vllm_has_the_right_kv[1-piecewise-1-0]",
            "tests/engines/test_vllm.py::test_host_disk_and_restart[12-16-128-blockwise]",
        ),
    ),
    Mistake(
        name="stale-after-a-clear",
        breaks="What is written to disk while it is cleared stays there, and is found after a "
        "restart.",
        commit="2be321c5",
        file="kvcore/manager/invalidation.py",
        old=(
            "            if reservation.revoked and tier in self._records:\n"
            "                self._records[tier].landed(reservation.slots[live:].tolist())\n"
            "            self._transport.invalidate(tier, slot_runs(reservation.slots[live:]))\n"
        ),
        new="            pass\n",
        found_by=(
            "tests/unit/manager/test_invalidation.py::"
            "test_a_clear_names_the_slots_that_are_still_written",
            "tests/unit/testing/test_races.py::test_a_clear_beside_a_save_that_lands",
        ),
    ),
    Mistake(
        name="a-rank-that-fails-alone",
        breaks="TensorRT-LLM uses the tokens of a step whose KV did not arrive on another rank.",
        commit="159374da",
        file="adapters/trtllm/kvcore_trtllm/worker.py",
        old="            plan.broken = self._tally.first(plan.broken)\n",
        new="            pass\n",
        found_by=(
            "tests/adapters/trtllm/test_ranks.py::"
            "test_a_step_fails_on_every_rank_if_a_load_has_failed_on_one",
            "tests/adapters/trtllm/test_ranks.py::"
            "test_a_step_that_shares_pages_with_a_load_that_failed_before",
        ),
    ),
    Mistake(
        name="an-asynchronous-failure",
        breaks="A load that an error has cancelled counts as an aborted request's, so the request "
        "that waits for it goes on from pages that were never filled.",
        commit="159374da",
        file="kvcore/connector/worker.py",
        old="            report = _refused(report)\n",
        new="            pass\n",
        found_by=(
            "tests/unit/connector/test_worker.py::"
            "test_what_an_error_cancels_is_not_reported_as_cancelled_by_the_leader",
            "tests/adapters/trtllm/test_ranks.py::"
            "test_a_load_that_an_error_has_cancelled_is_not_taken_for_an_aborted_one",
        ),
    ),
    Mistake(
        name="a-shard-of-another-size",
        breaks="A clear of a store leaves the values of engines with another number of ranks.",
        commit="05e03a2b",
        file="kvcore/tiers/remote/lookup.py",
        old="        splits = [self._shards, *self._others()]\n",
        new="        splits = [self._shards]\n",
        found_by=(
            "tests/unit/tiers/test_sharding_stores.py::test_blocks_are_removed_in_all_their_parts",
            "tests/unit/testing/test_remote_engine.py::"
            "test_clear_removes_what_engines_of_another_size_wrote",
        ),
    ),
    Mistake(
        name="a-torn-record",
        breaks="A record of the disk tier that was written in part is believed after a restart.",
        commit="c9decaf8",
        file="kvcore/tiers/disk/format.py",
        old='    valid = current & (seals == candidates["seal"])\n',
        new="    valid = current\n",
        found_by=(
            "tests/unit/tiers/disk/test_disk_damage.py::"
            "test_a_flipped_bit_of_a_record_drops_its_block",
            "tests/adversary/test_forged_blocks.py::"
            "test_forged_kv_in_the_disk_folder_is_recomputed",
        ),
    ),
    Mistake(
        name="a-forged-value",
        breaks="A value of a store is believed without its MAC, so whoever writes to the store "
        "chooses what the model reads.",
        commit="79ae6f0e",
        file="kvcore/tiers/remote/format.py",
        old="    elif guard is not None and not guard.unseal(\n",
        new="    elif guard is not None and guard.encrypts and not guard.unseal(\n",
        found_by=(
            "tests/unit/tiers/test_guard.py::test_a_value_that_was_changed_anywhere_is_refused",
            "tests/adversary/test_forged_blocks.py::test_every_forged_value_of_a_store_is_refused",
        ),
    ),
    Mistake(
        name="a-leaked-pin",
        breaks="A load that cannot be planned keeps its source blocks pinned for ever.",
        commit="520663e9",
        file="kvcore/manager/loader.py",
        old="deadline_s)\n        except KVCoreError:\n            self._flights.release(flight)\n",
        new="deadline_s)\n        except KVCoreError:\n",
        found_by=(
            "tests/unit/manager/test_manager.py::"
            "test_a_lookup_that_is_no_longer_true_leaves_nothing_pinned",
            "tests/unit/testing/test_reference_engine.py::"
            "test_a_load_that_cannot_be_planned_is_computed_and_pins_nothing",
        ),
    ),
)
"""The mistakes, in the order in which issue 31 names their kinds."""
