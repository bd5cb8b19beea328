"""Saving a run and bringing it back."""
