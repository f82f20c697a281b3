"""Times one ONNX file in a process of its own. `race` starts it; it needs onnxruntime and numpy only.

    python runner.py '{"path": "model.onnx", "threads": 1, "batch": 1, "seq": 128,
                       "vocabulary": 30522, "entries": {}, "warm_up": 5}'

Prints one JSON line when ready: init_ms (opening the session), first_ms (the first run). Then each line read, a
number of runs, is answered by one JSON line: the milliseconds of each run, and the peak memory of this process so far.
Ends when its input does, so it never outlives whoever started it.
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

WARM_UP_PER_ROUND = 2
"""Untimed runs that bring caches and threads back after another process had the cores."""


def session_options(threads: int, entries: Mapping[str, str]) -> onnxruntime.SessionOptions:
    """Options of a CPU session: `threads` within an operator (0: onnxruntime's choice), `entries` as the file asks."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # fatal: errors are raised, no need to print them too
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return options


def feeds(session: onnxruntime.InferenceSession, batch: int, seq: int, vocabulary: int) -> dict[str, Any]:
    """Random token ids, the same in every process; full attention; one segment. In the types the file declares."""
    ids = np.random.default_rng(0).integers(0, vocabulary, (batch, seq))
    known = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    declared = {node.name: node.type for node in session.get_inputs()}
    if unknown := sorted(declared.keys() - known.keys()):
        sys.exit(f"inputs {', '.join(unknown)} are not among {', '.join(known)}: not the ONNX file of a text encoder")
    return {name: known[name].astype(np.int32 if "int32" in declared[name] else np.int64) for name in declared}


def peak_rss_mb() -> float:
    """The most memory this process has held, in 10^6 bytes.

    Not ru_maxrss on Linux: that survives fork and exec, and would show a large parent's peak.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text(encoding="ascii").splitlines() if ":" in line)
        if "VmHWM" in lines:
            return int(lines["VmHWM"].split()[0]) * 1024 / 1e6
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e6


def main(job: dict[str, Any]) -> None:
    start = time.perf_counter()
    options = session_options(job["threads"], job["entries"])
    session = onnxruntime.InferenceSession(job["path"], options, providers=["CPUExecutionProvider"])
    init = time.perf_counter() - start
    batch = feeds(session, job["batch"], job["seq"], job["vocabulary"])

    def run() -> float:
        start = time.perf_counter()
        session.run(None, batch)
        return (time.perf_counter() - start) * 1e3

    print(json.dumps({"init_ms": init * 1e3, "first_ms": run()}), flush=True)
    for _ in range(job["warm_up"]):
        run()
    for line in sys.stdin:
        for _ in range(WARM_UP_PER_ROUND):
            run()
        times = [run() for _ in range(int(line))]
        print(json.dumps({"ms": times, "peak_rss_mb": peak_rss_mb()}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
