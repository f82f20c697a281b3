"""How fast are our files beside optimum-onnx's best, on the same weights, on the same machine in the same minutes?

    python3 -m venv optimum
    optimum/bin/pip install torch==2.13.0
    optimum/bin/pip install transformers==4.57.6 optimum==2.1.0 optimum-onnx==0.1.0 onnxruntime==1.31.1 onnx==1.23.2
    python -m benchmarks.export_race --peer optimum/bin --out benchmarks/results/export_race_<hardware>_<yyyymm>.json

The peer's best int8 on a processor with VNNI: `optimum-cli export onnx`, then `optimum-cli onnxruntime quantize
--avx512_vnni --per_channel`. Ours: the exported graph rewritten (`exporters.rewrite`), then dynamic int8 in one step
or static int8; and static int8 in OpenVINO, another runtime, where that is installed. All run in processes of their
own, in turns, two passes; the peer's files with onnxruntime's own settings, as their users run them. Shapes are random
weights: speed only. `--trained BUNDLE --data DIR` adds what the same files of a trained classifier score. Beside
them runs a file with the int8 products of such a model and nothing between them: its time over a file's is the share
of the reachable speed that the file has. `peak` is the speed of one large product of that file's operator.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import make_parser, write_result
from compress.benchmark.local import machine, open_local
from compress.exporters.int8 import quantize_dynamic, quantize_static
from compress.exporters.rewrite.forms import Form, rewrite_graph
from compress.exporters.session import read_model
from compress.quantization.calibration import compute_ranges
from compress.records.latency import Latency, Setting

PEER = "optimum-onnx int8"
PRODUCTS = "products alone"
PEAK = "peak"
PEAK_WIDTH = 1024
PEAK_PRODUCTS = 4
"""The width of the matrices of the large products, and how many there are."""
VOCABULARY_SIZE = 30522
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
SHAPES = {"tinybert": (4, 312, 1200), "minilm": (6, 384, 1536), "bert-base": (12, 768, 3072)}
"""Layers, width, feed-forward width; 12 heads."""
SPEED = 3.5e8
"""Multiplications a millisecond, roughly, of int8 on one core: decides how many runs a figure is of."""
ROUNDS = 4
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a")
PACKAGES = ("compress", "onnxruntime", "onnx", "torch", "transformers", "openvino")


@dataclass(frozen=True)
class Model:
    """A checkpoint in `folder`, and the rows that static int8 is calibrated on."""

    name: str
    folder: Path
    work: Path
    rows: list[dict[str, list[int]]]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--peer", type=Path, required=True, help="bin folder of a venv with optimum-onnx")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--seq", default="32,128")
    parser.add_argument("--seconds", type=float, default=0.8, help="timed, for each figure")
    parser.add_argument("--trained", type=Path, action="append", default=[], help="bundle of a trained classifier")
    parser.add_argument("--data", help="its data, a folder that compress.load_task reads")
    parser.add_argument("--rows", type=int, default=2000, help="of the validation split, that it is scored on")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    args = parser.parse_args()
    lists = ([int(part) for part in text.split(",")] for text in (args.threads, args.batch, args.seq))
    settings = [Setting(*values) for values in product(*lists)]
    found: list[dict[str, Any]] = []
    reached: list[dict[str, Any]] = []
    scores: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.shapes.split(","):
            model = build_model(name, Path(scratch))
            files = {**build_files(model, args.peer), **write_limits(model)}
            for setting in settings:
                times = race_files(files, setting, SHAPES[name], args.seconds)
                found += [{"shape": name, **asdict(each)} for each in times]
                print(format_line(name, setting, times), flush=True)
                reached.append(reached_speed(name, setting, times))
                print("  ".join(f"{key} {value}" for key, value in reached[-1].items()), flush=True)
        for bundle in args.trained:
            scores[str(bundle)] = score_bundle(bundle, args.data, args.rows, Path(scratch), args.peer)
    write_result(
        args.out,
        {"peer": peer_versions(args.peer), "latencies": found, "reached": reached, "scores": scores},
        filter(find_spec, PACKAGES),
    )


def build_model(name: str, scratch: Path) -> Model:
    """Build a BERT of this shape with random weights."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    layers, width, inner = SHAPES[name]
    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=layers, hidden_size=width, intermediate_size=inner, num_attention_heads=12)
    model = BertForSequenceClassification(config).eval()
    for key, weight in model.named_parameters():
        if key.endswith("bias"):  # equal ones would be stored once
            torch.nn.init.normal_(weight, std=0.02)
    work = scratch / name
    model.save_pretrained(work / "checkpoint")
    BertTokenizer(vocab={word: at for at, word in enumerate(VOCABULARY)}).save_pretrained(work / "checkpoint")
    draw = np.random.default_rng(0)
    rows = [
        {"input_ids": draw.integers(0, 30522, 64).tolist(), "attention_mask": [1] * 64, "token_type_ids": [0] * 64}
        for _ in range(8)
    ]
    return Model(name, work / "checkpoint", work, rows)


