"""``python -m gym_compress``: the command ``gym-compress``."""

import sys

from gym_compress.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
