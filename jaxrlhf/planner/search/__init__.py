"""Looking for a fast plan: the choices of each call, the simulation of a step, strategies."""
