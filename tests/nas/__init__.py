"""As files (see `tests`), studies in SQLite are not flushed: each commit would take 30 ms."""

from typing import Any

from sqlalchemy import Engine, event


@event.listens_for(Engine, "connect")
def skip_flushes(connection: Any, _: object) -> None:
    """Leave it to the system when a study reaches the disk, which a killed process changes nothing about."""
    if "sqlite3" in type(connection).__module__:
        connection.execute("PRAGMA synchronous = OFF")
