"""Public names of hooks; `fusedmoe/layers/wire_hooks.py` defines them."""

from fusedmoe.layers.wire_hooks import *  # noqa: F403
from fusedmoe.layers.wire_hooks import __all__ as __all__
