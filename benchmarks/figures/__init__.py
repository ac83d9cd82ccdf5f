"""The paper's figures on the virtual H200 cluster: ``python -m benchmarks.figures.figure_8``, or all without a name.

Each module has the same three functions. ``measure`` computes everything that the figure and its table show, as values
that JSON can hold; ``draw`` makes the picture of them and ``table`` the table in ``docs/benchmarks.md``.
"""
