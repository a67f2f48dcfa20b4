"""What `import fusedmoe` brings along, in a process of its own."""

from __future__ import annotations

import pickle
import subprocess
import sys

import fusedmoe

CODE = """
import pickle, sys
import fusedmoe
heavy = [name for name in ("triton", "torch._dynamo", "sympy", "scipy.optimize", "sklearn", "ortools", "matplotlib")
         if name in sys.modules]
assert not heavy, heavy

# A layer that nobody has made here is left out of graphs, too.
import torch
layer = pickle.load(sys.stdin.buffer)
graphs = []
compiled = torch.compile(layer, backend=lambda module, inputs: graphs.append(module) or module)
x = torch.randn(5, 8)
assert torch.equal(compiled(x), layer(x)) and not graphs, graphs
"""


def test_the_compiler_is_imported_with_the_first_layer() -> None:
    gate, experts = fusedmoe.gates.TopK(4, k=2), fusedmoe.experts.SwiGLU(16)
    layer = pickle.dumps(fusedmoe.MoELayer(8, gate, experts, hooks=[fusedmoe.Hooks()]))
    done = subprocess.run([sys.executable, "-c", CODE], input=layer, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
