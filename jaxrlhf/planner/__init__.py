"""Which devices and which strategy every call gets."""
