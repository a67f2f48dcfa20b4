"""Integer programmes (OR-Tools CP-SAT) whose result is the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


def solved(model: cp_model.CpModel, limit: float) -> cp_model.CpSolver | None:
    """A solver with the best solution that it found; None where there is none.

    `limit`: of its work, in units of about a second that are the same on every machine. One worker with one seed then
    stops at the same solution everywhere.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = limit
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    return solver if solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
