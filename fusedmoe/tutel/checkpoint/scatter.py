"""Split a checkpoint with all experts into the checkpoints of W ranks.

python -m fusedmoe.tutel.checkpoint.scatter --input all.ckpt --output_size 8 --outputs 'out/{rank}-of-{size}.ckpt'
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedmoe.tutel.checkpoint import arguments_of, layer_of, layers_of, read, split
from fusedmoe.tutel.system import apply_rank_size_from_pattern


def main(arguments: Sequence[str] | None = None) -> None:
    names = "file name pattern with {rank} and {size}"
    args = arguments_of(__doc__, arguments, output_size="number of ranks W", input="merged file", outputs=names)
    whole, state = read(args.input, args.namespace)
    layers = layers_of(args.input, state, args.default_num_global_experts)
    counts = {key: experts for key in state if (experts := layer_of(key, layers)) is not None}
    pieces = {key: split(key, state[key], experts, args.output_size) for key, experts in counts.items()}
    paths = [apply_rank_size_from_pattern(args.outputs, rank, args.output_size) for rank in range(args.output_size)]
    for rank, path in enumerate(paths):
        for key, parts in pieces.items():
            state[key] = parts[rank]
        torch.save(whole, path)
    files = " to ".join(dict.fromkeys((paths[0], paths[-1])))
    print(f"{len(pieces)} parameters of experts, for {args.output_size} ranks, are in {files}")


if __name__ == "__main__":
    main()
