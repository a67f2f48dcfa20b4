"""Orders, without the floor they live on."""

from fusedmoe.layers.orders import *  # noqa: F403
from fusedmoe.layers.orders import __all__ as __all__
