"""Merge the checkpoints of W ranks into one.

python -m fusedmoe.tutel.checkpoint.gather --inputs 'out/{rank}-of-{size}.ckpt' --input_size 2 --output all.ckpt
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedmoe.tutel.checkpoint import arguments_of, joined, layer_of, layers_of, read, without_padding
from fusedmoe.tutel.system import apply_rank_size_from_pattern


def main(arguments: Sequence[str] | None = None) -> None:
    names = "file name pattern with {rank} and {size}"
    args = arguments_of(__doc__, arguments, input_size="number of ranks W", inputs=names, output="merged file")
    parts: dict[str, list[Tensor]] = {}
    for rank in range(args.input_size):
        path = apply_rank_size_from_pattern(args.inputs, rank, args.input_size, create_dir=False)
        whole, state = read(path, args.namespace)
        layers = layers_of(path, state, args.default_num_global_experts)
        for key in state:
            if layer_of(key, layers) is not None:
                parts.setdefault(key, []).append(state[key])
    for key, tensors in parts.items():
        experts = layer_of(key, layers)
        assert experts is not None
        state[key] = joined(tensors, experts)
    for key in parts:
        state[key] = without_padding(key, state)
    torch.save(whole, args.output)
    print(f"{len(parts)} parameters of experts, from {args.input_size} ranks, are in {args.output}")


if __name__ == "__main__":
    main()
