"""Run one file in its own process, on any machine. Needs only Python 3.8, numpy and the
file's runtime.

    python runner.py '{"path": "model.onnx", "runtime": "onnxruntime", "options": {},
                       "entries": {}, "threads": 1, "affinity": [], "batch": 1,
                       "seq": 128, "vocabulary": 30522, "warm_up": 5}'

`options` are attributes of onnxruntime's SessionOptions, `entries` its session
configuration for this file. Rows for a file of fixed length are padded, with
attention_mask 0, to the shortest length that holds them. A file that takes texts has
`words`, each one token, in place of `vocabulary`.

Prints one JSON line when ready: init_ms (opening the file), first_ms (the first run;
only with `seq`). Then it answers each line of input with one line:

    {"runs": 15}       {"ms": [...], "peak_rss_mb": 81.2}: the milliseconds of each
                       run, the peak memory so far
    {"seconds": 60}    {"p50_ms": 3.1, "runs": 19021, ...}: as many runs as fit in the
                       time
    {"rows": [...]}    {"logits": [[shape, base64], ...]}: the logits of encoded texts,
                       each by itself

Exits when its input ends, so that it never outlives its parent. If it refuses a job, it
prints the reason on standard error and exits with code 3."""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import NoReturn

    Feeds = dict[str, Any]
    Job = Mapping[str, Any]
    """What to run: see above."""

WARM_UP_PER_ROUND = 2
"""Untimed runs that warm up caches and threads again after another process used the
cores."""

REFUSED = 3
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class Opened(NamedTuple):
    """An open file.

    types    input name -> the numpy type that the file declares
    run      runs it: inputs -> outputs
    lengths  the tokens of a row that it takes, where they are fixed
    optional names of inputs with a default, one number for each row
    """

    types: dict[str, Any]
    run: Callable[[Feeds], list[Any]]
    lengths: Collection[int] = ()
    optional: Collection[str] = ()


def refuse(reason: str) -> NoReturn:
    print(reason, file=sys.stderr)
    sys.exit(REFUSED)


def pin(cpus: list[int]) -> None:
    """Keep this process, with all threads it will start, on these CPUs; if empty, the
    system decides."""
    if not cpus:
        return
    if not hasattr(os, "sched_setaffinity"):
        refuse(
            f"the CPUs of a process cannot be chosen on {sys.platform}; measure "
            "without --affinity"
        )
    allowed = os.sched_getaffinity(0)
    if missing := sorted(set(cpus) - allowed):
        refuse(
            f"CPUs {missing} do not exist or are not allowed; allowed: "
            f"{sorted(allowed)}"
        )
    os.sched_setaffinity(0, cpus)


def open_onnxruntime(job: Job) -> Opened:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    for name, value in {
        **job["options"],
        "intra_op_num_threads": job["threads"],
    }.items():
        setattr(options, name, value)
    for key, value in job["entries"].items():
        options.add_session_config_entry(key, value)
    session = onnxruntime.InferenceSession(
        job["path"], options, providers=["CPUExecutionProvider"]
    )
    known = {"tensor(int32)": np.int32, "tensor(string)": np.object_}
    types = {node.name: known.get(node.type, np.int64) for node in session.get_inputs()}
    fixed = {
        node.shape[1]
        for node in session.get_inputs()
        if len(node.shape) == 2 and isinstance(node.shape[1], int)
    }
    optional = [node.name for node in session.get_overridable_initializers()]
    return Opened(types, lambda feeds: session.run(None, feeds), fixed, optional)


def open_openvino(job: Job) -> Opened:
    import openvino

    properties = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1", **job["entries"]}
    if job["threads"]:
        properties["INFERENCE_NUM_THREADS"] = str(job["threads"])
    compiled = openvino.Core().compile_model(job["path"], "CPU", properties)
    request = compiled.create_infer_request()
    types = {
        node.get_any_name(): node.get_element_type().to_dtype().type
        for node in compiled.inputs
    }

    def run(feeds: Feeds) -> list[Any]:
        outputs = request.infer(feeds, share_inputs=True)
        return [outputs[port] for port in compiled.outputs]

    return Opened(types, run)


def open_litert(job: Job) -> Opened:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(job["path"], num_threads=job["threads"])
    runners = {}
    for name in interpreter.get_signature_list():
        signature = interpreter.get_signature_runner(name)
        inputs = signature.get_input_details()
        if "input_ids" in inputs:
            runners[int(inputs["input_ids"]["shape"][1])] = signature
    if not runners:
        refuse(
            "has no signature with an input named input_ids; expected what compress "
            "export --for litert writes"
        )
    types = {name: each["dtype"] for name, each in inputs.items()}
    return Opened(
        types,
        lambda feeds: list(runners[feeds["input_ids"].shape[1]](**feeds).values()),
        runners,
    )


def open_executorch(job: Job) -> Opened:
    """Open a file whose inputs have no names: they are in the order of INPUTS."""
    import executorch.kernels.quantized  # noqa: F401  # registers the operators of int8 files
    import torch
    from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool
    from executorch.runtime import Runtime

    _unsafe_reset_threadpool(job["threads"])
    method = Runtime.get().load_program(job["path"]).load_method("forward")
    names = INPUTS[: method.metadata.num_inputs()]

    def run(feeds: Feeds) -> list[Any]:
        return [
            each.numpy()
            for each in method.execute(
                [torch.from_numpy(feeds[name]) for name in names]
            )
        ]

    return Opened(dict.fromkeys(names, np.int64), run)


