"""Sequence parallelism over the group of the running micro-batch."""
