"""Compute ranking.json: what trec_eval and bm25s return on the inputs that stand beside the values.

    pip install pytrec-eval-terrier==0.5.11 bm25s==0.3.16
    python tests/golden/ranking.py > tests/golden/ranking.json

trec_eval puts equal scores in the order of the documents' names, the last first; the names here make that our order.
"""

import json
import re

import bm25s
import numpy as np
import pytrec_eval

from compress.evaluation.ranking import rank_candidates

TEXTS = (
    "The cat sat on the mat; the dog did not.",
    "Dogs and cats live in houses",
    "a dog is a dog",
    "Nothing of this is there.",
    "The house of the mouse, the cat's house",
)
ASKED = ("dog house", "the cat the cat", "unheard", "A mouse")


def cases() -> list[dict[str, dict[str, float]]]:
    rng = np.random.default_rng(0)
    found = []
    for n in range(24):
        size = int(rng.integers(1, 150 if n % 4 == 0 else 14))
        candidates = rng.permutation(300)[:size]
        scores = rng.integers(-3, 4, size) if n % 3 == 0 else rng.normal(size=size).round(3)  # a third has ties
        relevance = rng.integers(0, 4, size) * (rng.random(size) < 0.5)
        judged = {str(c): float(r) for c, r in zip(candidates, relevance, strict=True)}
        judged |= {str(400 + extra): 2.0 for extra in range(n % 3)}  # relevant, and not found
        if not any(judged.values()):
            judged[str(candidates[0])] = 1.0
        found.append({"found": dict(zip(map(str, candidates), map(float, scores), strict=True)), "judged": judged})
    return found


def trec_eval(case: dict[str, dict[str, float]]) -> dict[str, float]:
    order = rank_candidates(dict.fromkeys(map(int, {**case["found"], **case["judged"]}), 0.0))
    name = {str(c): f"{len(order) - place:020d}" for place, c in enumerate(order)}
    run = {name[c]: score for c, score in case["found"].items()}
    truth = {"q": {name[c]: int(relevance) for c, relevance in case["judged"].items()}}
    names = {"ndcg_cut_10": "ndcg@10", "map": "map", "recall_10": "recall@10", "recall_100": "recall@100"}
    values = pytrec_eval.RelevanceEvaluator(truth, set(names)).evaluate({"q": run})["q"]
    first = dict(sorted(run.items(), key=lambda each: (each[1], each[0]), reverse=True)[:10])
    reciprocal = pytrec_eval.RelevanceEvaluator(truth, {"recip_rank"}).evaluate({"q": first})["q"]["recip_rank"]
    return {names[each]: values[each] for each in names} | {"mrr@10": reciprocal}


def lucene() -> list[list[float]]:
    corpus, asked = ([re.findall(r"\w+", text.lower()) for text in texts] for texts in (TEXTS, ASKED))
    index = bm25s.BM25(method="lucene", k1=1.2, b=0.75, dtype="float64")
    index.index(corpus, show_progress=False)
    known = {word for text in corpus for word in text}
    return [[float(x) for x in index.get_scores([w for w in text if w in known])] if known & set(text) else
            [0.0] * len(TEXTS) for text in asked]  # fmt: skip


if __name__ == "__main__":
    measured = [case | {"values": trec_eval(case)} for case in cases()]
    print(json.dumps({"trec_eval": measured, "bm25": {"texts": TEXTS, "asked": ASKED, "scores": lucene()}}))
