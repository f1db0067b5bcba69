"""`python -m qerl`."""

from qerl.cli.commands import main

main()
