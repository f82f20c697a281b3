"""One stage of ours; started by benchmarks/distill_throughput.py.

compress_worker.py DATA FOLDER STEPS PRECISION [ROWS]

Prints one JSON line: steps, examples, seconds, peak_rss_mb. The stage is timed as the tool reports it, first step and
logging included; checkpoints and evaluation are off, as they are for the peer. With ROWS, the teacher's outputs for
the first so many rows are on disk before the clock starts, as they are from a stage's second epoch on.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from compress import Recipe, load_task
from compress.data.collate import Collate
from compress.models import student as students
from compress.models import teacher as teachers
from compress.training.context import TrainingContext
from compress.training.run import Run
from compress.training.stage import run_stage

data, folder, steps, precision = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
rows = int(sys.argv[5]) if len(sys.argv) > 5 else None
LINES = """
extends: tinybert
stages:
  - distill: all
    lr: 5.0e-5
    batch: 32
    max_length: 64
    evaluate: 0
    objective:
      - {loss: tinybert.embeddings, project: true}
      - {loss: tinybert.hidden, layers: uniform, project: true}
      - {loss: tinybert.attention, layers: uniform}
      - {loss: tinybert.prediction}
"""
with tempfile.TemporaryDirectory() as scratch:
    file = Path(scratch, "all.yaml")
    file.write_text(LINES)
    cached = f"stages.0.cache_teacher={str(rows is not None).lower()}"
    recipe = Recipe.load(str(file), [f"stages.0.steps={steps}", f"stages.0.checkpoint={10 * steps}", cached])
    task = load_task(data)
    task = replace(task, train=task.train.select(range(rows or len(task.train))))
    teacher = teachers.load("minilm", folder / "teacher", task.task)
    material = TrainingContext(
        task, None, teacher.tokenizer, Collate(teacher.tokenizer), precision == "bf16", Console(quiet=True)
    )
    student = students.build(recipe.student, teacher.model)
    run = Run.open(Path(scratch, "run"), recipe, {"seed": 0})
    (stage,) = recipe.training
    run_stage(stage, student, teacher, material, run)
    facts = json.loads((run.result("all") / "training.json").read_text())
print(json.dumps(facts["trained"]))
