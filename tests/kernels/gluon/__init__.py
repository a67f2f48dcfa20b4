"""Gluon kernels, in an interpreter of their own (`tests.gluon_interpreter`).

A kernel is compared with float64 over ugly sizes and some orders of events; `grouped_cases` has one function for each
kernel that does both. A fault is planted by `changed`, which puts a function in place of one of the kernel's parts or
of Gluon's; it must be found in every order.
"""
