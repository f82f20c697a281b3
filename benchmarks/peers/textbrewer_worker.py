"""Distil with TextBrewer 0.2.1, in a venv of its own; started by benchmarks/distill_throughput.py.

    textbrewer_worker.py FOLDER ROUND STEPS

FOLDER holds teacher/, student/ (config) and rows.npz; prints one JSON line: steps, examples, seconds. The five matches
of hidden states, four of attention scores and the cross entropy of the logits are the losses of recipes/tinybert.yaml
as TextBrewer has them: its own loop, fp32, shuffled rows, padded to the longest of each batch of 32.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import textbrewer
import torch
from textbrewer import DistillationConfig, GeneralDistiller, TrainingConfig
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForSequenceClassification

folder, round_, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(round_)
saved = np.load(folder / "rows.npz")
rows = np.split(saved["ids"], np.cumsum(saved["lengths"])[:-1])
labels = saved["labels"]


def collate(chosen):
    width = max(len(rows[i]) for i in chosen)
    ids, mask = torch.zeros(len(chosen), width, dtype=torch.long), torch.zeros(len(chosen), width, dtype=torch.long)
    for at, i in enumerate(chosen):
        ids[at, : len(rows[i])] = torch.from_numpy(rows[i].astype(np.int64))
        mask[at, : len(rows[i])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(labels[chosen])}


def adaptor(batch, outputs):
    return {
        "logits": outputs.logits,
        "hidden": outputs.hidden_states,
        "attention": outputs.attentions,
        "inputs_mask": batch["attention_mask"],
    }


shown = {"output_hidden_states": True, "output_attentions": True, "attn_implementation": "eager"}
teacher = AutoModelForSequenceClassification.from_pretrained(folder / "teacher", **shown)
config = AutoConfig.from_pretrained(folder / "student", **shown)
student = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
N, M = teacher.config.num_hidden_layers, config.num_hidden_layers
widths = [config.hidden_size, teacher.config.hidden_size]
above = [(m + 1) * N // M for m in range(M)]
matches = [
    {"layer_T": t, "layer_S": s, "feature": "hidden", "loss": "hidden_mse", "weight": 1, "proj": ["linear", *widths]}
    for s, t in enumerate([0, *above])
] + [
    {"layer_T": t - 1, "layer_S": s, "feature": "attention", "loss": "attention_mse", "weight": 1}
    for s, t in enumerate(above)
]
order: Any = range(len(rows))
loader = DataLoader(order, batch_size=32, shuffle=True, collate_fn=collate, drop_last=True)
distiller = GeneralDistiller(
    TrainingConfig(device="cpu", ckpt_steps=1_000_000, log_dir=None, output_dir=str(folder / f"out{round_}")),
    DistillationConfig(temperature=1, hard_label_weight=0, kd_loss_type="ce", intermediate_matches=matches),
    teacher,
    student,
    adaptor,
    adaptor,
)
optimizer = torch.optim.AdamW(student.parameters(), lr=5e-5)
started: list[float] = []


def first_step_done(batch):
    """Start the clock behind the third batch, when buffers are warm."""
    started.append(time.perf_counter())
    return batch


with distiller:
    distiller.train(optimizer, loader, num_epochs=None, num_steps=steps, batch_postprocessor=first_step_done)
seconds = time.perf_counter() - started[3]
print(
    json.dumps({"steps": steps - 3, "examples": (steps - 3) * 32, "seconds": seconds, "version": textbrewer.__name__})
)
