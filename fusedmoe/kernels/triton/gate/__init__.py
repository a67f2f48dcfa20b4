"""The gate's kernels: the choice of experts and its gradient, and the router's products. They need Triton."""
