"""The runs whose results were captured from Tutel 0.4 on a CPU, in tests/data/tutel: one process, and two.

Weights depend on a parameter's name and inputs on the rank, by NumPy's legacy generator, so that nothing rests on how
parameters are initialised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmoe.tutel import moe, net

DATA = Path(__file__).parent.parent / "data" / "tutel"
EXPERTS, MODEL_DIM, TOKENS = 4, 16, 24


def draw(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(shape) * scale)


def captured(rank: int, world: int) -> dict[str, np.ndarray]:
    name = "one" if world == 1 else "two"
    return dict(np.load(DATA / f"{name}_rank{rank}.npz"))


def relu(x: Tensor) -> Tensor:
    return F.relu(x)


def cases(rank: int, world: int) -> dict[str, dict[str, Any]]:
    """Name -> gate, experts, layer, forward: differences from the defaults of `run_case`; shape, dtype, train."""
    found: dict[str, dict[str, Any]] = {
        "top1_cf1": {"gate": {"k": 1}},
        "top2_cf1": {},
        "top3_cf1": {"gate": {"k": 3}},
        "top2_cf1.25": {"gate": {"capacity_factor": 1.25}},
        "top2_cf0.5_drop": {"gate": {"capacity_factor": 0.5}},
        "top2_cf0_dropless": {"gate": {"capacity_factor": 0.0}},
        "top2_cf-1": {"gate": {"capacity_factor": -1.0}},
        "top2_cf-0.25": {"gate": {"capacity_factor": -0.25}},
        "top2_nonorm": {"layer": {"normalize_gate": False}},
        "top2_prescore": {"layer": {"is_postscore": False}},
        "top2_bpr": {"gate": {"capacity_factor": 0.5}, "layer": {"batch_prioritized_routing": True}},
        "top1_bpr": {"gate": {"k": 1, "capacity_factor": 0.5}, "layer": {"batch_prioritized_routing": True}},
        "top1_loadimp_eval": {
            "gate": {"k": 1, "gate_noise": 1.0},
            "layer": {"is_gshard_loss": False},
            "train": False,
        },
        "top2_loadimp_train_seeded": {
            "gate": {"gate_noise": 1.0, "fp32_gate": True},
            "layer": {"is_gshard_loss": False},
        },
        "cosine_top1": {"gate": {"type": "cosine_top", "k": 1, "proj_dim": 8, "init_t": 0.5}},
        "cosine_top2_fp32": {"gate": {"type": "cosine_top", "fp32_gate": True, "proj_dim": 8}},
        "outdim10": {"experts": {"output_dim": 10}},
        "nobias": {"experts": {"has_fc1_bias": False, "has_fc2_bias": False}},
        "gelu": {"experts": {"activation_fn": lambda x: F.gelu(x)}},
        "x3d": {"shape": (3, 8, 16)},
        "fwd_topk1": {"forward": {"top_k": 1}},
        "fwd_topk99": {"forward": {"top_k": 99}},
        "fwd_cf2": {"forward": {"capacity_factor": 2.0}},
        "overlap4_align": {"gate": {"capacity_factor": 0.7}, "forward": {"a2a_ffn_overlap_degree": 4}},
        "fp64": {"dtype": torch.float64},
        "bf16": {"dtype": torch.bfloat16},
        "odd_T": {"shape": (7, 16)},
        "one_token": {"shape": (1, 16)},
        "megablocks_train_ignored": {"gate": {"capacity_factor": 0.0}, "forward": {"megablocks_size": 1}},
        "inequiv": {"shape": (TOKENS - 4 * rank, 16), "forward": {"inequivalent_tokens": True}},
        "llama_ffn": {"experts": {"type": "llama_ffn", "activation_fn": F.silu}},
        "count_per_node": {"experts": {"count_per_node": EXPERTS // world}},
    }
    if world > 1:
        for kind in ("data", "model", "auto", "adaptive:0", "adaptive:1", f"adaptive:{world}"):
            shared = {"experts": {"num_experts_per_device": -world}, "layer": {"parallel_type": kind}}
            found[f"shard-{world}_{kind}"] = shared
        found["adaptive_r0"] = {"forward": {"adaptive_r": 0}}
        found["use_2dh_LOCAL1"] = {"layer": {"use_2dh": True}}
    return found


def make_layer(rank: int, world: int, case: dict[str, Any]) -> moe.MOELayer:
    experts = {
        "type": "ffn",
        "num_experts_per_device": EXPERTS // world,
        "hidden_size_per_expert": 32,
        "activation_fn": relu,
        **case.get("experts", {}),
    }
    before = torch.get_default_dtype()
    torch.set_default_dtype(case.get("dtype", torch.float32))
    try:
        gate = {"type": "top", "k": 2, **case.get("gate", {})}
        layer = moe.moe_layer(gate, MODEL_DIM, experts, seeds=(1, rank + 1, 1), **case.get("layer", {}))
    finally:
        torch.set_default_dtype(before)
    fill(layer, rank, world)
    layer.train(case.get("train", True))
    return layer


@torch.no_grad()
def fill(layer: moe.MOELayer, rank: int, world: int) -> None:
    """Whole experts are equal in every world; each rank loads its own experts, or its shard."""
    E, s = layer.num_global_experts, layer.sharded_count
    for name, parameter in layer.named_parameters():
        leaf = name.rpartition(".")[2]
        if not leaf.startswith("batched_"):
            parameter.copy_(draw(tuple(parameter.shape), 2000 + sum(map(ord, name)), 0.5))
            continue
        H, out = layer.experts.hidden_size_per_expert, layer.experts.output_dim
        shape = {"fc1_w": (E, H, MODEL_DIM), "fc2_w": (E, H, out), "fc1_bias": (E, H), "fc2_bias": (E, out)}
        whole = draw(shape[leaf.removeprefix("batched_")], 1000 + sum(map(ord, name)), 0.2)
        mine = whole.chunk(world)[rank] if s == 1 else whole[rank // s].chunk(s)[rank % s][None]
        parameter.copy_(mine)


def run_case(rank: int, world: int, case: dict[str, Any]) -> dict[str, Tensor]:
    """Return y, dx, gradients of parameters and counts, under the names of the capture."""
    layer = make_layer(rank, world, case)
    dtype = case.get("dtype", torch.float32)
    x = draw(case.get("shape", (TOKENS, MODEL_DIM)), 7 + rank).to(dtype).requires_grad_()
    torch.manual_seed(123 + rank)
    y = layer(x, **case.get("forward", {}))
    ((y * draw(tuple(y.shape), 99).to(dtype)).sum() + 0.1 * layer.l_aux).backward()
    found = {"y": y, "dx": x.grad, "dispatch_count": layer.dispatch_count, "y_shape": torch.tensor(y.shape)}
    grads = {f"d_{name}": parameter.grad for name, parameter in layer.named_parameters()}
    return {name: value.detach() for name, value in (found | grads).items() if value is not None}


def net_cases(rank: int, world: int) -> Iterator[tuple[str, Callable[[Tensor], Tensor], tuple[int, ...]]]:
    W = world
    yield "all_to_all_1_0", lambda x: net.all_to_all(x, 1, 0), (W * 2, 6, 4)
    yield "all_to_all_0_1", lambda x: net.all_to_all(x, 0, 1), (W, 4 * W, 4)
    yield "all_to_all_1_2", lambda x: net.all_to_all(x, 1, 2), (3, W, 2 * W)
    yield "all_to_all_single", net.all_to_all_single, (W * 3, 4)
    yield "all_gather_d0", lambda x: net.all_gather(x, 0), (3, 4)
    yield "all_gather_d1", lambda x: net.all_gather(x, 1), (3, 4)
    yield "all_gather_fused", lambda x: net.all_gather(x, 0, fused=True), (3, 4)
    yield "reduce_scatter_d0", lambda x: net.reduce_scatter(x, 0), (W * 2, 3)
    yield "reduce_scatter_d1", lambda x: net.reduce_scatter(x, 1), (3, W * 2)
    yield "spatial_split_d1", lambda x: net.spatial_split(x, 1), (3, W * 2)
    yield "zero_gather", net.zero_gather, (2, 3)
    yield "zero_gather_full", lambda x: net.zero_gather(x, full_shape=[3, 3]), (5,)
    yield "allreduce_forward", net.allreduce_forward, (2, 3)
    yield "allreduce_backward", net.allreduce_backward, (2, 3)


def run_net(rank: int, world: int) -> dict[str, Tensor]:
    found = {}
    for name, function, shape in net_cases(rank, world):
        x = draw(shape, 5 + rank).float().requires_grad_()
        y = function(x)
        (y * draw(tuple(y.shape), 77 + rank).float()).sum().backward()
        assert x.grad is not None
        found |= {f"net.{name}/y": y.detach(), f"net.{name}/dx": x.grad}
    W = world
    simple = {
        "simple_all_reduce": (net.simple_all_reduce, (4,)),
        "simple_all_gather": (net.simple_all_gather, (2, 3)),
        "simple_reduce_scatter": (net.simple_reduce_scatter, (W * 2, 3)),
        "simple_split": (net.simple_split, (W * 2, 3)),
        "simple_all_to_all": (net.simple_all_to_all, (W * 2, 3)),
    }
    for name, (plain, shape) in simple.items():
        found[f"net.{name}/y"] = plain(draw(shape, rank).float())
    part, shape = net.zero_scatter(draw((5,), rank).float(), net.simple_split)
    return found | {"net.zero_scatter/y": part, "net.zero_scatter/shape": torch.tensor(shape)}


def run_functions() -> dict[str, Tensor]:
    scores = draw((10, 4), 3).float().softmax(1)
    critical, loss = moe.extract_critical(scores, 2, alignment=1)
    experts, index, location, gate, capacity, count = critical
    tokens = draw((10, 6), 4).float()
    found = {
        "extract/E": torch.tensor(experts),
        "extract/cap": torch.tensor(capacity),
        "extract/idx": torch.stack(index),
        "extract/loc": torch.stack(location),
        "extract/gates": torch.stack(gate),
        "extract/dc": count,
    }
    for suffix, postscore in (("", True), ("_pre", False)):
        rows = moe.fast_encode(tokens, critical, postscore)
        found |= {f"fast_encode{suffix}/y": rows, f"fast_decode{suffix}/y": moe.fast_decode(rows, critical, postscore)}
    found["fast_encode/shape"] = torch.tensor(found["fast_encode/y"].shape)
    dispatcher = moe.fast_dispatcher(4, capacity, 6, tokens.dtype)
    dispatcher.update(index, location, gate, capacity=capacity)
    rows = dispatcher.encode(tokens)
    found |= {"dispatcher/enc": rows, "dispatcher/dec": dispatcher.decode(rows)}
    found["cumsum/y"] = moe.fast_cumsum_sub_one((draw((9, 4), 8) > 0).long())
    index[0][3] = -1
    dispatcher.update(index, location, gate, capacity=capacity)
    return found | {"dispatcher_neg_index/enc": dispatcher.encode(tokens)}
