"""How often does `compress gate` fail a model that is no slower, and pass one that is 10 % slower?

    python -m benchmarks.gate_alarms [--pairs 200] [--slower 50] [--layers 40] [--max-slower 5%] [--minutes 5] [--out F]

A file is a chain of equal matrix products behind an embedding, in float32: with a tenth more of them it has a tenth
more work. Identical pairs are two copies of one file. How much slower the slower one is in truth is measured by all of
its pairs together. Run it beside whatever keeps the machine busy: that is what it is about.
"""

import json
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.common import make_parser, write_result
from compress.benchmark.arguments import parse_percentage
from compress.benchmark.devices import open_device
from compress.commands.gate import compare_latency
from compress.records.latency import Setting

WIDTH, VOCABULARY, TOKENS = 128, 64, 32


def write_chain(path: Path, layers: int) -> Path:
    """Write an embedding of WIDTH numbers a token, and `layers` products with as many square matrices."""
    draw = np.random.default_rng(0)
    tables = {"words": draw.normal(size=(VOCABULARY, WIDTH))}
    tables |= {f"w{n}": draw.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)) for n in range(layers)}
    nodes = [helper.make_node("Gather", ["words", "input_ids"], ["h0"])]
    nodes += [helper.make_node("MatMul", [f"h{n}", f"w{n}"], [f"h{n + 1}"]) for n in range(layers)]
    shape = ["batch", "tokens"]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, shape)],
        [helper.make_tensor_value_info(f"h{layers}", TensorProto.FLOAT, [*shape, WIDTH])],
        [numpy_helper.from_array(table.astype(np.float32), name) for name, table in tables.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--slower", type=int, default=50)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--max-slower", default="5%")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as scratch, open_device("local", say=lambda _: None) as device:
        folder = Path(scratch)
        old, same = (write_chain(folder / name, args.layers) for name in ("old.onnx", "same.onnx"))
        tenth = write_chain(folder / "tenth.onnx", round(1.1 * args.layers))
        for name, new, count in (("identical", same, args.pairs), ("10 % more work", tenth, args.slower)):
            checks, began = [], time.monotonic()
            for number in range(count):
                check = compare_latency(
                    device, (old, new), Setting(1, 1, TOKENS),
                    max_slower=parse_percentage("max-slower", args.max_slower),
                    minutes=args.minutes, say=lambda _: None,
                )  # fmt: skip
                checks.append(check)
                print(f"{name} {number + 1} of {count}: {check.outcome}: {check.reason}", flush=True)
            found[name] = {
                "outcomes": Counter(one.outcome for one in checks),
                "p50_ms": float(np.median([one.old for one in checks])),
                "median_change": float(np.median([one.change for one in checks])),
                "median_passes": float(np.median([one.samples for one in checks])),
                "most_passes": max(one.samples for one in checks),
                "seconds_a_pair": (time.monotonic() - began) / count,
            }
    print(json.dumps(found, indent=1))
    write_result(args.out, found, ("compress", "onnxruntime"))


if __name__ == "__main__":
    main()
