"""Costs of calls: operations, bytes, memory, seconds."""
