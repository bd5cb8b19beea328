"""Typed configuration: `reading.py` reads user text strictly, `schema.py` says what a run is."""
