"""Private names of PyTorch, checked against 2.11 to 2.15."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch._C import _get_tracing_state as _get_tracing_state  # None unless torch.jit traces
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.algorithms.model_averaging import utils as averaging
from torch.nn.modules import module as _module
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from fusedmoe.compat import require_names
from fusedmoe.errors import ConfigError

CHECKED = "2.11 to 2.15"
_TESTED_BELOW = (2, 16)

_autograd = torch._C._autograd
_HOOKS = ("_top_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks", "_push_saved_tensors_default_hooks")
for _owner, _names in (
    (torch._C, ("_current_graph_task_id",)),
    (_autograd, _HOOKS),
    (torch.autograd.function, ("BackwardCFunction",)),
    (checkpoint, ("_CheckpointFrame", "_CachingTorchDispatchMode", "_CachedTorchDispatchMode")),
    (DistributedDataParallel, ("_active_ddp_module",)),
    (averaging, ("average_parameters",)),
    (TorchDispatchMode, ("__torch_dispatch__", "__enter__", "__exit__")),
    (torch.ops.c10d, ("allreduce_", "alltoall_base_")),
):
    require_names("torch", torch.__version__, CHECKED, _owner, *_names)

if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= _TESTED_BELOW:
    warnings.warn(f"fusedmoe was tested with PyTorch {CHECKED}; this is {torch.__version__}", stacklevel=2)

# Every collective of PyTorch runs as an operator of one of these namespaces.
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")

#: Modules to which FSDP2 and other composable functions of PyTorch were applied, each with a reference to their state.
module_states = _module_state_mapping

disable_current_modes = _disable_current_modes
dispatch_modes = _get_current_dispatch_mode_stack
#: Dispatch modes of selective activation checkpoints, in a forward and in its recomputation.
selective_modes = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)

#: Number of the backward pass that this thread is in; −1 outside of one.
graph_task_id = torch._C._current_graph_task_id

#: Return the innermost saved-tensor hooks of this thread, (pack, unpack), or None. Its argument: also while tracing.
saved_tensor_hooks = _autograd._top_saved_tensors_default_hooks


def unexpected(what: str) -> ConfigError:
    """Make the error for private state of PyTorch that has another shape than the checked versions give it."""
    return ConfigError(f"fusedmoe: {what} in PyTorch {torch.__version__} is not as expected; install torch {CHECKED}")


def active_ddp() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel module whose forward is under way."""
    return DistributedDataParallel._active_ddp_module


class ShardedParameter(NamedTuple):
    """A parameter that FSDP2 shards: its module, its name there, and the ranks that hold the shards."""

    module: nn.Module
    name: str
    ranks: list[int]


def fsdp_parameters() -> Iterator[ShardedParameter]:
    """Iterate over the parameters that FSDP2 shards in this process."""
    if not module_states:
        return
    # The import takes long and is needed only where some composable function was applied.
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    for reference in list(module_states.values()):
        state = reference()
        if not isinstance(state, FSDPState):
            continue
        groups: list[Any]
        if hasattr(state, "_fsdp_param_groups"):
            groups = state._fsdp_param_groups
        elif hasattr(state, "_fsdp_param_group"):  # PyTorch 2.11: one group at most
            groups = [state._fsdp_param_group]
        else:
            raise unexpected("FSDPState (without parameter groups)")
        for group in filter(None, groups):
            yield from map(_sharded_parameter, group.fsdp_params)


def _sharded_parameter(parameter: Any) -> ShardedParameter:
    try:
        info, mesh = parameter._module_info, parameter.mesh_info.mesh
        return ShardedParameter(info.module, info.param_name, mesh.mesh.flatten().tolist())
    except AttributeError as error:
        raise unexpected(f"FSDPParam ({error})") from error


class Recomputation(NamedTuple):
    """A checkpoint that computes its forward again.

    Attributes:
        checkpoint: the object that the first forward had for it, in `checkpoints()`.
        run: identifies this recomputation: a retained graph has one for each backward pass.
    """

    checkpoint: Any
    run: Any


class Checkpoints(NamedTuple):
    """Activation checkpoints around a call, as objects that live as long as their graphs.

    Attributes:
        forward: checkpoints whose first forward this call is in.
        again: the innermost checkpoint that computes this call again, if any.
    """

    forward: list[Any]
    again: Recomputation | None


def checkpoints() -> Checkpoints:
    """Find the activation checkpoints around the caller.

    A non-reentrant checkpoint of PyTorch pushes a saved-tensor hook that refers to its frame: one hook for the first
    forward, another for a recomputation. Any other checkpoint is an autograd function whose `forward(ctx, …)` runs
    without a graph and whose `backward(ctx, …)` runs it again: PyTorch's reentrant one, Megatron's, DeepSpeed's.
    """
    forward: list[Any] = []
    again = None
    with saved_tensor_hooks_removed() as hooks:
        for pack, _ in hooks:
            if is_checkpoint_hook(pack):
                frame, group = _frame_of(pack)
                if group is not None:
                    again = Recomputation(frame, pack), group
                    break  # whatever is further out called this backward pass, not this forward
                forward.append(frame)
    contexts, backward = _autograd_contexts()
    forward += contexts
    task = graph_task_id()
    if again is None:
        return Checkpoints(forward, None if backward is None else Recomputation(backward, task))
    # A backward pass begun during the recomputation is a task of its own. What it computes again is not the frame's.
    nested = isinstance(again[1], int) and task not in (-1, again[1])
    return Checkpoints(forward, Recomputation(backward, task) if nested and backward is not None else again[0])


