"""What a config means, before there is a device: roles, samplings, the tokenizer, Python functions, rows of data."""
