"""Activation checkpoints around a call: which will compute it again, and which does so now.

What is decided once for a forward and must be the same when a checkpoint computes it again (here, experts that are
replayed) is kept with the checkpoint, and goes with it. Known are torch's checkpoints, reentrant or not, selective or
not, and whatever else is an autograd function whose backward calls the forward again (Megatron's, DeepSpeed's).
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NamedTuple

from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint


class Checkpoints(NamedTuple):
    """Objects that live as long as the graphs of checkpoints.

    Attributes:
        forward: of those whose first forward this call is in, the innermost first.
        again: of the innermost that computes this call again; None: none does.
    """

    forward: list[Any]
    again: Any


def enclosing_checkpoints() -> Checkpoints:
    """Finds the checkpoints around the caller, on Python's stack.

    Torch hands out no such thing: what it keeps of a checkpoint are local variables of its functions.
    """
    forward: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        of_torch = code.co_filename == checkpoint.__file__
        if of_torch and code.co_name == "checkpoint" and (generator := frame.f_locals.get("gen")) is not None:
            if generator.gi_frame is not None:
                forward.append(generator.gi_frame.f_locals["new_frame"])
        elif of_torch and code.co_name == "unpack_hook":
            # Whatever is further out has nothing to do with this forward: it only called the backward pass.
            return Checkpoints(forward, frame.f_locals["frame"])
        elif code.co_name in ("forward", "backward") and "ctx" in code.co_varnames[: code.co_argcount]:
            ctx = frame.f_locals["ctx"]
            if not isinstance(ctx, BackwardCFunction):
                pass
            elif code.co_name == "backward":
                return Checkpoints(forward, ctx)
            else:
                forward.append(ctx)
        frame = frame.f_back
    return Checkpoints(forward, None)
