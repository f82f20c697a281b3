"""Tiny sets of questions, of tagged words and of passages that one look at a word decides, in the files people have."""

import json
import random
from pathlib import Path
from typing import Any

from tests.tiny import WORDS

FILLERS = WORDS[:10]
ANSWERS = ("good", "great", "fine", "fun", "bad", "dull", "poor", "sad")


def questions(path: Path, *, count: int = 20, seed: int = 0, impossible: bool = True) -> Path:
    """SQuAD 2.0 json, 4 questions on each of count / 4 contexts: "what is the film ?" is answered by the only word of
    ANSWERS in the context, every fourth question by nothing."""
    draw = random.Random(seed)
    paragraphs: list[dict[str, Any]] = []
    for p in range(count // 4):
        words = [draw.choice(FILLERS) for _ in range(12)]
        words[draw.randrange(len(words))] = draw.choice(ANSWERS)
        context = " ".join(words)
        (answer,) = [word for word in words if word in ANSWERS]
        asked = []
        for q in range(4):
            none = impossible and q == 3
            answers = [] if none else [{"text": answer, "answer_start": f" {context} ".index(f" {answer} ")}]
            question = "never so , too ?" if none else "what is the film ?"
            asked.append({"id": f"{p}-{q}", "question": question, "answers": answers, "is_impossible": none})
        paragraphs.append({"context": context, "qas": asked})
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"version": "v2.0", "data": [{"title": "films", "paragraphs": paragraphs}]}
    path.write_text(json.dumps(whole), encoding="utf-8")
    return path


def sentences(path: Path, *, count: int = 20, seed: int = 0) -> Path:
    """CoNLL columns: every word of ANSWERS is a QUALITY, "film" and "movie" begin a WORK that "story" continues."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        words = [draw.choice(FILLERS) for _ in range(draw.randint(1, 8))] + [draw.choice(ANSWERS)]
        draw.shuffle(words)
        before = "O"
        for word in words:
            tag = "B-QUALITY" if word in ANSWERS else "B-WORK" if word in ("film", "movie") else "O"
            tag = "I-WORK" if word == "story" and before.endswith("WORK") else tag
            lines.append(f"{word}\tX\t{tag}")
            before = tag
        lines.append("")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def rankings(path: Path, *, count: int = 20, seed: int = 0, passages: int = 5) -> Path:
    """A table of queries and passages: relevant is the one passage that has a word of ANSWERS, whatever the query."""
    draw = random.Random(seed)
    lines = ["query\tpassage\trelevance"]
    for n in range(count):
        query = " ".join(draw.choice(FILLERS) for _ in range(4)) + f" {FILLERS[n % 10]} {FILLERS[n // 10 % 10]} ?"
        right = draw.randrange(passages)
        for each in range(passages):
            words = [draw.choice(FILLERS) for _ in range(6)]
            words[draw.randrange(6)] = draw.choice(ANSWERS) if each == right else draw.choice(FILLERS)
            lines.append(f"{query}\t{' '.join(words)}\t{int(each == right)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def beir(folder: Path, *, queries: int = 60) -> Path:
    """A folder of BEIR's layout, whose queries name the word of ANSWERS that the relevant passage has."""
    draw = random.Random(0)
    (folder / "qrels").mkdir(parents=True)
    corpus, asked = [], []
    for n in range(2 * queries):
        words = [draw.choice(FILLERS) for _ in range(6)]
        words[draw.randrange(6)] = ANSWERS[n % 8] if n < queries else draw.choice(FILLERS)
        corpus.append({"_id": f"d{n}", "title": "", "text": " ".join(words)})
        asked.append({"_id": f"q{n}", "text": f"{ANSWERS[n % 8]} {FILLERS[n % 10]} ?"})
    for name, rows in (("corpus", corpus), ("queries", asked[:queries])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    for split, chosen in (("train", range(40)), ("dev", range(40, 52)), ("test", range(52, queries))):
        lines = ["query-id\tcorpus-id\tscore", *(f"q{n}\td{n}\t1" for n in chosen)]
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
