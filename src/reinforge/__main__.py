"""`python -m reinforge`."""

from __future__ import annotations

import sys

from reinforge.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
