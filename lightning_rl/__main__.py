"""Run the command line: `python -m lightning_rl`."""

import sys

from lightning_rl.cli.main import main
from lightning_rl.processes.startup import search_here_last

if __name__ == "__main__":
    search_here_last()
    sys.exit(main())
