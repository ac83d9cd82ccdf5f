"""From samples to steps: sampler, loader, collate, data module."""
