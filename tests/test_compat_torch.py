"""`fusedmoe.compat.torch`: activation checkpoints are recognised, and an unexpected PyTorch raises at once."""

from __future__ import annotations

import ast
import gc
import random
import runpy
import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from fusedmoe.compat import require_parameters
from fusedmoe.compat import torch as compat
from fusedmoe.engine.recomputation import CheckpointedValues
from fusedmoe.errors import ConfigError
from tests.house import foreign_names, own_names

Call = Callable[[Tensor], Tensor]
Around = Callable[[Call, Tensor], Tensor]


class Module(nn.Module):
    def __init__(self, function: Call) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class OtherCheckpoint(torch.autograd.Function):
    """A checkpoint of another library: an autograd function with its own argument names."""

    @staticmethod
    def forward(context: Any, run: Call, x: Tensor) -> Tensor:
        context.run = run
        context.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Any:
        (x,) = context.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = context.run(x)
        y.backward(grad)
        return None, x.grad


def selective() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.sin.default])


def offloaded(f: Call, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        return checkpoint(f, x, use_reentrant=False)


KINDS: dict[str, Around] = {
    "non-reentrant": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "without_early_stop": lambda f, x: checkpoint(f, x, use_reentrant=False, early_stop=False),
    "selective": lambda f, x: checkpoint(f, x, use_reentrant=False, context_fn=selective),
    "offloaded": offloaded,
    "sequential": lambda f, x: checkpoint_sequential([f, nn.Identity()], 2, x, use_reentrant=False),
    "wrapper": lambda f, x: checkpoint_wrapper(Module(f))(x),
    "composable": lambda f, x: composable_checkpoint(Module(f))(x),
    "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
    "function": OtherCheckpoint.apply,
}


class CallCounter(nn.Module):
    """Multiply by the number of the call, which a recomputation must reproduce."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: CheckpointedValues[int] = CheckpointedValues()
        self.calls = self.repeated = 0

    def forward(self, x: Tensor) -> Tensor:
        around = compat.checkpoints()
        if around.recomputation is None:
            self.calls += 1
            number = self.calls
        else:
            self.repeated += 1
            found = self.kept.stored_value(around)
            assert found is not None
            number = found
        self.kept.store(number, around)
        return (x * (1 + number / 8)).sin()


def tree(rng: random.Random, depth: int) -> Any:
    """A call of `Counted`, or several of them, in a checkpoint of some kind."""
    if depth == 0:
        return None
    return rng.choice([*KINDS, "plain"]), [tree(rng, rng.randrange(depth)) for _ in range(rng.randint(1, 3))]


def apply_tree(part: Any, module: nn.Module, x: Tensor, plain: bool) -> Tensor:
    if part is None:
        return module(x)
    kind, parts = part

    def run(x: Tensor) -> Tensor:
        for inner in parts:
            x = apply_tree(inner, module, x, plain) + x.cos()
        return x

    return run(x) if plain or kind == "plain" else KINDS[kind](run, x)


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_matches_its_forward(kind: str) -> None:
    grads = []
    for plain in (True, False):
        module, x = CallCounter(), torch.full((3,), 0.3, dtype=torch.float64, requires_grad=True)
        for _ in range(3):  # three checkpoints of the same module and the same input
            y = apply_tree((kind, [None, None]), module, x, plain)
            y.sum().backward(retain_graph=not plain and kind not in ("selective", "reentrant", "function"))
        grads.append(x.grad)
        assert module.repeated == (0 if plain else 6)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("seed", range(12))
def test_nested_checkpoints_equal_plain_gradients(seed: int) -> None:
    rng = random.Random(seed)
    forest = [tree(rng, 3) for _ in range(3)]
    grads = []
    for plain in (True, False):
        module, x = CallCounter(), torch.linspace(0.1, 0.9, 4, dtype=torch.float64, requires_grad=True)
        ys = [apply_tree(part, module, x, plain) for part in forest]
        for y in reversed(ys):
            y.sum().backward()
        grads.append(x.grad)
        del ys, y
        gc.collect()
        assert not module.kept  # freed with the graphs
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("kind", ["non-reentrant", "without_early_stop", "offloaded"])
def test_repeated_backward_of_retained_graph_is_equal(kind: str) -> None:
    module, x = CallCounter(), torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    y = apply_tree((kind, [None, None]), module, x, plain=False).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    with torch.utils.checkpoint.GraphExecGroup():
        second = torch.autograd.grad(y, x, retain_graph=True)
    third = torch.autograd.grad(y, x)
    assert torch.equal(*first, *second) and torch.equal(*first, *third)


def test_saved_tensors_are_readable_outside_backward() -> None:
    module, x = CallCounter(), torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    y = checkpoint(lambda x: module(module(x)), x, use_reentrant=False)
    for _ in range(2):
        torch.testing.assert_close(y.grad_fn._saved_self.sin(), y)
    assert module.calls == 2 and module.repeated == 4


@pytest.mark.parametrize("kind", KINDS)
def test_backward_inside_checkpoint_equals_plain(kind: str) -> None:
    """A checkpoint that is run backward by the function of another checkpoint."""
    grads = []
    for plain in (True, False):
        module, x = CallCounter(), torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)

        def penalised(x: Tensor, module: nn.Module = module, plain: bool = plain) -> Tensor:
            own = x.detach().requires_grad_()
            apply_tree((kind, [None, None]), module, own, plain).sum().backward()
            assert own.grad is not None
            return module(x) * own.grad

        y = penalised(x) if plain else checkpoint(penalised, x, use_reentrant=False)
        y.sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_checkpoints_of_threads_are_independent() -> None:
    module, failed = CallCounter(), []

    def train() -> None:
        try:
            x = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
            for kind in KINDS:
                apply_tree((kind, [None]), module, x, plain=False).sum().backward()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and module.repeated == 3 * len(KINDS)


def test_extra_call_in_recomputation_raises() -> None:
    module, x = CallCounter(), torch.ones(2, requires_grad=True)
    times = [1, 2]
    y = checkpoint(lambda x: [module(x) for _ in range(times.pop(0))][-1], x, use_reentrant=True)
    with pytest.raises(ConfigError, match="more often in its recomputation"):
        y.sum().backward()


def test_saved_tensor_hooks_are_preserved() -> None:
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        x = torch.ones(2, requires_grad=True)
        before = torch._C._autograd._top_saved_tensors_default_hooks(True)
        compat.require_checkpoints.__wrapped__()
        assert compat.checkpoints() == ([], None) and not packed
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) == before
        x.sin()
    assert len(packed) == 1


def test_disabled_saved_tensor_hooks_are_preserved() -> None:
    """AOT autograd disables hooks around a region that it compiled with the caller's hooks."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        before = torch._C._autograd._top_saved_tensors_default_hooks(True)
        torch._C._autograd._saved_tensors_hooks_disable("compiled", False)
        try:
            with compat.without_saved_tensor_hooks() as hooks:
                assert hooks == []
        finally:
            torch._C._autograd._saved_tensors_hooks_enable()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) == before


