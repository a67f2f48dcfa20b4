"""Hooks, without the floor they live on."""

from fusedmoe.layers.hooks import *  # noqa: F403
from fusedmoe.layers.hooks import __all__ as __all__
