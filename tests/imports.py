"""Import what commands import, as the `compress` script would: see `tests.forks`."""

import gc
import importlib
import os

from compress.cli import configure_libraries

NAMES = (
    "compress.cli", "compress.commands.distill", "compress.commands.pretrain", "compress.commands.prune",
    "compress.commands.search",
    "compress.nas.record", "compress.commands.label", "compress.commands.quantize",
    "compress.commands.trim",
    "compress.exporters.export", "compress.exporters.predictor", "compress.reporting.compare",
    "compress.benchmark.devices",
    "compress.commands.students", "compress.reporting.html",
    "transformers.models.bert.modeling_bert", "datasets", "optuna",
    "transformers.models.gpt2.modeling_gpt2", "onnxruntime", "sklearn.metrics", "sklearn.linear_model",
    "torch.utils.tensorboard", "torch.onnx", "jinja2",
)  # fmt: skip

os.environ["OMP_NUM_THREADS"] = "1"
configure_libraries()
for name in NAMES:
    importlib.import_module(name)
gc.collect()
gc.freeze()