def build_files(model: Model, peer: Path) -> dict[str, Path]:
    """Return the peer's file first, then ours."""
    import onnx
    from transformers import AutoModelForSequenceClassification

    from compress.exporters.onnx import to_onnx

    files = {PEER: quantize_with_peer(model, peer)}
    raw = model.work / "raw.onnx"
    to_onnx(AutoModelForSequenceClassification.from_pretrained(model.folder), raw, form=None)
    forms = {"turned": Form(), "plain": Form(tokens_first=False)}
    for name, form in forms.items():
        onnx.save_model(rewrite_graph(read_model(raw), form).model, model.work / f"{name}.onnx")
    turned, plain = (model.work / f"{name}.onnx" for name in forms)
    files["ours, dynamic"] = model.work / "dynamic.onnx"
    quantize_dynamic(turned, files["ours, dynamic"])
    files["ours, static"] = model.work / "static.onnx"
    quantize_static(turned, files["ours, static"], compute_ranges(turned, model.rows))
    if find_spec("openvino"):
        import openvino

        quantize_static(plain, model.work / "qdq.onnx", compute_ranges(plain, model.rows), form="qdq")
        files["ours, OpenVINO"] = model.work / "openvino.xml"
        openvino.save_model(
            openvino.convert_model(model.work / "qdq.onnx"), files["ours, OpenVINO"], compress_to_fp16=False
        )
        (model.work / "config.json").write_bytes((model.folder / "config.json").read_bytes())
        fast = {"avx512_bf16", "amx_int8"} & set(machine().get("instructions", "").split())
        told = {"INFERENCE_PRECISION_HINT": "bf16" if fast else "f32"}  # of what is not int8
        files["ours, OpenVINO"].with_suffix(".session.json").write_text(json.dumps(told), encoding="utf-8")
    return files


def write_limits(model: Model) -> dict[str, Path]:
    """Write the files that have products alone."""
    files = {name: model.work / f"{name.split()[0]}.onnx" for name in (PRODUCTS, PEAK)}
    write_products(files[PRODUCTS], product_sizes(SHAPES[model.name]))
    write_products(files[PEAK], [(PEAK_WIDTH, PEAK_WIDTH)] * PEAK_PRODUCTS)
    return files


def write_products(file: Path, sizes: list[tuple[int, int]]) -> None:
    """Write a file that multiplies bytes of every token by int8 matrices of these sizes (in, out), one after another,
    each product read by nothing but the sum of one of its numbers."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    draw = np.random.default_rng(0)
    widest = max(width for width, _ in sizes)
    arrays = {"table": draw.integers(0, 256, (VOCABULARY_SIZE, widest), np.uint8)}
    arrays |= {"zero": np.array([0]), "one": np.array([1]), "axis": np.array([-1])}
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["codes"])]
    parts = []
    for place, (width, outputs) in enumerate(sizes):
        arrays[f"weight{place}"] = draw.integers(-127, 128, (width, outputs), np.int8)
        arrays[f"end{place}"] = np.array([width])
        cut, product, part = f"cut{place}", f"product{place}", f"part{place}"
        nodes += [
            helper.make_node("Slice", ["codes", "zero", f"end{place}", "axis"], [cut]),
            helper.make_node("MatMulInteger", [cut, f"weight{place}"], [product]),
            helper.make_node("Slice", [product, "zero", "one", "axis"], [part]),
        ]
        parts.append(part)
    nodes.append(helper.make_node("Concat", parts, ["logits"], axis=-1))
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["rows", "tokens"]) for name in INPUTS]
    logits = [helper.make_tensor_value_info("logits", TensorProto.INT32, ["rows", "tokens", "parts"])]
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "products", inputs, logits, tensors)
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), file)


def product_sizes(shape: tuple[int, int, int]) -> list[tuple[int, int]]:
    """List the matrices of the layers; of the last one keys and values alone, since its others are of one token."""
    layers, width, inner = shape
    square = (width, width)
    return [*(layers - 1) * [*[square] * 4, (width, inner), (inner, width)], square, square]


def reached_speed(name: str, setting: Setting, times: list[Latency]) -> dict[str, Any]:
    """Return the speed of the large product, in 10^9 multiplications a second, and the share of the time of each file
    that its products take alone, and would take at that speed. By the fastest run of each."""
    by_name = {each.name: each.min_ms for each in times}
    tokens = setting.batch * setting.seq
    work = tokens * sum(width * outputs for width, outputs in product_sizes(SHAPES[name]))
    peak = tokens * PEAK_PRODUCTS * PEAK_WIDTH**2 / by_name[PEAK] / 1e6
    files = {key: ms for key, ms in by_name.items() if key not in (PEAK, PRODUCTS)}
    alone = {key: round(by_name[PRODUCTS] / ms, 3) for key, ms in files.items()}
    at_peak = {key: round(work / peak / 1e6 / ms, 3) for key, ms in files.items()}
    return {"shape": name, "setting": str(setting), "peak": round(peak, 1), "alone": alone, "at peak": at_peak}


def quantize_with_peer(model: Model, peer: Path) -> Path:
    """Make the peer's int8 file."""
    exported, small = model.work / "peer", model.work / "peer-int8"
    cli = str(peer / "optimum-cli")
    for command in (
        [cli, "export", "onnx", "--model", str(model.folder), "--task", "text-classification", str(exported)],
        [
            cli,
            "onnxruntime",
            "quantize",
            "--onnx_model",
            str(exported),
            "--avx512_vnni",
            "--per_channel",
            "-o",
            str(small),
        ],
    ):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return small / "model_quantized.onnx"


