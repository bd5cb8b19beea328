"""The output of a run: timeline, metrics, console, trackers, pictures."""
