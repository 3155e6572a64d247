"""The end of an op that several workers carry out, each on its own part."""

from __future__ import annotations

from kvcore.transfer.graph import OpReport, RowError

__all__ = ["Quorum"]


class Quorum:
    """Merges the reports of an op until they cover all ``ranks``.

    A row has failed if it failed on any rank. Not thread-safe.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._partial: dict[tuple[int, int], tuple[int, dict[int, RowError]]] = {}

    def add(self, report: OpReport) -> OpReport | None:
        """Add a rank's report.

        Returns the merged report if all ranks have now ended the op, else None.
        """
        place = (report.graph_id, report.op_id)
        seen, failed = self._partial.pop(place, (0, {}))
        seen, failed = seen + 1, {**failed, **report.failed}
        if seen < self._ranks:
            self._partial[place] = (seen, failed)
            return None
        return OpReport(*place, failed)

    def __len__(self) -> int:
        """Return the number of ops that some ranks have ended and others have not."""
        return len(self._partial)
