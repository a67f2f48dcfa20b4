"""Gates, without the floor they live on."""

from fusedmoe.layers.gates import *  # noqa: F403
from fusedmoe.layers.gates import __all__ as __all__
