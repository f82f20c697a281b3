"""What does `compress distill --keep SHARE` find on real data: how fast are the students, and do they keep the share?

    python -m benchmarks.keep --data ../shared/data --keep 98.5% 95% --seeds 0 1 2 --out result.json

Each run is the command alone, from the teacher `minilm`; it says no size, no recipe and no length. `topics` is made
here of a Wikipedia-extractor dump: which of 20 articles a sentence is from, 2,000 rows to train, 400 to validate, 3,000
to test. A run that was interrupted is resumed, one that is finished is read again. Of each: the sizes on the path, what
they keep on validation rows with 80 % intervals, and of the student that ships, what its int8 file keeps of the
teacher's score on the test split, its speed beside the teacher's own int8 file in one race, its MB and the minutes.
`--picture keep.svg` draws the students of all runs: speed, predicted, against the share after their longest training.
"""

import json
import math
import random
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.common import log, make_parser, write_result

SETS: Mapping[str, str] = {
    "intents": "intents",
    "sst2": "sst2",
    "mrpc": "mrpc/glue",
    "stsb": "stsb/glue",
    "wnut17": "wnut17",
    "topics": "topics",
}
"""Where each data set is in the folder of --data; `intents` comes with the toolkit, `topics` is made in --work."""
ARTICLES = 20
FILES = 4
SPLITS = {"train": 2000, "validation": 400, "test": 3000}
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
WORDS = range(6, 31)


def make_topics(dump: Path, folder: Path) -> None:
    """Write the rows of `topics` from the longest articles of a dump, seed 0."""
    if folder.is_dir():
        return
    articles = sorted(read_articles(dump), key=lambda article: -len(article[1]))[:ARTICLES]
    rows = [(text, title) for title, sentences in articles for text in sentences]
    random.Random(0).shuffle(rows)
    folder.mkdir(parents=True)
    at = 0
    for split, count in SPLITS.items():
        lines = [json.dumps({"text": text, "label": title}) for text, title in rows[at : at + count]]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        at += count


def read_articles(dump: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the different sentences of each article of the dump's first files."""
    with tarfile.open(dump) as archive:
        members = (each for each in archive if each.isfile() and "wiki_" in each.name)
        files = [archive.extractfile(each) for each in islice(members, FILES)]
        text = "\n".join(file.read().decode() for file in files if file)
    for title, body in re.findall(r'<doc [^>]*title="([^"]+)">\n[^\n]*\n(.*?)</doc>', text, re.DOTALL):
        sentences = SENTENCE.split(" ".join(body.split()))
        yield title, list(dict.fromkeys(each for each in sentences if len(each.split()) in WORDS))


def run_one(name: str, keep: str, seed: int, data: str, work: Path) -> dict[str, Any]:
    """Run the command to its end, if it has not, and return what was found."""
    out = work / f"{name}-{keep}-{seed}"
    words = ["distill", "--teacher", "minilm", "--data", data, "--keep", keep, "--seed", str(seed)]
    words += ["--out", str(out)]
    report = out / "bundle" / "report.json"
    if not report.is_file():
        resume = ["--resume"] if (out / "run.json").is_file() else []
        log(shlex.join(["compress", *words, *resume]))
        with out.with_suffix(".log").open("a", encoding="utf-8") as lines:
            command = [sys.executable, "-m", "compress", *words, *resume]
            subprocess.run(command, stdout=lines, stderr=lines, check=True)
    found = json.loads(report.read_text(encoding="utf-8"))
    return {"set": name, "keep": keep, "seed": seed, **digest(found)}


def digest(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what matters of a report."""
    path = report["path"]
    files = [row for row in report["rows"] if row["role"] == "student" and row["file_mb"]]
    return {
        "metric": report["metric"],
        "rows": report["split_rows"],
        "kept": path["tested"],
        "speed": path["whole_measured"] / path["measured"],
        "file_mb": min(row["file_mb"] for row in files),
        "minutes": report["seconds"] / 60,
        "date": report["date"],
        "path": path,
    }


def summarize(runs: list[dict[str, Any]]) -> None:
    """Print a line for each run."""
    for run in runs:
        kept = run["kept"]
        log(
            f"{run['set']} {run['keep']} seed {run['seed']}: {run['path']['chosen']}, keeps {kept['share']:.1%} "
            f"({kept['low']:.1%} to {kept['high']:.1%}) of test, {run['speed']:.2f} x, {run['file_mb']:.1f} MB, "
            f"{run['minutes']:.0f} min"
        )


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 400, 56, 352, 16
TIMES = (1, 2, 4, 8, 16, 32, 64, 128)
LEAST_SHARE = 0.85


def draw(runs: list[dict[str, Any]]) -> str:
    """Draw a line for each run, from its teacher at 1 x; what ships is filled."""
    marks = []
    for share in range(math.ceil(100 * LEAST_SHARE), 103, 3):
        y = _height(share / 100)
        marks.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 8}" stroke="#ddd"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share} %</text>')
    for times in TIMES:
        marks.append(f'<text x="{_place(times):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{times} x</text>')
    named = dict(zip(dict.fromkeys(run["set"] for run in runs), COLOURS, strict=False))
    for at, (name, colour) in enumerate(named.items()):
        marks.append(f'<text x="{LEFT + 10}" y="{BOTTOM - 10 - 17 * at}" fill="{colour}">{name}</text>')
    for run in runs:
        marks.append(_draw_run(run, named[run["set"]]))
    title = f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">speed over the teacher as int8</text>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    return f'{head} font-size="13" fill="#333">{ground}{"".join(marks)}{title}</svg>\n'


def _draw_run(run: dict[str, Any], colour: str) -> str:
    path = run["path"]
    points = [(1.0, 1.0, "teacher")]
    for rung in [*path["rungs"], *([path["far"]] if path.get("far") else [])]:
        looks = [rung["looks"][name] for name in ("finished", "long", "brief") if name in rung["looks"]]
        points += [(path["whole"] / rung["cost"], look["share"], rung["name"]) for look in looks[:1]]
    shown = [(_place(times), _height(share), name) for times, share, name in points if share >= LEAST_SHARE]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in shown)
    fills = {path["chosen"]: colour}
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" stroke="{colour}" fill="{fills.get(name, "#fff")}"/>'
        for x, y, name in shown
    )
    return f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>{dots}'


def _place(times: float) -> float:
    return LEFT + (WIDTH - LEFT - 24) * math.log(times) / math.log(TIMES[-1] * 1.3)


def _height(share: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * (share - LEAST_SHARE) / (1.03 - LEAST_SHARE)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--dump", type=Path, help="a .tar of a Wikipedia-extractor dump, for `topics`")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--keep", nargs="+", default=["98.5%"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--work", type=Path, default=Path("work"), help="the folder that keeps the runs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path, help="draw the runs here, as SVG")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    own = {"intents": "intents", "topics": str(args.work / "topics")}
    if "topics" in args.sets:
        make_topics(args.dump, args.work / "topics")
    places = {name: own.get(name, str(args.data / SETS[name])) for name in args.sets}
    done = []
    for seed in args.seeds:
        for keep in args.keep:
            for name in args.sets:
                done.append(run_one(name, keep, seed, places[name], args.work))
                summarize(done[-1:])
                write_result(args.out, {"runs": done})
                if args.picture is not None:
                    args.picture.write_text(draw(done), encoding="utf-8")
