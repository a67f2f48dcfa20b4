"""What Tutel's public modules are made of, under the names that clients import from."""
