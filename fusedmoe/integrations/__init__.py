"""Doors for users of other libraries. Each part imports its library, which is no dependency, when it is imported."""
