"""Hooks, without the floor they live on."""

from fusedmoe.layers.wire_hooks import *  # noqa: F403
from fusedmoe.layers.wire_hooks import __all__ as __all__
