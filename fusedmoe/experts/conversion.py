"""Expert networks with the trained weights of another model: its expert modules, stacked tensors or state dict.

    experts = from_modules(block.experts)    # a list of modules, or one module with stacked weights
    layer = MoELayer(model_dim, gate, experts, topology=topology)

Each rank copies its experts and, with esp > 1, its shard of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import FeedForward
from fusedmoe.kernels.activation import ACTIVATIONS, define_activation

# Names of an expert's projections: (gate,) up, down. Mixtral and torchtitan, LLaMA and Qwen, T5; then without a gate:
# torchtitan's w1 without w3, fairseq and BERT-like models, GPT-2, Megatron-LM and DeepSpeed, Megatron-core, T5.
_GATED_NAMES = (
    ("w1", "w3", "w2"),
    ("gate_proj", "up_proj", "down_proj"),
    ("gate", "up", "down"),
    ("wi_0", "wi_1", "wo"),
)
_UNGATED_NAMES = (
    ("w1", "w2"),
    ("fc1", "fc2"),
    ("up_proj", "down_proj"),
    ("c_fc", "c_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("linear_fc1", "linear_fc2"),
    ("wi", "wo"),
    ("batched_fc1_w", "batched_fc2_w"),
)
# Gate and up projection in one matrix, gate rows first.
_CONCATENATED_NAMES = ("gate_up_proj", "down_proj")
# Tutel stores the down projection as [E, H, M] and calls biases batched_fc1_bias.
_TUTEL_BIAS = {"batched_fc1_bias": "batched_fc1_w.bias", "batched_fc2_bias": "batched_fc2_w.bias"}
# Maximum difference between an expert and its copy relative to the largest output, by dtype.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Rows of the comparison.
_NUM_TEST_ROWS = 16


class ExpertTensors(NamedTuple):
    """One whole expert: w1 [H, M] or gated [2, H, M], w2 [M, H], b1 [H] or [2, H], b2 [M].

    M is the model dimension, H the hidden dimension.
    """

    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None


class ExpertSource:
    """Reads trained experts by global number. Copies of a layer share the source; pickled layers omit it.

    `read` returns one of `count` experts by its index in the source. `first`: global number of index 0; None: 0, and
    the source has all experts of the layer.
    """

    def __init__(self, count: int, read: Callable[[int], ExpertTensors], first: int | None = None) -> None:
        self.count, self.first, self._read = count, first, read

    def require_experts(self, experts: int) -> None:
        if self.first is None and self.count != experts:
            raise ConfigError(
                f"from_modules: the source has {self.count} experts, the gate selects from {experts}; for a source of "
                "this rank's experts pass first="
            )

    def __call__(self, number: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        first = self.first or 0
        if not first <= number < first + self.count:
            raise ConfigError(
                f"from_modules: this rank needs expert {number}, the source has experts {first} to "
                f"{first + self.count - 1}"
            )
        found = self._read(number - first)._asdict()
        if wrong := [name for name, shape in shapes.items() if found[name].shape != shape]:
            raise ConfigError(
                f"from_modules: expert {number} of the source has {wrong[0]} {list(found[wrong[0]].shape)}, the layer "
                f"needs {list(shapes[wrong[0]])}: model_dim differs"
            )
        return {name: value.detach() for name, value in found.items() if value is not None}

    def __deepcopy__(self, memo: Any) -> ExpertSource:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def from_modules(
    source: nn.Module | Sequence[nn.Module] | Mapping[str, Tensor],
    activation: str | None = None,
    *,
    first: int | None = None,
) -> FeedForward:
    """Return experts that copy trained weights when a `MoELayer` is constructed with them.

    Layouts that are recognised by parameter names, with or without biases:

    - a list of modules, one per expert (Mixtral, DeepSpeed-MoE, your own): LLaMA's `gate_proj, up_proj, down_proj`,
      Mixtral's `w1, w3, w2`, or two linear layers such as `fc1, fc2` or an `nn.Sequential`;
    - a module with stacked parameters [E, …]: torchtitan's `w1, w2, w3`, transformers' `gate_up_proj, down_proj`,
      Tutel's `batched_fc1_w, batched_fc2_w`;
    - a state dict of either, for example of safetensors files; only this rank's experts are read.

    The copies are verified on random rows against the first module, if it can be called.

    Args:
        source: all experts of the layer, on every rank, in any floating-point dtype and on any device. Parameters are
            copied to the layer's dtype and device.
        activation: "gelu", "gelu_tanh", "relu" or "silu"; gated: "swiglu", "geglu". None: the activation with which the
            copy equals the first module; required for state dicts and modules that cannot be called.
        first: number of the source's first expert, if the source has only some of the layer's experts, which must
            include all experts of this rank (for example those of a rank of DeepSpeed-MoE or Tutel).
    Returns:
        `FeedForward`; assign it to one layer. Its hidden dimension and biases are those of the source.
    Raises:
        ConfigError: unknown or missing parameter names; experts of different shapes, or with shared weights; quantised
            weights; a module that computes another function (a clamped or scaled activation, interleaved gate rows,
            dropout): wrap such modules with `Custom`, or use `fusedmoe.hf.apply` for models of
            transformers. When the layer is constructed: fewer experts than the gate selects from, or another model
            dimension.
    Example:
        >>> def network():
        ...     return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        >>> trained = fusedmoe.experts.from_modules([network() for _ in range(4)])
        >>> layer = fusedmoe.MoELayer(8, fusedmoe.gates.TopK(experts=4), trained)
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise ConfigError(f"from_modules: unknown activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
    source = _unwrap(source)
    if isinstance(source, nn.Module):
        count, read_any = _read_stacked(dict(source.named_parameters()))
        run = _call_of_expert_0(source)
    elif isinstance(source, Mapping):
        (count, read_any), run = _read_state_dict(source), None
    else:
        _require_distinct(source)
        count, read_any = len(source), partial(_read_module, source)
        run = source[0] if source else None
    if not count:
        raise ConfigError("from_modules: the source has no experts")
    example = read_any(0)
    shapes = [None if tensor is None else tensor.shape for tensor in example]
    gated = example.w1.dim() == 3

    def read(number: int) -> ExpertTensors:
        expert = read_any(number)
        own = [None if tensor is None else tensor.shape for tensor in expert]
        if own != shapes:
            raise ConfigError(f"from_modules: expert {number} has shapes {own}, expert 0 has {shapes}")
        return expert

    candidates = [activation] if activation else [name for name, one in ACTIVATIONS.items() if one.gated == gated]
    if ACTIVATIONS[candidates[0]].gated != gated:
        choices = ", ".join(name for name, one in ACTIVATIONS.items() if one.gated == gated)
        raise ConfigError(
            f"from_modules: the source has {'a gate' if gated else 'no gate'}; activation={activation!r} does not fit, "
            f"choose {choices}"
        )
    name = _find_activation(example, candidates, run)
    if name is None:
        raise ConfigError(f"from_modules: pass activation=, one of {', '.join(candidates)}: the source is not callable")
    experts = FeedForward(example.w2.shape[1], name, bias=example.b1 is not None)
    experts.source = ExpertSource(count, read, first)
    return experts


def _unwrap(source: Any) -> Any:
    """Return the expert modules as a list if `source` is a list, tuple, ModuleList or ModuleDict, or contains one.

    Containers are searched up to 3 attributes deep, for DeepSpeed-MoE. Otherwise returns the innermost module, or the
    state dict unchanged. Raises `ConfigError` for other types.
    """
    for _ in range(4):
        if isinstance(source, nn.ModuleDict):
            return list(source.values())
        if isinstance(source, nn.ModuleList | list | tuple):
            return list(source)
        inner = [getattr(source, name, None) for name in ("deepspeed_moe", "deepspeed_experts", "experts")]
        source = next((one for one in inner if isinstance(one, nn.Module)), source)
    if not isinstance(source, nn.Module | Mapping):
        raise ConfigError(f"from_modules: {type(source).__name__} is no module, list of modules or state dict")
    return source


def _require_distinct(modules: Sequence[nn.Module]) -> None:
    """Raise `ConfigError` if two experts are one module or share a parameter, which copies would not share."""
    first: dict[Any, int] = {}
    for number, module in enumerate(modules):
        for parameter in module.parameters():
            # Without storage (meta device, or freed by FSDP) the address is 0.
            address = parameter.data_ptr() if type(parameter.data) is Tensor else 0
            key = (parameter.device, address, parameter.shape) if address else id(parameter)
            if (other := first.setdefault(key, number)) != number:
                raise ConfigError(
                    f"from_modules: experts {other} and {number} share weights, their copies would not; pass distinct "
                    "modules. To start all experts from one network, pass a state dict with its tensors for each number"
                )


#: Number of experts, and a function that reads one.
_CountAndReader = tuple[int, Callable[[int], ExpertTensors]]


def _read_state_dict(state: Mapping[str, Tensor]) -> _CountAndReader:
    """Read experts with keys `….<number>.<projection>.weight`, or stacked tensors."""
    names: dict[int, dict[str, str]] = {}
    for key in state:
        # Keys may begin with the number of a block; "5.0.weight" is the first layer of an nn.Sequential.
        match = re.fullmatch(r"(?:.*?\.)?(\d+)\.(\w+\.(?:weight|bias)|(?!weight$|bias$)[A-Za-z]\w*)", key)
        if match is not None and names.setdefault(int(match[1]), {}).setdefault(match[2], key) != key:
            raise ConfigError(f"from_modules: {key} occurs for several layers; pass the experts of one layer")
    if not names:
        tails = {re.sub(r"^.*\.(?=\w+(\.weight|\.bias)?$)", "", key): key for key in state}
        if len(tails) < len(state):
            raise ConfigError("from_modules: tensors of one name occur twice; pass the experts of one layer")
        return _read_stacked({tail: state[key] for tail, key in tails.items()})
    if sorted(names) != list(range(len(names))):
        raise ConfigError(f"from_modules: the state has experts {sorted(names)}; expected 0 to {len(names) - 1}")
    return len(names), lambda number: _expert_tensors({name: state[key] for name, key in names[number].items()}, number)


def _read_module(modules: Sequence[nn.Module], number: int) -> ExpertTensors:
    return _expert_tensors(dict(modules[number].named_parameters()), number, in_order=True)


def _read_stacked(given: Mapping[str, Tensor]) -> _CountAndReader:
    stacks = {_TUTEL_BIAS.get(name, name): value for name, value in given.items() if value.dim() >= 2}
    counts = {len(value) for value in stacks.values()}
    if len(counts) != 1:
        raise ConfigError(f"from_modules: no experts of one number in {_shapes_of(given)}")

    def read(number: int) -> ExpertTensors:
        return _expert_tensors({name: value[number] for name, value in stacks.items()}, number)

    return counts.pop(), read


def _expert_tensors(given: Mapping[str, Tensor], number: int, in_order: bool = False) -> ExpertTensors:
    """Return one expert from its parameters by name, with or without `.weight` and `.bias`.

    `in_order`: two matrices with unknown names are up and down projection; the caller verifies the result. Raises
    `ConfigError` for quantised, unknown or mismatched parameters.
    """
    weights = {name.removesuffix(".weight"): value for name, value in given.items() if not _is_bias(name)}
    biases = {re.sub(r"(\.bias|_bias)$", "", name): value for name, value in given.items() if _is_bias(name)}
    quantised = [name for name, value in weights.items() if not value.is_floating_point() or value.dim() < 2]
    if quantised:
        raise ConfigError(f"from_modules: {quantised[0]} of expert {number} is quantised; dequantise the source first")
    names = _projections(weights, number, in_order)
    b = [biases.get(name) for name in names]
    if len({bias is None for bias in b}) > 1:
        raise ConfigError(f"from_modules: expert {number} has biases in some projections only: {_shapes_of(given)}")
    b1, b2 = b[0], b[-1]
    if len(names) == 3 and weights[names[0]].shape != weights[names[1]].shape:
        raise ConfigError(
            f"from_modules: expert {number} has {_shapes_of(given)}; {names[0]} (gate) and {names[1]} (up) must have "
            f"one shape [hidden, model_dim], and {names[2]} (down) [model_dim, hidden]"
        )
    if len(names) == 3:
        w1 = torch.stack([weights[names[0]], weights[names[1]]])
        b1 = None if b1 is None else torch.stack([b1, biases[names[1]]])
    else:
        w1 = weights[names[0]]
        # Gate and up rows in one matrix: transformers' name, or twice the rows of the down projection.
        down = weights[names[1]]
        if names[0] == _CONCATENATED_NAMES[0] or w1.shape[0] == 2 * down.shape[-1] and w1.shape[1] == down.shape[0]:
            w1 = w1.reshape(2, -1, w1.shape[-1]) if w1.shape[0] % 2 == 0 else w1
            b1 = None if b1 is None else b1.reshape(2, -1)
    w2 = weights[names[-1]]
    if names[0] == "batched_fc1_w":
        w2, b1, b2 = w2.mT, None if b1 is None else b1.flatten(), None if b2 is None else b2.flatten()
    if w1.shape[-2:] != w2.shape[::-1]:
        raise ConfigError(
            f"from_modules: expert {number} has {_shapes_of(given)}; expected [hidden, model_dim] for gate and up and "
            "[model_dim, hidden] for down, as nn.Linear stores them"
        )
    return ExpertTensors(w1, w2, b1, b2)


def _projections(weights: Mapping[str, Tensor], number: int, in_order: bool) -> tuple[str, ...]:
    for names in (*_GATED_NAMES, _CONCATENATED_NAMES, *_UNGATED_NAMES):
        if weights.keys() == set(names):
            return names
    if len(weights) == 2 and (in_order or all(map(str.isdigit, weights))):
        return tuple(weights) if in_order else tuple(sorted(weights, key=int))  # nn.Sequential
    raise ConfigError(
        f"from_modules: expert {number} has {_shapes_of(weights)}; known names, in the order (gate,) up, down: "
        f"{'; '.join(', '.join(names) for names in (*_GATED_NAMES, *_UNGATED_NAMES))}. For other names pass a state "
        f"dict with keys such as '0.gate_proj.weight', and activation=, one of {', '.join(ACTIVATIONS)}"
    )


@torch.no_grad()
def _find_activation(
    expert: ExpertTensors, candidates: Sequence[str], run: Callable[[Tensor], Tensor] | None
) -> str | None:
    """Return the activation with which the expert equals `run`; without `run`, the only candidate or None.

    Raises `ConfigError` if no candidate equals `run`, or if `run` fails and there are several.
    """
    only_candidate = candidates[0] if len(candidates) == 1 else None
    like = expert.w1
    if run is None or like.is_meta:
        return only_candidate
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_NUM_TEST_ROWS, like.shape[-1], generator=generator, dtype=torch.float64, device="cpu")
    rows = rows.to(like.device, like.dtype)
    try:
        expected = _call_in_mode(run, rows, training=False)
    except Exception as error:
        if only_candidate is not None:
            return only_candidate
        raise ConfigError(
            f"from_modules: pass activation=, one of {', '.join(candidates)}: the first expert could not be called on "
            f"rows [{_NUM_TEST_ROWS}, {like.shape[-1]}] to find it: {type(error).__name__}: {error}"
        ) from error
    tolerance = _TOLERANCE.get(like.dtype, 0.0)
    errors = {name: _relative_error(expert, name, rows, expected) for name in candidates}
    best = min(errors, key=errors.__getitem__)
    if not errors[best] <= tolerance:
        raise ConfigError(
            f"from_modules: the first expert is no {' or '.join(candidates)} network of its weights: results differ by "
            f"{errors[best]:.2g} of the largest; wrap the modules with fusedmoe.experts.Custom"
        )
    # Last: training may change buffers. A module for inference only may refuse it.
    try:
        expected = _call_in_mode(run, rows, training=True)
    except Exception:
        return best
    if not _relative_error(expert, best, rows, expected) <= tolerance:
        raise ConfigError(
            "from_modules: in training, the first expert is no network of its weights alone, for example because of "
            "dropout; set its p to 0, or wrap the modules with fusedmoe.experts.Custom"
        )
    return best


