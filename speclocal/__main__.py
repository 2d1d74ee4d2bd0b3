"""`python -m speclocal`."""

from __future__ import annotations

from speclocal.cli import main

if __name__ == "__main__":
    main()
