"""Damage to a file, as disks and power cuts do it."""

from pathlib import Path

KINDS = ("bit", "cut", "empty", "gone")


def damaged(path: Path, kind: str, *, at: float = 0.5) -> Path:
    """Flip one bit of a file, cut it in its middle, empty or remove it; return its path."""
    content = bytearray(path.read_bytes())
    place = min(int(len(content) * at), len(content) - 1)
    if kind == "gone":
        path.unlink()
        return path
    if kind == "bit":
        content[place] ^= 1
    path.write_bytes({"bit": bytes(content), "cut": bytes(content[:place]), "empty": b""}[kind])
    return path
