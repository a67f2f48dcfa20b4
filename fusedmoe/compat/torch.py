"""Private names of PyTorch, checked against 2.11 to 2.15."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache, partial, wraps
from operator import attrgetter
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.autograd import Variable, forward_ad, profiler
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.algorithms.model_averaging import utils as averaging
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules import module as _module
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fusedmoe.compat import require_names, require_parameters
from fusedmoe.errors import ConfigError

CHECKED = "2.11 to 2.15"
VERSIONS = ("torch", torch.__version__, CHECKED)
_TESTED_BELOW = (2, 16)

_C: Any = torch._C
_c10d: Any = dist.distributed_c10d
_engine: Any = Variable._execution_engine
_DISPATCH = (
    *("_AutoDispatchBelowAutograd", "_after_autograd_keyset", "_are_functorch_transforms_active"),
    *("_current_graph_task_id", "_dispatch_tls_is_dispatch_key_excluded", "_dispatch_tls_set_dispatch_key_excluded"),
    "_is_fwd_grad_enabled",
)
_HOOKS = ("_top_saved_tensors_default_hooks", "_saved_tensors_hooks_is_enabled")
_WRAPPER = ("_pre_forward", "_set_params_and_buffers_to_ignore_for_model")
for _owner, _names in (
    (torch.cuda, ("_compile_kernel",)),
    (_C, _DISPATCH),
    (_C._autograd, (*_HOOKS, "_get_current_graph_task_keep_graph")),
    (_C._distributed_c10d, ("_SymmetricMemory",)),
    (_C._profiler, ("_ExperimentalConfig",)),
    (torch.autograd.function, ("BackwardCFunction",)),
    (forward_ad, ("_current_level",)),
    (profiler, ("_is_profiler_enabled",)),
    (_engine, ("queue_callback",)),
    (Tensor, ("_version",)),
    (nn.Module, ("_compiled_call_impl",)),
    (DistributedDataParallel, _WRAPPER),
    (averaging, ("average_parameters",)),
    (_c10d, ("_new_process_group_helper", "_world")),
    (_c10d._world, ("pg_group_ranks", "pg_map", "pg_names", "pg_to_tag", "tags_to_pg")),
    (TorchDispatchMode, ("__torch_dispatch__", "__enter__", "__exit__")),
    (torch.ops.c10d, ("allreduce_", "alltoall_base_")),
    (torch.ops.aten.view.default, ("_schema",)),
):
    require_names(*VERSIONS, _owner, *_names)

if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= _TESTED_BELOW:
    warnings.warn(f"fusedmoe was tested with PyTorch {CHECKED}; this is {torch.__version__}", stacklevel=2)

# Every collective of PyTorch runs as an operator of one of these namespaces.
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")

#: −1 outside of forward mode.
forward_level: Callable[[], int] = partial(attrgetter("_current_level"), forward_ad)
#: Forward mode is disabled in the forward of an autograd function.
is_forward_mode_enabled: Callable[[], bool] = _C._is_fwd_grad_enabled
is_transform_active: Callable[[], bool] = _C._are_functorch_transforms_active
#: Context in which operators skip their autograd kernels.
below_autograd: Callable[[], AbstractContextManager[None]] = _C._AutoDispatchBelowAutograd
KEYS_AFTER_AUTOGRAD: Any = _C._after_autograd_keyset
tensor_version: Callable[[Tensor], int] = attrgetter("_version")
schema_of_operator: Callable[[Any], Any] = attrgetter("_schema")
is_profiler_active: Callable[[], bool] = partial(attrgetter("_is_profiler_enabled"), profiler)
#: Id of this thread's backward pass; −1 outside of one.
graph_task_id: Callable[[], int] = _C._current_graph_task_id
retains_graph: Callable[[], bool] = _C._autograd._get_current_graph_task_keep_graph
#: Calls a function at the end of this thread's backward pass.
call_after_backward: Callable[[Callable[[], None]], None] = _engine.queue_callback
#: Compiles a kernel from CUDA source and the kernel's name.
compile_cuda: Callable[[str, str], Any] = torch.cuda._compile_kernel
#: Returns the innermost saved-tensor hooks of this thread, (pack, unpack), or None. Argument: also while tracing.
saved_tensor_hooks = _C._autograd._top_saved_tensors_default_hooks

#: Context without dispatch modes; yields the caller's modes.
disable_current_modes = _disable_current_modes
#: Dispatch modes of selective activation checkpoints, in a forward and in its recomputation.
selective_modes = tuple(map(type, checkpoint.create_selective_checkpoint_contexts([])))

#: References to the states of FSDP2 and other composable functions, by module.
module_states = _module_state_mapping
tracing_context: Callable[[], TracingContext | None] = TracingContext.try_get
ProfilerConfig: Any = _C._profiler._ExperimentalConfig
SymmetricMemory: Any = _C._distributed_c10d._SymmetricMemory

#: Attributes under which torch.compile, FSDP1 and checkpoint wrappers hold the wrapped module.
WRAPPED_NAMES = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def unsupported_version_error(what: str) -> ConfigError:
    return ConfigError(f"fusedmoe: {what} in PyTorch {torch.__version__} is not as expected; install torch {CHECKED}")


@contextmanager
def autograd_recording() -> Iterator[None]:
    """Context in which autograd records, also in an operator's body, which otherwise runs below autograd."""
    key = torch.DispatchKey.AutogradFunctionality
    was_below = _C._dispatch_tls_is_dispatch_key_excluded(key)
    _C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        _C._dispatch_tls_set_dispatch_key_excluded(key, was_below)


