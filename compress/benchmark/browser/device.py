"""Measure in a browser: drive a page step by step, with onnxruntime-web in one pinned
version.

Each file has a worker with its own runtime and threads, as it has its own process on
other devices.
"""

import base64
import hashlib
import importlib
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from compress.arrays import Array, Floats
from compress.benchmark import jobs
from compress.benchmark.browser.server import (
    WEB,
    Acknowledgement,
    BrowserFacts,
    OpenTimes,
    PageSession,
    Replied,
    RoundTimes,
    RowOutputs,
    Site,
    parse_answer,
    serve_site,
)
from compress.benchmark.race import Pass, PassTimes, race_files
from compress.benchmark.remote.runner import WARM_UP_PER_ROUND, feeds
from compress.data.cache import home, load_or_create
from compress.errors import ExportError
from compress.exporters.session import (
    EncodedRow,
    read_model,
    vocabulary_size,
    weights_elsewhere,
)
from compress.io import JsonObject, sha256
from compress.progress import Say, note
from compress.provenance import install_command
from compress.records.latency import WARM_UP, DeviceError, Latency, Setting, Sustained

WEB_VERSION = "1.30.0"
WEB_PACKAGE = f"onnxruntime-web@{WEB_VERSION}"
TARBALL = f"onnxruntime-web-{WEB_VERSION}.tgz"
INTEGRITY = "sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="  # noqa: E501
"""The tarball's hash, as the package's `dist.integrity` gives it."""

Pins = Mapping[str, str]
"""File of the package -> its SHA-256."""
WASM: Pins = {
    "ort.wasm.min.mjs": "219e6a1fc8a9938268d18efca3c91d310bd2f4a59bbd13744df5b2b7fc6cee3b",  # noqa: E501
    "ort-wasm-simd-threaded.mjs": "e13f7f94fc51b4ca72b12faeb1ee95f4ace6dfbc8939bc718aabdc0a27c4299b",  # noqa: E501
    "ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",  # noqa: E501
}
"""The files that the page loads, entry first, with their SHA-256 (14 MB in all)."""

WEBGPU: Pins = {
    "ort.webgpu.min.mjs": "3dffff71811bc13a3a3d9591c57ca5ee5735b8f5f3eaf789510b02bb040ae3a0",  # noqa: E501
    "ort-wasm-simd-threaded.asyncify.mjs": "3d1c85995364bb643302fc6fd877a0c3ba5ae72401815e0f24828a53d9191e28",  # noqa: E501
    "ort-wasm-simd-threaded.asyncify.wasm": "39f9f0894d478800487ed9f7dbe92618498db320cf55c8e3d89adff8dce658da",  # noqa: E501
}
"""The files of the build with WebGPU (27 MB in all)."""

NPM_TIMEOUT = 600
"""Seconds that npm may take to fetch the tarball of 33 MB."""

BY_HAND = (
    f"On a machine that has npm: npm pack {WEB_PACKAGE}. Then pass the tarball, or the "
    f"unpacked folder: --assets {TARBALL}"
)


def load_runtime(source: Path | None = None, *, webgpu: bool = False) -> list[Path]:
    """Return the files of onnxruntime-web that the page loads, entry first, after
    comparing their hashes.

    source  None: the cache under $COMPRESS_HOME/web, which npm fills the first time; a
            file: the package's tarball; a folder: one that has the files, directly or
            in `dist` or `package/dist`
    Raises DeviceError if npm is missing or fails, or if the files are not those of
    WEB_VERSION.
    """
    pins = WEBGPU if webgpu else WASM
    if source is not None and source.is_dir():
        for folder in (source, source / "dist", source / "package" / "dist"):
            if all((folder / name).is_file() for name in pins):
                return _check_files(folder, pins)
        raise DeviceError(
            f"--assets {source}: a folder without {', '.join(pins)}. {BY_HAND}"
        )
    cache = home() / "web" / WEB_VERSION / ("webgpu" if webgpu else "wasm")
    if source is not None:
        return _unpack(source, pins, cache)
    if cache.exists():
        if not (changed := _list_changed(cache, pins)):
            return [cache / name for name in pins]
        note(
            f"{cache}: {', '.join(changed)} is damaged or missing; fetching "
            f"{WEB_PACKAGE} again"
        )
    with tempfile.TemporaryDirectory() as scratch:
        return _unpack(fetch_tarball(Path(scratch)), pins, cache)


