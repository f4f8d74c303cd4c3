"""The command line: one module per command, imported only when needed."""

from opgraph.cli.main import main

__all__ = ["main"]
