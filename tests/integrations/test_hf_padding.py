"""Padding tokens of transformers models are sent to no expert: results equal those of the sequences without padding."""

from __future__ import annotations

import copy
import inspect
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from transformers import StaticCache

import fusedmoe.hf
from fusedmoe.errors import ConfigError
from fusedmoe.hf.callbacks import RouterMetrics, expert_inputs
from tests.cluster import Cluster
from tests.integrations.models import VOCABULARY, make
from tests.integrations.test_hf_parallel import load
from tests.marks import slowly


def sequences(seed: int, left: bool, lengths: tuple[int, ...] = (5, 1, 9)) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]
    pad = [torch.full((max(lengths) - len(row),), 3) for row in rows]
    joined = [torch.cat((blank, row) if left else (row, blank)) for blank, row in zip(pad, rows, strict=True)]
    mask = [torch.arange(max(lengths)) >= len(blank) if left else torch.arange(max(lengths)) < len(row)
            for blank, row in zip(pad, rows, strict=True)]  # fmt: skip
    return rows, torch.stack(joined), torch.stack(mask).long()


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if "_is_expert_parallel" in vars(module)]


@pytest.mark.parametrize("left", [True, *slowly(False)])
@pytest.mark.parametrize("family", ["mixtral", "deepseek", *slowly("qwen3", "olmoe", "gpt-oss")])
def test_masked_padding_equals_unpadded_sequences(family: str, left: bool) -> None:
    torch.manual_seed(1)
    model = make(family, "fusedmoe", torch.float64).train()
    assert fusedmoe.hf.mask_padding(fusedmoe.hf.mask_padding(model)) is model
    rows, tokens, mask = sequences(2, left)
    alone = copy.deepcopy(model)
    wanted_metrics, metrics = RouterMetrics(alone), RouterMetrics(model)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=tokens, attention_mask=mask, position_ids=position).logits
    wanted = torch.cat([alone(input_ids=row[None]).logits[0] for row in rows])
    torch.testing.assert_close(logits[mask.bool()], wanted, rtol=1e-6, atol=1e-6)
    logits[mask.bool()].square().sum().backward()
    wanted.square().sum().backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in (one, other)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    found, expected = metrics.collect(per_expert=True), wanted_metrics.collect(per_expert=True)
    for key in ("moe/router_entropy", "moe/z_loss"):
        assert key not in expected or found[key] == pytest.approx(expected[key], rel=1e-5)
    loads = [{k: v for k, v in one.items() if "expert" in k or "load" in k} for one in (found, expected)]
    assert loads[0] == pytest.approx(loads[1]) and loads[0]


def rows_of(model: Any, **given: Any) -> list[int]:
    """Count the rows that experts compute."""
    counts: list[int] = []

    def count(_: Any, args: Any, kwargs: Any) -> None:
        counts.append(int((expert_inputs(*args, **kwargs)["top_k_index"] >= 0).sum()))

    hooks = [experts.register_forward_pre_hook(count, with_kwargs=True) for experts in experts_of(model)]
    model(**given)
    for hook in hooks:
        hook.remove()
    return counts


def test_masked_tokens_send_no_rows() -> None:
    model = fusedmoe.hf.mask_padding(make("mixtral", "fusedmoe"))
    _, tokens, mask = sequences(1, False)
    assert rows_of(model, input_ids=tokens, attention_mask=mask) == [2 * 15] * 2
    x = torch.randn(3, 9, 32)
    block = model.model.layers[0].mlp
    seen: list[Tensor] = []
    block.register_forward_hook(
        lambda _, given, output: seen.append(output if isinstance(output, Tensor) else output[0])
    )
    model(tokens, mask)
    assert not seen[0][~mask.bool()].any() and seen[0][mask.bool()].any()
    block(x)
    assert seen[1].any(-1).all()  # outside a model call there is no mask


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_with_masked_padding(reentrant: bool) -> None:
    torch.manual_seed(3)
    model = fusedmoe.hf.mask_padding(make("qwen3", "fusedmoe", torch.float64)).train()
    batches, found = [sequences(seed, False, lengths)[1:] for seed, lengths in ((1, (9, 4)), (2, (2, 9)))], []
    for checked in (False, True):
        if checked:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.zero_grad(set_to_none=True)
        losses = [model(input_ids=tokens, attention_mask=mask, labels=tokens).loss for tokens, mask in batches]
        for loss in losses:
            loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_unknown_recomputation_raises() -> None:
    model = fusedmoe.hf.mask_padding(make("qwen3", "fusedmoe")).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _, tokens, mask = sequences(1, False)
    loss = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
    x = torch.zeros(1, 3, 32, requires_grad=True)
    z = x * 2
    z.register_hook(lambda grad: model.model.layers[0].mlp(x) and None)
    with pytest.raises(ConfigError, match="under an unrecognised checkpoint"):
        z.sum().backward()
    del loss


