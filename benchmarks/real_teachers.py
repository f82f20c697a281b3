"""Do the steps that a user would take keep what real teachers know? By the commands of `compress` alone.

    python -m benchmarks.real_teachers korean TEACHER --data ../shared/data --work FOLDER [--out RESULT.json]
    python -m benchmarks.real_teachers wikipedia TEACHER --data WIKI --work FOLDER [--out RESULT.json]
    python -m benchmarks.real_teachers prompted TEACHER --data ../shared/data/sst2 --work FOLDER [--out RESULT.json]

TEACHER is a folder that `python -m benchmarks.teachers` wrote: e5, smollm2, smollm2.

korean     multilingual-e5-small is trimmed to the tokens of NSMC and KorSTS, distilled into 4 layers on their texts,
           and exported as a text file, whose tokens and vectors are compared with the bundle's. Spearman correlation
           on KorSTS's test split, as the run reports it, and of the untrimmed teacher. Then the trimmed teacher is
           fine-tuned on reviews, and teaches a student that begins as that of the vectors, and those of --recipes
wikipedia  SmolLM2 is distilled into 10 of its layers, beside the same student without its teacher, in as many minutes
prompted   SmolLM2 labels sentences with zero, one and four examples, and an encoder learns its answers

Every command is printed, and is skipped where its folder is in --work, so that a run that was stopped goes on.
"""

import argparse
import json
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from benchmarks.common import log, make_parser, write_result
from compress.data.answers import Vector
from compress.exporters.artifact import TEXT, Bundle
from compress.exporters.tokenizer.text_model import read_proof, run_text
from compress.records.json_text import load_record
from compress.records.language_scores import PERPLEXITY, LanguageScores

SEED = 0
PROMPT = "query: "
"""What e5 reads before a text that is compared with another."""
PUBLISHED = "e5, as published"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("proof", choices=PROOFS)
    parser.add_argument("teacher")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=28, help="of each distillation")
    parser.add_argument("--texts", type=int, default=16_000, help="to distil vectors on, those of KorSTS among them")
    parser.add_argument("--numbers", nargs="+", default=[], metavar="KEY=VALUE", help="of the stage of vectors")
    parser.add_argument("--reviews", type=int, default=3_000, help="to fine-tune on")
    parser.add_argument("--tested", type=int, default=5_000, help="reviews to score on")
    parser.add_argument("--compared", type=int, default=2_000, help="texts whose vectors are compared")
    parser.add_argument(
        "--recipes", nargs="*", default=[], help="korean: teach reviews by these too, in 10 minutes each"
    )
    parser.add_argument("--arms", nargs="+", default=["distilgpt2", "distilgpt2-alone"], help="-alone: no teacher")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    write_result(given.out, {"proof": given.proof, **PROOFS[given.proof](given)})


def compress(out: Path, *arguments: Any) -> dict[str, Any]:
    """Run a command whose result is the folder `out`, unless it is there; return command and seconds."""
    words = [*map(str, arguments), "--out", str(out)]
    done = out.with_name(f"{out.name}.done.json")
    if not done.exists():
        log(f"compress {shlex.join(words)}")
        began = time.perf_counter()
        resumed = ["--resume"] if (out / "run.json").exists() else []
        subprocess.run([sys.executable, "-m", "compress", *words, *resumed], check=True)
        taken = {"command": f"compress {shlex.join(words)}", "seconds": time.perf_counter() - began}
        done.write_text(json.dumps(taken), encoding="utf-8")
    facts: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
    return facts


def read_rows(file: Path) -> list[list[str]]:
    """Read a table with a header, without quotes."""
    return [line.split("\t") for line in file.read_text(encoding="utf-8").splitlines()[1:]]


