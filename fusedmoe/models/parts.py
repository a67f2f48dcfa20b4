"""The parts of a MoE layer that a config describes in words: its gate, experts and order."""

from __future__ import annotations

import inspect

from fusedmoe.errors import ConfigError
from fusedmoe.layers.experts import FeedForward
from fusedmoe.layers.gates import GATES, Gate
from fusedmoe.layers.orders import ORDERS, Order
from fusedmoe.models.config import ModelConfig


def make_gate(config: ModelConfig) -> Gate:
    """The gate named in the config. Of experts, k and capacity_factor it is given those that it takes.

    Raises:
        ConfigError: no such gate or option, or experts that are not settled.
    """
    if config.gate not in GATES:
        raise ConfigError(f"gate = {config.gate!r} is not one of {', '.join(GATES)}")
    if config.experts is None:
        raise ConfigError("the number of experts is not settled: give `experts`, or call with_experts(ranks)")
    kind = GATES[config.gate]
    known = inspect.signature(kind).parameters
    arguments = {"experts": config.experts, "k": config.k, "capacity_factor": config.capacity_factor}
    arguments = {name: value for name, value in arguments.items() if name in known}
    for name in config.gate_options:
        if name not in known:
            raise ConfigError(f"gate {config.gate} has no option {name!r}; it has {', '.join(known)}")
    return kind(**{**arguments, **config.gate_options})


def make_experts(config: ModelConfig) -> FeedForward:
    """The experts of one layer."""
    return FeedForward(config.hidden, config.nonlinearity, config.bias)


def make_shared(config: ModelConfig) -> FeedForward | None:
    """The expert that every token visits, if there is one."""
    return FeedForward(config.shared_hidden, config.nonlinearity, config.bias) if config.shared_hidden else None


def make_order(config: ModelConfig) -> Order | None:
    """The order named in the config; None leaves it to the layer."""
    if config.order is None:
        return None
    if config.order not in ORDERS:
        raise ConfigError(f"order = {config.order!r} is not one of {', '.join(ORDERS)}")
    return ORDERS[config.order]()
