"""From a call and a layout to jitted functions: generation, inference, training, in one piece and over stages."""