def test_generation_with_cache_equals_unpadded() -> None:
    torch.manual_seed(4)
    model = fusedmoe.hf.mask_padding(make("mixtral", "fusedmoe"))
    rows, tokens, mask = sequences(5, True)
    given = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    found = model.generate(tokens, attention_mask=mask, **given)[:, tokens.shape[1] :]
    wanted = [
        model.generate(row[None], attention_mask=torch.ones_like(row)[None], **given)[0, len(row) :] for row in rows
    ]
    assert torch.equal(found, torch.stack(wanted))


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float", "bfloat16", "big", "heads", "flex"])
def test_attention_masks_mark_same_padding_as_token_mask(kind: str, left: bool) -> None:
    """A mask of queries and keys marks the same padding tokens as a token mask."""
    model = fusedmoe.hf.mask_padding(make("mixtral", "fusedmoe"))
    _, tokens, mask = sequences(6, left)
    attends = mask.bool()[:, None, None] & torch.ones(9, 9).tril().bool()
    masks: dict[str, Any] = {"bool": attends, "heads": attends.expand(-1, 4, -1, -1)}
    for name, dtype, least in (
        ("float", torch.float32, torch.finfo(torch.float32).min),
        ("bfloat16", torch.bfloat16, float("-inf")),
        ("big", torch.bfloat16, -1e4),
    ):
        masks[name] = torch.zeros(attends.shape, dtype=dtype).masked_fill(~attends, least)
    real = mask.bool()
    masks["flex"] = create_block_mask(lambda b, h, q, k: (q >= k) & real[b, k], 3, None, 9, 9, device="cpu")
    found = tokens_of_experts(model, input_ids=tokens, attention_mask=masks[kind])
    assert torch.equal(found, real)


def test_broadcast_attention_mask_applies_to_all_sequences() -> None:
    model = fusedmoe.hf.mask_padding(make("mixtral", "fusedmoe"))
    attends = torch.ones(1, 1, 5, 5).tril().bool()
    attends[..., :2] = False
    tokens = torch.randint(0, VOCABULARY, (3, 5))
    assert tokens_of_experts(model, input_ids=tokens, attention_mask=attends).tolist() == [[False] * 2 + [True] * 3] * 3


def test_mask_dict_of_none_has_no_padding() -> None:
    model = fusedmoe.hf.mask_padding(make("gpt-oss", "fusedmoe"))
    masks = {"full_attention": None, "sliding_attention": None}
    assert rows_of(model, input_ids=torch.randint(0, VOCABULARY, (3, 5)), attention_mask=masks) == [2 * 15] * 2


def tokens_of_experts(model: Any, **given: Any) -> Tensor:
    """Return the tokens, [batch, tokens], that experts compute in a call; attention has no effect here."""
    rows: list[Tensor] = []

    def first(_: Any, __: Any, kwargs: Any) -> None:
        rows.append((kwargs["top_k_index"] >= 0).all(1))
        raise StopIteration

    hook = experts_of(model)[0].register_forward_pre_hook(first, with_kwargs=True)
    attention = model.model.layers[0].self_attn
    with patch.object(attention, "forward", lambda hidden_states, **_: (hidden_states, None)), suppress(StopIteration):
        model(**given)
    hook.remove()
    return rows[0].view(given["input_ids"].shape)


STATIC = [("mixtral", "sdpa", None), ("gpt-oss", "eager", 4)]
STATIC_OTHERS = [("mixtral", "eager", 4), ("qwen3", "sdpa", 4), ("olmoe", "sdpa", None), ("deepseek", "eager", None)]


