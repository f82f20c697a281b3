#!/usr/bin/env python3
"""How long is it from a run's end to the label of a text of one's own: in a terminal, in Python, and in a browser?

    python -m benchmarks.demo_first_answer runs/first/bundle --text "wake me at seven" --out result.json

Each way that the README names, in a new process each time. Then each time a new process writes and serves the page
of `compress demo`, a new Chromium with an empty profile opens it, a text is typed; measured cold (no tokenizer's graph
is kept yet) and warm; onnxruntime-web has been fetched before in both. Without Chromium, the ways of the README alone.
"""

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.chromium import NEEDED, open_tab
from benchmarks.common import make_parser, write_result
from compress.benchmark.browser.device import WEB_VERSION
from compress.data.cache import home
from compress.exporters.artifact import Bundle

ANSWERED = "/ ms$/.test(document.querySelector('#ms')?.textContent)"


def time_ways(bundle: Path, text: str, app: Path) -> dict[str, float]:
    """Return the seconds of a new process for each way of the README. app: where the file that takes text goes."""
    compress, python = [sys.executable, "-m", "compress"], [sys.executable, "-c"]
    notebook = f"from compress import Bundle; print(Bundle.load({str(bundle)!r}).predict([{text!r}])[0].label)"
    plain = f"""from onnxruntime import InferenceSession
print(InferenceSession({str(app / "model_text.onnx")!r}).run(["label"], {{"text": [{text!r}]}})[0][0])"""
    ways = {
        "terminal_s": [*compress, "predict", str(bundle), text],
        "notebook_s": [*python, notebook],
        "export_s": [*compress, "export", str(bundle), "--for", "text", "--out", str(app)],
        "onnxruntime_s": [*python, plain],
    }
    found = {}
    for name, command in ways.items():
        start = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found[name] = time.monotonic() - start
    return found


def measure(bundle: Path, text: str, caches: Path) -> dict[str, Any]:
    """Return seconds from the start of the command to its link, and to the answer; and what the page says."""
    command = [sys.executable, "-m", "compress", "demo", str(bundle), "--serve", "--no-open", "--quiet"]
    start = time.monotonic()
    with (
        subprocess.Popen(
            command, env={**os.environ, "COMPRESS_HOME": str(caches)}, stdout=subprocess.PIPE, text=True
        ) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)  # after an error; else it has ended
        assert process.stdout is not None
        link = process.stdout.readline().split()[-1]
        linked, computed = time.monotonic() - start, cpu_seconds(process.pid)
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
            open_tab(Path(profile) / "profile", link) as tab,
        ):
            tab.wait("!!document.querySelector('#text-0')")
            tab.type("#text-0", text)
            tab.wait(ANSWERED)
            answered = time.monotonic() - start
            label, ms = (tab.see(f"document.querySelector('{name}').textContent") for name in ("#label", "#ms"))
            later = []
            for number in range(10):  # the same text, longer by a space each time, which is no token
                tab.see("document.querySelector('#ms').textContent = ''")
                tab.type("#text-0", text + " " * (number + 1))
                tab.wait(ANSWERED)
                later.append(tab.see("document.querySelector('#ms').textContent"))
        process.send_signal(signal.SIGINT)
        process.wait(30)
    return {
        "link_s": linked,
        "answer_s": answered,
        "cpu_to_link_s": computed,
        "label": label,
        "ms": ms,
        "later_ms": later,
    }


def cpu_seconds(process: int) -> float:
    """Read the processor time of a process, which says more than the clock where others compute beside it (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--text", required=True)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    ways = []
    for number in range(args.times):
        with tempfile.TemporaryDirectory() as folder:
            ways.append(time_ways(args.bundle, args.text, Path(folder) / "app"))
            print(f"{number + 1} of {args.times}", ways[-1], flush=True)
    found: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []} if all(map(shutil.which, NEEDED)) else {}
    with tempfile.TemporaryDirectory() as caches:
        if found:
            shutil.copytree(home() / "web", Path(caches) / "web")
        for _ in range(args.times):
            shutil.rmtree(Path(caches) / "readers", ignore_errors=True)
            for state, each in found.items():
                each.append(measure(args.bundle, args.text, Path(caches)))
                print(state, each[-1], flush=True)
    medians = {
        f"{state} {name}": statistics.median(one[name] for one in each)
        for state, each in found.items()
        for name in ("link_s", "answer_s", "cpu_to_link_s")
    }
    medians |= {name: statistics.median(each[name] for each in ways) for name in ways[0]}
    manifest = Bundle.load(args.bundle).manifest
    result = {
        "onnxruntime-web": WEB_VERSION, "model_type": manifest.model_type, "parameters": manifest.parameters,
        "medians": medians, "ways": ways, **found,
    }  # fmt: skip
    write_result(args.out, result)


if __name__ == "__main__":
    main()
