"""Operations: tensors in, tensors out.

`X.py` is the contract of an operation and its definition in plain torch, which also serves CPU tensors; `triton/X.py`
is its Triton (`triton/X/` where it takes several kernels), imported only where it serves; `gluon/X.py` is its form for
Hopper, where there is one.
"""
