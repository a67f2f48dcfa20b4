"""The older name of `system`."""

from __future__ import annotations

from fusedmoe.tutel.system import *  # noqa: F403
from fusedmoe.tutel.system import init_affinity_at_program_beginning, init_data_model_parallel

__all__ = ["init_affinity_at_program_beginning", "init_data_model_parallel"]
