"""The package in Python: runs that are made, stepped, asked and resumed, and plans for clusters that need not be there.

`import jaxrlhf as rl` has all of it, by the names in `jaxrlhf.__all__`.
"""
