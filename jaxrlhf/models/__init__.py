"""Decoder-only transformers of the Llama family, as pure functions of weights and arrays."""
