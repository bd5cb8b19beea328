"""Running a planned graph: calls dispatched in order, versions of weights, what processes tell one another."""
