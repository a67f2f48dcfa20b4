"""Gluon kernels, in the interpreter that the library has for them."""
