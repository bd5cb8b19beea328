"""Running a planned graph: roles, their compiled programs, their weights, and what a run leaves behind."""
