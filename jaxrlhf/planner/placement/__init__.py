"""Placement strategies: devices of every role from a short description, and the plan that is fastest on them."""
