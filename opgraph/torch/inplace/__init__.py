"""Finds in-place mistakes that raise no error, by a run."""
