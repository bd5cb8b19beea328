"""Two train calls as one pipeline: which may be fused, and which are faster so."""