def fetch_tarball(folder: Path) -> Path:
    """Fetch the tarball into `folder` with npm, and return its path."""
    npm = shutil.which("npm")
    if npm is None:
        raise DeviceError(
            f"browser: {WEB_PACKAGE} is needed, and npm, which fetches it, is not on "
            f"the PATH. Install Node.js. {BY_HAND}"
        )
    command = [
        npm,
        "pack",
        WEB_PACKAGE,
        "--pack-destination",
        str(folder),
        "--loglevel",
        "error",
    ]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=NPM_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(
            f"browser: npm pack {WEB_PACKAGE} took over {NPM_TIMEOUT} s. {BY_HAND}"
        ) from None
    if done.returncode != 0 or not (folder / TARBALL).is_file():
        output = " ".join(done.stderr.split())[:600] or "no output"
        raise DeviceError(
            f"browser: npm pack {WEB_PACKAGE} ended with code {done.returncode}: "
            f"{output}. {BY_HAND}"
        )
    return folder / TARBALL


def _unpack(tarball: Path, pins: Pins, cache: Path) -> list[Path]:
    """Unpack the pinned files of the tarball into the cache, after checking its
    hash."""
    if not tarball.is_file():
        raise DeviceError(
            f"--assets {tarball}: no such file or folder; expected {TARBALL}. {BY_HAND}"
        )
    with tarball.open("rb") as file:
        integrity = (
            "sha512-"
            + base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
        )
    if integrity != INTEGRITY:
        raise DeviceError(
            f"{tarball}: not {WEB_PACKAGE}: its integrity is {integrity}; expected "
            f"{INTEGRITY}. {BY_HAND}"
        )

    def unpack(folder: Path) -> None:
        with tarfile.open(tarball) as package:
            for name in pins:
                member = package.extractfile(f"package/dist/{name}")
                assert member is not None  # guaranteed by the integrity
                with member, (folder / name).open("wb") as target:
                    shutil.copyfileobj(member, target)

    return _check_files(load_or_create(cache, unpack), pins)


def _check_files(folder: Path, pins: Pins) -> list[Path]:
    for name in _list_changed(folder, pins):
        raise DeviceError(
            f"{folder / name}: not {WEB_PACKAGE}, or damaged. Remove it. {BY_HAND}"
        )
    return [folder / name for name in pins]


def _list_changed(folder: Path, pins: Pins) -> list[str]:
    """List the files that are missing or do not have the pinned hash."""
    paths = ((folder / name, expected) for name, expected in pins.items())
    return [
        path.name
        for path, expected in paths
        if not path.is_file() or sha256(path) != expected
    ]


@dataclass(frozen=True)
class BrowserModel:
    """An ONNX file, its session entries, and the numpy types of its inputs by name."""

    path: Path
    entries: Mapping[str, str]
    types: Mapping[str, Any]

    @staticmethod
    def load(path: Path) -> "BrowserModel":
        """Read an ONNX file. Raises DeviceError or ExportError unless it is a text
        encoder in one file."""
        if path.suffix != ".onnx":
            raise DeviceError(f"{path}: a browser runs ONNX files only")
        if elsewhere := weights_elsewhere(path):
            raise ExportError(
                f"{path}: keeps weights in other files ({', '.join(elsewhere)}); "
                "expected one file to send. Save it as one: "
                "onnx.save(onnx.load(path), target)"
            )
        return BrowserModel(
            path, jobs.logits_job(path)["entries"], jobs.input_types(path)
        )

    @cached_property
    def vocabulary(self) -> int:
        return vocabulary_size(read_model(self.path), self.path)

    def random_inputs(self, setting: Setting) -> list[JsonObject]:
        """Draw the inputs that every device times the file with, as the page expects
        them."""
        return _tensors(feeds(self.types, setting.batch, setting.seq, self.vocabulary))

    def encode_row(self, row: EncodedRow) -> list[JsonObject]:
        """Encode a row as the page expects it. Raises DeviceError if it lacks an input
        of the file."""
        if missing := [name for name in self.types if name not in row]:
            raise DeviceError(
                f"{self.path}: a row has {', '.join(row)}; expected "
                f"{', '.join(missing)} too"
            )
        jobs.refuse_prompt_length(row, str(self.path))
        return _tensors(
            {name: np.asarray([row[name]], dtype) for name, dtype in self.types.items()}
        )


