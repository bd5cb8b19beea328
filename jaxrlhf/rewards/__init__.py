"""Rewards that are Python functions: built-in verifiers and a user's own."""
