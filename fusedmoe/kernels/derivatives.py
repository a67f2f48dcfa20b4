"""Custom operators and autograd functions whose derivatives are supported or raise an error with the operation's name.

Second derivatives raise `DerivativeError` when computed, except of functions with `double_backward` and of operators
whose backward consists of such functions. Forward-mode AD of an argument with a tangent and differentiating transforms
of `torch.func` raise. Operators support `torch.func.vmap`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fusedmoe.compat.torch import (
    KEYS_AFTER_AUTOGRAD,
    below_autograd,
    forward_level,
    is_forward_mode_enabled,
    is_transform_active,
    tracing_context,
)
from fusedmoe.errors import DerivativeError

_library = torch.library.Library("fusedmoe", "FRAGMENT")


@dataclass
class _Gradient:
    """An operator's backward; raises until `register_gradient` replaces it."""

    backward: Callable[..., tuple[Any, ...]]
    setup: Callable[..., None]


_gradients: dict[Any, _Gradient] = {}


def operator(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function of tensors and plain values to make it the operator `torch.ops.fusedmoe.<name>`.

    Unless given, the schema is inferred from the annotations, without defaults. The function must return new memory and
    mutate no argument. Tensors inside lists (a layout) get no gradient. Call `register_fake` for the operator, and
    `register_gradient` if it is differentiable.
    """

    # A call takes a few µs longer; with `torch.library.custom_op` and a gradient about 20 µs.

    def define(body: Callable[..., Any]) -> Any:
        qualified = f"fusedmoe::{name}"
        signature = schema or torch.library.infer_schema(body, mutates_args=())
        _library.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, body, "CompositeExplicitAutograd")
        overload = getattr(torch.ops.fusedmoe, name).default
        # `register_gradient` replaces its functions later.
        gradient = _gradients[overload] = _Gradient(lambda *_: _raise_double_backward(qualified), lambda *_: None)

        class Differentiated(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs_and_keyset: Any) -> Any:
                *inputs, keyset = inputs_and_keyset
                with below_autograd():
                    output = overload.redispatch(keyset, *inputs)
                gradient.setup(ctx, inputs, output)
                return output

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
                return *gradient.backward(ctx, *grads), None

        Differentiated.__name__ = name
        # Skips the check of `Function.apply` for transforms, which are never active below the dispatcher.
        apply = super(torch.autograd.Function, Differentiated).apply

        def autograd_kernel(keyset: Any, *inputs: Any) -> Any:
            # To the operator's body, its fake, or a dispatch mode.
            keyset = keyset & KEYS_AFTER_AUTOGRAD
            differentiable = False
            if torch.is_grad_enabled():
                for value in inputs:
                    if isinstance(value, Tensor) and value.requires_grad:
                        differentiable = True
                        break
            # Also without gradients, where a tangent would be dropped silently.
            if forward_level() >= 0:
                require_no_tangent(qualified, inputs)
            if not differentiable:
                with below_autograd():
                    return overload.redispatch(keyset, *inputs)
            if is_transform_active():
                _require_reverse_mode(qualified, inputs)
            return apply(*inputs, keyset)

        _library.impl(name, autograd_kernel, "Autograd", with_keyset=True)
        # Differentiating transforms call `autograd_kernel`; vmap has a separate dispatch key.
        torch.library.register_vmap(qualified, partial(_apply_per_element, overload), lib=_library)
        return overload

    return define


def _apply_per_element(overload: Any, info: Any, in_dims: tuple[Any, ...], *values: Any) -> tuple[Any, Any]:
    """Apply an operator to each batch element, because PyTorch's `vmap` fallback does not support lists of tensors."""

    def element(value: Any, dim: Any, index: int) -> Any:
        if isinstance(value, list):
            return [element(*pair, index) for pair in zip(value, dim, strict=True)]
        return value if dim is None else value.select(dim, index)

    outputs = []
    for index in range(info.batch_size):
        given = (element(value, dim, index) for value, dim in zip(values, in_dims, strict=True))
        outputs.append(overload(*given))
    if isinstance(outputs[0], Tensor):
        return torch.stack(outputs), 0
    return tuple(map(torch.stack, zip(*outputs, strict=True))), (0,) * len(outputs[0])


def register_fake(overload: Any) -> Callable[[Callable[..., Any]], Any]:
    """Register a function that returns empty results with an operator's shapes, dtypes and devices."""
    return torch.library.register_fake(overload, lib=_library)


def graph_allows_dynamic_sizes() -> bool:
    """Return whether the graph being traced may contain data-dependent sizes, as with `fullgraph=True`.

    Other graphs break at each operator with such results.
    """
    context = tracing_context()
    if context is None or context.fake_mode is None or context.fake_mode.shape_env is None:
        return False
    return bool(context.fake_mode.shape_env.allow_dynamic_output_shape_ops)


@cache
def exclude_from_graphs(owner: type, method: str) -> None:
    """Exclude a method of a class from compiled graphs.

    Call it from a constructor, not at import: it imports the compiler, which takes longer than importing this library.
    """
    setattr(owner, method, torch.compiler.disable(getattr(owner, method)))


@cache
def mark_constant_in_graphs(function: Callable[..., Any]) -> None:
    """Make compiled graphs treat the function's result as a constant. Call it like `exclude_from_graphs`."""
    torch.compiler.assume_constant_result(function)


_flops: dict[Any, tuple[Callable[..., int], bool]] = {}


def register_flops(overload: Any, get_raw: bool = False) -> Callable[[Callable[..., int]], Any]:
    """Register an operator's FLOP formula, of shapes and `out_shape`; with `get_raw`, of tensors and `out_val`."""

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        _flops[overload.overloadpacket] = formula, get_raw
        if "torch.utils.flop_counter" in sys.modules:
            count_flops()
        return formula

    return register


def count_flops() -> None:
    """Register all pending formulas. Called with the first layer, because PyTorch's counter imports Triton."""
    if _flops:
        from torch.utils.flop_counter import register_flop_formula

        while _flops:
            operation, (formula, get_raw) = _flops.popitem()
            register_flop_formula(operation, get_raw)(formula)


def register_gradient(overload: Any, backward: Callable[..., tuple[Any, ...]], setup: Callable[..., None]) -> None:
    """Set an operator's backward.

    Args:
        backward: (context, output gradients) -> one gradient or None per argument. If it uses an output of the
            operator, it must wrap the values computed from it in `first_order`, with the operator's inputs as sources.
        setup: (context, list of arguments, output); saves tensors for `backward`.
    """
    _gradients[overload].backward, _gradients[overload].setup = backward, setup


LinearMap = Callable[[Tensor], Tensor]


class Function(torch.autograd.Function):
    """Base class of the library's autograd functions. `operation` is the name in errors.

    With `double_backward`, backward is itself differentiable; otherwise higher-order derivatives raise.
    """

    operation: ClassVar[str]
    double_backward: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if not cls.double_backward:
            cls.backward = staticmethod(_first_order_only(cls.operation, cls.backward))  # type: ignore[method-assign]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().apply(*args)
        if forward_level() >= 0 or is_transform_active():
            _require_reverse_mode(cls.operation_name(args), args)
        outputs = super().apply(*args)
        # Double backward must raise for every input, saved or not, so attach a tensor that depends on all of them.
        if not cls.double_backward and torch.is_grad_enabled():
            for output in outputs if isinstance(outputs, tuple) else (outputs,):
                if isinstance(output, Tensor) and output.grad_fn is not None:
                    node: Any = output.grad_fn  # the context passed to `_first_order_only`
                    node.inputs = _InputDependency.apply(*args)
                    break
        return outputs

    @classmethod
    def operation_name(cls, args: Sequence[Any]) -> str:
        return cls.operation


class _Linear(Function):
    operation, double_backward = "a linear map", True

    @staticmethod
    def forward(ctx: Any, rows: Tensor, forward_map: LinearMap, backward_map: LinearMap, name: str) -> Tensor:
        ctx.forward_map, ctx.backward_map, ctx.name = forward_map, backward_map, name
        out = forward_map(rows)
        return out.view_as(out) if out is rows else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # Without create_graph a direct call is cheaper than an autograd node.
        is_first_order = not torch.compiler.is_compiling() and is_first_order_only()
        drows = ctx.backward_map(grad) if is_first_order else linear(grad, ctx.backward_map, ctx.forward_map, ctx.name)
        return drows, None, None, None

    @classmethod
    def operation_name(cls, args: Sequence[Any]) -> str:
        return str(args[3])


def linear(rows: Tensor, forward_map: LinearMap, backward_map: LinearMap, name: str) -> Tensor:
    """Apply `forward_map`, with `backward_map` as its backward and vice versa. Saves nothing. `name`: in errors."""
    return _Linear.apply(rows, forward_map, backward_map, name)


class _TransformGradient(Function):
    operation, double_backward = "a function of a gradient", True

    @staticmethod
    def forward(ctx: Any, x: Tensor, transform: Callable[[Tensor], Tensor], name: str) -> Tensor:
        ctx.transform = transform
        return x.detach()  # autograd takes `x` itself for no output; a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transform(grads[0]), None, None

    @classmethod
    def operation_name(cls, args: Sequence[Any]) -> str:
        return str(args[2])


def transform_gradient(x: Tensor, transform: Callable[[Tensor], Tensor], name: str) -> Tensor:
    """Return `x`. Backward applies `transform`, which may be differentiable, to its gradient. `name`: in errors."""
    return _TransformGradient.apply(x, transform, name)


def before_backward(y: Tensor, call: Callable[[], object], name: str) -> Tensor:
    """Return `y`. Its backward first calls `call`. `name`: in errors."""

    def call_first(grad: Tensor) -> Tensor:
        call()
        return grad

    return transform_gradient(y, call_first, name)


def first_order(operation: str, gradients: Sequence[Any], sources: Iterable[Any]) -> tuple[Any, ...]:
    """Wrap gradients computed without a graph: differentiating them by a source raises `DerivativeError`.

    PyTorch's `once_differentiable` does not connect the sources in the graph, so a second derivative would not raise.
    """
    connected = [one for one in sources if isinstance(one, Tensor) and one.requires_grad]
    if not connected:
        return tuple(gradients)
    tensors = [one for one in gradients if one is not None]
    raising = iter(_RaiseInBackward.apply(operation, len(tensors), *tensors, *connected))
    return tuple(None if one is None else next(raising) for one in gradients)


def _first_order_only(operation: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(backward)
    def first_order_backward(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling() or is_first_order_only():
            return backward(ctx, *grads)
        _require_reverse_mode(operation, grads)
        with torch.no_grad():
            gradients = backward(ctx, *grads)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        return first_order(operation, gradients, (ctx.inputs, *grads))

    return first_order_backward


class _InputDependency(torch.autograd.Function):
    """Empty tensor that depends on a function's inputs in the autograd graph without keeping their memory."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise AssertionError("no gradient goes through it")


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.operation = operation
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        _raise_double_backward(ctx.operation)


def is_first_order_only() -> bool:
    """Return whether no graph, no tangent and no `torch.func` transform is active."""
    return not (torch.is_grad_enabled() or forward_level() >= 0 or is_transform_active())


def _require_reverse_mode(operation: str, args: Iterable[Any]) -> None:
    require_no_tangent(operation, args)
    if is_transform_active():
        raise DerivativeError(
            f"{operation} does not support transforms of torch.func (grad, vjp, jacrev, jvp, hessian, vmap); use "
            "torch.autograd.grad on a plain call"
        )


def require_no_tangent(operation: str, args: Iterable[Any]) -> None:
    if forward_level() < 0 or not is_forward_mode_enabled():
        return
    if any(isinstance(one, Tensor) and forward_ad.unpack_dual(one).tangent is not None for one in args):
        raise DerivativeError(
            f"{operation} does not support forward-mode AD (dual tensors, torch.func.jvp, jacfwd, hessian); use "
            "reverse mode: torch.autograd.grad or torch.autograd.functional.jacobian"
        )


def _raise_double_backward(operation: str) -> NoReturn:
    raise DerivativeError(
        f"{operation} does not support double backward (Hessian-vector products, gradient penalties); use finite "
        "differences of gradients, or fusedmoe.experts.Custom without a schedule"
    )
