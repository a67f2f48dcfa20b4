"""Modules that `import fusedmoe` imports, in a separate process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

import fusedmoe

CODE = """
import pickle, sys
from importlib import import_module
from pkgutil import iter_modules

import fusedmoe
assert all(getattr(fusedmoe, name) is not None for name in fusedmoe.__all__)
heavy = [name for name in ("triton", "torch._dynamo", "sympy", "scipy.optimize", "sklearn", "ortools", "matplotlib")
         if name in sys.modules]
assert not heavy, heavy
sys.modules["triton"] = None  # a CPU needs none

# A layer that nobody has made here is left out of graphs, too.
import torch
layer = pickle.load(sys.stdin.buffer)
graphs = []
compiled = torch.compile(layer, backend=lambda module, inputs: graphs.append(module) or module)
x = torch.randn(5, 8)
assert torch.equal(compiled(x), layer(x)) and not graphs, graphs

layer = fusedmoe.MoELayer(8, fusedmoe.gates.TopK(4, k=2), fusedmoe.experts.SwiGLU(4), hooks=[fusedmoe.hooks.WireCast()])
layer(x).sum().backward()
import fusedmoe.kernels
for module in iter_modules(fusedmoe.kernels.__path__, "fusedmoe.kernels."):
    if not module.ispkg:
        import_module(module.name)
"""


@pytest.mark.slow
def test_cpu_layer_imports_compiler_but_not_triton() -> None:
    """Neither a layer on a CPU nor any operation's contract needs Triton."""
    gate, experts = fusedmoe.gates.TopK(4, k=2), fusedmoe.experts.SwiGLU(16)
    layer = pickle.dumps(fusedmoe.MoELayer(8, gate, experts, hooks=[fusedmoe.Hooks()]))
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        input=layer,
        capture_output=True,
        timeout=120,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("name", ["fusedmoe", "fusedmoe.schedule", "fusedmoe.tutel"])
def test_import_does_not_load_torch(name: str) -> None:
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_lazy_attributes_resolve_or_raise() -> None:
    from fusedmoe.gates import TopK

    assert fusedmoe.gates.TopK is TopK is fusedmoe.gates.topk.TopK  # type: ignore[attr-defined]
    assert set(fusedmoe.__all__) <= set(dir(fusedmoe))
    with pytest.raises(AttributeError, match="no attribute 'MoeLayer'"):
        fusedmoe.MoeLayer  # type: ignore[attr-defined]  # noqa: B018


PARTS = """
import sys
import fusedmoe
names = {"errors", "hf", "hooks", "metrics", "placement", "schedule", "titan", "training", "tutel"}
assert names <= set(dir(fusedmoe)) and "torch" not in sys.modules
for name in names - {"hf", "titan"}:
    assert getattr(fusedmoe, name) is sys.modules[f"fusedmoe.{name}"], name
fusedmoe.training.sync_gradients, fusedmoe.metrics.Metrics, fusedmoe.tutel.install
sys.modules["transformers"] = None  # not installed
assert not hasattr(fusedmoe, "hf") and not hasattr(fusedmoe, "nothing")
try:
    fusedmoe.hf
except AttributeError as error:
    assert "transformers" in str(error), error
"""


@pytest.mark.slow
def test_subpackages_are_attributes() -> None:
    subprocess.run([sys.executable, "-c", PARTS], timeout=120, check=True)
