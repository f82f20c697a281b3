"""Which matrix products an int8 file must leave in float32 to keep its score.

Dynamic int8 gives all activations of a tensor one scale, and a few large values in a feed-forward layer's inner
activations coarsen the rest: the products that read them lose most, the first layer's more than all others together
(docs/LOG.md). So where the score falls on real rows, these products are tried one by one.
"""

import tempfile
from pathlib import Path

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from compress.exam import Exam
from compress.export.bundle import Bundle
from compress.export.int8 import contracting_products, quantize_dynamic
from compress.export.predictor import open_predictor

ROWS = 2000
"""Rows that decide whether the score is kept, spread evenly over the split."""
PROBE = 128
"""Rows, spread likewise, that rank the products by how far their quantisation moves the logits."""
SHARE = 0.2
"""Of the mean squared error of the logits, that a product must carry to be worth its time in float32."""


def products_to_keep(bundle: Bundle, exam: Exam, *, limit: float, threads: int) -> tuple[str, ...]:
    """Names of products which, left in float32, bring int8 near enough to fp32 on the exam's rows.

    Near enough: the score falls by at most `limit`, and at most that share of the answers changes (for a regression:
    r lacks that much to 1), which is the steadier figure. Empty when all-int8 is near enough already. Otherwise the
    products that carry a SHARE of the error are added, the worst first; others would cost speed for little, so where
    those do not suffice int8 stays as near as it is.
    """
    task, source = bundle.task, bundle.files()["fp32"]
    exam = exam.spread(ROWS)
    exact = bundle.logits(exam.rows, precision="fp32", threads=threads)

    def near(logits: NDArray[np.float32]) -> bool:
        before, after = (exam.scores(each)[task.metric] for each in (exact, logits))
        return before - after <= limit and exam.agreement(logits, exact) >= 1 - limit

    if near(bundle.logits(exam.rows, precision="int8", threads=threads)):
        return ()
    probe = exam.spread(PROBE).rows
    expected = bundle.logits(probe, precision="fp32", threads=threads)
    with tempfile.TemporaryDirectory() as scratch:

        def logits(keep: list[str], asked: Dataset) -> NDArray[np.float32]:
            file = Path(scratch, "trial.onnx")
            quantize_dynamic(source, file, keep=keep)
            length = bundle.manifest.max_length
            return open_predictor(bundle.path, file, task=task, max_length=length, threads=threads).logits(asked)

        def error(keep: list[str]) -> float:
            return float(np.square(logits(keep, probe) - expected).mean())

        left = {name: error([name]) for name in contracting_products(source)}
        much = (1 - SHARE) * error([])
        keep: list[str] = []
        for name in sorted((name for name in left if left[name] <= much), key=lambda each: left[each]):
            keep.append(name)
            if near(logits(keep, exam.rows)):
                break
    return tuple(keep)
