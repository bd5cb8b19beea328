"""Which two train calls may run as one pipeline, and whether that is faster."""
