"""Emulation of CUDA graphs without a GPU: operations and launches are recorded once and rerun.

Operations that a CUDA graph refuses are refused here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class NoWaitingOperation(TorchDispatchMode):
    """Reject operations that wait for the device on CUDA, to return a value or the shape of their result."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "repeat_interleave", "equal")

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        sized = kwargs.get("output_size") is not None
        if function.overloadpacket.__name__ in self.NAMES and not sized:
            raise RuntimeError(f"{function} would wait for the device")
        return function(*args, **kwargs)


class NoWaitingMethod(TorchFunctionMode):
    """Reject methods that read a CPU tensor without an operation."""

    METHODS = (Tensor.tolist, Tensor.numpy, Tensor.cpu)

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in self.METHODS:
            raise RuntimeError(f"{function} would wait for the device")
        return function(*args, **(kwargs or {}))


class Recording(NoWaitingOperation):
    """Record operations and launches inside `with`, each with its memory and its scalar arguments.

    Collectives and waiting operations are rejected. `replay` reruns everything in the same memory with the same
    scalars, even if the host has received or counted new values since.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Callable[[], Any]] = []
        self._inside, self._methods = False, NoWaitingMethod()

    def __enter__(self) -> Self:
        from triton.runtime.interpreter import InterpretedFunction

        self._run = InterpretedFunction.run

        def launch(kernel: Any, *args: Any, **keywords: Any) -> Any:
            return self._launch(kernel, *args, **keywords)

        InterpretedFunction.run = launch  # type: ignore[method-assign]
        self._methods.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        super().__exit__(*error)
        self._methods.__exit__(*error)
        InterpretedFunction.run = self._run

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if "c10d" in function.namespace:
            raise RuntimeError(f"{function} is a collective")
        outer, self._inside = self._inside, True
        try:
            made = super().__torch_dispatch__(function, types, args, kwargs)
        finally:
            self._inside = outer
        self._steps.append(partial(_again, function, args, kwargs or {}, made))
        return made

    def _launch(self, kernel: Any, *args: Any, **keywords: Any) -> Any:
        # Replaying an operator replays its own launches.
        if not self._inside:
            self._steps.append(partial(self._run, kernel, *args, **keywords))
        with _disable_current_modes():
            return self._run(kernel, *args, **keywords)

    def replay(self) -> None:
        with torch.no_grad():
            for step in self._steps:
                step()


def _again(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
    for old, new in zip(tree_leaves(made), tree_leaves(function(*args, **kwargs)), strict=True):
        # Views and tensors written in place keep their memory.
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            assert old.shape == new.shape, f"{function} makes {list(new.shape)} where it made {list(old.shape)}"
            old.copy_(new)


@contextmanager
def captured(device: torch.device) -> Iterator[Callable[[], None]]:
    """Capture the body, in a CUDA graph on a GPU; yield the function that replays it, for calls after the block."""
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph.replay
        return
    with Recording() as recording:
        yield recording.replay
