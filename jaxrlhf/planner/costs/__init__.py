"""What calls cost: operations, bytes, memory, seconds."""
