"""Import packages and time matrix products, in a separate process, which may crash or
hang.

    python probe.py '["numpy", "torch"]' 2

Prints one JSON line for each package, {"package": "torch", "seconds": 1.6}, with
"error" if it does not load. If torch loads, then {"gpu": "..."} ('' without one, else
with "bytes" of its memory) and for each number format {"product": "fp32", "gflops":
{"1": 48.1, "2": 90.3}} by the number of threads.
"""

import importlib
import json
import sys
import time
from typing import Any

SIZE = 1024
"""Rows and columns of the matrices; one product is 2 * SIZE^3 floating-point
operations."""
SECONDS_PER_PROBE = 0.125
"""Seconds for each number format and number of threads; half a second in all."""


def main(packages: list[str], threads: int) -> None:
    broken = set()
    for name in packages:
        begin = time.perf_counter()
        try:
            importlib.import_module(name)
            say(package=name, seconds=round(time.perf_counter() - begin, 3))
        except Exception as error:  # a broken package may raise anything
            broken.add(name)
            say(
                package=name,
                error=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            )
    if "torch" in packages and "torch" not in broken:
        import torch

        say(**gpu(torch))
        for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
            say(
                product=name,
                gflops={
                    str(count): product(torch, dtype, count)
                    for count in sorted({1, threads})
                },
            )


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def gpu(torch: Any) -> dict[str, Any]:
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        return {
            "gpu": f"{device.name}, {device.total_memory / 1e9:.1f} GB",
            "bytes": device.total_memory,
        }
    return {"gpu": "Apple GPU (mps)" if torch.backends.mps.is_available() else ""}


def product(torch: Any, dtype: Any, threads: int) -> float:
    """Time products of square matrices on the CPU; return 10^9 operations per second of
    the fastest."""
    torch.set_num_threads(threads)
    left = torch.ones(SIZE, SIZE, dtype=dtype)
    right = torch.ones(SIZE, SIZE, dtype=dtype)
    _ = left @ right  # warm-up
    best = float("inf")
    end = time.perf_counter() + SECONDS_PER_PROBE
    while best == float("inf") or time.perf_counter() < end:
        begin = time.perf_counter()
        _ = left @ right
        best = min(best, time.perf_counter() - begin)
    return round(2 * SIZE**3 / best / 1e9, 3)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
