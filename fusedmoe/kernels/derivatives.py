"""One rule for derivatives, of all operators and functions of the library: right, or refused by name; none is dropped.

First derivatives, backward, are written out. Derivatives of gradients are right where a function says that they are
(`Function.twice`; operators whose gradients are made of such), and else `DerivativeError`, raised when they are asked
for: `create_graph=True` alone changes nothing. Forward mode is refused where an argument has a tangent, and so are the
transforms of `torch.func` where gradients would go through them. (Operators under `torch.func.vmap` are right.)
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
    tracing_context,
    transforms_active,
)
from fusedmoe.errors import DerivativeError

_library = torch.library.Library("fusedmoe", "FRAGMENT")


@dataclass
class _Gradient:
    """An operator's backward: what `register_gradient` gave; until then one that refuses."""

    backward: Callable[..., tuple[Any, ...]]
    setup: Callable[..., None]


_gradients: dict[Any, _Gradient] = {}


def operator(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function of tensors and plain values the operator `torch.ops.fusedmoe.<name>`, and returns that.

    Operators go into graphs of `torch.compile` as they are. The function's annotations are its schema, unless one is
    given; it has no defaults, mutates no argument and returns new memory. Only what is a tensor itself has a gradient,
    not what is in a list (a layout). `register_fake` and `register_gradient` complete it.

    """

    # A call costs a few microseconds beside the function: `torch.library.custom_op` with a gradient costs about 20.

    def define(body: Callable[..., Any]) -> Any:
        qualified = f"fusedmoe::{name}"
        signature = schema or torch.library.infer_schema(body, mutates_args=())
        _library.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, body, "CompositeExplicitAutograd")
        overload = getattr(torch.ops.fusedmoe, name).default
        # Looked up at each call: `register_gradient` comes later.
        gradient = _gradients[overload] = _Gradient(lambda *_: _refuse_again(qualified), lambda *_: None)

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
        # Without the Python of `Function.apply`, which looks for transforms: there are none below the dispatcher.
        apply = super(torch.autograd.Function, Differentiated).apply

        def by_autograd(keyset: Any, *inputs: Any) -> Any:
            # What comes after autograd: the operator's body, a fake, a mode that looks on.
            keyset = keyset & KEYS_AFTER_AUTOGRAD
            differentiable = False
            if torch.is_grad_enabled():
                for value in inputs:
                    if isinstance(value, Tensor) and value.requires_grad:
                        differentiable = True
                        break
            # Also without a gradient: a tangent would be dropped in silence.
            if forward_level() >= 0:
                require_no_tangent(qualified, inputs)
            if not differentiable:
                with below_autograd():
                    return overload.redispatch(keyset, *inputs)
            if transforms_active():
                _require_plain(qualified, inputs)
            return apply(*inputs, keyset)

        _library.impl(name, by_autograd, "Autograd", with_keyset=True)
        # Transforms that differentiate call `by_autograd`; vmap has a key of its own.
        torch.library.register_vmap(qualified, partial(_one_by_one, overload), lib=_library)
        return overload

    return define


def _one_by_one(overload: Any, info: Any, in_dims: tuple[Any, ...], *values: Any) -> tuple[Any, Any]:
    """Call an operator once for each element of a batch: PyTorch's fallback for `vmap` takes no lists of tensors."""

    def element(value: Any, dim: Any, number: int) -> Any:
        if isinstance(value, list):
            return [element(*pair, number) for pair in zip(value, dim, strict=True)]
        return value if dim is None else value.select(dim, number)

    outputs = []
    for number in range(info.batch_size):
        given = (element(value, dim, number) for value, dim in zip(values, in_dims, strict=True))
        outputs.append(overload(*given))
    if isinstance(outputs[0], Tensor):
        return torch.stack(outputs), 0
    return tuple(map(torch.stack, zip(*outputs, strict=True))), (0,) * len(outputs[0])


def register_fake(overload: Any) -> Callable[[Callable[..., Any]], Any]:
    """Has a function tell an operator's results without computing: shapes, dtypes and devices."""
    return torch.library.register_fake(overload, lib=_library)


def graph_takes_sizes() -> bool:
    """Tells whether the graph that is being made may have sizes that are known only when it runs, as of received rows.

    With `fullgraph=True` it may; otherwise it would break at each operator with such results.
    """
    context = tracing_context()
    if context is None or context.fake_mode is None or context.fake_mode.shape_env is None:
        return False
    return bool(context.fake_mode.shape_env.allow_dynamic_output_shape_ops)


@cache
def keep_out_of_graphs(owner: type, method: str) -> None:
    """Have compiled models call this method of a class as it is.

    Called with the first object, not with the module: it imports the compiler, which takes longer than this library.
    """
    setattr(owner, method, torch.compiler.disable(getattr(owner, method)))


@cache
def constant_in_graphs(function: Callable[..., Any]) -> None:
    """Have the compiler call a function and take its result as a constant. Called with the first object, too."""
    torch.compiler.assume_constant_result(function)


# Formulas that PyTorch's counter does not have yet.
_flops: dict[Any, tuple[Callable[..., int], bool]] = {}


def register_flops(overload: Any, get_raw: bool = False) -> Callable[[Callable[..., int]], Any]:
    """Give PyTorch's `FlopCounterMode` an operator's formula: of shapes in place of tensors, and `out_shape`.

    Args:
        get_raw: the formula gets tensors, and `out_val`.
    """

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        _flops[overload.overloadpacket] = formula, get_raw
        if "torch.utils.flop_counter" in sys.modules:
            count_flops()
        return formula

    return register


def count_flops() -> None:
    """Register all formulas. Called with the first layer, because PyTorch's counter imports Triton."""
    if _flops:
        from torch.utils.flop_counter import register_flop_formula

        while _flops:
            operation, (formula, get_raw) = _flops.popitem()
            register_flop_formula(operation, get_raw)(formula)


def register_gradient(overload: Any, backward: Callable[..., tuple[Any, ...]], setup: Callable[..., None]) -> None:
    """Gives an operator its backward.

    The backward is made of operators, which refuse derivatives of their own or have them. So what it computes from an
    output must also be told what that was made of: `first_order`.

    Args:
        backward: gets the context and the gradients of the outputs; returns one gradient or None for each argument.
        setup: gets the context, the list of arguments and the output, and keeps what `backward` needs.
    """
    _gradients[overload].backward, _gradients[overload].setup = backward, setup


Move = Callable[[Tensor], Tensor]


class Function(torch.autograd.Function):
    """Base of all functions of autograd in the library.

    Attributes:
        operation: the name in errors.
        twice: its backward consists of what autograd can differentiate, so that derivatives of higher order are right.
            Else they are refused.
    """

    operation: ClassVar[str]
    twice: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if not cls.twice:
            cls.backward = staticmethod(_once(cls.operation, cls.backward))  # type: ignore[method-assign]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().apply(*args)
        if forward_level() >= 0 or transforms_active():
            _require_plain(cls.name_of(args), args)
        outputs = super().apply(*args)
        # A backward with `create_graph` must refuse what goes through this function's inputs, some of which it may not
        # have saved: the context gets a tensor that hangs on all of them.
        if not cls.twice and torch.is_grad_enabled():
            for output in outputs if isinstance(outputs, tuple) else (outputs,):
                if isinstance(output, Tensor) and output.grad_fn is not None:
                    node: Any = output.grad_fn  # the context that `_once` gets
                    node.inputs = _Inputs.apply(*args)
                    break
        return outputs

    @classmethod
    def name_of(cls, args: Sequence[Any]) -> str:
        """The name in errors of a call with these arguments."""
        return cls.operation


class _Linear(Function):
    operation, twice = "a linear map", True

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Move, back: Move, name: str) -> Tensor:
        ctx.there, ctx.back, ctx.name = there, back, name
        out = there(rows)
        return out.view_as(out) if out is rows else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # Where only numbers are asked for, as mostly, a node that nobody sees would cost more than a small map.
        plain = not torch.compiler.is_compiling() and numbers_only()
        drows = ctx.back(grad) if plain else linear(grad, ctx.back, ctx.there, ctx.name)
        return drows, None, None, None

    @classmethod
    def name_of(cls, args: Sequence[Any]) -> str:
        return str(args[3])


