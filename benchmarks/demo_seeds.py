"""What does `make demo` end with, and how much of that is the luck of a seed?

    python -m benchmarks.demo_seeds --out benchmarks/results/demo_seeds_<hardware>_<yyyymm>.json

The command of `make demo` once for each seed, one after the other, each with empty caches, as on a fresh machine. Of
every row of a run's report the result has the score, the agreement, the size and the times, and of each of them the
median, the lowest and the highest over the seeds. Times are those of a machine that may have been busy: its load at the
start is among the facts of the machine.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.common import log, make_parser, write_result
from compress.records.run_report import REPORT, Report, ReportRow

DEMO = ("distill", "--teacher", "minilm", "--data", "intents", "--effort", "quick")
Values = dict[str, float | None]


def run_demo(seed: int, work: Path, threads: int) -> tuple[float, Report]:
    """Run the demo with this seed in a folder of its own; return its seconds and its report."""
    out = work / f"seed-{seed}"
    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "compress", *DEMO, "--seed", str(seed), "--out", str(out)],
        check=True,
        env={**os.environ, "COMPRESS_HOME": str(work / f"caches-{seed}"), "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.DEVNULL,
    )
    return time.monotonic() - start, Report.from_json(out / "bundle" / REPORT)


def read_row(report: Report, row: ReportRow) -> Values:
    """Read what the table of a run shows of a row: score, agreement, parameters, MB, and milliseconds."""
    latency = report.latency(row)
    return {
        report.metric: report.score(row),
        "agreement": row.agreement,
        "parameters": row.parameters,
        "file_mb": row.file_mb,
        "p50_ms": latency.p50_ms if latency else None,
        "p95_ms": latency.p95_ms if latency else None,
    }


def summarise(rows: Sequence[Mapping[str, float | None]]) -> dict[str, Values]:
    """Return the median, the lowest and the highest of each value; a value that a row lacks is left out."""
    found = dict[str, Values]()
    for name in rows[0]:
        values = [value for row in rows if (value := row[name]) is not None]
        if values:
            found[name] = {"median": median(values), "lowest": min(values), "highest": max(values)}
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--threads", type=int, default=2, help="of each run")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    runs = list[dict[str, object]]()
    times = list[Values]()
    tables = list[dict[str, Values]]()
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            seconds, report = run_demo(seed, Path(folder), args.threads)
            times.append({"seconds": seconds})
            tables.append({row.name: read_row(report, row) for row in report.rows})
            runs.append({"seed": seed, "recipe": report.recipe, "seconds": seconds, "rows": tables[-1]})
            log(f"seed {seed}: {seconds:.0f} s, {tables[-1]}")
            summary = {name: summarise([table[name] for table in tables]) for name in tables[0]}
            facts = {
                "split": report.split,
                "split_rows": report.split_rows,
                "settings": report.settings,
                "threads": args.threads,
                "rows": summary,
                "run": summarise(times),
                "runs": runs,
            }
            write_result(args.out, facts)  # after each seed: an interrupted series has what it has


if __name__ == "__main__":
    main()
