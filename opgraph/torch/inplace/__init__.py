"""In-place mistakes that raise no error, found by running."""
