"""Run the command line with `python -m deepinfer_jax`.

Separate because importing the package must not run anything.
Read next: `cli/__init__.py`.
"""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
