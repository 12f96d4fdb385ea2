"""`python -m reinforge`."""

from __future__ import annotations

import sys

from reinforge.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
