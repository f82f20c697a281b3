"""Start the command line. An interruption while it loads ends it without a word."""

import sys


def main() -> None:
    """Run a command; exit with 130 if it is interrupted before it has begun."""
    try:
        from compress.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
