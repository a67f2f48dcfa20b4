"""Expert networks, without the floor they live on."""

from fusedmoe.layers.expert_networks import *  # noqa: F403
from fusedmoe.layers.expert_networks import __all__ as __all__
