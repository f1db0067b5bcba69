"""`python -m qerl`."""

from qerl.cli import main

main()
