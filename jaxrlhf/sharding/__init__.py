"""Meshes, logical axes and the rules that join them."""
