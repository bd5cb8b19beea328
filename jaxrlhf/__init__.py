"""jaxrlhf: reinforcement learning from feedback for language models, planned and run as one JAX program."""

__version__ = "0.1.0"