def _tensors(arrays: Mapping[str, Array]) -> list[JsonObject]:
    return [
        {
            "name": name,
            "type": array.dtype.name,
            "dims": array.shape,
            "data": array.ravel().tolist(),
        }
        for name, array in arrays.items()
    ]


def probe_model() -> bytes:
    """Build an ONNX file that returns its input: opening it starts a runtime, and shows
    whether it starts at all."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])], "probe", [x], [y]
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8
    )
    return model.SerializeToString()


TIMES_HEADER = ("file", "p50 ms", "p95 ms", "to first")


def latency_tables(latencies: Sequence[Latency]) -> list[JsonObject]:
    """Lay out one table per setting, in the order measured; the last column is the
    ratio of p50 to the first file's."""
    by_setting: dict[Setting, list[Latency]] = {}
    for latency in latencies:
        by_setting.setdefault(latency.setting, []).append(latency)
    return [
        {
            "title": str(setting),
            "head": TIMES_HEADER,
            "rows": [
                (
                    latency.name + (" (noisy)" if latency.noisy else ""),
                    f"{latency.p50_ms:.2f}",
                    f"{latency.p95_ms:.2f}",
                    f"{latency.p50_ms / group[0].p50_ms:.2f}",
                )
                for latency in group
            ],
        }
        for setting, group in by_setting.items()
    ]


BURST = 5.0
"""Seconds of one step of a sustained measurement: the page shows progress, and a lost
page is noticed."""

ROWS_PER_MESSAGE = 32

HIDDEN_WARNING = "the page was hidden meanwhile, and browsers slow hidden pages down"