def _call_in_mode(run: Callable[[Tensor], Tensor], rows: Tensor, training: bool) -> Any:
    """Return run(rows) with all modules in training or evaluation mode; keeps their modes and the random state."""
    modules = run.modules() if isinstance(run, nn.Module) else ()
    changed = [module for module in modules if module.training != training]
    try:
        for module in changed:
            module.training = training
        with torch.random.fork_rng([rows.device] if rows.is_cuda else []):
            return run(rows)
    finally:
        for module in changed:
            module.training = not training


def _relative_error(expert: ExpertTensors, activation: str, rows: Tensor, expected: Any) -> float:
    if not isinstance(expected, Tensor) or expected.shape != rows.shape:
        return float("inf")
    w1, w2, b1, b2 = (None if tensor is None else tensor.double() for tensor in expert)
    assert w1 is not None and w2 is not None
    h = rows.double() @ w1.reshape(-1, w1.shape[-1]).mT
    h = h if b1 is None else h + b1.flatten()
    y = define_activation(activation, h.view(len(rows), *w1.shape[:-1])) @ w2.mT
    y = y if b2 is None else y + b2
    return float((y - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30))


def _call_of_expert_0(stacked: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return a call of expert 0 of transformers' stacked experts; None for other modules."""
    if not hasattr(stacked, "gate_up_proj"):
        return None

    class Expert0(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stacked = stacked

        def forward(self, rows: Tensor) -> Any:
            expert_SK = rows.new_zeros(len(rows), 1, dtype=torch.long)
            return self.stacked(rows, expert_SK, rows.new_ones(len(rows), 1))

    return Expert0()


def _is_bias(name: str) -> bool:
    return name == "bias" or name.endswith((".bias", "_bias"))


def _shapes_of(given: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in given.items()) or "no parameters"
