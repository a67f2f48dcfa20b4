"""Gluon kernels, in a custom interpreter (`tests.gluon_interpreter`).

Each kernel is compared with float64 over irregular sizes and several orders of events; `grouped_cases` has one function
per kernel that does both. `changed` plants a fault by replacing a part of a kernel or of Gluon with another function;
every order of events must detect it.
"""
