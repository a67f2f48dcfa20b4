"""Late copies: experts that a rank gets once the gate has chosen, and that follow the layer's rows.

Worked example: rank 1's table is [2, 0], and its copy of expert 0 was chosen after the gate. Rows go first, then the
copy; rank 1 computes its rows for expert 2 meanwhile, and those for expert 0 last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fusedmoe.comm.all_to_all import LastTokens
from fusedmoe.placement.traffic import Transfer


class LateCopies:
    """The late copies of one layer, the same on all ranks.

    They are known until placements change: what is computed again, and a step's other forwards, must find the order of
    rows that the first one had. There they travel with all other copies.

    Args:
        transfers: what brings them; () where there are none.
        held_W: the experts in each rank's table.
        computed_EV: rows of each expert that each rank computes.
        start: starts them on their way, given whether that is to be recorded.
    Attributes:
        rows_W: their rows in each rank's table.
        tokens: those that go to them, which come last; None: there are none.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer] = (),
        held_W: Sequence[Sequence[int]] = (),
        computed_EV: NDArray[np.int64] | None = None,
        start: Callable[[bool], None] | None = None,
    ) -> None:
        came = {(one.target, one.expert) for one in transfers}
        self.rows_W = [
            [row for row, expert in enumerate(held) if (rank, expert) in came] for rank, held in enumerate(held_W)
        ]
        self._start = start
        self.tokens: LastTokens | None = None
        if computed_EV is not None:
            last_WP = np.zeros((len(held_W), max(map(len, held_W))), dtype=bool)  # places as `by_place` numbers them
            late_W = np.zeros(len(held_W))
            for rank, rows in enumerate(self.rows_W):
                last_WP[rank, rows] = True
                late_W[rank] = computed_EV[[held_W[rank][row] for row in rows], rank].sum()
            self.tokens = LastTokens(last_WP, late_W / np.maximum(computed_EV.sum(axis=0), 1))

    def __bool__(self) -> bool:
        return any(self.rows_W)

    @property
    def waiting(self) -> bool:
        """Tells whether they are to follow the rows of this forward, and have not started yet."""
        return self._start is not None

    def send(self, recorded: bool = True) -> bool:
        """Starts them on their way, and tells whether there were any to start. Collective.

        recorded: as a span of the layer's recorder; else the executor records a plan's task.
        """
        start, self._start = self._start, None
        if start is not None:
            start(recorded)
        return start is not None

    def forget(self) -> None:
        """Leaves those that have not started where they are."""
        self._start = None
