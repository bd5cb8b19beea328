"""A run's life, from its config to its outcome: assembly, training loop, evaluation, checkpoints, recovery, export."""