def test_default_store_without_process_group_raises() -> None:
    assert not torch.distributed.is_initialized()
    with pytest.raises(ConfigError, match="not initialised; call init_process_group"):
        compat.default_store()


class _Renamed(torch.autograd.graph.saved_tensors_hooks):
    """A hook of a later PyTorch, which keeps its frame under another name."""

    def __init__(self, frame: Any) -> None:
        checkpoint_state = frame

        def pack(x: Tensor) -> Tensor:
            assert checkpoint_state is not None
            return x

        pack.__module__ = torch_checkpoint.__name__
        super().__init__(pack, lambda x: x)


def test_unknown_pytorch_checkpoint_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_checkpoint, "_checkpoint_hook", _Renamed)
    compat.require_checkpoints.cache_clear()
    try:
        with pytest.raises(ConfigError, match=rf"checkpoint_state.*PyTorch {torch.__version__.split('+')[0]}"):
            CheckpointedValues()
        # Hooks that are not recognised as a checkpoint's.
        monkeypatch.setattr(
            torch_checkpoint,
            "_checkpoint_hook",
            lambda frame: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        )
        with pytest.raises(ConfigError, match=r"checkpoint\(use_reentrant=False\)"):
            CheckpointedValues()
    finally:
        compat.require_checkpoints.cache_clear()