def write_lines(file: Path, lines: Sequence[str]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


# Korean


def prove_korean(given: argparse.Namespace) -> dict[str, Any]:
    nsmc, korsts, work = given.data / "nsmc", given.data / "korsts", given.work
    reviews = [row[1] for row in read_rows(nsmc / "train.tsv")]
    others = (nsmc / "unlabelled.txt").read_text(encoding="utf-8").splitlines()
    sentences = list(dict.fromkeys(text for row in read_rows(korsts / "sts-train.tsv") for text in row[5:7]))
    corpus = write_lines(work / "corpus" / "texts.txt", list(dict.fromkeys([*reviews, *others, *sentences])))
    drawn = random.Random(SEED).sample(others, given.texts - len(sentences))
    train = write_lines(work / "train.txt", list(dict.fromkeys([*sentences, *drawn])))
    commands = [compress(work / "trimmed", "trim", given.teacher, "--corpus", corpus)]
    splits = f"train={train},validation={korsts / 'sts-dev.tsv'},test={korsts / 'sts-test.tsv'}"
    numbers = ["max_length=64", "table=codebook", *given.numbers]
    sizes = [word for number in numbers for word in ("--set", f"stages.0.{number}")]
    options = ["--teacher", work / "trimmed", "--recipe", "leaf", "--kind", "embedding", "--data", splits]
    options += ["--set", "student.layers=4", *sizes]
    commands.append(compress(work / "vectors", "distill", *options, "--minutes", given.minutes))
    bundle = Bundle.load(work / "vectors" / "bundle")
    texts_file = work / "text"
    unseen = write_lines(work / "reviews.txt", others)
    commands.append(compress(texts_file, "export", bundle.path, "--for", "text", "--data", unseen))
    facts = compare_vectors(given, bundle, texts_file / Path(TEXT).name, others)
    published = score_published(given.teacher, korsts / "sts-test.tsv")
    models = [published, *read_report(bundle.path)]
    reviewed = fine_tune(given, commands)
    others_taught = {recipe: teach(given, recipe, commands) for recipe in given.recipes}
    for each in (*models, *reviewed, *chain(*others_taught.values())):
        if each["role"] == "teacher":
            each["name"] = "e5, trimmed"
    return {"commands": commands, "korsts": models, **facts, "nsmc": reviewed, "recipes": others_taught}


def score_published(teacher: str, pairs: Path) -> dict[str, Any]:
    """Score the teacher as it was published, by transformers alone, on the pairs that the report has."""
    rows = [row for row in read_rows(pairs) if row[5] != row[6]]
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    model = AutoModel.from_pretrained(teacher).eval()
    vectors = dict[str, Tensor]()
    texts = sorted({text for row in rows for text in row[5:7]}, key=len)
    for at in range(0, len(texts), 32):
        some = texts[at : at + 32]
        batch = tokenizer([PROMPT + text for text in some], padding=True, return_tensors="pt")
        with torch.no_grad():
            states_BLD = model(**batch).last_hidden_state
        mask_BL1 = batch["attention_mask"].unsqueeze(-1)
        vectors.update(zip(some, normalize((states_BLD * mask_BL1).sum(1)), strict=True))
    cosines = [float(vectors[row[5]] @ vectors[row[6]]) for row in rows]
    return {
        "name": PUBLISHED,
        "role": "published",
        "score": {"spearman": float(spearmanr(cosines, [float(row[4]) for row in rows]).statistic)},
        "interval": None,
        "parameters": model.num_parameters(),
        "file_mb": sum(path.stat().st_size for path in Path(teacher).glob("*.safetensors")) / 1e6,
    }


def compare_vectors(given: argparse.Namespace, bundle: Bundle, file: Path, reviews: Sequence[str]) -> dict[str, Any]:
    """Compare the vectors of the text file with those of the bundle, one text a call."""
    some = reviews[-given.compared :]
    expected = np.concatenate([bundle.embed([text]) for text in some])
    answers = (answer for answer in run_text(file, some) if isinstance(answer, Vector))
    answered = np.stack([np.asarray(answer.numbers) for answer in answers])
    proof = read_proof(file)
    return {
        "text_file_mb": file.stat().st_size / 1e6,
        "read_as_by_the_tokenizer": {"hard texts": proof.hard, "reviews": proof.given},
        "vectors": {"texts": len(some), "largest_difference": float(np.abs(answered - expected).max())},
    }


def fine_tune(given: argparse.Namespace, commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fine-tune the trimmed teacher on reviews, and distil it; return the models of the report."""
    work = given.work
    for name, count in {"train": given.reviews, "validation": 300, "test": given.tested}.items():
        lines = (given.data / "nsmc" / f"{name}.tsv").read_text(encoding="utf-8").splitlines()
        write_lines(work / "nsmc" / f"{name}.tsv", lines[: count + 1])
    # its bundle has lost the tokens that its own texts never use
    begun = work / "vectors" / "stages" / "vectors" / "model"
    numbers = {"augment": "null", "epochs": 4, "evaluate": 1, "max_length": 64, "table": "codebook"}
    changes = [f"student={{init: {begun}}}", "teacher.epochs=2", "teacher.evaluate=1", "teacher.max_length=64"]
    changes += [f"stages.0.{name}={value}" for name, value in numbers.items()]
    options = ["--teacher", work / "trimmed", "--recipe", "hinton", "--data", work / "nsmc", "--vocabulary", "full"]
    columns = ["--text", "document", "--label", "label", "--kind", "classification"]
    words = [word for change in changes for word in ("--set", change)]
    commands.append(compress(work / "reviews", "distill", *options, *columns, *words))
    return read_report(work / "reviews" / "bundle")


def teach(given: argparse.Namespace, recipe: str, commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Distil the teacher that was fine-tuned on reviews by another recipe; return the models of the report."""
    out = given.work / f"twelve-{recipe}"
    options = ["--teacher", given.work / "reviews" / "stages" / "teacher" / "model", "--recipe", recipe]
    options += ["--data", given.work / "nsmc", "--text", "document", "--label", "label", "--kind", "classification"]
    commands.append(compress(out, "distill", *options, "--minutes", 10))
    return read_report(out / "bundle")


def read_report(bundle: Path) -> list[dict[str, Any]]:
    """Return name, score with its interval, size and parameters of each model of a run's bundle."""
    report = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
    names = ("name", "role", "score", "interval", "agreement", "parameters", "file_mb", "train_seconds")
    return [{name: row.get(name) for name in names} for row in report["rows"]]


# Wikipedia


def prove_wikipedia(given: argparse.Namespace) -> dict[str, Any]:
    """Distil in `--minutes`, and train the same student on the words alone; both are scored on the same documents."""
    numbers = {"max_length": 128, "batch": 8, "micro_batch": 8, "limit_tokens": 400_000, "evaluate": 0}
    options = ["--teacher", given.teacher, "--corpus", given.data, "--minutes", given.minutes]
    options += ["--set", "student.layers=10"]
    commands, found = [], {}
    for arm in given.arms:
        recipe = arm.removesuffix("-alone")
        changes = [f"stages.0.{name}={value}" for name, value in numbers.items()]
        if recipe != arm:
            changes.append("stages.0.objective=[{loss: bert.masked_lm}]")
        run = given.work / arm
        lines = [word for change in changes for word in ("--set", change)]
        commands.append(compress(run, "pretrain", "--recipe", recipe, *options, *lines))
        scores = load_record(LanguageScores, run / PERPLEXITY, "delete it")
        *_, student = scores.models
        trained = next((run / "stages").glob("*/model/training.json"))
        found[arm] = {
            "models": scores.summarise(),
            "nats_above": {each.name: scores.compare(student, each) for each in scores.models[:-1]},
            "documents": len(scores.tokens),
            "tokens": sum(scores.tokens),
            "trained": json.loads(trained.read_text(encoding="utf-8"))["trained"],
            "nats_of_documents": student.nats,
        }
    return {"commands": commands, "arms": found}


# Prompted


def prove_prompted(given: argparse.Namespace) -> dict[str, Any]:
    """Label and distil with each number of examples."""
    draw = random.Random(SEED)
    data = given.work / "sst2"
    for name, count in {"train": 2000, "dev": 400, "test": 872}.items():
        lines = (given.data / f"{name}.tsv").read_text(encoding="utf-8").splitlines()
        write_lines(data / f"{name}.tsv", [lines[0], *draw.sample(lines[1:], count)])
    prompt = Path("recipes/prompts/sentiment.yaml").read_text(encoding="utf-8")
    commands, found = [], {}
    for examples in (0, 1, 4):
        own = given.work / f"sentiment-{examples}.yaml"
        own.write_text(prompt.replace("examples: 4 ", f"examples: {examples} "), encoding="utf-8")
        options = ["--teacher", given.teacher, "--prompt", own, "--recipe", "prompted", "--data", data]
        numbers = ["--set", "stages.0.max_length=64", "--effort", "quick", "--gate", "warn"]
        run = given.work / f"examples-{examples}"
        commands.append(compress(run, "distill", *options, *numbers))
        found[examples] = read_report(run / "bundle")
    return {"commands": commands, "examples": found}


PROOFS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "korean": prove_korean,
    "wikipedia": prove_wikipedia,
    "prompted": prove_prompted,
}


if __name__ == "__main__":
    main()
