"""Plans as plain data: placements of calls, what a plan must keep to, plans on disk."""