@pytest.mark.parametrize("beams", [1, *slowly(2)])
@pytest.mark.parametrize(("family", "attention", "window"), [*STATIC, *slowly(*STATIC_OTHERS)])
def test_static_cache_masks_padding(family: str, attention: str, window: int | None, beams: int) -> None:
    """`generate` prepares masks of queries and keys for such caches, one per kind of layer."""
    torch.manual_seed(7)
    model = make(family, "fusedmoe")
    model.set_attn_implementation(attention)
    if window is not None:
        model.config.sliding_window = window
    masked = fusedmoe.hf.mask_padding(copy.deepcopy(model))
    _, tokens, mask = sequences(8, True)
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
    # Trainers of other tests set use_cache=False in the shared configuration.
    given |= {"attention_mask": mask, "cache_implementation": "static", "use_cache": True}
    wanted = model.generate(tokens, **given)
    counts: list[int] = []
    hook = experts_of(masked)[0].register_forward_pre_hook(
        lambda _, __, kwargs: counts.append(int((kwargs["top_k_index"] >= 0).all(1).sum())), with_kwargs=True
    )
    found = masked.generate(tokens, **given)
    hook.remove()
    assert torch.equal(found, wanted)
    assert counts == [15 * beams] + [3 * beams] * 5
    # A token mask as long as the cache.
    cache = StaticCache(model.config, max_cache_len=16)
    for name in {"past_key_values", *inspect.signature(masked.forward).parameters} & {"past_key_values", "cache"}:
        given = {"input_ids": tokens, "attention_mask": F.pad(mask, (0, 7)), name: copy.deepcopy(cache)}
        assert rows_of(masked, **given) == [2 * 15] * len(experts_of(masked))


@pytest.mark.slow
def test_compiled_model_with_attention_mask_equals_eager() -> None:
    torch.manual_seed(4)
    model = fusedmoe.hf.mask_padding(make("mixtral", "fusedmoe", torch.float64)).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    _, tokens, mask = sequences(5, False)
    attends = mask.bool()[:, None, None] & torch.ones(9, 9).tril().bool()
    found = [call(input_ids=tokens, attention_mask=attends).logits[mask.bool()] for call in (model, compiled)]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_model_with_token_mask_equals_eager() -> None:
    """The whole model is one graph, for positional and keyword arguments."""
    torch.manual_seed(4)
    model = fusedmoe.hf.mask_padding(make("mixtral", "fusedmoe", torch.float64)).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    _, tokens, mask = sequences(5, True)
    found = []
    for call in (model, compiled):
        model.zero_grad()
        logits = call(tokens, mask).logits
        logits[mask.bool()].square().sum().backward()
        found.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert rows_of(compiled, input_ids=tokens, attention_mask=mask) == [2 * 15] * 2
    torch._dynamo.reset()


def test_mask_padding_rejects_unsupported_models_and_masks() -> None:
    with pytest.raises(ConfigError, match="is not computed by this library; call fusedmoe.hf.apply"):
        fusedmoe.hf.mask_padding(make("mixtral", "eager"))
    with pytest.raises(ConfigError, match="Linear has no experts"):
        fusedmoe.hf.mask_padding(torch.nn.Linear(2, 2))
    model = fusedmoe.hf.mask_padding(make("mixtral", "fusedmoe"))
    tokens, square = torch.ones(1, 4).long(), torch.ones(1, 1, 4, 4)
    with pytest.raises(ConfigError, match=r"must be \[batch, tokens\], or .*, got torch.int64 \[1, 1, 4, 4\]"):
        model(input_ids=tokens, attention_mask=square.long())
    with pytest.raises(ConfigError, match=r"must be \[batch, tokens\], or .*, got torch.float32 \[1, 4, 4\]"):
        model(input_ids=tokens, attention_mask=square[0])
    with pytest.raises(ConfigError, match=r"is \[1, 1, 4, 6\] for 4 tokens, .* pass a mask \[batch, tokens\]"):
        model(input_ids=tokens, attention_mask=torch.ones(1, 1, 4, 6).bool())
    with pytest.raises(ConfigError, match="tokens that do not attend to themselves, and others attend to them"):
        model(input_ids=tokens, attention_mask=square.tril(-1).bool())
    block = create_block_mask(lambda b, h, q, k: q > k, 1, None, 4, 4, device="cpu")
    with pytest.raises(ConfigError, match="tokens that do not attend to themselves, and others attend to them"):
        model(input_ids=tokens, attention_mask=block)


def run_on_ranks(rank: int, world: int, folder: str, sizes: dict[str, int]) -> None:
    model = fusedmoe.hf.mask_padding(load(rank, world, folder, sizes))
    _, tokens, mask = sequences(rank // sizes["tp_size"], False)
    logits = model(input_ids=tokens, attention_mask=mask).logits
    alone = fusedmoe.hf.mask_padding(load(rank, world, folder, None))
    wanted = alone(input_ids=tokens, attention_mask=mask).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    logits.square().mean().backward()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp_size": 1, "ep_size": 2, "fsdp_size": 2}, {"tp_size": 2, "ep_size": 2}])
def test_masked_padding_on_two_ranks(cluster: Cluster, tmp_path: Path, sizes: dict[str, int]) -> None:
    torch.manual_seed(6)
    make("mixtral", "eager").save_pretrained(tmp_path)
    cluster.run(2, run_on_ranks, str(tmp_path), sizes)