def race_files(
    files: Mapping[str, Path], setting: Setting, shape: tuple[int, int, int], seconds: float
) -> list[Latency]:
    layers, width, inner = shape
    work = setting.batch * setting.seq * layers * (4 * width * width + 2 * width * inner)
    runs = int(np.clip(1e3 * seconds * SPEED / work / ROUNDS, 2, 60))
    with open_local() as device:
        return device.race(files, [setting], rounds=ROUNDS, runs=runs)


def format_line(name: str, setting: Setting, times: list[Latency]) -> str:
    first, parts = times[0], []
    for each in times:
        ratios = f"{each.p50_ms / first.p50_ms:.2f}x, min {each.min_ms / first.min_ms:.2f}x"
        parts.append(f"{each.name} {each.p50_ms:.2f} ({ratios}){' noisy' * each.noisy}")
    return f"{name:10} {setting!s:31} " + "  ".join(parts)


def score_bundle(bundle: Path, data: str, rows: int, scratch: Path, peer: Path) -> dict[str, Any]:
    """Score every file of a trained bundle, beside fp32."""
    from transformers import AutoTokenizer

    from compress import load_task
    from compress.evaluation.evaluator import Evaluator
    from compress.exporters.artifact import Bundle

    shipped, found = Bundle.load(bundle), load_task(data)
    tokenizer = AutoTokenizer.from_pretrained(bundle)
    evaluator, train = (
        Evaluator.from_split(shipped.task, split, tokenizer, shipped.manifest.max_length).subsample(count)
        for split, count in ((found.validation, rows), (found.train, 256))
    )
    columns = ["input_ids", "attention_mask", "token_type_ids"]
    model = Model(bundle.name, bundle, scratch / bundle.parent.name, list(train.rows.select_columns(columns)))
    model.work.mkdir()
    files = {"fp32": shipped.files()["fp32"], **build_files(model, peer)}
    asked = list(evaluator.rows.select_columns(columns))
    with open_local() as device:
        logits = {name: np.stack(device.logits(path, asked)) for name, path in files.items()}
    told = {
        name: {
            "score": evaluator.scores(each)[shipped.task.metric],
            "agreement": evaluator.agreement(each, logits["fp32"]),
            "difference": float(np.abs(each - logits["fp32"]).max()),
        }
        for name, each in logits.items()
    }
    for name, each in told.items():
        print(f"{bundle.parent.name:20} {name:20} " + "  ".join(f"{key} {value:.4f}" for key, value in each.items()))
    return {"rows": len(evaluator), "metric": shipped.task.metric, "files": told}


def peer_versions(peer: Path) -> dict[str, str]:
    names = ["optimum", "optimum-onnx", "transformers", "torch", "onnxruntime", "onnx"]
    code = f"import json; from importlib.metadata import version; print(json.dumps({{n: version(n) for n in {names}}}))"
    done = subprocess.run([str(peer / "python"), "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
