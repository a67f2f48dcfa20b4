"""The operations of `fusedmoe.kernels` in Triton; imported only where it serves."""

import torch

from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import INTERPRET

if torch.version.hip is not None and not INTERPRET:
    raise ConfigError(
        f"fusedmoe: this PyTorch is for AMD GPUs (ROCm {torch.version.hip}), and the kernels run on NVIDIA GPUs alone; "
        "keep tensors on the CPU, or install a CUDA build of PyTorch"
    )
