"""Does a teacher that reads facts teach a student that does not? Beside the same teacher without facts.

    python -m benchmarks.knowledge WIKI --work FOLDER [--seeds 0 1 2] [--arms ...] [--out RESULT.json]

WIKI is a folder of WikiExtractor's files. A text is a sentence that names one thing of which another article's first
sentence says what it is; its label is the nation in that first sentence ("was an American astronomer"). The triples
are these predicates. No thing is in two of the splits: few labelled texts to train on, a corpus of texts without
labels, validation and test. So the facts, which decide, are of no use to who has learned them by heart.

For each seed, which draws the splits too, minilm is fine-tuned with and without the facts, and teaches two students:
on the labelled texts alone, and on these and the corpus. The student of the arm `labels` begins as that of `hinton`,
and learns the labels alone. Accuracy on the test split, of 0 to 1. The same --work goes on with the teachers in it.
"""

import os
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.common import log, make_parser, write_result
from compress.commands.preflight import distill_request
from compress.config.options import DataOptions, RunOptions
from compress.data.knowledge import load_knowledge
from compress.evaluation import metrics
from compress.evaluation.evaluator import Evaluator
from compress.jobs.phase import run_phases
from compress.jobs.request import ForecastArguments
from compress.jobs.train import RunStages
from compress.teachers.inputs import open_job

NATIONS = {
    "American": "American",
    **dict.fromkeys(("British", "English", "Scottish", "Welsh"), "British"),
    **dict.fromkeys(("Italian", "Roman"), "Italian"),
    **dict.fromkeys(("German", "Prussian", "Austrian"), "German"),
    "French": "French",
    **dict.fromkeys(("Greek", "Athenian"), "Greek"),
}
SHARES = {"train": 0.15, "dev": 0.15, "test": 0.3, "corpus": 0.4}
"""Shares of the things in each split."""
MOST_SENTENCES = {"train": 3, "dev": 2, "test": 3, "corpus": 4}
"""The most texts about a thing."""
CHARACTERS = (40, 120)
"""The shortest and the longest text."""
SETTINGS = [
    *("teacher.epochs=6", "teacher.lr=1e-4", "teacher.batch=16", "teacher.max_length=64", "teacher.evaluate=1"),
    *(
        "stages.0.augment=null",
        "stages.0.lr=2e-4",
        "stages.0.batch=16",
        "stages.0.max_length=64",
        "stages.0.evaluate=1",
    ),
]
ARMS = ("labels", "hinton", "hinton-corpus", "knowledge", "knowledge-corpus")
STEPS = {False: 60, True: 150}
"""Steps of a student, without and with the corpus."""


