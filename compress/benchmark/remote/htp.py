"""Run rows on the emulator of Qualcomm's HTP. Needs only Python 3.11, numpy,
onnxruntime and onnxruntime-qnn.

    python htp.py MODEL.onnx ROWS.npz ANSWERS.npz FOLDER

ROWS holds each input of the file for all rows, (rows, tokens); ANSWERS receives each
output, (rows, ...), in the file's order. FOLDER is for the context binary. Prints one
JSON line:

    {"left": ["/Gelu: Gelu"], "context_bytes": 123456, "seconds": 0.2,
     "runtime": "onnxruntime 1.31.1, ..."}

`left` are the nodes that the HTP does not support, which run on the CPU; if there are
none, the CPU fallback is off. `seconds` is the emulator's time per row, which does not
predict that of a phone."""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

SOC: dict[str, str] = {"soc_model": "60", "htp_arch": "75"}
"""The emulated processor: HTP version 75, as in Snapdragon 8 Gen 3."""
UNTAKEN = "fallback to CPU EP has been explicitly disabled"


def open_session(model: str, context: Path, *, fallback: bool) -> Any:
    import onnxruntime_qnn  # type: ignore[import-not-found,unused-ignore]  # of the extra npu

    if not any("QNN" in each.ep_name for each in onnxruntime.get_ep_devices()):
        onnxruntime.register_execution_provider_library(
            "QNN", onnxruntime_qnn.get_library_path()
        )
    devices = [each for each in onnxruntime.get_ep_devices() if "QNN" in each.ep_name]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    entries = {
        "session.disable_cpu_ep_fallback": "0" if fallback else "1",
        "session.record_ep_graph_assignment_info": "1",
        "ep.context_enable": "1",
        "ep.context_embed_mode": "0",
        "ep.context_file_path": str(context),
    }
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    options.add_provider_for_devices(
        devices, {"backend_path": onnxruntime_qnn.get_qnn_htp_path(), **SOC}
    )
    return onnxruntime.InferenceSession(model, options)


def main(model: str, rows: str, answers: str, folder: str) -> None:
    """Run every row, write the outputs, and print the report."""
    try:
        session = open_session(model, Path(folder) / "taken.onnx", fallback=False)
    except Exception as error:  # onnxruntime's errors have no parent in common
        if UNTAKEN not in str(error):
            raise
        session = open_session(model, Path(folder) / "partly.onnx", fallback=True)
    with np.load(rows) as file:
        feeds = dict(file)
    count = len(next(iter(feeds.values())))
    start = time.monotonic()
    found = [
        session.run(None, {name: array[at : at + 1] for name, array in feeds.items()})
        for at in range(count)
    ]
    seconds = (time.monotonic() - start) / count
    outputs: dict[str, Any] = {
        str(n): np.concatenate(arrays)
        for n, arrays in enumerate(zip(*found, strict=True))
    }
    np.savez(answers, **outputs)
    left = [
        f"{node.name}: {node.op_type}"
        for part in session.get_provider_graph_assignment_info()
        if "QNN" not in part.ep_name
        for node in part.get_nodes()
    ]
    size = sum(path.stat().st_size for path in Path(folder).glob("*.bin"))
    runtime = (
        f"onnxruntime {onnxruntime.__version__}, onnxruntime-qnn "
        f"{version('onnxruntime-qnn')}"
    )
    print(
        json.dumps(
            {
                "left": left,
                "context_bytes": size,
                "seconds": seconds,
                "runtime": runtime,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
