"""Measuring this machine: passes of calls, links, the host."""
