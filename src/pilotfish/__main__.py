"""`python -m pilotfish`."""

from pilotfish.cli import main

main()
