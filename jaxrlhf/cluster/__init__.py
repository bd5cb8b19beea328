"""Clusters: kinds of devices, nodes, links, and how users write them."""
