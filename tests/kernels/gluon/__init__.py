"""Gluon kernels, in the interpreter that the library has for them (`fusedmoe.kernels.gluon.interpreter`).

A kernel is compared with float64 over ugly sizes and some orders of events; `grouped_cases` has one function for each
kernel that does both. A fault is planted by `changed`, which puts a function in place of one of the kernel's parts or
of Gluon's; it must be found in every order.
"""