def compile_passes(
    module: torch.fx.GraphModule, inputs: Sequence[Any], **compilers: Callable[..., Any]
) -> Callable[..., Any]:
    """Capture forward and backward of a graph, and return the compiled function.

    Args:
        compilers: called with the module and example inputs of a pass: `fw_compiler`, `bw_compiler`,
            `inference_compiler`.
    """
    from torch._dynamo.backends.common import aot_autograd

    compiled: Callable[..., Any] = aot_autograd(**compilers)(module, inputs)
    return compiled


def is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None


def default_store() -> dist.Store:
    if not dist.is_initialized():
        raise ConfigError("fusedmoe: torch.distributed is not initialised; call init_process_group")
    store: dist.Store = _c10d._world.pg_map[dist.group.WORLD][1]
    return store


def group_named(name: str) -> dist.ProcessGroup:
    named: dict[str, dist.ProcessGroup] = {its_name: group for group, its_name in _c10d._world.pg_names.items()}
    if name not in named:
        raise ConfigError(f"fusedmoe: no process group has the name {name!r}; make it before the graph that uses it")
    return named[name]


def make_group(
    ranks: tuple[int, ...], rank: int, backend: dist.Backend, store: dist.Store, name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Create a process group over a store, which `torch.distributed.new_group` cannot do. Call `register_group` next.

    `rank`: this rank's index in `ranks`.
    """
    group, _ = _c10d._new_process_group_helper(len(ranks), rank, list(ranks), backend, store, name, timeout=timeout)
    made: dist.ProcessGroup = group
    return made


def register_group(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> None:
    _c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a process group, and remove the empty list that PyTorch leaves under its tag."""
    tag = _c10d._world.pg_to_tag.get(group)
    dist.destroy_process_group(group)
    _c10d._world.tags_to_pg.pop(tag, None)


class WatchedDataParallel(DistributedDataParallel):
    """DistributedDataParallel whose collectives before a forward run inside `pre_forward_context`."""

    def pre_forward_context(self) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self.pre_forward_context():
            return super()._pre_forward(*inputs, **kwargs)


def hide_from_ddp(module: nn.Module, names: list[str]) -> None:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def shard_placement_maker(mesh: DeviceMesh) -> Callable[[Any], Any] | None:
    """Return a function that converts a placement to FSDP2's argument for sharding a parameter over `mesh`.

    None before PyTorch 2.12, where FSDP2 has one mesh for all parameters.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    except ImportError:
        return None
    over = FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0)
    return lambda placement: ShardPlacementResult(placement, over)


class ShardedParameter(NamedTuple):
    """Parameter sharded by FSDP2: its module, its name there, and the ranks that hold the shards."""

    module: nn.Module
    name: str
    ranks: list[int]


def fsdp_parameters() -> Iterator[ShardedParameter]:
    if not module_states:
        return
    from torch.distributed.fsdp import FSDPModule  # slow to import

    for module, reference in list(module_states.items()):
        state = reference()
        if state is None or not isinstance(module, FSDPModule):
            continue
        groups: list[Any]
        if hasattr(state, "_fsdp_param_groups"):
            groups = state._fsdp_param_groups
        elif hasattr(state, "_fsdp_param_group"):  # PyTorch 2.11: one group at most
            groups = [state._fsdp_param_group]
        else:
            raise unsupported_version_error(f"{type(state).__name__} (without parameter groups)")
        for group in filter(None, groups):
            yield from map(_sharded_parameter, group.fsdp_params)


def _sharded_parameter(parameter: Any) -> ShardedParameter:
    try:
        info, mesh = parameter._module_info, parameter.mesh_info.mesh
        return ShardedParameter(info.module, info.param_name, mesh.mesh.flatten().tolist())
    except AttributeError as error:
        raise unsupported_version_error(f"FSDPParam ({error})") from error


class Recomputation(NamedTuple):
    """Recomputation of an activation checkpoint.

    Attributes:
        checkpoint: the object in `Checkpoints.forward` of the first forward.
        run_id: identifies this recomputation: a retained graph has one per backward pass.
    """

    checkpoint: Any
    run_id: Any


class Checkpoints(NamedTuple):
    """Activation checkpoints around a call.

    An object that lives as long as the checkpoint's graph represents a checkpoint.

    Attributes:
        forward: checkpoints that contain this call and are in their first forward.
        recomputation: the innermost checkpoint that is recomputing this call, or None.
    """

    forward: list[Any]
    recomputation: Recomputation | None


def checkpoints() -> Checkpoints:
    """Return the activation checkpoints that contain the caller's call."""
    # Non-reentrant checkpoints push a saved-tensor hook that refers to their frame, in the first forward and in a
    # recomputation. Other checkpoints (reentrant, Megatron's, DeepSpeed's) are autograd functions whose backward
    # recomputes the graph.
    forward: list[Any] = []
    again = None
    with without_saved_tensor_hooks() as hooks:
        for pack, _ in hooks:
            if is_checkpoint_hook(pack):
                frame, group = _frame_of(pack)
                if group is not None:
                    again = Recomputation(frame, pack), group
                    break  # outer frames called this backward pass, not this forward
                forward.append(frame)
    contexts, backward = _autograd_contexts()
    forward += contexts
    task = graph_task_id()
    if again is None:
        return Checkpoints(forward, None if backward is None else Recomputation(backward, task))
    # A backward pass started inside the recomputation is a separate task, and does not belong to the frame.
    nested = isinstance(again[1], int) and task not in (-1, again[1])
    return Checkpoints(forward, Recomputation(backward, task) if nested and backward is not None else again[0])


def is_checkpoint_hook(pack: Any) -> bool:
    """Return whether a pack hook belongs to a non-reentrant checkpoint of PyTorch."""
    return getattr(pack, "__module__", None) == checkpoint.__name__


def is_early_stop(error: BaseException) -> bool:
    """Return whether a checkpoint raised the exception to end a complete recomputation."""
    from_checkpoint = type(error).__module__ == checkpoint.__name__
    return from_checkpoint and not isinstance(error, checkpoint.CheckpointError)


@contextmanager
def without_saved_tensor_hooks(only_checkpoints: bool = False) -> Iterator[list[tuple[Any, Any]]]:
    """Remove this thread's saved-tensor hooks for the duration of a context, and yield them, innermost first.

    If hooks are disabled, yield an empty list and keep them.

    Args:
        only_checkpoints: keep the innermost hook that is not a checkpoint's, and the hooks below it.
    """
    hooks: list[tuple[Any, Any]] = []
    is_enabled = _C._autograd._saved_tensors_hooks_is_enabled()
    try:
        while is_enabled and (top := saved_tensor_hooks(True)) is not None:
            if only_checkpoints and not is_checkpoint_hook(top[0]):
                break
            saved_tensors_hooks(*top).__exit__()
            hooks.append(top)
        yield hooks
    finally:
        for pack_and_unpack in reversed(hooks):
            saved_tensors_hooks(*pack_and_unpack).__enter__()


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
    if type(frame).__module__ != checkpoint.__name__:
        raise unsupported_version_error(
            f"a hook of torch.utils.checkpoint (free variables {', '.join(free) or 'none'})"
        )
    return frame, group


def _autograd_contexts() -> tuple[list[Any], Any]:
    """Return the ctx of each `Function.forward` on the Python stack up to the first `backward`, and its ctx or None."""
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
    """Raise ConfigError if `checkpoints` does not recognise this PyTorch's checkpoints. Runs one of each kind."""
    # Independent of the caller's state.
    with disable_current_modes(), without_saved_tensor_hooks(), torch.inference_mode(False), torch.enable_grad():
        for reentrant in (False, True):
            seen: list[Checkpoints] = []

            def run(x: Tensor, seen: list[Checkpoints] = seen) -> Tensor:
                seen.append(checkpoints())
                return x * x

            x = torch.ones(1, device="cpu", requires_grad=True)
            checkpoint.checkpoint(run, x, use_reentrant=reentrant, preserve_rng_state=False).backward()
            again = seen[-1].recomputation
            if len(seen) != 2 or again is None or seen[0].forward != [again.checkpoint]:
                raise unsupported_version_error(f"torch.utils.checkpoint(use_reentrant={reentrant})")


class RefuseCollectives(TorchDispatchMode):
    """Dispatch mode in which collectives of `torch.distributed` raise `ConfigError` before they send anything.

    Args:
        what: beginning of the error: the caller of the collective.
        cure: end of the error.
    """

    def __init__(self, what: str, cure: str) -> None:
        super().__init__()
        self._what, self._cure = what, cure

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVES:
            raise ConfigError(
                f"{self._what} {func} while the collectives of a schedule run; ranks could then issue them in "
                f"different orders. {self._cure}"
            )
        return func(*args, **(kwargs or {}))


_GLOBAL_PREFIX = "_global"  # prefix of hooks registered for all modules


def _find_hooks() -> tuple[tuple[str, ...], tuple[Mapping[int, Any], ...]]:
    """Return the names of a module's hook dictionaries that a call runs, and the dictionaries of global hooks."""
    names, probe = [], nn.Module()
    for kind in HOOK_KINDS:
        handle = getattr(probe, f"register_{kind}_hook")(lambda *_: None)
        hooks = handle.hooks_dict_ref()
        names += [name for name, value in vars(probe).items() if isinstance(value, dict) and value is hooks]
    global_names = [_GLOBAL_PREFIX + name for name in names]  # registering one would affect full backward hooks
    require_names(*VERSIONS, _module, *global_names)
    if len(set(names)) != len(HOOK_KINDS):
        raise unsupported_version_error(f"the hooks of a module ({', '.join(names) or 'none found'})")
    return tuple(names), tuple(getattr(_module, name) for name in global_names)


#: Kinds of hooks that a call of a module runs.
HOOK_KINDS = ("forward_pre", "forward", "full_backward_pre", "full_backward")
_OWN_HOOKS, GLOBAL_HOOKS = _find_hooks()
#: Returns a module's hooks of each kind. Every forward reads them.
hooks_of = attrgetter(*_OWN_HOOKS)


def has_own_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks that a call runs. Traceable, unlike `hooks_of`."""
    for name in _OWN_HOOKS:  # noqa: SIM110 — compilers break graphs at generators
        if getattr(module, name):
            return True
    return False


def check_before(owner: Any, name: str, check: Callable[..., None]) -> None:
    """Call `check` with the arguments of each call of a PyTorch function, before the function runs.

    Not effective for callers that imported the function by name earlier.

    Args:
        owner: module or class in which users look the function up.
    """
    function = getattr(owner, name)

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    setattr(owner, name, checked)


def install_ddp_check(check: Callable[[DistributedDataParallel, list[nn.Parameter]], None]) -> None:
    """Call `check(wrapper, parameters)` after DistributedDataParallel's constructor, with the reduced parameters."""
    original_init, delayed_name = DistributedDataParallel.__init__, "delay_all_reduce_named_params"
    require_parameters(*VERSIONS, original_init, "self", "module", keywords=[delayed_name])
    signature = inspect.signature(original_init)

    @wraps(original_init)
    def checked(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        delayed = given.arguments.get(delayed_name)
        if delayed is not None:  # may be an iterator
            given.arguments[delayed_name] = delayed = list(delayed)
        original_init(*given.args, **given.kwargs)
        wrapper = given.arguments["self"]
        # PyTorch also ignores the delayed parameters, and reduces them later in the backward pass.
        named, ignored = wrapper.module.named_parameters(), wrapper.parameters_to_ignore
        reduced = [parameter for name, parameter in named if name not in ignored]
        check(wrapper, reduced + [parameter for _, parameter in delayed or ()])

    DistributedDataParallel.__init__ = checked  # type: ignore[method-assign]


def install_average_check(check: Callable[..., None]) -> None:
    """Call `check(parameters, process_group)` before parameters are averaged over ranks.

    All of PyTorch's averagers (periodic, hierarchical, post-local SGD) use this one function.
    """

    def with_list(parameters: Any, process_group: Any) -> Any:
        parameters = list(parameters)
        check(parameters, process_group)
        return average(iter(parameters), process_group)

    average = averaging.average_parameters
    require_parameters(*VERSIONS, average, "params", "process_group")
    averaging.average_parameters = wraps(average)(with_list)  # type: ignore[assignment]
