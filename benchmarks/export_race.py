"""How fast are our files beside optimum-onnx's best, on the same weights, on the same machine in the same minutes?

    python3 -m venv optimum
    optimum/bin/pip install torch==2.13.0
    optimum/bin/pip install transformers==4.57.6 optimum==2.1.0 optimum-onnx==0.1.0 onnxruntime==1.31.1 onnx==1.23.2
    python -m benchmarks.export_race --peer optimum/bin --out benchmarks/results/export_race_<hardware>_<yyyymm>.json

The peer's best int8 on a processor with VNNI: `optimum-cli export onnx`, then `optimum-cli onnxruntime quantize
--avx512_vnni --per_channel`. Ours: the exported graph rewritten (`exporters.rewrite`), then dynamic int8 in one step
or static int8; and static int8 in OpenVINO, another runtime, where that is installed. All run in processes of their
own, in turns, two passes; the peer's files with onnxruntime's own settings, as their users run them. Shapes are random
weights: speed only. `--trained BUNDLE --data DIR` adds what the same files of a trained classifier score.
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
    scores: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.shapes.split(","):
            model = build_model(name, Path(scratch))
            files = build_files(model, args.peer)
            for setting in settings:
                times = race_files(files, setting, SHAPES[name], args.seconds)
                found += [{"shape": name, **asdict(each)} for each in times]
                print(format_line(name, setting, times), flush=True)
        for bundle in args.trained:
            scores[str(bundle)] = score_bundle(bundle, args.data, args.rows, Path(scratch), args.peer)
    write_result(
        args.out, {"peer": peer_versions(args.peer), "latencies": found, "scores": scores}, filter(find_spec, PACKAGES)
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
