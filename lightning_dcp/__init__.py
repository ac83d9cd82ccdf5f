"""Data-Centric Parallel for PyTorch Lightning."""
