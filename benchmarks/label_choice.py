"""Does it pay to choose the texts that are labelled first by their vectors, rather than at random?

    python -m benchmarks.label_choice ../shared/data/sst2 --out RESULT.json

From a pool of the training sentences some are labelled, by their own labels, which stand for a language model's. They
are chosen at random; by k-centre (each the farthest from those that are chosen: Sener & Savarese 2018,
arXiv:1708.00489, Alg. 1); or as the nearest to each centre of k-means. All vectors are the mean of MiniLM's last
states. Two models learn from the labels: a logistic regression on the vectors, and MiniLM itself, fine-tuned. Both are
scored on sentences of dev.tsv; test.tsv is not read. Each seed draws another pool and other weights of the head.
"""

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.common import log, make_parser, write_result
from compress.models.checkpoints import resolve

Vectors = NDArray[np.float32]
MAX_LENGTH = 64
BATCH = 16
LR = 1e-4
STEPS = 150


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pool", type=int, default=2_000)
    parser.add_argument("--scored", type=int, default=1_000)
    parser.add_argument("--labels", type=int, nargs="+", default=[50, 100, 200], help="for the regression")
    parser.add_argument("--seeds", type=int, default=3, help="of the regression")
    parser.add_argument("--tuned-labels", type=int, default=100, help="to fine-tune on")
    parser.add_argument("--tuned-seeds", type=int, default=3)
    given = parser.parse_args()
    write_result(given.out, measure(given))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Score every way to choose, by seed."""
    torch.set_num_threads(1)
    folder = str(resolve("minilm"))
    scored = sample(given.data / "dev.tsv", given.scored, seed=0)
    scored_vectors = embed(folder, [text for text, _ in scored])
    regression: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    tuned: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(given.seeds):
        pool = sample(given.data / "train.tsv", given.pool, seed=seed)
        vectors = embed(folder, [text for text, _ in pool])
        for way, choose in WAYS.items():
            for count in given.labels:
                rows = choose(vectors, count, seed)
                labels = [pool[row][1] for row in rows]
                model = LogisticRegression(max_iter=1000).fit(vectors[rows], labels)
                score = float((model.predict(scored_vectors) == [label for _, label in scored]).mean())
                regression[way].setdefault(str(count), []).append(score)
            if seed < given.tuned_seeds:
                chosen = [pool[row] for row in choose(vectors, given.tuned_labels, seed)]
                tuned[way].append(fine_tune(folder, chosen, scored, seed))
            log(f"seed {seed}, {way}: {regression[way]} {tuned[way]}")
    settings = {"pool": given.pool, "scored": len(scored), "steps": STEPS, "batch": BATCH, "lr": LR}
    return {
        "settings": settings,
        "regression": {way: {count: summarise(found) for count, found in regression[way].items()} for way in WAYS},
        "fine_tuned": {"labels": given.tuned_labels, **{way: summarise(tuned[way]) for way in WAYS}},
        "against_random": compare(regression, tuned),
    }


def compare(
    regression: Mapping[str, Mapping[str, Sequence[float]]], tuned: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, Any]]:
    """Summarise the differences from random, seed by seed."""
    found: dict[str, dict[str, Any]] = {}
    for way in [way for way in WAYS if way != "random"]:
        pairs = {count: (regression[way][count], regression["random"][count]) for count in regression[way]}
        pairs["fine_tuned"] = (tuned[way], tuned["random"])
        found[way] = {name: summarise(np.subtract(*pair).tolist()) for name, pair in pairs.items()}
    return found


def summarise(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean, its standard error over the seeds, and the values."""
    error = float(np.std(values, ddof=1) / len(values) ** 0.5)
    return {"mean": float(np.mean(values)), "standard_error": error, "seeds": list(values)}


def sample(file: Path, count: int, *, seed: int) -> list[tuple[str, int]]:
    """Draw different sentences, with their labels."""
    lines = file.read_text(encoding="utf-8").splitlines()[1:]
    rows = {text: int(label) for text, label in (line.split("\t") for line in lines)}
    return random.Random(seed).sample(sorted(rows.items()), count)


@torch.no_grad()
def embed(folder: str, texts: Sequence[str]) -> Vectors:
    """Return the mean of the last states of each text, with length 1: (N, 384)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    vectors = np.empty((len(texts), model.config.hidden_size), np.float32)
    for start in range(0, len(order), 64):
        rows = order[start : start + 64]
        batch = tokenizer([texts[row] for row in rows], padding=True, truncation=True, return_tensors="pt")
        mask = batch["attention_mask"][..., None]
        mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
        vectors[rows] = torch.nn.functional.normalize(mean).numpy()
    return vectors


def fine_tune(folder: str, train: Sequence[tuple[str, int]], scored: Sequence[tuple[str, int]], seed: int) -> float:
    """Fine-tune MiniLM on the chosen sentences; return its accuracy."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min((step + 1) / 15, 1 - step / STEPS))

    def encode(rows: Sequence[tuple[str, int]]) -> Any:
        texts = [text for text, _ in rows]
        return tokenizer(texts, padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")

    model.train()
    for _ in range(STEPS):
        rows = draw.sample(list(train), BATCH)
        loss = model(**encode(rows), labels=torch.tensor([label for _, label in rows])).loss
        loss.backward()
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
    model.eval()
    ordered = sorted(scored, key=lambda row: len(row[0]))
    right = 0
    with torch.no_grad():
        for start in range(0, len(ordered), 64):
            rows = ordered[start : start + 64]
            predicted = model(**encode(rows)).logits.argmax(-1).tolist()
            right += sum(one == label for one, (_, label) in zip(predicted, rows, strict=True))
    return right / len(scored)


def at_random(vectors: Vectors, count: int, seed: int) -> list[int]:
    return random.Random(1000 + seed).sample(range(len(vectors)), count)


def k_centre(vectors: Vectors, count: int, seed: int) -> list[int]:
    """Choose each text the farthest from those before it, from a random one on."""
    chosen = [random.Random(1000 + seed).randrange(len(vectors))]
    similarity = vectors @ vectors[chosen[0]]
    while len(chosen) < count:
        chosen.append(int(similarity.argmin()))
        similarity = np.maximum(similarity, vectors @ vectors[chosen[-1]])
    return chosen


def k_means(vectors: Vectors, count: int, seed: int) -> list[int]:
    """Choose the text that is nearest to each centre."""
    found = KMeans(count, n_init=1, random_state=seed).fit(vectors)
    distances = found.transform(vectors)
    members = (np.flatnonzero(found.labels_ == centre) for centre in range(count))
    return [int(rows[distances[rows, centre].argmin()]) for centre, rows in enumerate(members)]


WAYS: Mapping[str, Callable[[Vectors, int, int], list[int]]] = {
    "random": at_random,
    "k-centre": k_centre,
    "k-means": k_means,
}

if __name__ == "__main__":
    main()
