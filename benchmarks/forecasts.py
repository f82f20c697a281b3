"""How near is what `--plan` tells to what the same command then takes, on a quiet machine and on a busy one?

    python -m benchmarks.forecasts --data DIR --out benchmarks/results/forecasts_<hardware>_<yyyymm>.json
    python -m benchmarks.forecasts --data DIR --only distill-sst2 quantize trim --scale 0.1    # a quick look

DIR has the folders sst2, rte, stsb and mrpc (GLUE's files) and tokenizers/roberta-base. Each of the 12 commands is run
with `--plan --json` and then for real, by itself, in one cache, so that what one keeps the next ones find, both times;
then, but with `--quiet-only`, both again in another cache beside a neighbour that keeps `--neighbours` cores busy.
Seconds are those of the whole process by the wall clock; memory is the most that the process held. A language model
for `label` is made here, of random weights: its labels are nothing, its time is real.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import make_parser, write_result
from compress.prompting.prompt import Prompt

ROWS = {"sst2": 2000, "rte": 2490, "stsb": 3000, "mrpc": 3000}
"""Training rows of each set that are taken; of the others, 500."""
FOLDERS = {"sst2": "sst2", "rte": "rte", "stsb": "stsb/glue", "mrpc": "mrpc/glue"}
PLAIN = """
paper: {title: A benchmark, authors: Nobody, year: 2026, url: https://example.org}
about: Thin students that are each trained.
mode: plain
student: {family: bert, init: scratch}
axes: {layers: [2, 3, 4], hidden: [128, 192, 256], ffn: [256, 512]}
short:
  distill: trial
  steps: STEPS
  max_length: 64
  lr: 1.0e-4
  evaluate: 0
  objective: [{loss: hinton.soft_targets}]
rungs: [0.5, 1.0]
final:
  - {distill: final, steps: STEPS, max_length: 64, lr: 1.0e-4, objective: [{loss: hinton.soft_targets}]}
"""


def commands(scratch: Path, scale: float) -> dict[str, list[str]]:
    """Return the words of each command but --out. scale: of the steps and rows that training and labelling take."""
    data = {name: str(scratch / "data" / name) for name in ROWS}
    bundle = str(scratch / "quiet" / "distill-sst2" / "bundle")

    def steps(count: int, *stages: str) -> list[str]:
        return [word for stage in stages for word in ("--set", f"{stage}.steps={max(4, round(scale * count))}")]

    warned = ["--gate", "warn"]  # few steps teach a teacher little

    def distilled(name: str, recipe: str, count: int, *stages: str) -> list[str]:
        source = data.get(name, name)
        return [
            "distill",
            "--teacher",
            "minilm",
            "--data",
            source,
            "--recipe",
            recipe,
            *warned,
            *steps(count, "teacher", *stages),
        ]

    study = ["--finalists", "2", "--shapes", "6", "--rounds", "2", "--seq", "32", *warned]
    recover = steps(200, "teacher", "stages.1", "stages.3")
    return {
        "distill-sst2": distilled("sst2", "distilbert", 300, "stages.0"),
        "distill-rte": distilled("rte", "distilbert", 100, "stages.0"),
        "distill-stsb": distilled("stsb", "distilbert", 200, "stages.0"),
        "distill-intents": distilled("intents", "tinybert", 250, "stages.0", "stages.1"),
        "prune-sst2": ["prune", "minilm", "--data", data["sst2"], "--layers", "3", "--ffn", "0.5", *warned, *recover],
        "prune-mrpc": ["prune", "minilm", "--data", data["mrpc"], "--hidden", "0.5", *warned, *recover],
        "pretrain": [
            "pretrain", "--teacher", "minilm", "--recipe", "tinybert-general", "--corpus", "pydoc",
            *steps(40, "stages.0"), "--set", "stages.0.batch=64",
        ],
        "search-supernet": [
            "search", "--teacher", "minilm", "--data", data["sst2"], *study, "--trials", "20",
            *steps(200, "teacher", "supernet"), *steps(60, "short", "final.0"),
        ],
        "search-plain": [
            "search", "--teacher", "minilm", "--data", data["sst2"], "--space", str(scratch / "plain.yaml"), *study,
            "--trials", "4", *steps(200, "teacher"),
        ],
        "quantize": ["quantize", bundle, "--data", data["sst2"]],
        "trim": ["trim", bundle, "--data", data["sst2"], "--corpus", "pydoc"],
        "label": [
            "label", "--teacher", str(scratch / "speaker"), "--prompt", str(scratch / "prompt.yaml"), *warned,
            "--data", str(scratch / "texts.txt"),
        ],
    }  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--only", nargs="+", help="these commands alone; distill-sst2 makes what others read")
    parser.add_argument("--scale", type=float, default=1.0, help="of the steps and rows of each command")
    parser.add_argument("--quiet-only", action="store_true", help="without the busy neighbour")
    parser.add_argument("--neighbours", type=int, default=1, help="cores that the neighbour keeps busy")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch, found = Path(folder), list[dict[str, Any]]()
        prepare(args.data, scratch, args.scale)
        chosen = commands(scratch, args.scale)
        if unknown := sorted({*(args.only or ())} - {*chosen}):
            parser.error(f"--only {', '.join(unknown)}: expected some of {', '.join(chosen)}")
        for load in ("quiet",) if args.quiet_only else ("quiet", "busy"):
            with ExitStack() as stack:
                for _ in range(args.neighbours if load == "busy" else 0):
                    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                    stack.callback(neighbour.wait)
                    stack.callback(neighbour.kill)
                for name, words in chosen.items():
                    if args.only is None or name in args.only:
                        found.append({"command": name, "load": load, **measure(words, scratch / load / name)})
                        print(format_line(found[-1]), flush=True)
    report(found)
    write_result(args.out, {"commands": found})


def prepare(data: Path, scratch: Path, scale: float) -> None:
    """Write the sets, the space, and the language model."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    for name, place in FOLDERS.items():
        (scratch / "data" / name).mkdir(parents=True)
        for split in ("train", "dev"):
            lines = (data / place / f"{split}.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
            kept = lines[: 1 + (ROWS[name] if split == "train" else 500)]
            (scratch / "data" / name / f"{split}.tsv").write_text("".join(kept), encoding="utf-8")
    (scratch / "plain.yaml").write_text(PLAIN.replace("STEPS", str(max(4, round(100 * scale)))), encoding="utf-8")
    texts = (data / "sst2" / "train.tsv").read_text(encoding="utf-8").splitlines()[1 : 1 + round(600 * scale)]
    (scratch / "texts.txt").write_text("\n".join(each.rpartition("\t")[0] for each in texts), encoding="utf-8")
    prompt = Prompt.load("sentiment").model_copy(update={"examples": 0})  # the texts have no labels to choose them by
    (scratch / "prompt.yaml").write_text(
        json.dumps(prompt.model_dump(mode="json", exclude_none=True)), encoding="utf-8"
    )
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizers" / "roberta-base", use_fast=True)
    tokenizer.save_pretrained(scratch / "speaker")
    config = GPT2Config(vocab_size=len(tokenizer), n_layer=6, n_embd=384, n_head=6, bos_token_id=0, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(scratch / "speaker")


def measure(words: Sequence[str], out: Path) -> dict[str, Any]:
    """Run a command with --plan and then for real."""
    out.parent.mkdir(parents=True, exist_ok=True)
    target = out.with_suffix(".jsonl") if words[0] == "label" else out
    line, home = [*words, "--out", str(target)], {"COMPRESS_HOME": str(out.parent / "home")}
    planned, planning, _ = run([*line, "--plan", "--json"], home)
    told = json.loads(planned)
    _, seconds, peak = run(line, home)
    return {
        "forecast_s": [60 * each for each in told["minutes"]], "likely_s": 60 * told["likely_minutes"],
        "real_s": seconds, "plan_s": planning,
        "forecast_peak_mb": told["peak_rss_mb"], "real_peak_mb": peak, "phases": told["phases"],
    }  # fmt: skip


def run(words: Sequence[str], environment: Mapping[str, str]) -> tuple[str, float, float]:
    """Run compress; return what it prints, its seconds and the most memory that it held, in 10^6 bytes."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            [sys.executable, "-m", "compress", *words], stdout=printed, stderr=said, env={**os.environ, **environment}
        )
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        printed.seek(0)
        said.seek(0)
        if child.returncode not in (0, 3):  # 3: an int8 file that loses too much, which was made all the same
            raise SystemExit(
                f"compress {' '.join(words)}: exit code {child.returncode}\n{said.read().decode()[-2000:]}"
            )
        return printed.read().decode(), time.monotonic() - began, used.ru_maxrss * 1024 / 1e6


HEAD = (
    f"{'command':<16} {'load':<6} {'forecast, s':>13} {'probably':>8} {'real, s':>8} "
    f"{'peak, MB':>9} {'real':>6} {'plan, s':>8}"
)


def format_line(found: Mapping[str, Any]) -> str:
    least, most = found["forecast_s"]
    seconds = f"{least:,.0f}" if round(least) == round(most) else f"{least:,.0f} to {most:,.0f}"
    return (
        f"{found['command']:<16} {found['load']:<6} {seconds:>13} {found['likely_s']:>8,.0f} "
        f"{found['real_s']:>8,.0f} "
        f"{found['forecast_peak_mb']:>9,.0f} {found['real_peak_mb']:>6,.0f} {found['plan_s']:>8,.0f}"
    )


def report(found: Sequence[Mapping[str, Any]]) -> None:
    """Print the table, and how many are near: real seconds within 25 % of what was probable, memory within 20 %."""
    print(HEAD, *map(format_line, found), sep="\n")
    for load in dict.fromkeys(each["load"] for each in found):
        some = [each for each in found if each["load"] == load]
        near = sum(abs(each["likely_s"] / each["real_s"] - 1) <= 0.25 for each in some)
        held = sum(abs(each["forecast_peak_mb"] / each["real_peak_mb"] - 1) <= 0.2 for each in some)
        print(f"{load}: {near} of {len(some)} within 25 % of the seconds, {held} within 20 % of the memory")


if __name__ == "__main__":
    main()
