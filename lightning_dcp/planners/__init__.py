"""Planners: one protocol, one output type."""
