"""`python -m opgraph`: the command line."""

import sys

from opgraph.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
