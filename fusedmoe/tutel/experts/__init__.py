"""Expert networks with Tutel's parameters; module `NAME` implements expert type `NAME`."""
