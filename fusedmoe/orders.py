"""Public names of orders; `fusedmoe/layers/orders.py` defines them."""

from fusedmoe.layers.orders import *  # noqa: F403
from fusedmoe.layers.orders import __all__ as __all__
