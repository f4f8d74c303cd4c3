"""The command line: one module per command, none of which is imported before it is needed."""

from opgraph.cli.main import main

__all__ = ["main"]
