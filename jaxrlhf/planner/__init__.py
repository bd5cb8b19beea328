"""Plans: the devices and the strategy of every call."""
