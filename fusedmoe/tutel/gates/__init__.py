"""Routers: modules from tokens [T, D] to logits [T, E]. A module `NAME` here is the gate type `NAME`."""
