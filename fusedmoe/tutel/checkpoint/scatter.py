"""Checkpoints for W ranks from one with all experts.

python -m fusedmoe.tutel.checkpoint.scatter --input all.ckpt --output_size 8 --outputs 'out/{rank}-of-{size}.ckpt'
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from fusedmoe.tutel.checkpoint import layer_of, layers_of, read, split
from fusedmoe.tutel.system import apply_rank_size_from_pattern


def main(arguments: Sequence[str] | None = None) -> None:
    """Splits the checkpoint.

    Raises:
        ConfigError: the file holds no layer, or its experts cannot be spread over so many ranks.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_size", type=int, required=True, help="W")
    parser.add_argument("--input", required=True)
    parser.add_argument("--outputs", required=True, help="file names with {rank} and {size}")
    parser.add_argument("--namespace", default="", help="where in the file the state_dict is: keys, by slashes")
    parser.add_argument("--default_num_global_experts", type=int, default=0, help="for a file that does not tell")
    args = parser.parse_args(arguments)
    whole, state = read(args.input, args.namespace)
    layers = layers_of(args.input, state, args.default_num_global_experts)
    pieces = {}
    for key, tensor in state.items():
        experts = layer_of(key, layers)
        if experts is not None:
            pieces[key] = split(key, tensor, experts, args.output_size)
    for rank in range(args.output_size):
        for key, parts in pieces.items():
            state[key] = parts[rank]
        torch.save(whole, apply_rank_size_from_pattern(args.outputs, rank, args.output_size))
    print(f"{len(pieces)} parameters of experts, for {args.output_size} ranks, are in {args.outputs}")


if __name__ == "__main__":
    main()
