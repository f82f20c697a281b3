"""Run what runs for long for long: memory must stay flat, nothing may be paid twice, nothing may be left behind.

    python -m tests.campaign.soak --minutes 30 [predict] [label] [browser] [search]

Prints a line for each: memory when it was warm and at the end, what was done, faults; exit code 1 where there are any.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from tests import tiny
from tests.benchmark.test_browser_chromium import FLAGS
from tests.campaign import works
from tests.campaign.works import DISTILL, PROMPT

ROWS = 1_000_000
GROWTH_MB = 50.0
"""What the memory of a process may grow by after its first tenth."""
CALLS = 64
COMPRESS = (sys.executable, "-m", "compress")
BUSY = "import compress.latency.measure as timing; timing.AGREE = float('inf'); from compress.cli import main; main()"
SEARCH = (sys.executable, "-c", BUSY)
"""`compress` where the latencies that a search measures may be those of a busy machine."""


@dataclass
class Soaked:
    """What a soak found: counts of what was done, resident MB of its processes over time, and faults."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    resident_mb: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def warm_mb(self) -> float:
        """The most of the second tenth."""
        tenth = max(1, len(self.resident_mb) // 10)
        return max(self.resident_mb[tenth : 2 * tenth], default=0)

    @property
    def last_mb(self) -> float:
        """The most of the last tenth."""
        return max(self.resident_mb[-max(1, len(self.resident_mb) // 10) :], default=0)

    def judge(self) -> None:
        """Count growth among the faults."""
        if self.last_mb > self.warm_mb + GROWTH_MB:
            self.faults.append(f"grew from {self.warm_mb:.0f} to {self.last_mb:.0f} MB")


def watch(process: psutil.Process, soaked: Soaked) -> None:
    """Note its memory, with that of its children."""
    with suppress(psutil.Error):
        family = [process, *process.children(recursive=True)]
        soaked.resident_mb.append(sum(each.memory_info().rss for each in family) / 2**20)


def predicts(given: dict[str, str], folder: Path, seconds: float) -> Soaked:
    """Label at least a million rows in one process, and as many as there is time for."""
    found, began = Soaked("predict -"), time.monotonic()
    with (folder / "errors").open("wb") as errors:
        child = subprocess.Popen(
            [*COMPRESS, "predict", given["bundle"], "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        assert child.stdin is not None and child.stdout is not None
        out = child.stdout

        def count() -> None:
            found.counts["answers"] = sum(1 for _ in out)

        reader = threading.Thread(target=count)
        reader.start()
        draw = random.Random(0)
        while child.poll() is None and (found.counts["rows"] < ROWS or time.monotonic() - began < seconds):
            lines = (" ".join(draw.choices(tiny.WORDS, k=draw.randint(1, 12))) for _ in range(1000))
            with suppress(BrokenPipeError):
                child.stdin.write(("\n".join(lines) + "\n").encode())
            found.counts["rows"] += 1000
            watch(psutil.Process(child.pid), found)
        with suppress(BrokenPipeError):
            child.stdin.close()
        reader.join()
    if child.wait():
        found.faults.append(f"exit code {child.returncode}: {(folder / 'errors').read_text()[-300:]}")
    if found.counts["answers"] != found.counts["rows"]:
        found.faults.append("a row has no answer")
    return found


class Faulty:
    """An endpoint that fails one request in eight, each in its own way, and counts what it was paid for."""

    def __init__(self) -> None:
        self.paid: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        lock, draw = threading.Lock(), random.Random(0)
        faulty = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    fault = draw.choice(("500", "429", "wait", "cut", "gone", "late")) if draw.random() < 0.125 else ""
                    faulty.faults[fault] += 1
                    if fault in ("", "late"):
                        faulty.paid.update(body["prompt"])
                if fault == "late":
                    time.sleep(0.5)
                if fault == "gone":
                    self.close_connection = True
                    return
                content = json.dumps(scored(body["prompt"])).encode()
                status = {"500": 500, "429": 429, "wait": 429}.get(fault, 200)
                self.send_response(status)
                if fault in ("429", "wait"):
                    self.send_header("Retry-After", "0" if fault == "429" else "nan")
                content = content[: len(content) // 2] if fault == "cut" else content
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with suppress(OSError):
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]  # callers are killed on purpose
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def scored(prompts: list[str]) -> dict[str, Any]:
    """Answer as /completions does with `echo`: every word is a token."""
    choices = []
    for index, text in enumerate(prompts):
        tokens = [word if not at else " " + word for at, word in enumerate(text.split(" "))]
        starts = [sum(map(len, tokens[:at])) for at in range(len(tokens))]
        log_p = [None, *[-0.1 * (1 + len(word) % 5) for word in tokens[1:]]]
        choices.append({"index": index, "logprobs": {"tokens": tokens, "text_offset": starts, "token_logprobs": log_p}})
    return {"choices": choices}


def labels(given: dict[str, str], folder: Path, seconds: float) -> Soaked:
    """Label against a faulty endpoint at 64 calls, killed now and then: what was under way then may be paid again."""
    found, began, draw = Soaked("label"), time.monotonic(), random.Random(0)
    faulty = Faulty()
    url = f"http://127.0.0.1:{faulty.server.server_port}/v1"
    (folder / "endpoint.yaml").write_text(f"url: {url}\nmodel: m\nconcurrency: {CALLS}\nretries: 12\n")
    (folder / "prompt.yaml").write_text(PROMPT + "calibrate: none\nnormalise: none\n")
    while time.monotonic() - began < seconds:
        number = found.counts["labellings"]
        texts = "\n".join(f"{number} {at} " + " ".join(draw.choices(tiny.WORDS, k=8)) for at in range(20_000))
        (folder / "texts.txt").write_text(texts)
        out = folder / f"{number}.jsonl"
        words = ["label", "--teacher", folder / "endpoint.yaml", "--prompt", folder / "prompt.yaml"]
        words += ["--data", folder / "texts.txt", "--gate", "warn", "--out", out]
        while not out.exists():
            with (folder / "said").open("wb") as said:
                child = subprocess.Popen([*COMPRESS, *map(str, words)], stdout=said, stderr=said)
                stop = time.monotonic() + draw.uniform(20, 120)
                while child.poll() is None and time.monotonic() < stop:
                    watch(psutil.Process(child.pid), found)
                    time.sleep(0.2)
            if child.poll() is None:
                child.kill()
                found.counts["kills"] += 1
            elif child.returncode:
                found.faults.append((folder / "said").read_text()[-300:])
                break
            child.wait()
        if found.faults:
            break
        found.counts["labellings"] += 1
        found.counts["texts"] += len(out.read_text().splitlines())
    again = sum(count - 1 for count in faulty.paid.values())
    found.counts |= Counter({"paid": sum(faulty.paid.values()), "paid again": again})
    found.counts["faulty answers"] = sum(faulty.faults.values()) - faulty.faults[""]
    if again > 2 * CALLS * found.counts["kills"]:
        found.faults.append(f"{again} prompts were paid twice, with {found.counts['kills']} kills of {CALLS} calls")
    faulty.server.shutdown()
    return found


def browses(given: dict[str, str], folder: Path, seconds: float) -> Soaked:
    """Measure in a browser, again and again: nothing is left of it, here or there."""
    found, began = Soaked("bench --device browser"), time.monotonic()
    program = shutil.which("chromium")
    if program is None:
        found.faults.append("needs chromium")
        return found
    browser, link = None, folder / "link"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    while time.monotonic() - began < seconds and not found.faults:
        with link.open("wb") as said:
            words = ["bench", given["bundle"], "--device", "browser", "--seq", "16", "--rounds", "2", "--runs", "3"]
            child = subprocess.Popen([*COMPRESS, *words], stdout=said, stderr=subprocess.STDOUT, env=environment)
        while child.poll() is None:
            shown = [word for word in link.read_text().split() if word.startswith("http://127.")]
            if shown and browser is None:
                command = [program, *FLAGS, f"--user-data-dir={folder / 'profile'}", shown[0]]
                browser = subprocess.Popen(
                    command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
                )
            watch(psutil.Process(child.pid), found)
            time.sleep(0.2)
        if browser is not None:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
        browser = None
        found.counts["measurements"] += 1
        if child.returncode:
            found.faults.append(link.read_text()[-300:])
    return found


def searches(given: dict[str, str], folder: Path, seconds: float) -> Soaked:
    """Search with two workers that are killed and started anew, until it ends; then the next search."""
    found, began, draw = Soaked("search with workers dying"), time.monotonic(), random.Random(0)
    while time.monotonic() - began < seconds and not found.faults:
        out = folder / f"study-{found.counts['searches']}"
        words = works.WORKS["search"].arguments(given, out)
        words = [word if word != "5" else "40" for word in words]
        with (folder / "said").open("wb") as said:
            child = subprocess.Popen([*SEARCH, *words], stdout=said, stderr=said)
            workers: list[subprocess.Popen[bytes]] = []
            while child.poll() is None:
                if (out / "study.db").exists() and len(workers) < 2:
                    command = [*SEARCH, "search", "--worker", "--storage", str(out / "study.db")]
                    workers.append(subprocess.Popen(command, stdout=said, stderr=said))
                if workers and draw.random() < 0.05:
                    workers[0].kill()
                    found.counts["kills"] += 1
                for worker in [each for each in workers if each.poll() is not None]:
                    workers.remove(worker)
                watch(psutil.Process(child.pid), found)
                time.sleep(0.5)
            for worker in workers:
                try:
                    worker.wait(240)
                except subprocess.TimeoutExpired:
                    worker.kill()
                    found.faults.append("a worker was still running 240 s after its search had ended")
        if child.returncode:
            found.faults.append((folder / "said").read_text()[-500:])
            break
        shown = subprocess.run([*COMPRESS, "search", "show", str(out), "--json"], capture_output=True, check=True)
        points = [point for point in json.loads(shown.stdout)["points"] if point["state"] in ("complete", "too slow")]
        judged = Counter(json.dumps(point["choice"], sort_keys=True) for point in points)
        found.counts["searches"] += 1
        found.counts["shapes"] += len(judged)
        found.counts["judged twice"] += sum(judged.values()) - len(judged)
    return found


SOAKS: dict[str, Callable[[dict[str, str], Path, float], Soaked]] = {
    "predict": predicts, "label": labels, "browser": browses, "search": searches,
}  # fmt: skip


def main() -> Iterator[str]:
    """Run the soaks that were named, or all; yield the table's lines."""
    parser = argparse.ArgumentParser(description="Run what runs for long for long.")
    parser.add_argument("--minutes", type=float, default=30.0, help="Length of each soak.")
    parser.add_argument("names", nargs="*", choices=[[], *SOAKS], default=[], help="Which; all of them.")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    os.environ |= {"COMPRESS_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    given = works.fill(folder / "given")
    words = DISTILL.format(**given, out=folder / "shipped").split()
    subprocess.run([*COMPRESS, *words], check=True, capture_output=True)
    given["bundle"] = str(folder / "shipped" / "bundle")
    failed = False
    for name in chosen.names or SOAKS:
        (folder / name).mkdir()
        found = SOAKS[name](given, folder / name, 60 * chosen.minutes)
        found.judge()
        failed |= bool(found.faults)
        counts = ", ".join(f"{count:,} {what}" for what, count in found.counts.items())
        memory = f"{found.warm_mb:6.0f} to {found.last_mb:6.0f} MB"
        yield f"{found.name:26}  {memory}  {counts}  {found.faults or 'no faults'}"
    shutil.rmtree(folder)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    for line in main():
        print(line, flush=True)
