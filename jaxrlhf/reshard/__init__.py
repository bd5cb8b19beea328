"""Moving arrays from one layout to another."""
