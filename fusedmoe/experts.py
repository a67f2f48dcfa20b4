"""Expert networks, without the floor they live on."""

from fusedmoe.layers.experts import *  # noqa: F403
from fusedmoe.layers.experts import __all__ as __all__