RUNTIME_OPENERS: Mapping[str, Callable[[Job], Opened]] = {
    "onnxruntime": open_onnxruntime,
    "openvino": open_openvino,
    "ai_edge_litert": open_litert,
    "executorch": open_executorch,
}


def write_texts(
    types: Mapping[str, Any],
    batch: int,
    seq: int,
    words: list[str],
) -> Feeds:
    """Write a text, or a pair, of `seq` tokens, with the special tokens around and
    between."""
    chosen = list(islice(cycle(words), max(0, seq - 1 - len(types))))
    parts = (
        [chosen]
        if len(types) == 1
        else [chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]]
    )
    texts = map(" ".join, parts)
    return {name: np.array([next(texts)] * batch, np.object_) for name in types}


def feeds(
    types: Mapping[str, Any],
    batch: int,
    seq: int,
    vocabulary: int,
    lengths: Collection[int] = (),
) -> Feeds:
    """Draw token ids, the same in every process, with full attention and one segment,
    in the declared types; padded to the shortest of `lengths` that holds them."""
    if lengths and seq > max(lengths):
        refuse(f"takes at most {max(lengths)} tokens")
    padding = min((each for each in lengths if each >= seq), default=seq) - seq
    ids = np.random.default_rng(0).integers(0, vocabulary, (batch, seq))
    arrays = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "token_type_ids": np.zeros_like(ids),
    }
    arrays = {
        name: np.pad(array, ((0, 0), (0, padding))) for name, array in arrays.items()
    }
    if unknown := sorted(types.keys() - arrays.keys()):
        refuse(
            f"inputs {', '.join(unknown)} are not among {', '.join(arrays)}: not a "
            "text encoder"
        )
    return {name: arrays[name].astype(dtype) for name, dtype in types.items()}


def peak_rss_mb() -> float | None:
    """Return the peak memory of this process in 10^6 bytes; None on Windows.

    Not ru_maxrss on Linux: that survives fork and exec, and would show a large parent's
    peak.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(
            line.split(":", 1)
            for line in status.read_text(encoding="ascii").splitlines()
            if ":" in line
        )
        if "VmHWM" in lines:
            return int(lines["VmHWM"].split()[0]) * 1024 / 1e6
    try:
        import resource
    except ModuleNotFoundError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e6


def time_run(run: Callable[[], object]) -> float:
    """Time one run in milliseconds."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def join_outputs(outputs: list[Any]) -> Any:
    """Return the answer among the outputs of one row: a vector, not the states of its
    tokens; the starts and ends of spans stacked."""
    rank = min(output.ndim for output in outputs)
    outputs = [output for output in outputs if output.ndim == rank]
    return outputs[0] if len(outputs) == 1 else np.stack(outputs, axis=-1)


def logits(opened: Opened, rows: list[dict[str, Any]], workers: int) -> list[Any]:
    """Compute [shape, base64 of float32 in row order] of each row."""
    types = opened.types

    def encode(row: dict[str, Any]) -> list[Any]:
        if missing := [name for name in types if name not in row]:
            refuse(f"a row has {', '.join(row)}; expected {', '.join(missing)} too")
        arrays = {name: np.asarray([row[name]], types[name]) for name in types}
        arrays.update(
            {
                name: np.asarray([row[name]], np.int64)
                for name in opened.optional
                if name in row
            }
        )
        joined = join_outputs([np.asarray(out)[0] for out in opened.run(arrays)])
        return [
            list(joined.shape),
            base64.b64encode(
                np.ascontiguousarray(joined, np.float32).tobytes()
            ).decode(),
        ]

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(encode, rows))


def main(job: Job) -> None:
    pin(job["affinity"])
    start = time.perf_counter()
    opened = RUNTIME_OPENERS[job["runtime"]](job)
    ready = {"init_ms": (time.perf_counter() - start) * 1e3}
    timing = "seq" in job
    batch: Feeds = {}
    if "words" in job:
        batch = write_texts(opened.types, job["batch"], job["seq"], job["words"])
    elif timing:
        batch = feeds(
            opened.types,
            job["batch"],
            job["seq"],
            job["vocabulary"],
            opened.lengths,
        )

    def run() -> object:
        return opened.run(batch)

    if timing:
        ready["first_ms"] = time_run(run)
    print(json.dumps(ready), flush=True)
    for _ in range(job["warm_up"] if timing else 0):
        run()
    # an infer request of OpenVINO serves one thread at a time
    workers = 1 if job["runtime"] == "openvino" else os.cpu_count() or 1
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), run, opened, workers)), flush=True)


def answer(
    request: Mapping[str, Any],
    run: Callable[[], object],
    opened: Opened,
    workers: int,
) -> dict[str, Any]:
    if "rows" in request:
        return {"logits": logits(opened, request["rows"], workers)}
    if "seconds" in request:
        end = time.perf_counter() + request["seconds"]
        times: list[float] = []
        while not times or time.perf_counter() < end:
            times.append(time_run(run))
        return {
            "p50_ms": float(np.median(times)),
            "runs": len(times),
            "peak_rss_mb": peak_rss_mb(),
        }
    for _ in range(WARM_UP_PER_ROUND):
        run()
    return {
        "ms": [time_run(run) for _ in range(request["runs"])],
        "peak_rss_mb": peak_rss_mb(),
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
