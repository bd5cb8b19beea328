"""The search for a fast plan, from the inside: chains, branch and bound, and their loops."""
