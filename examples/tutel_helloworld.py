"""Train with Tutel's interface, flags and `[Summary]` line.

    python examples/tutel_helloworld.py --batch_size 1 --num_steps 10
    torchrun --nproc-per-node 2 examples/tutel_helloworld.py --batch_size 1 --num_steps 10 --a2a_ffn_overlap_degree auto

With `from tutel import …` in the two marked lines, this program runs on Tutel.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedmoe.tutel import moe as tutel_moe  # from tutel import moe as tutel_moe
from fusedmoe.tutel import net, system  # from tutel import net, system


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--num_tokens", type=int, default=512)
    parser.add_argument("--model_dim", type=int, default=2048)
    parser.add_argument("--hidden_size", type=int, default=2048)
    parser.add_argument("--num_local_experts", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=("float64", "float32", "float16", "bfloat16"))
    parser.add_argument("--fp32_gate", action="store_true")
    parser.add_argument("--top", type=int, default=2)
    parser.add_argument("--l_aux_wt", type=float, default=0.0)
    parser.add_argument("--a2a_ffn_overlap_degree", default="1", help="a number, or auto")
    parser.add_argument("--allreduce_degree", type=int, default=1, help="-1: do not average shared gradients")
    parser.add_argument("--num_steps", type=int, default=100)
    parser.add_argument("--parallel_type", default="adaptive:1")
    parser.add_argument("--checkpoint_path", default="", help="with {rank} and {size}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--use_2dh", action="store_true")
    parser.add_argument("--eval", action="store_true")
    parser.add_argument("--capacity_factor", type=float, default=1.0, help="0: no drops; -f: at most f")
    parser.add_argument("--megablocks_size", type=int, default=0)
    parser.add_argument("--use_tensorcore", action="store_true")
    parser.add_argument("--expert_type", default="ffn", choices=("ffn", "llama_ffn"))
    parser.add_argument(
        "--init", default="0.4", choices=("0.4", "0.3"), help="initial weights of a Tutel version (new)"
    )
    return parser.parse_args(arguments)


class Model(nn.Module):
    def __init__(self, args: argparse.Namespace, env: object) -> None:
        super().__init__()
        rank = env.global_rank  # type: ignore[attr-defined]
        experts = {
            "type": args.expert_type,
            "num_experts_per_device": args.num_local_experts,
            "hidden_size_per_expert": args.hidden_size,
        }
        if args.expert_type == "ffn":
            experts |= {"activation_fn": lambda x: F.relu(x)}
            if args.init != "0.4":  # not an argument of Tutel
                experts |= {"init": args.init}
        degree = args.a2a_ffn_overlap_degree
        self.megablocks_size = args.megablocks_size
        self._moe_layer = tutel_moe.moe_layer(
            gate_type={
                "type": "top",
                "k": args.top,
                "fp32_gate": args.fp32_gate,
                "capacity_factor": args.capacity_factor,
            },
            experts=experts,
            model_dim=args.model_dim,
            scan_expert_func=lambda name, param: setattr(param, "skip_allreduce", True),
            seeds=(1, rank + 1, 1),
            a2a_ffn_overlap_degree=degree if degree == "auto" else int(degree),
            parallel_type=args.parallel_type,
            use_2dh=args.use_2dh,
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self._moe_layer(x, megablocks_size=self.megablocks_size)
        return F.log_softmax(y.sum(2), dim=1)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train and return the losses."""
    args = parse(arguments)
    torch.backends.cuda.matmul.allow_tf32 = args.use_tensorcore
    env = system.init_data_model_parallel(backend="nccl" if args.device == "cuda" else "gloo")
    show, size = env.dist_print, env.global_size
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, args.dtype))
    model = Model(args, env).to(env.local_device)
    counts = {
        kind: sum(p.numel() for _, p in model._moe_layer.get_parameter_iterator(kind))
        for kind in ("local_experts", "gate")
    }
    show(
        f"[Statistics] param count for MoE local_experts = {counts['local_experts']}, "
        f"param count for MoE gate = {counts['gate']}.\n"
    )
    show(model)
    path = args.checkpoint_path and system.apply_rank_size_from_pattern(args.checkpoint_path, env.global_rank, size)
    if path and os.path.exists(path):
        model.load_state_dict(torch.load(path, map_location=env.local_device, weights_only=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    torch.manual_seed(0)
    drawn = torch.randn(args.batch_size, args.num_tokens, args.model_dim, dtype=torch.float32)
    x = drawn.to(env.local_device, torch.get_default_dtype())
    y = torch.zeros(args.batch_size, dtype=torch.long, device=env.local_device)
    torch.set_default_dtype(before)
    show(
        f"[Benchmark] world_size = {size}, dtype = {args.dtype}, model_dim = {args.model_dim}, "
        f"hidden_size = {args.hidden_size}, samples = {args.batch_size * args.num_tokens}, "
        f"num_local_experts = {args.num_local_experts}, topK = {args.top}, "
        f"a2a_ffn_overlap_degree = {args.a2a_ffn_overlap_degree}, parallel_type = `{args.parallel_type}`, "
        f"device = `{env.local_device}`"
    )
    shared = [p for p in model.parameters() if not hasattr(p, "skip_allreduce") and p.requires_grad]
    if args.allreduce_degree == -1:
        shared = []
    experts = tutel_moe.moe_layer.global_expert_count(args.num_local_experts, group=env.model_group)
    products = 4 * args.batch_size * args.num_tokens * args.model_dim * args.hidden_size * min(args.top, experts)
    losses: list[float] = []
    seconds: list[float] = []
    for step in range(args.num_steps):
        start = system.record_time()
        with torch.set_grad_enabled(not args.eval):
            loss = F.nll_loss(model(x), y)
            if args.l_aux_wt:
                loss = loss + args.l_aux_wt * model._moe_layer.l_aux
        if not args.eval:
            optimizer.zero_grad()
            loss.backward()
            for p in shared if size > 1 else ():
                assert p.grad is not None
                p.grad = net.simple_all_reduce(p.grad / size)
            optimizer.step()
        losses.append(float(loss.detach()))
        seconds.append(system.record_time() - start)
        tflops = products * (1 if args.eval else 3) * 1e-12 / seconds[-1]
        show(f"STEP-{step}: loss = {losses[-1]:.5f}, step_time = {seconds[-1]:.6f} sec, perf = {tflops:.4g} tflops.")
    last = seconds[-10:]
    show(f"\n[Summary] Average synchronized step_time = {sum(last) / max(len(last), 1)} sec.")
    if path and not args.eval:
        torch.save(model.state_dict(), path)
    return losses


if __name__ == "__main__":
    main()