@dataclass(frozen=True)
class Browser:
    """A page that has claimed the link, as a Device.

    entry        the file of onnxruntime-web that its workers import
    say          receives messages about progress
    more_facts   facts from elsewhere, such as adb's about a phone
    """

    site: Site
    browser_facts: BrowserFacts
    entry: str
    webgpu: bool
    say: Say
    name: str = "browser"
    more_facts: Mapping[str, str] = field(default_factory=dict)

    def facts(self) -> dict[str, str]:
        """Return the browser's description of its machine, and what is special about
        its figures."""
        known = self.browser_facts
        facts = {
            "device": known.model,
            "cpu": known.processor,
            "cores": str(known.cores or ""),
            "instructions": "simd" if known.simd else "",
            "threads": "" if known.isolated else "one only: the page is not isolated",
            "memory": f"{known.memory_gb:g} GB or more" if known.memory_gb else "",
            "gpu": known.gpu,
            "system": known.system,
            "browser": known.agent,
            "runtime": f"onnxruntime-web {WEB_VERSION}, "
            f"{'WebGPU' if self.webgpu else 'WebAssembly'}",
            "clock": f"steps of {known.timer_ms:.2g} ms",
            "MB": "of WebAssembly memory",
        }
        return {
            name: value for name, value in {**facts, **self.more_facts}.items() if value
        }

    def race(
        self,
        files: Mapping[str, Path],
        settings: Sequence[Setting],
        *,
        rounds: int = 8,
        runs: int = 15,
    ) -> list[Latency]:
        """Race the files as on every device; the peak memory is that of WebAssembly.

        A sample that would be shorter than 100 steps of the browser's clock is the mean
        of several forwards. Figures measured while the page was hidden are flagged as
        noisy.
        """
        self._check_threads(settings)
        models = {name: BrowserModel.load(path) for name, path in files.items()}
        measure = partial(self._run_pass, models)

        def show(latencies: Sequence[Latency]) -> None:
            tables = latency_tables(latencies)
            self._ask({"do": "show", "tables": tables}, Acknowledgement)

        return race_files(
            files, settings, rounds, runs, measure, say=self._say, show=show
        )

    def sustain(
        self,
        files: Mapping[str, Path],
        setting: Setting,
        *,
        seconds: float,
    ) -> list[Sustained]:
        """Run each file in turn for `seconds` without a pause. Raises DeviceError if
        the page was hidden meanwhile."""
        self._check_threads([setting])
        models = {name: BrowserModel.load(path) for name, path in files.items()}
        return [
            self._run_sustained(name, model, setting, seconds)
            for name, model in models.items()
        ]

    def logits(
        self,
        file: Path,
        rows: Sequence[EncodedRow],
    ) -> list[Floats]:
        """Compute the file's logits of each row by itself: (outputs,), or (tokens,
        outputs) for a tokenwise task."""
        name = file.name
        model = BrowserModel.load(file)
        logits = list[Floats]()
        self._clear(model)
        self._open(name, model, None)
        for start in range(0, len(rows), ROWS_PER_MESSAGE):
            batch = [
                model.encode_row(row) for row in rows[start : start + ROWS_PER_MESSAGE]
            ]
            progress = {
                "say": f"{name}: answering {len(rows)} rows",
                "done": start / len(rows),
            }
            answer, _ = self._ask(
                {"do": "logits", "worker": name, "rows": batch, **progress},
                RowOutputs,
                about=name,
            )
            if len(answer.rows) != len(batch):
                raise DeviceError(
                    f"browser: {name}: the page answered {len(answer.rows)} of "
                    f"{len(batch)} rows"
                )
            logits += answer.logits()
        return logits

    def _check_threads(self, settings: Sequence[Setting]) -> None:
        most = max((setting.threads for setting in settings), default=1)
        if most > 1 and not self.browser_facts.isolated:
            raise DeviceError(
                f"browser: {most} threads: this page may have one only, because it "
                "came over plain http from another machine. Measure with --threads 1, "
                "or from the same machine: 127.0.0.1, or --device adb."
            )

    def _say(self, message: str) -> None:
        self.say(f"{self.name}: {message}")

    def _run_pass(
        self,
        models: Mapping[str, BrowserModel],
        this: Pass,
    ) -> dict[str, PassTimes]:
        self._clear(*models.values())
        times = {}
        for name in this.turns[0]:
            opened = self._open(name, models[name], this.setting)
            times[name] = PassTimes(opened.init_ms, opened.first_ms)
        for number, turn in enumerate(this.turns):
            progress = {
                "say": f"Measuring: {this}",
                "done": this.done + this.share * number / len(this.turns),
            }
            for name in turn:
                measured, hidden = self._time(
                    name, this.setting, {"runs": this.runs, **progress}
                )
                times[name].ms += measured.ms
                times[name].peak_rss_mb = measured.heap_mb
                times[name].disturbed = (
                    HIDDEN_WARNING if hidden else times[name].disturbed
                )
        return times

    def _run_sustained(
        self,
        name: str,
        model: BrowserModel,
        setting: Setting,
        seconds: float,
    ) -> Sustained:
        self._clear(model)
        self._open(name, model, setting)
        minutes: dict[int, list[float]] = {}
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < seconds:
            progress = {
                "say": f"{name}: without pause for {seconds:.0f} s, {setting}",
                "done": passed / seconds,
            }
            measured, hidden = self._time(
                name, setting, {"seconds": min(BURST, seconds - passed), **progress}
            )
            if hidden:
                raise DeviceError(
                    f"browser: {name}: after {passed:.0f} s {HIDDEN_WARNING}. Measure "
                    "again with it in front."
                )
            minutes.setdefault(int(passed // 60), []).extend(measured.ms)
        medians = tuple(float(np.median(times)) for _, times in sorted(minutes.items()))
        return Sustained(name, setting, medians, (None,) * len(medians))

    def _clear(self, *upcoming: BrowserModel) -> None:
        """End all workers, and let the page drop all files but the upcoming ones: a
        phone has little memory."""
        names = [self.site.offer(model.path) for model in upcoming]
        self._ask({"do": "clear", "keep": names}, Acknowledgement)

    def _open(
        self,
        name: str,
        model: BrowserModel,
        setting: Setting | None,
    ) -> OpenTimes:
        """Open the file in a worker of that name and warm up; without a setting, for
        logits, only open it."""
        command = {
            "do": "open",
            "worker": name,
            "file": self.site.offer(model.path),
            "runtime": self.entry,
            "provider": "webgpu" if self.webgpu else "wasm",
            "threads": setting.threads if setting else 1,
            "entries": dict(model.entries),
            "inputs": model.random_inputs(setting) if setting else None,
            "warm_up": WARM_UP,
            "say": f"{name}: opening",
        }
        return self._ask(
            command, OpenTimes, about=f"{name} at {setting}" if setting else name
        )[0]

    def _time(
        self,
        name: str,
        setting: Setting,
        options: Mapping[str, Any],
    ) -> tuple[RoundTimes, bool]:
        command = {
            "do": "time",
            "worker": name,
            "warm_up": WARM_UP_PER_ROUND,
            **options,
        }
        return self._ask(command, RoundTimes, about=f"{name} at {setting}")

    def _ask(
        self,
        command: Mapping[str, Any],
        kind: type[Replied],
        *,
        about: str = "",
    ) -> tuple[Replied, bool]:
        """Return the page's answer, and whether the page was hidden while it worked on
        it."""
        answer = self.site.session.ask(command)
        return parse_answer(answer, kind, about=about), answer.get("hidden") is True


def qr_code(link: str) -> str:
    """Draw the QR code in half-block characters; without `segno`, return a line that
    says how to install it."""
    try:
        segno = importlib.import_module("segno")
    except ModuleNotFoundError:
        return f"For a QR code of this link: {install_command('lan')}"
    drawing = StringIO()
    segno.make(link, error="m").terminal(drawing, compact=True)
    return drawing.getvalue()


@contextmanager
def browser(
    *,
    lan: bool = False,
    timeout: float = 60.0,
    say: Say = print,
    visit: Say | None = None,
    assets: Path | None = None,
    webgpu: bool = False,
    name: str = "browser",
    more: Mapping[str, str] | None = None,
) -> Iterator[Browser]:
    """Print a link, and yield the browser that opens it as a Device. The page is always
    told when it is over.

    lan      listen on this machine's network address instead of 127.0.0.1, and show the
             link as a QR code too
    timeout  seconds to wait for somebody to open the link
    say      receives messages for the user
    visit    opens or shows the link, instead of printing it
    assets   the tarball or folder of onnxruntime-web, if npm cannot fetch it
    webgpu   run every operator that WebGPU supports on the GPU, the rest in WebAssembly
    name     the name of the device; more: facts about it beyond those of the browser
    Raises DeviceError if onnxruntime-web cannot be fetched, nobody opens the link, or
    the browser lacks a feature."""
    files = load_runtime(assets, webgpu=webgpu)
    offers: dict[str, Path | bytes] = {
        "worker.js": WEB / "worker.js",
        "probe.onnx": probe_model(),
    }
    site = Site(PageSession(), offers | {path.name: path for path in files})
    with serve_site(site, lan=lan) as link:
        if visit is not None:
            visit(link)
        else:
            say(
                "Open this link in the browser to be measured, and keep its page in "
                f"front: {link}"
            )
            if lan:
                say(qr_code(link))
                say(
                    "Over plain http from another machine, browsers give a page "
                    "neither threads nor WebGPU: one thread only. A phone on a cable "
                    "has both: --device adb."
                )
        if not site.session.wait_for_claim(timeout):
            near = "on a device in this machine's network, if no firewall blocks it"
            raise DeviceError(
                f"browser: nobody opened the link in {timeout:.0f} s. Open it in a "
                "browser "
                f"{near if lan else 'on this machine, or on another with --lan'}; for "
                f"more time: --timeout {max(120.0, 2 * timeout):.0f}."
            )
        message = "Stopped: the command ended early. Nothing runs here any more."
        try:
            facts = parse_answer(
                site.session.ask({"do": "known", "webgpu": webgpu}), BrowserFacts
            )
            say(f"Measuring in {facts.agent}")
            if webgpu and not facts.gpu:
                raise DeviceError(
                    "browser: this browser gives the page no WebGPU. Use one that has "
                    "it, with a link to this machine itself (127.0.0.1) or with a "
                    "phone on a cable (--device adb), not --lan."
                )
            yield Browser(site, facts, files[0].name, webgpu, say, name, more or {})
            message = "Done. You can close this page."
        finally:
            site.session.end(message)
