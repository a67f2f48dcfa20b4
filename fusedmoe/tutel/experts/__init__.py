"""Expert networks with Tutel's parameters. A module `NAME` here is the experts' type `NAME`."""
