"""How much of a distillation's time goes into flushing files and checking their SHA-256?

    python -m benchmarks.durability [--epochs 6]

Distils the embedded teacher on the embedded data, timing every flush and every digest of `compress.io`.
"""

import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import make_parser
from compress import RunOptions, distill, io
from compress.cli import configure_libraries


def timed(function: Callable[..., Any], seconds: dict[str, float], name: str) -> Callable[..., Any]:
    """Return the function, adding the wall time of its calls to `seconds[name]`."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began

    return call


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    epochs = parser.parse_args().epochs
    configure_libraries()
    seconds: dict[str, float] = {}
    for name in ("_flush", "sha256"):
        setattr(io, name, timed(getattr(io, name), seconds, name))
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        overrides = [f"stages.triple.epochs={epochs}", "stages.triple.lr=1e-4", "teacher.lr=1.2e-4"]
        options = RunOptions(overrides=overrides)
        distill(teacher="minilm", recipe="distilbert", data="intents", out=Path(folder) / "run", options=options)
        whole = time.perf_counter() - began
    shares = {name: f"{taken:.2f} s, {taken / whole:.2%}" for name, taken in seconds.items()}
    print(
        json.dumps({"seconds": round(whole, 1), **shares, "together": f"{sum(seconds.values()) / whole:.2%}"}, indent=1)
    )


if __name__ == "__main__":
    main()
