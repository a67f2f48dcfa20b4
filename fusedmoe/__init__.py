"""Mixture-of-experts layers for PyTorch whose communication overlaps with computation.

Names are imported on first access, so modules without tensor computation (`fusedmoe.schedule`) do not import torch.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusedmoe import autograd as autograd
    from fusedmoe import experts as experts
    from fusedmoe import gates as gates
    from fusedmoe import graph as graph
    from fusedmoe import hooks as hooks
    from fusedmoe import losses as losses
    from fusedmoe import metrics as metrics
    from fusedmoe import orders as orders
    from fusedmoe import placement as placement
    from fusedmoe import routing as routing
    from fusedmoe import schedule as schedule
    from fusedmoe import training as training
    from fusedmoe.blocks.pipeline import PipelinedBlocks as PipelinedBlocks
    from fusedmoe.blocks.pipeline import pipeline as pipeline
    from fusedmoe.comm.topology import Topology as Topology
    from fusedmoe.engine.dispatcher import Dispatcher as Dispatcher
    from fusedmoe.engine.dispatcher import Handle as Handle
    from fusedmoe.engine.dispatcher import Routed as Routed
    from fusedmoe.errors import ConfigError as ConfigError
    from fusedmoe.errors import RankError as RankError
    from fusedmoe.hooks import HookContext as HookContext
    from fusedmoe.hooks import Hooks as Hooks
    from fusedmoe.layers.fsmoe import CallbackBase as CallbackBase
    from fusedmoe.layers.fsmoe import ExpertBase as ExpertBase
    from fusedmoe.layers.fsmoe import LinearGate as LinearGate
    from fusedmoe.layers.fsmoe import MOELayer as MOELayer
    from fusedmoe.layers.fsmoe import SimpleOrder as SimpleOrder
    from fusedmoe.layers.moe import MoELayer as MoELayer
    from fusedmoe.layers.schedule import Schedule as Schedule
    from fusedmoe.memory import keep_memory as keep_memory
    from fusedmoe.metrics import trace as trace
    from fusedmoe.schedule.policies import register_policy as register_policy

__version__ = "0.1.0"

_NAMES = {
    "hooks": ("HookContext", "Hooks"),
    "blocks.pipeline": ("PipelinedBlocks", "pipeline"),
    "comm.topology": ("Topology",),
    "engine.dispatcher": ("Dispatcher", "Handle", "Routed"),
    "errors": ("ConfigError", "RankError"),
    "layers.fsmoe": ("CallbackBase", "ExpertBase", "LinearGate", "MOELayer", "SimpleOrder"),
    "layers.moe": ("MoELayer",),
    "metrics": ("trace",),
    "layers.schedule": ("Schedule",),
    "memory": ("keep_memory",),
    "schedule.policies": ("register_policy",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
__all__ = [*_HOMES]

# From `__getattr__` a type checker would infer that any name exists.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _parts():
            try:
                return import_module(f"fusedmoe.{name}")
            except ImportError as error:
                # The library behind an integration is not installed; `hasattr` catches only AttributeError.
                raise AttributeError(f"fusedmoe.{name} cannot be imported: {error}") from error
        if name not in _HOMES:
            raise AttributeError(f"module 'fusedmoe' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"fusedmoe.{_HOMES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_parts()})

    def _parts() -> set[str]:
        return {part.name for part in iter_modules(__path__) if not part.name.startswith("_")}
