"""Former name of `system`."""

from fusedmoe.tutel.system import *  # noqa: F403