def articles(wiki: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the paragraphs of each article."""
    pattern = re.compile(r'<doc id="\d+" url="[^"]*" title="([^"]*)">\n(.*?)</doc>', re.DOTALL)
    for file in sorted(wiki.rglob("wiki_*")):
        for found in pattern.finditer(file.read_text(encoding="utf-8")):
            yield found[1], [line for line in found[2].split("\n")[1:] if line.strip()]


def describe(title: str, paragraphs: Sequence[str]) -> tuple[str, str] | None:
    """Return the nation of an article's thing, and what its first sentence says that it is; None if unknown."""
    first = paragraphs[0][:400] if paragraphs else ""
    found = re.search(r"\b(?:is|was|are|were) (?:an?|the|one of the) ([^.;,(]{3,100})", first)
    if found is None or "(" in title or len(title) < 4:
        return None
    words = re.split(r'[ "-]', found[1])[:6]
    nations = {NATIONS[word] for word in words if word in NATIONS}
    return (nations.pop(), found[1].strip()) if len(nations) == 1 else None


def collect(wiki: Path, folder: Path) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Write the triples, and return the nation of each thing, and the sentences of other articles that name it."""
    known = {title: found for title, lines in articles(wiki) if (found := describe(title, lines))}
    rows = [f"{title.replace(' ', '_')}\tis\t{predicate}" for title, (_, predicate) in known.items()]
    path = folder / "triples.tsv"
    path.write_text("\n".join(["head\trelation\ttail", *rows]) + "\n", encoding="utf-8")
    sentences = defaultdict[str, list[str]](list)
    knowledge = load_knowledge(path)
    titles = {knowledge.find_names(title)[0]: title for title in known if knowledge.find_names(title)}
    for title, lines in articles(wiki):
        for line in lines[1:]:
            for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", line.replace("\t", " ")):
                if CHARACTERS[0] <= len(sentence) <= CHARACTERS[1]:
                    names = list(dict.fromkeys(knowledge.find_names(sentence)))
                    if len(names) == 1 and titles.get(names[0]) not in (None, title):
                        sentences[titles[names[0]]].append(sentence)
    return {title: known[title][0] for title in sentences}, sentences


def write_splits(folder: Path, nations: Mapping[str, str], texts: Mapping[str, list[str]], seed: int) -> dict[str, int]:
    """Draw the splits and write them; return their numbers of texts."""
    draw = random.Random(seed)
    things = sorted(texts)
    draw.shuffle(things)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    counts = {}
    begin = 0.0
    for split, share in SHARES.items():
        chosen = things[round(begin * len(things)) : round((begin + share) * len(things))]
        begin += share
        rows = []
        for thing in chosen:
            some = draw.sample(texts[thing], min(len(texts[thing]), MOST_SENTENCES[split]))
            rows += [(text, nations[thing]) for text in some]
        draw.shuffle(rows)
        counts[split] = len(rows)
        if split == "corpus":
            (folder / "corpus.txt").write_text("\n\n".join(text for text, _ in rows) + "\n", encoding="utf-8")
        else:
            lines = ["text\tlabel", *map("\t".join, rows)]
            (folder / "data" / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return counts


def distil(folder: Path, seed: int, arm: str) -> dict[str, float]:
    """Distil a student, and score it and its teacher on the test split."""
    corpus = arm.endswith("-corpus")
    recipe = "knowledge" if arm.startswith("knowledge") else "hinton"
    changes = [*SETTINGS, f"stages.0.steps={STEPS[corpus]}", f"stages.0.corpus={str(corpus).lower()}"]
    if arm == "labels":
        changes.append("stages.0.objective=[{loss: bert.labels}]")
    arguments = ForecastArguments(
        teacher="minilm",
        data=str(folder / "data"),
        recipe=recipe,
        corpus=str(folder / "corpus.txt") if corpus else None,
        knowledge=str(folder.parent / "triples.tsv") if recipe == "knowledge" else None,
        columns=DataOptions(kind="classification"),
        options=RunOptions(seed=seed, precision="fp32", gate="warn", overrides=changes),
    )
    with open_job(distill_request(arguments, folder / arm)) as (opened, phases):
        job = run_phases([*phases, RunStages()], opened)
    context = job.models.context
    test = context.data.test
    assert test is not None and job.student is not None
    exam = Evaluator.from_split(context.data.task, test, context.tokenizer, job.models.recipe.stages[-1].length)
    ask = partial(metrics.logits, encoded=exam.rows, collate=context.collate)
    taught = job.teacher.known_answers(test)
    return {
        "majority": context.data.task.majority(context.data, test)["accuracy"],
        "teacher": exam.scores(ask(job.teacher.model) if taught is None else taught)["accuracy"],
        "student": exam.scores(ask(job.student))["accuracy"],
    }


def summarise(seeds: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Average over the seeds, and say how far teacher and student with facts lead, with the deviation of the lead."""
    means: dict[str, dict[str, float]] = {}
    arms = list(next(iter(seeds.values())))
    pairs = [(end, {f"hinton{end}", f"knowledge{end}"}) for end in ("", "-corpus")]
    for arm in arms:
        means[arm] = {name: fmean(each[arm][name] for each in seeds.values()) for name in ("teacher", "student")}
    for end in [end for end, pair in pairs if pair <= {*arms}]:
        leads = {
            name: [each[f"knowledge{end}"][name] - each[f"hinton{end}"][name] for each in seeds.values()]
            for name in ("teacher", "student")
        }
        for name, values in leads.items():
            spread = stdev(values) if len(values) > 1 else 0.0
            means[f"lead{end} of the {name}"] = {"mean": fmean(values), "deviation": spread}
    return means


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("wiki", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="a folder for data, cache and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    os.environ["COMPRESS_HOME"] = str(given.work / "home")
    began = time.perf_counter()
    nations, texts = collect(given.wiki, given.work)
    found: dict[str, Any] = {}
    sizes = {}
    for seed in given.seeds:
        folder = given.work / f"seed{seed}"
        sizes[str(seed)] = write_splits(folder, nations, texts, seed)
        found[str(seed)] = {}
        for arm in given.arms:
            found[str(seed)][arm] = distil(folder, seed, arm)
            log(f"seed {seed}, {arm}: {found[str(seed)][arm]}, {time.perf_counter() - began:.0f} s")
    summary = summarise(found)
    facts = {
        "things": Counter(nations.values()),
        "texts": sizes,
        "settings": [*SETTINGS, f"stages.0.steps={STEPS[False]}, or {STEPS[True]} with the corpus"],
        "seeds": found,
        "summary": summary,
        "seconds": time.perf_counter() - began,
    }
    write_result(given.out, facts, ("compress", "torch", "transformers", "datasets", "onnxruntime", "numpy"))
    for name, values in summary.items():
        print(name, {key: round(value, 3) for key, value in values.items()})


if __name__ == "__main__":
    main()
