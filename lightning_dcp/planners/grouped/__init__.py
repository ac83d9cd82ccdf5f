"""The paper's planners: batches of similar lengths, drawn from the permutation (paper 3.3, 3.4 and its baselines)."""
