"""The entry point: `qerl`, or `python -m qerl`."""

from qerl.host.process import interruptible


def main() -> None:
    """Import the command line, which takes a second, and call it; Ctrl-C may come in either."""
    with interruptible():
        from qerl.cli.commands import app, error_sentences

        with error_sentences():
            app()


if __name__ == "__main__":
    main()
