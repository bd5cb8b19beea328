"""Programs compiled for devices that are only described, and what is counted in them."""
