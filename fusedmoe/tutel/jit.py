"""Client-provided CUDA kernels."""

from fusedmoe.tutel.impls.jit_compiler import JitCompiler as JitCompiler
from fusedmoe.tutel.impls.jit_compiler import create_cuda_kernel as create_cuda_kernel
