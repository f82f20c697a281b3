"""Import what commands import: the fork server does it once, before it forks."""

import gc
import importlib
import os

from compress.cli import settle_libraries

NAMES = (
    "compress.cli", "compress.pipeline", "compress.pretraining", "compress.pruning.line", "compress.search.pipeline",
    "compress.search.record", "compress.prompted.labelled", "compress.quantize.pipeline", "compress.trim.measured",
    "compress.export.formats", "compress.export.predictor", "compress.report.compare", "compress.bench.device",
    "compress.students.listing", "compress.report.page", "transformers.models.bert.modeling_bert", "datasets", "optuna",
    "transformers.models.gpt2.modeling_gpt2", "onnxruntime", "sklearn.metrics", "sklearn.linear_model",
    "torch.utils.tensorboard", "torch.onnx", "jinja2",
)  # fmt: skip

os.environ["OMP_NUM_THREADS"] = "1"
settle_libraries()
for name in NAMES:
    importlib.import_module(name)
gc.collect()
gc.freeze()
