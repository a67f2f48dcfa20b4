"""The operations of `fusedmoe.kernels` in Triton; imported only where it serves."""
