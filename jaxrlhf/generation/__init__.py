"""Generation: loops that decode over a cache, all rows at once, in slots, and over stages; how a token is drawn."""
