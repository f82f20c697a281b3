"""How fast does TinyBERT's distillation train, against TextBrewer's, on the same machine in the same minutes?

    python -m venv peer
    peer/bin/pip install torch==2.13.0 && peer/bin/pip install textbrewer==0.2.1 transformers==4.57.6
    python -m benchmarks.distill_throughput --data DIR --peer peer/bin/python

TinyBERT 4x312 from the 6-layer, 384-wide `minilm`, batch 32, all TinyBERT terms at once: embeddings and hidden states
at five depths with projections, attention scores at four, soft cross entropy of the logits. Both sides run alternately,
each run in a process of its own, and the clock runs over optimiser steps only. Ours: the tool's own stage, with what it
chooses on this machine (bf16 where the processor has it, rows grouped by length), in a first epoch and in a later one,
with the teacher's outputs kept. Theirs: GeneralDistiller, fp32.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.common import make_parser, run_worker, write_result

HERE = Path(__file__).resolve().parent
CACHED = ("8000",)
OURS = {
    "compress bf16": ("bf16", ()), "compress fp32": ("fp32", ()),
    "compress bf16, teacher cached": ("bf16", CACHED), "compress fp32, teacher cached": ("fp32", CACHED),
}  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", required=True, help="a folder that compress.load_task reads, such as SST-2's")
    parser.add_argument("--peer", help="python of a venv with textbrewer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120, help="of the peer; ours runs five times as many")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(args.data, folder)
        runs: dict[str, list[dict]] = {name: [] for name in [*OURS, "textbrewer"]}
        for round_ in range(args.rounds):
            for name, (precision, rows) in OURS.items():
                command = [sys.executable, str(HERE / "peers" / "compress_worker.py"), args.data, str(folder)]
                runs[name].append(worker([*command, str(5 * args.steps), precision, *rows]))
            if args.peer:
                command = [args.peer, str(HERE / "peers" / "textbrewer_worker.py"), str(folder)]
                runs["textbrewer"].append(worker([*command, str(round_), str(args.steps)]))
    report(runs, args.out)


def prepare(data: str, folder: Path) -> None:
    """Return the teacher with a head, the student's config, and the tokenised rows, for both sides."""
    from compress import Recipe, load_task
    from compress.data.tokenize import encode
    from compress.models import student
    from compress.models import teacher as teachers
    from compress.models.checkpoints import resolve

    task = load_task(data)
    teacher = teachers.load("minilm", resolve("minilm"), task.task)
    recipe = Recipe.load("tinybert")
    teacher.model.save_pretrained(folder / "teacher")
    teacher.tokenizer.save_pretrained(folder / "teacher")
    student.config_for(recipe.student, teacher.model.config).save_pretrained(folder / "student")
    rows = encode(task.train, teacher.tokenizer, 64)
    np.savez(
        folder / "rows.npz",
        ids=np.concatenate([np.asarray(row) for row in rows["input_ids"]]),
        lengths=np.asarray(rows["length"][:]),
        labels=np.asarray(rows["labels"][:]),
    )


def worker(command: list[str]) -> dict:
    found = run_worker(command, OMP_WAIT_POLICY="PASSIVE")  # as the command line sets it; for the peer as well
    print(f"{Path(command[1]).stem:20} {found['examples'] / found['seconds']:8.1f} samples/s", flush=True)
    return found


def report(runs: dict[str, list[dict]], out: Path | None) -> None:
    speeds = {name: [run["examples"] / run["seconds"] for run in each] for name, each in runs.items() if each}
    peer = median(speeds["textbrewer"]) if "textbrewer" in speeds else None
    for name, each in speeds.items():
        ratio = f"  {median(each) / peer:5.2f}x" if peer else ""
        print(f"{name:30} median {median(each):7.1f} samples/s  min {min(each):7.1f}  max {max(each):7.1f}{ratio}")
    write_result(out, {"speeds": speeds})


if __name__ == "__main__":
    main()
