"""What a run shows: timeline, metrics, console, trackers, pictures."""