def is_checkpoint_hook(pack: Any) -> bool:
    """Return whether a pack hook for saved tensors belongs to a non-reentrant checkpoint of PyTorch."""
    return getattr(pack, "__module__", None) == checkpoint.__name__


@contextmanager
def saved_tensor_hooks_removed(only_checkpoints: bool = False) -> Iterator[list[tuple[Any, Any]]]:
    """Remove this thread's saved-tensor hooks for the duration of a context, and yield them, the innermost first.

    Args:
        only_checkpoints: keep the innermost hook that is no checkpoint's, and the hooks below it.
    """
    hooks: list[tuple[Any, Any]] = []
    try:
        while (top := saved_tensor_hooks(True)) is not None:
            if only_checkpoints and not is_checkpoint_hook(top[0]):
                break
            _autograd._pop_saved_tensors_default_hooks()
            hooks.append(top)
        yield hooks
    finally:
        for pack_and_unpack in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(*pack_and_unpack)


def _frame_of(pack: Any) -> tuple[Any, Any]:
    """Return the checkpoint frame of a pack hook, and its graph task or execution group during a recomputation."""
    function = inspect.unwrap(pack)
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    free = {} if code is None else dict(zip(code.co_freevars, cells or (), strict=True))
    if free.keys() == {"frame"}:
        frame, group = free["frame"].cell_contents, None
    elif free.keys() == {"gid", "target_frame_ref"}:
        reference, group = free["target_frame_ref"].cell_contents, free["gid"].cell_contents
        frame = reference() if isinstance(reference, ref) else None
    else:
        frame = group = None
    if not isinstance(frame, checkpoint._CheckpointFrame):
        raise unexpected(f"a hook of torch.utils.checkpoint (free variables {', '.join(free) or 'none'})")
    return frame, group


def _autograd_contexts() -> tuple[list[Any], Any]:
    """Return the ctx of each `forward(ctx, …)` on the stack up to a `backward(ctx, …)`, and the ctx of the latter.

    Only the first argument of these two methods is read, as `torch.autograd.Function` documents them.
    """
    forward: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("forward", "backward") and code.co_argcount and code.co_varnames[0] != "self":
            ctx = frame.f_locals[code.co_varnames[0]]
            if isinstance(ctx, torch.autograd.function.BackwardCFunction):
                if code.co_name == "backward":
                    return forward, ctx
                forward.append(ctx)
        frame = frame.f_back
    return forward, None


@cache
def require_checkpoints() -> None:
    """Raise ConfigError if `checkpoints` does not recognise the checkpoints of this PyTorch: runs one of each kind."""
    # Whatever is around the caller takes no part: modes, hooks, a default device, a disabled autograd.
    with disable_current_modes(), saved_tensor_hooks_removed(), torch.inference_mode(False), torch.enable_grad():
        for reentrant in (False, True):
            seen: list[Checkpoints] = []

            def run(x: Tensor, seen: list[Checkpoints] = seen) -> Tensor:
                seen.append(checkpoints())
                return x * x

            x = torch.ones(1, device="cpu", requires_grad=True)
            checkpoint.checkpoint(run, x, use_reentrant=reentrant, preserve_rng_state=False).backward()
            again = seen[-1].again
            if len(seen) != 2 or again is None or seen[0].forward != [again.checkpoint]:
                raise unexpected(f"torch.utils.checkpoint(use_reentrant={reentrant})")


class RefuseCollectives(TorchDispatchMode):
    """A mode in which a collective of `torch.distributed` raises `ConfigError` before it sends anything.

    Args:
        what: the beginning of the error: who calls the collective.
        cure: the end of the error.
    """

    def __init__(self, what: str, cure: str) -> None:
        super().__init__()
        self._what, self._cure = what, cure

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVES:
            raise ConfigError(
                f"{self._what} {func} while the collectives of a schedule run, so that ranks could issue them in "
                f"different orders. {self._cure}"
            )
        return func(*args, **(kwargs or {}))


def check_before(owner: Any, name: str, check: Callable[..., None]) -> None:
    """Have `check` called with the arguments of each call of a function of PyTorch, before the function runs.

    For functions that offer no hook. A caller that has imported the function by name earlier is not checked.

    Args:
        owner: module or class that holds the function, and whose users look it up there.
    """
    function = getattr(owner, name)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    setattr(owner, name, checked)


def check_averages(check: Callable[..., None]) -> None:
    """Have `check(parameters, process_group)` called before parameters are averaged over ranks.

    All of PyTorch's averagers (periodic, hierarchical, post-local SGD) average by this one function.
    """

    # The function gets an iterator, which only one of the two can read.
    def with_list(parameters: Any, process_group: Any) -> Any:
        parameters = list(parameters)
        check(parameters, process_group)
        return average(iter(parameters), process_group)

    average = averaging.average_parameters
    averaging.average_parameters = functools.wraps(average)(with_list)  # type: ignore[assignment]


_OWN_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
require_names("torch", torch.__version__, CHECKED, nn.Module(), *_OWN_HOOKS)
require_names("torch", torch.__version__, CHECKED, _module, *_GLOBAL_HOOKS)

#: Names of the kinds of hooks that a call of a module runs.
HOOK_KINDS = ("forward_pre", "forward", "full_backward_pre", "full_backward")
#: A module's hooks of each kind. No Python function: a layer asks it in each forward.
hooks_of = attrgetter(*_OWN_HOOKS)


def has_own_hooks(module: nn.Module) -> bool:
    """Return whether a call of this module runs hooks of its own. A compiler takes it, as it does not `hooks_of`."""
    own = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return bool(own)


#: Hooks of all modules, of each kind.
GLOBAL_HOOKS: tuple[Mapping[int, Any], ...] = attrgetter(*_GLOBAL_HOOKS)(_module)
