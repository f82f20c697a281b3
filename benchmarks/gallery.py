"""Make the students of the site's gallery, and keep what was measured of each.

    python -m benchmarks.gallery                                              all of STUDENTS, in work/
    python -m benchmarks.gallery distilbert-intents --device local browser    this one, measured there too

Those of SST-2 need it as the folder work/data/sst2. A student's report.json becomes
benchmarks/results/gallery/NAME.json, whatever it says: bad results stay. What `compress.bench` measured on a device,
apart from the training, is NAME@DEVICE.json beside it; a browser is a headless Chromium of this machine.
docs/reference.py makes the page of both. A run that was interrupted is resumed, one that is finished is only measured.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack, chdir
from dataclasses import replace
from pathlib import Path

import compress
from benchmarks.chromium import open_tab
from benchmarks.common import make_parser
from compress.config.options import DeviceOptions
from compress.records.bench_result import BenchResult

RESULTS = Path(__file__).parent / "results" / "gallery"
STUDENTS = {
    "distilbert-intents-brief": "distill --teacher minilm --recipe distilbert --data intents --set teacher.steps=60 "
    "--set teacher.evaluate=1 --set stages.0.steps=100 --set stages.0.evaluate=1 --set stages.0.augment=null",
    "distilbert-intents": "distill --teacher minilm --recipe distilbert --data intents --effort quick",
    "tinybert-intents": "distill --teacher minilm --recipe tinybert --data intents --effort quick",
    "pruned-intents": "prune minilm --data intents --speedup 2 --effort quick",
    "distilbert-sst2": "distill --teacher minilm --recipe distilbert --data data/sst2 --effort quick",
    "auto-intents": "distill --teacher minilm --data intents --effort quick",
    "albert-sst2": "distill --teacher minilm --recipe albert-shared --data data/sst2 --effort quick --minutes 8",
}
SEQ = (32, 64)
"""Tokens of a text, on the devices; all of these students read at least so many."""


def make(name: str, work: Path, devices: list[str]) -> None:
    """Run the student's command, in `work`, and file its report; then measure it on the other devices."""
    run = Path("runs", name)  # the report quotes the command, which names no place of this machine
    if not (work / run / "bundle" / "report.json").is_file():
        resume = ["--resume"] if (work / run / "run.json").is_file() else []
        words = [*shlex.split(STUDENTS[name]), "--out", str(run), *resume]
        subprocess.run([sys.executable, "-m", "compress", *words], cwd=work, check=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(work / run / "bundle" / "report.json", RESULTS / f"{name}.json")
    for device in devices:
        place = RESULTS / f"{name}@{re.sub(r'[^a-z0-9]+', '-', device.lower())}.json"
        command = f"python -m benchmarks.gallery {name} --device {device}"
        with chdir(work):  # the result names the files without a place of this machine
            result = measure(run / "bundle", device)
        replace(result, command=command).write(place)


def measure(bundle: Path, device: str) -> BenchResult:
    """Time both files of a bundle on a device, and visit the link with Chromium if it is a browser."""
    with ExitStack() as stack:
        profile = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))

        def say(message: str) -> None:
            print(message)
            if device == "browser" and (link := re.search(r"http://\S+", message)):
                stack.enter_context(open_tab(profile, link[0]))

        return compress.bench([bundle], device=DeviceOptions(device=device), seq=SEQ, say=say)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("names", nargs="*", help="of STUDENTS; none: all")
    parser.add_argument("--device", nargs="+", default=[], help="measure there too")
    parser.add_argument("--work", type=Path, default=Path("work"), help="the folder that keeps the runs")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for name in args.names or STUDENTS:
        make(name, args.work, args.device)
