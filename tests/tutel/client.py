"""A client of Tutel without any reference to this library: all names and deep imports that clients use."""

import sys

import tutel  # noqa: F401
import tutel.impls.communicate as C
from tutel import moe as tutel_moe
from tutel import net, system, system_init  # noqa: F401
from tutel.checkpoint import gather, scatter  # noqa: F401
from tutel.experts.ffn import FusedExpertsNetwork  # noqa: F401
from tutel.experts.llama_ffn import LlamaFFNNetwork  # noqa: F401
from tutel.gates.cosine_top import CosineTopKGate  # noqa: F401
from tutel.gates.top import LinearTopKGate
from tutel.impls import losses  # noqa: F401
from tutel.impls.communicate import TUTEL_GROUPING_CACHE, get_world_size, simple_all_reduce  # noqa: F401
from tutel.impls.fast_dispatch import (  # noqa: F401
    GatingDecoder,
    GatingEncoder,
    TutelMoeFastDispatcher,
    extract_critical,
    fast_decode,
    fast_encode,
    get_dispatch_count,
)
from tutel.impls.jit_compiler import IS_HIP_EXTENSION, JitCompiler  # noqa: F401
from tutel.impls.moe_layer import MOELayer
from tutel.impls.overlap import a2a_ffn_overlap_forward  # noqa: F401
from tutel.jit import create_cuda_kernel  # noqa: F401
from tutel.jit_kernels import sparse  # noqa: F401
from tutel.jit_kernels.gating import fast_cumsum_sub_one, torch_cumsum_sub_one  # noqa: F401
from tutel.launcher import execl, run  # noqa: F401

env = system.init_data_model_parallel(backend="gloo")
layer = tutel_moe.moe_layer(
    gate_type={"type": "top", "k": 2},
    experts={"type": "ffn", "count_per_node": 2, "hidden_size_per_expert": 8},
    model_dim=4,
)
assert isinstance(layer, MOELayer) and isinstance(layer.gates[0], LinearTopKGate)
assert C.get_world_size() == env.global_size
names = [name for name in sys.modules if name == "tutel" or name.startswith("tutel.")]
assert all(sys.modules[name] is sys.modules[f"fusedmoe.{name}"] for name in names)
assert MOELayer.__module__ == "fusedmoe.tutel.impls.moe_layer"
print("client", sys.argv[1:], __name__, env.global_size)
