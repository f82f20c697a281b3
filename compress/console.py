"""How warnings reach the terminal."""

from rich.console import Console


def warn(console: Console, text: str) -> None:
    """Print a warning on lines of its own."""
    console.print(f"warning: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)
