"""Registry of objects that compiled graphs refer to by name.

A graph of `torch.compile` holds tensors and plain values only. Its operators look the object up by name when the graph
runs, so one graph serves all layers that are alike.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet, WeakValueDictionary

from fusedmoe.errors import ConfigError


class GraphHandle:
    """The objects registered under one name (`owners`), held weakly. Copies and pickles have no owners.

    Each owner keeps the handle, so the name is registered as long as one of them lives.
    """

    __slots__ = ("__weakref__", "owners")

    def __init__(self) -> None:
        self.owners: WeakSet[Any] = WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphHandle:
        return GraphHandle()

    def __reduce__(self) -> tuple[type[GraphHandle], tuple[()]]:
        return GraphHandle, ()


_handles: WeakValueDictionary[str, GraphHandle] = WeakValueDictionary()


def register(name: str, owner: Any) -> GraphHandle:
    """Register an object under a name, which several objects may share.

    `owner` must keep the returned handle: the name is registered as long as a handle exists.
    """
    handle = _handles.get(name)
    if handle is None:
        handle = _handles[name] = GraphHandle()
    handle.owners.add(owner)
    return handle


def find(name: str) -> Any:
    """Return an object registered under `name`, preferably one whose `is_open` is true; None if all were freed.

    Objects under one name are interchangeable.
    """
    handle = _handles.get(name)
    owners = [] if handle is None else list(handle.owners)
    return next((owner for owner in owners if getattr(owner, "is_open", True)), owners[0] if owners else None)


def require(name: str, operation: str) -> Any:
    """Return an object registered under `name`, as `find`. Raise `ConfigError` if there is none."""
    owner = find(name)
    if owner is None:
        raise ConfigError(
            f"{operation}: the layer of {name} was freed; keep the model until the backward pass has ended"
        )
    return owner
