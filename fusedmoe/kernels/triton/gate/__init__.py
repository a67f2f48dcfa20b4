"""Gate kernels: top-k selection, its gradient, and the router GEMMs; requires Triton."""
