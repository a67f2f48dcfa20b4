"""Models of Hugging Face with this library's experts, compared with transformers' own experts in float64."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.moe import ExpertsInterface
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import fusedmoe.hf
from fusedmoe.errors import ConfigError
from fusedmoe.hf.module_experts import NAME, experts_forward, fused_activation, is_clamped_swiglu, require_finite_inputs
from tests.integrations.models import CONFIGS, VOCABULARY, make
from tests.marks import slowly


def results(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Return logits and all gradients."""
    model.zero_grad()
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), **grads}


def worst(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    assert found.keys() == exact.keys()
    return max(float((found[name] - exact[name]).norm() / exact[name].norm().clamp(min=1e-9)) for name in exact)


@pytest.mark.parametrize("family", CONFIGS)
def test_model_families_equal_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(0, VOCABULARY, (2, 11))
    exact = make(family, "eager", torch.float64)
    single = copy.deepcopy(exact).float()
    wanted, plain = results(exact, tokens), results(single, tokens)
    assert fusedmoe.hf.apply(single) is single
    found = results(single, tokens)
    # For some random weights float32 itself has a larger error, with transformers' own experts as well as with these.
    assert worst(found, wanted) < max(1e-5, 2 * worst(plain, wanted))
    monkeypatch.setattr("fusedmoe.autograd.order", lambda *_: pytest.fail("ours"))
    with pytest.raises(BaseException, match="ours"):
        single(input_ids=tokens)


@pytest.mark.parametrize("family", CONFIGS)
def test_half_precision_error_is_near_grouped_mm(family: str) -> None:
    """The error is at most 1.5 times that of transformers' own grouped products, for one module's fresh inputs."""
    errors = dict.fromkeys(("grouped_mm", "fusedmoe"), 0.0)
    for _ in range(5):  # one input's error may be twice another's
        experts, (x_TM, number_TK, weight_TK) = module_of(family)
        dy_TM = torch.randn_like(x_TM).bfloat16()
        half = copy.deepcopy(experts).bfloat16()
        with torch.no_grad():  # rounded values are valid parameters
            for ours, theirs in zip(experts.parameters(), half.parameters(), strict=True):
                ours.copy_(theirs)
        rounded = (x_TM.bfloat16(), number_TK, weight_TK.float())
        whole = (rounded[0].double(), number_TK, rounded[2].double())
        exact = gradients(experts, whole, dy_TM.double(), "eager")
        for name in errors:
            found = gradients(half, rounded, dy_TM, name)
            errors[name] += worst({key: value.double() for key, value in found.items()}, exact)
    assert errors["fusedmoe"] <= 1.5 * errors["grouped_mm"] + 1e-3, errors


def module_of(family: str, tokens: int = 29) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
    """Return the first experts of a model in float64, and their input: tokens, expert numbers and weights."""
    experts: Any = next(m for m in make(family, "eager").double().modules() if hasattr(m, "_is_expert_parallel"))
    return experts, routed(experts, torch.rand(tokens, experts.num_experts).topk(2).indices)


def routed(experts: Any, number_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(len(number_TK), 32, dtype=torch.float64), number_TK, torch.rand(number_TK.shape).double()


def gradients(experts: Any, inputs: tuple[Tensor, Tensor, Tensor], dy_TM: Tensor, name: str) -> dict[str, Tensor]:
    """Return the result and the gradients of tokens, weights and parameters with an implementation."""
    experts.config._experts_implementation = name
    experts.zero_grad()
    x_TM, weight_TK = inputs[0].clone().requires_grad_(), inputs[2].clone().requires_grad_()
    y_TM = experts(x_TM, inputs[1], weight_TK)
    assert y_TM.shape == x_TM.shape and y_TM.dtype == x_TM.dtype
    y_TM.backward(dy_TM)
    own = {"y": y_TM.detach(), "x": x_TM.grad, "weight": weight_TK.grad}
    return own | {name: p.grad for name, p in experts.named_parameters()}  # type: ignore[return-value]


def test_fused_clamped_swiglu_needs_unmodified_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, (x_TM, number_TK, weight_TK) = module_of("gpt-oss")
    assert is_clamped_swiglu(experts)
    experts.config._experts_implementation = "fusedmoe"
    rows: list[int] = []
    gate = type(experts)._apply_gate
    monkeypatch.setattr(type(experts), "_apply_gate", lambda self, given: rows.append(len(given)) or gate(self, given))
    x_TM = 20 * x_TM
    before = experts(x_TM, number_TK, weight_TK)
    experts.limit /= 2  # a user's change takes effect at the next call
    assert not torch.allclose(experts(x_TM, number_TK, weight_TK), before)
    assert number_TK.numel() not in rows and len(rows) == 2  # only probed, for each pair of gate and limit

    class SideBySide(GptOssExperts):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            g, u = gate_up.chunk(2, -1)
            return super()._apply_gate(torch.stack([g, u], -1).flatten(-2))

    class Shifted(GptOssExperts):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            return super()._apply_gate(gate_up) + 1e-6

    monkeypatch.undo()
    for kind in (SideBySide, Shifted, MixtralExperts):
        assert not is_clamped_swiglu(kind(experts.config)), kind


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
@pytest.mark.parametrize("rows", [1, 17])
def test_uneven_routings_equal_eager(family: str, rows: int) -> None:
    """One token, all tokens on one expert, experts without tokens, 32-bit expert numbers."""
    experts, _ = module_of(family)
    for number_TK in (torch.full((rows, 1), 2), torch.tensor([[1, 3]] * rows, dtype=torch.int32)):
        inputs = routed(experts, number_TK)
        dy_TM = torch.randn_like(inputs[0])
        wanted = gradients(experts, (inputs[0], number_TK.long(), inputs[2]), dy_TM, "eager")
        found = gradients(experts, inputs, dy_TM, "fusedmoe")
        assert worst(found, wanted) < 1e-12
        idle = [e for e in range(experts.num_experts) if e not in number_TK]
        assert not any(found[name][idle].any() for name in found if found[name].dim() == 3)


@pytest.mark.parametrize("rows", [3, 90])
def test_activation_hooks_take_effect(rows: int) -> None:
    experts, inputs = module_of("mixtral", rows)
    experts.act_fn.register_forward_hook(lambda _, __, a: a * 2)
    dy_TM = torch.randn_like(inputs[0])
    wanted, found = (gradients(experts, inputs, dy_TM, name) for name in ("eager", "fusedmoe"))
    assert worst(found, wanted) < 1e-12


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_experts_without_local_rows_return_zeros(family: str) -> None:
    """No tokens; or no expert of this rank is chosen, as expert parallelism encodes it."""
    experts, (x_TM, number_TK, weight_TK) = module_of(family)
    for here in (slice(0), slice(None)):
        experts._is_expert_parallel = here != slice(0)
        elsewhere = torch.full_like(number_TK[here], experts.num_experts)
        inputs = (x_TM[here], elsewhere, torch.zeros_like(weight_TK[here]))
        found = gradients(experts, inputs, torch.randn_like(x_TM[here]), "fusedmoe")
        assert all(grad is not None and not grad.any() for grad in found.values())


def test_expert_number_out_of_range_raises() -> None:
    experts, (x_TM, number_TK, weight_TK) = module_of("mixtral")
    experts.config._experts_implementation = "fusedmoe"
    number_TK[3, 1] = experts.num_experts
    with pytest.raises(ConfigError, match="chosen experts must be numbers from 0 to 3"):
        experts(x_TM, number_TK, weight_TK)


@pytest.mark.parametrize("rows", [5, *slowly(70)])  # few, and more
def test_non_finite_inputs_raise(rows: int) -> None:
    experts, given = module_of("gpt-oss")
    experts.config._experts_implementation = "fusedmoe"
    x_TM, number_TK, weight_TK = (tensor[:1].expand(rows, -1).clone() for tensor in given)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        module = copy.deepcopy(experts).to(dtype)
        for bad, place in itertools.product((torch.nan, torch.inf, -torch.inf), (0, 1)):
            inputs = [x_TM.to(dtype), weight_TK.to(dtype)]
            inputs[place][3, 1] = bad
            with torch.set_grad_enabled(bool(place)), pytest.raises(ConfigError, match="Experts: tokens or .* are NaN"):
                module(inputs[0], number_TK, inputs[1])
        y_TM = module(x_TM.to(dtype).requires_grad_(), number_TK, weight_TK.to(dtype))
        y_TM.backward(torch.full_like(y_TM, torch.inf))  # overflowing gradients are left to the loss scaler
    # Finite values with an infinite sum are no fault.
    require_finite_inputs(module, torch.full((64, 8), 6e4, dtype=torch.float16))
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    compiled(x_TM, number_TK, weight_TK)
    x_TM[2, 2] = torch.nan
    with pytest.raises(RuntimeError, match="GptOssExperts: tokens or router weights are NaN"):
        compiled(x_TM, number_TK, weight_TK)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_decoding_skips_sort(family: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens without gradients, on a CPU, are not sorted."""
    experts, (_, number_TK, _) = module_of(family)
    monkeypatch.setattr("fusedmoe.autograd.order", lambda *_: pytest.fail("it was"))
    for numbers in (number_TK[:rows], torch.full((rows, 2), 2, dtype=torch.int32), torch.tensor([[3, 3]] * rows)):
        x_TM, number, weight_TK = routed(experts, numbers.view(rows, 2))
        with torch.no_grad():
            experts.config._experts_implementation = "eager"
            wanted = experts(x_TM, number.long(), weight_TK)
            experts.config._experts_implementation = "fusedmoe"
            torch.testing.assert_close(experts(x_TM, number, weight_TK), wanted, rtol=1e-12, atol=1e-14)
            with torch.autocast("cpu", torch.bfloat16):
                half = experts(x_TM.float(), number, weight_TK.float())
            assert half.dtype == torch.float32
            torch.testing.assert_close(half.double(), wanted, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_decoding_in_float32_equals_eager(family: str) -> None:
    """Experts chosen in any order, also twice, with all experts in one product."""
    experts, _ = module_of(family)
    for numbers in ([[2, 0]], [[3, 1, 3]], [[1, 0, 2], [3, 0, 1]], [[0, 2], [0, 2], [0, 1], [0, 3]]):
        given = routed(experts, torch.tensor(numbers))
        with torch.no_grad():
            experts.config._experts_implementation = "eager"
            wanted = experts(*given)
            single = copy.deepcopy(experts).float()
            single.config._experts_implementation = "fusedmoe"
            x_TM, number_TK, weight_TK = given
            found = single(x_TM.float(), number_TK, weight_TK.float())
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-6)


def test_decoding_with_experts_of_other_ranks() -> None:
    experts, (x_TM, number_TK, weight_TK) = module_of("mixtral")
    experts.config._experts_implementation = "fusedmoe"
    number_TK[0, 1] = experts.num_experts
    with torch.no_grad():
        with pytest.raises(ConfigError, match="chosen experts must be numbers from 0 to 3"):
            experts(x_TM[:2], number_TK[:2], weight_TK[:2])
        experts._is_expert_parallel = True
        wanted = experts(x_TM, number_TK, weight_TK)
        for tokens in (1, 2):
            found = experts(x_TM[:tokens], number_TK[:tokens], weight_TK[:tokens])
            torch.testing.assert_close(found, wanted[:tokens], rtol=1e-12, atol=1e-14)
        # All choices of one token are on other ranks.
        nowhere = torch.full_like(number_TK[:1], experts.num_experts)
        assert torch.equal(experts(x_TM[:1], nowhere, weight_TK[:1]), torch.zeros_like(x_TM[:1]))


def test_autocast_output_is_float32_and_close() -> None:
    experts, inputs = module_of("mixtral")
    single, x_TM = copy.deepcopy(experts).float(), inputs[0].float().requires_grad_()
    single.config._experts_implementation = "fusedmoe"
    with torch.autocast("cpu", torch.bfloat16):
        y_TM = single(x_TM, inputs[1], inputs[2].float())
    assert y_TM.dtype == torch.float32
    torch.testing.assert_close(y_TM, single(x_TM, inputs[1], inputs[2].float()), rtol=0.05, atol=0.05)
    y_TM.sum().backward()
    assert single.down_proj.grad.dtype == x_TM.grad.dtype == torch.float32


def test_strided_parameters_equal_eager() -> None:
    experts, inputs = module_of("mixtral")
    dy_TM = torch.randn_like(inputs[0])
    wanted = gradients(experts, inputs, dy_TM, "eager")
    for name, parameter in list(experts.named_parameters()):
        strided = torch.empty(*parameter.shape[:-1], 2 * parameter.shape[-1], dtype=parameter.dtype)[..., ::2]
        setattr(experts, name, torch.nn.Parameter(strided.copy_(parameter.detach())))
        assert not getattr(experts, name).is_contiguous()
    assert worst(gradients(experts, inputs, dy_TM, "fusedmoe"), wanted) < 1e-12


def test_families_with_fused_activation() -> None:
    fused = {family: fused_activation(module_of(family)[0]) for family in CONFIGS}
    assert fused == dict.fromkeys(CONFIGS, "swiglu") | {"gpt-oss": None}


def test_apply_names_reason_for_rejected_model(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    )
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts"):
        fusedmoe.hf.apply(dense)
    with pytest.raises(ConfigError, match="'a/model' is no model; load it first"):
        fusedmoe.hf.apply("a/model")
    model = make("mixtral", "eager")
    model.model.layers[1].mlp.experts.forward = lambda *_: None
    with pytest.raises(
        ConfigError, match="tests.integrations.test_hf_experts has replaced the forward of model.layers.1"
    ):
        fusedmoe.hf.apply(model)
    monkeypatch.setattr(MixtralExperts, "forward", GptOssExperts.__init__.__wrapped__)
    with pytest.raises(ConfigError, match="modeling_gpt_oss has replaced the forward of model.layers.0"):
        fusedmoe.hf.apply(make("mixtral", "eager"))


class Wrapper(nn.Module):
    """Model inside a module of another class, as in DistributedDataParallel and FSDP; FSDP preserves the names."""

    def __init__(self, module: Any, answers: bool = False) -> None:
        super().__init__()
        self.module, self.answers = module, answers

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not self.answers:
                raise
            return getattr(self.module, name)

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.module(*given, **named)


def wrap_experts(model: Any, wrap: Callable[[Any], Any]) -> Any:
    """Let `wrap` replace all expert modules with its results."""
    for block in [block for block in model.modules() if "experts" in block._modules]:
        block.experts = wrap(block.experts)
    return model


def compiled(experts: Any) -> Any:
    experts.forward = torch.compile(experts.forward, backend="eager")
    return experts


def add_lora(model: Any) -> Any:
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return get_peft_model(model, LoraConfig(r=2, target_parameters=names))


WRAPS: dict[str, Callable[[Any, str], Any]] = {
    "wrapped_model": lambda model, _: Wrapper(model),
    "wrapped_model_and_experts": lambda model, _: wrap_experts(Wrapper(model, True), partial(Wrapper, answers=True)),
    "compiled_forward": lambda model, _: wrap_experts(model, compiled),
    "LoRA": lambda model, _: Wrapper(add_lora(model)),
    "hooks": lambda model, _: dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "two_hooks": lambda model, _: wrap_experts(
        dispatch_model(model, {"": "cpu"}, force_hooks=True),
        lambda experts: add_hook_to_module(experts, ModelHook(), append=True),
    ),
    "offloaded": lambda model, _: cpu_offload(model, execution_device=torch.device("cpu")) or model,
    "disk_offload": lambda model, folder: disk_offload(model, folder, execution_device=torch.device("cpu")) or model,
}


@pytest.mark.parametrize("how", [*(how for how in WRAPS if how != "compiled_forward"), *slowly("compiled_forward")])
def test_wrapped_and_hooked_models_equal_eager(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, tokens = make("mixtral", "eager", torch.float64), torch.randint(0, VOCABULARY, (2, 40))
    model = WRAPS[how](copy.deepcopy(exact), str(tmp_path))
    called: list[str] = []
    for _ in range(2):
        assert fusedmoe.hf.apply(model) is model
    monkeypatch.setitem(
        ExpertsInterface._global_mapping, NAME, lambda *given: called.append("") or experts_forward(*given)
    )
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=tokens).logits, exact(input_ids=tokens).logits, rtol=0, atol=1e-10)
    assert len(called) == 2


def test_apply_names_replaced_forward_of_hooked_model() -> None:
    model = make("mixtral", "eager")
    model.model.layers[1].mlp.experts.forward = partial(lambda *_: None)
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    with pytest.raises(ConfigError, match="test_hf_experts has replaced the forward of model.layers.1"):
        fusedmoe.hf.apply(model)
    with pytest.raises(ConfigError, match="MixtralExperts.* keeps experts_implementation='eager'.*PreTrainedModel"):
        fusedmoe.hf.apply(make("mixtral", "eager").model.layers[0].mlp.experts)


@pytest.mark.parametrize("family", ["gpt-oss", *slowly("mixtral")])
def test_dynamic_token_count_compiles_to_one_graph(family: str) -> None:
    """Eager code uses a separate path for few tokens."""
    experts, (x_TM, number_TK, weight_TK) = module_of(family, 300)
    exact, graphs = experts(x_TM, number_TK, weight_TK), []
    experts.config._experts_implementation = NAME
    tokens = torch.export.Dim("tokens", min=2, max=300)
    compiled = torch.compile(
        experts, backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True, dynamic=True
    )
    with torch.no_grad():
        given = x_TM[:20], number_TK[:20], weight_TK[:20]
        exported = torch.export.export(experts, given, dynamic_shapes=({0: tokens},) * 3).module()
        for count in (20, 2, 63, 64, 65, 300):
            for graph in (exported, compiled):
                found = graph(x_TM[:count], number_TK[:count], weight_TK[:count])
                torch.testing.assert_close(found, exact[:count], rtol=1e-10, atol=1e-10)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("down_proj", torch.zeros(4, 32, 24, dtype=torch.float8_e4m3fn), "MixtralExperts: down_proj must be .*float8"),
        ("gate_up_proj", None, "gate_up_proj must be a tensor of 3 dimensions .* got NoneType"),
        ("has_bias", True, "gate_up_proj_bias must be a tensor of 2 dimensions"),
    ],
)
def test_unsupported_expert_module_raises_by_name(name: str, value: Any, match: str) -> None:
    experts, inputs = module_of("mixtral")
    if name in experts._parameters:
        del experts._parameters[name]
    setattr(experts, name, value)
    with pytest.raises(ConfigError, match=match):
        experts_forward(experts, *inputs)
    with pytest.raises(ConfigError, match="Linear has no has_gate, has_bias"):
        experts_forward(torch.nn.Linear(2, 2), *inputs)