def linear(rows: Tensor, there: Move, back: Move, name: str) -> Tensor:
    """`there(rows)`; its backward is `back`, whose own backward is `there`. Saves nothing. `name`: in errors."""
    return _Linear.apply(rows, there, back, name)


def first_order(operation: str, gradients: Sequence[Any], sources: Iterable[Any]) -> tuple[Any, ...]:
    """Gradients, computed without a graph, whose own derivatives are refused.

    `sources`: what they depend on. Refused is what goes to one of these, also if it is the only one that is asked for
    (PyTorch's `once_differentiable` hangs on none of them, and is then passed over).
    """
    connected = [one for one in sources if isinstance(one, Tensor) and one.requires_grad]
    if not connected:
        return tuple(gradients)
    tensors = [one for one in gradients if one is not None]
    refusing = iter(_Refusing.apply(operation, len(tensors), *tensors, *connected))
    return tuple(None if one is None else next(refusing) for one in gradients)


def _once(operation: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling() or numbers_only():
            return backward(ctx, *grads)
        _require_plain(operation, grads)
        with torch.no_grad():
            # Numbers only; `first_order` hangs them on a node that refuses.
            found = backward(ctx, *grads)
        found = found if isinstance(found, tuple) else (found,)
        return first_order(operation, found, (ctx.inputs, *grads))

    return checked


class _Inputs(torch.autograd.Function):
    """An empty tensor that hangs on a function's inputs: it keeps none of their memory."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise AssertionError("no gradient goes through it")


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.operation = operation
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        _refuse_again(ctx.operation)


def numbers_only() -> bool:
    """Returns whether only numbers are asked for: no graph, no tangent, no transform of `torch.func`."""
    return not (torch.is_grad_enabled() or forward_level() >= 0 or transforms_active())


def _require_plain(operation: str, args: Iterable[Any]) -> None:
    require_no_tangent(operation, args)
    if transforms_active():
        raise DerivativeError(
            f"{operation} has no part in transforms of torch.func (grad, vjp, jacrev, jvp, hessian, vmap); use "
            "torch.autograd.grad on a plain call"
        )


def require_no_tangent(operation: str, args: Iterable[Any]) -> None:
    """Refuses tensors that have one, in forward mode."""
    if forward_level() < 0 or not is_forward_mode_enabled():
        return
    if any(isinstance(one, Tensor) and forward_ad.unpack_dual(one).tangent is not None for one in args):
        raise DerivativeError(
            f"{operation} has no derivative in forward mode (dual tensors, torch.func.jvp, jacfwd and hessian); use "
            "backward: torch.autograd.grad, or torch.autograd.functional.jacobian"
        )


def _refuse_again(operation: str) -> NoReturn:
    raise DerivativeError(
        f"{operation} cannot be differentiated again, as a Hessian-vector product or a gradient penalty asks for; take "
        "differences of gradients, or experts in plain PyTorch: fusedmoe.experts.Custom, without a schedule, can"
    )
