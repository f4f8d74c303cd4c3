"""From a loop to C++ source text."""
