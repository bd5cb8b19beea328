"""Schedules of pipelines, of one model and of two fused, and the search for short ones."""
