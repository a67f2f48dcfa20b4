"""Auxiliary losses, without the floor they live on."""

from fusedmoe.layers.losses import *  # noqa: F403
from fusedmoe.layers.losses import __all__ as __all__
