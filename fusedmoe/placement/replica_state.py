"""State machine of a layer's replicas, and the times at which replicas are sent.

docs/life-of-a-replica.md draws the transitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class ReplicaState(Enum):
    """State of all replicas of one layer on one rank."""

    ABSENT = "absent"  # no replica of the current parameters
    IN_FLIGHT = "in flight"
    PRESENT = "present"  # every replica in the table is complete
    RELEASED = "released"  # memory is freed until the backward pass fetches the replicas again


class ReplicaEvent(Enum):
    """Event that changes the state of a layer's replicas."""

    FETCH = "fetch"  # start the transfers of all replicas
    ARRIVE = "arrive"
    FAIL = "fail"
    ADD = "add"  # start transfers of replicas chosen after the gate
    RELEASE = "release"
    DROP = "drop"  # a new forward pass or placement begins: parameters may have changed


_S, _E = ReplicaState, ReplicaEvent

#: (state, event) -> next state. Missing pairs are errors.
TRANSITIONS: Mapping[tuple[ReplicaState, ReplicaEvent], ReplicaState] = MappingProxyType(
    {
        (_S.ABSENT, _E.FETCH): _S.IN_FLIGHT,
        (_S.RELEASED, _E.FETCH): _S.IN_FLIGHT,
        (_S.IN_FLIGHT, _E.ARRIVE): _S.PRESENT,
        (_S.IN_FLIGHT, _E.FAIL): _S.ABSENT,
        (_S.PRESENT, _E.ADD): _S.IN_FLIGHT,
        (_S.PRESENT, _E.RELEASE): _S.RELEASED,
        # A later forward pass of the step has dropped the replicas before this forward's backward.
        (_S.ABSENT, _E.RELEASE): _S.RELEASED,
        (_S.RELEASED, _E.RELEASE): _S.RELEASED,
        # Transfers in flight still write to the memory: await them first.
        **{(state, _E.DROP): _S.ABSENT for state in _S if state is not _S.IN_FLIGHT},
    }
)


def after(state: ReplicaState, event: ReplicaEvent) -> ReplicaState:
    """Return the next state. Raises `RuntimeError` for an event that is illegal in `state`."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        legal = ", ".join(sorted(event.value for source, event in TRANSITIONS if source is state))
        raise RuntimeError(
            f"placement='fssdp': replicas are {state.value} and cannot {event.value}; legal events: {legal}"
        ) from None


class ReplicaTiming(Enum):
    """When a layer's replicas are sent, and their gradients returned."""

    EAGER = "from the start of the model's forward pass, and from the end of the layer's backward pass"
    IN_TURNS = "between the rows of one layer and the rows of the next layer, in a step with a plan"
    BY_TASKS = "in the sparse all-gather and reduce-scatter tasks of a plan"
