"""What the campaign interrupts and damages: each command at tiny size, and what of its results must never differ."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from tests import children, pruning_given, tiny
from tests.nas import shelved
from tests.prompting import language_models

TIMED = ("log.jsonl", "tensorboard", ".lock", "report.json", "report.html", "run.json", "training.json", "README.md",
         "manifest.json", "costs.json", "search.json", "search.html", "trainer_state.json", "checksums.json",
         "seconds.json", "checkpoints", "export.json", "student.json", "study.db")  # fmt: skip
"""Files and folders that hold dates, durations or measurements: two whole runs differ in them."""
RECIPE = tiny.RECIPE.replace("lr: 2.0e-2\n", "lr: 2.0e-2\n    cache_teacher: true\n")
"""Teacher outputs are kept, too."""
GENERAL = """
paper: {title: A tiny test, authors: Nobody, year: 2025, url: https://example.org}
about: A student shaped on text.
student: {layers: 1, hidden: 16, ffn: 32, heads: 2}
stages:
  - distill: general
    data: text
    steps: 24
    batch: 8
    max_length: 32
    lr: 1.0e-3
    checkpoint: 4
    objective:
      - {loss: tinybert.hidden, project: true}
"""
PROMPT = """
template: "Review: {{ text }}\\nSentiment: {{ label }}"
labels: {negative: bad, positive: good}
"""


@dataclass(frozen=True)
class Work:
    """A command to interrupt.

    words    its arguments; {out} is the folder it writes to, other names are those of `given`
    again    what is added to repeat it
    begins   what {out} is a copy of when it begins: `bundle`, or the result of another work
    before   what is changed in its process
    """

    words: str
    again: str = ""
    begins: str = ""
    before: Callable[[], None] | None = None

    def arguments(self, given: Mapping[str, str], out: Path, *, repeated: bool = False) -> list[str]:
        """Return the command's words; `repeated`: those that continue it."""
        continued = repeated and (self.again != "--resume" or (out / ".lock").exists())  # it may not have begun
        words = f"{self.words} {self.again}" if continued else self.words
        return [word.format(**given, out=out) for word in words.split()]


def searches() -> None:
    """Measure a search's students by their files' sizes, so that no clock decides what is found."""
    from compress.benchmark import devices

    devices.open_device = shelved.weighing  # type: ignore[assignment]


DISTILL = "distill --teacher {teacher} --recipe {recipe} --data {data} --precision fp32 --out {out}"
WORKS: Mapping[str, Work] = {
    "distill": Work(DISTILL, "--resume", before=children.does_not_ship),
    "ship": Work(f"{DISTILL} --resume", begins="distill"),
    "pretrain": Work(
        "pretrain --teacher {teacher} --recipe {general} --corpus {corpus} --precision fp32 --out {out}", "--resume"
    ),
    "prune": Work(
        "prune {model} --recipe {cuts} --data {data} --precision fp32 --gate warn --layers 3 --ffn 24 --out {out}",
        "--resume", before=children.does_not_ship,
    ),
    "search": Work(
        "search --teacher {teacher} --data {data} --space {space} --seq 16 --shapes 7 --rounds 2 --runs 1 --trials 5 "
        "--finalists 2 --precision fp32 --max-params 15000 --sampler random --out {out}",
        "--resume", before=searches,
    ),
    "label": Work(
        "label --teacher {speaker} --prompt {prompt} --data {texts} --precision fp32 --gate warn --out {out}/all.jsonl"
    ),
    "quantize": Work("quantize {out} --data {data} --method static --max-drop 100", begins="bundle"),
    "export": Work("export {out} --precision fp16", begins="bundle"),
    "export-ort": Work("export {bundle} --for ort --out {out}"),
    "trim": Work("trim {bundle} --data {data} --max-drop 100 --out {out}"),
}  # fmt: skip


AFTER = {
    "predict": "predict {bundle} good bad --precision fp32",
    "report": "report {bundle}",
    "bench": "bench {bundle} --seq 8 --rounds 2 --runs 1",
    "quantize": "quantize {bundle} --data {data} --method static --max-drop 100 --out {out}",
    "export": "export {bundle} --for ort --out {out}",
    "trim": "trim {bundle} --data {data} --max-drop 100 --out {out}",
}
"""What is done with a damaged bundle."""


def fill(folder: Path) -> dict[str, str]:
    """Make what commands are given, but `bundle`; returns each by name."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {
        "teacher": tiny.checkpoint(folder / "teacher"),
        "data": tiny.reviews(folder / "data"),
        "recipe": tiny.recipe(folder / "recipes", RECIPE),
        "model": tiny.checkpoint(folder / "model", tiny.bert(layers=4, initializer_range=0.1)),
        "speaker": language_models.saved(folder / "speaker", language_models.gpt2(), language_models.byte_bpe()),
    }
    lines = [" ".join(tiny.WORDS[(at * 7 + word) % 30] for word in range(9)) + " ." for at in range(160)]
    texts = {
        "general": ("general.yaml", GENERAL),
        "cuts": ("cuts.yaml", pruning_given.RECIPE),
        "space": ("space.yaml", shelved.SPACE),
        "prompt": ("prompt.yaml", PROMPT),
        "corpus": ("corpus.txt", "\n\n".join(lines)),
        "texts": ("texts.txt", "\n".join(lines)),
    }
    for name, (file, text) in texts.items():
        (folder / file).write_text(text + "\n", encoding="utf-8")
        given[name] = str(folder / file)
    return given


def results(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file that must not differ, by name.

    A trial that was killed is run again under another number. So the trials of a search are counted without it.
    """
    places, record = dict[str, str](), folder / "search.json"
    if record.is_file():
        points = json.loads(record.read_text(encoding="utf-8"))["points"]
        done = sorted(point["number"] for point in points if point["state"] != "failed")
        places = {str(number): str(place) for place, number in enumerate(done)}
    found = {}
    for path in _compared(folder):
        parts, content = list(path.relative_to(folder).parts), path.read_bytes()
        if parts[0] == "students":
            number, parts[1] = parts[1], places.get(parts[1], parts[1])
            if path.name == "recipe.yaml":
                content = re.sub(rf"\b{number}\b".encode(), parts[1].encode(), content, count=1)
        elif parts == ["winners.json"]:
            content = json.dumps([places[str(number)] for number in json.loads(content)]).encode()
        found["/".join(parts)] = _digest(path, content)
    return found


def plain(text: str, bundle: str | Path, out: Path) -> str:
    """Return what a command printed without the folders it was given."""
    return text.replace(str(bundle), "BUNDLE").replace(str(out), "OUT")


def _compared(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not {*path.relative_to(folder).parts} & {*TIMED}:
            yield path


def _digest(path: Path, content: bytes) -> str:
    if path.suffix == ".onnx":  # certificates are in its metadata, with their dates
        file = onnx.load_model_from_string(content)
        file.ClearField("metadata_props")
        content = file.SerializeToString(deterministic=True)
    if path.suffix == ".jsonl":  # rows that are asked again are in other batches: a seventh digit may differ
        content = re.sub(rb"\d\.\d+", lambda share: b"%.3f" % float(share[0]), content)
    return hashlib.sha256(content).hexdigest()
