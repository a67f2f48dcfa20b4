"""A router's work on one rank: logits, choice of experts, weights, statistics for the auxiliary losses; all backward.

Import what is needed from the modules; those with kernels (choose.py, product.py) need Triton.
"""
