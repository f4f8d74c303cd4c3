"""The loop form: what one kernel does, as a small value that prints, parses back and runs in NumPy."""
