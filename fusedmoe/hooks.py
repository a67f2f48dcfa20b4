"""Public names of hooks; `fusedmoe/autograd/hooks.py` defines them."""

from fusedmoe.autograd.hooks import *  # noqa: F403
from fusedmoe.autograd.hooks import __all__ as __all__
