"""Costs from compiled programs: described devices, HLO, counts."""