def test_unknown_fsdp_state_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class State:
        pass

    class Sharded(FSDPModule, nn.Linear):
        pass

    module, state = object.__new__(Sharded), State()
    monkeypatch.setattr(compat, "module_states", {module: lambda: state})
    with pytest.raises(ConfigError, match="State .without parameter groups"):
        list(compat.fsdp_parameters())
    state._fsdp_param_groups = [SimpleNamespace(fsdp_params=[SimpleNamespace(module=module)])]
    with pytest.raises(ConfigError, match="FSDPParam.*_module_info"):
        list(compat.fsdp_parameters())


@pytest.mark.parametrize(("version", "warns"), [("2.16.0a0+git1", True), ("3.0.1", True), ("2.15.4+cu132", False)])
def test_untested_pytorch_version_warns(version: str, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        runpy.run_path(compat.__file__)
    assert [str(one.message) for one in seen if "fusedmoe" in str(one.message)] == (
        [f"fusedmoe was tested with PyTorch {compat.CHECKED}; this is {version}"] if warns else []
    )


def test_missing_private_name_raises_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nn.parallel.DistributedDataParallel, "_pre_forward")
    with pytest.raises(ImportError, match=r"DistributedDataParallel._pre_forward, which torch .* lacks"):
        runpy.run_path(compat.__file__)


def test_unknown_module_hook_storage_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks stored elsewhere in a module would be skipped silently."""
    register = nn.Module.register_forward_hook

    def elsewhere(self: nn.Module, hook: Any) -> Any:
        handle = register(self, hook)
        handle.hooks_dict_ref = lambda: None
        return handle

    monkeypatch.setattr(nn.Module, "register_forward_hook", elsewhere)
    with pytest.raises(ConfigError, match="the hooks of a module"):
        compat._find_hooks()


def test_global_hooks_equal_module_hooks_of_pytorch() -> None:
    hooks: list[Any] = []
    for kind in compat.HOOK_KINDS[:3]:  # the fourth would select full backward hooks permanently
        hooks.append(getattr(nn.modules.module, f"register_module_{kind}_hook")(lambda *_: None))
    try:
        assert [len(each) for each in compat.GLOBAL_HOOKS] == [1, 1, 1, 0]
    finally:
        for hook in hooks:
            hook.remove()
    assert compat.GLOBAL_HOOKS[3] is nn.modules.module._global_backward_hooks and not any(compat.GLOBAL_HOOKS)


def test_unexpected_signature_raises() -> None:
    def replaced(self: Any, *, options: Any = None) -> None:
        pass

    require_parameters("torch", "3.0", compat.CHECKED, replaced, "self", keywords=["options"])
    for names, keywords in ((("model",), ()), (("self", "model"), ()), (("self",), ("mesh",))):
        with pytest.raises(ImportError, match=r"replaced\(.*torch 3.0 has the parameters \(self, options\)"):
            require_parameters("torch", "3.0", compat.CHECKED, replaced, *names, keywords=keywords)


def test_recording_enables_grad_below_autograd() -> None:
    x = torch.ones(2, requires_grad=True)
    with compat.below_autograd():
        assert not (x * 2).requires_grad
        with torch.no_grad(), compat.autograd_recording():
            assert (x * 2).requires_grad
        assert not (x * 2).requires_grad
    with compat.autograd_recording():
        pass
    assert (x * 2).requires_grad


def test_private_names_of_other_packages_are_detected() -> None:
    text = """
import torch._dynamo
from torch.nn.modules import module as m
class Own:
    def __init__(self): self._own = self._version = 1
    def read(self, x, own):
        return self._own, own._own, self._version, x._replace(a=1), torch.ops._c10d_functional.wait_tensor
def f(x, module):
    return x._version, module._parameters, getattr(x, "_hidden"), m._own, x._fusedmoe_mark, hasattr(x, "_own")
"""
    tree = ast.parse(text)
    found = [name for _, name in foreign_names(tree, own_names([tree]))]
    assert sorted(found) == ["_hidden", "_own", "_parameters", "_version", "torch._dynamo"]
