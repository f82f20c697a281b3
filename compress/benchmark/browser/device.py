"""Measure in a browser: a page is driven from here, step by step, with onnxruntime-web of one version and these bytes.

Each file has a worker with a runtime and threads of its own, as each has a process elsewhere.
"""

import base64
import hashlib
import importlib
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from compress.benchmark import jobs
from compress.benchmark.browser.server import (
    WEB,
    Answer,
    Computed,
    Done,
    Known,
    Opened,
    Site,
    Timed,
    Visitor,
    read,
    serving,
)
from compress.benchmark.race import Pass, PassTimes, race_files
from compress.benchmark.remote.runner import WARM_UP_PER_ROUND, feeds
from compress.data.cache import cached, home, note
from compress.exporters.session import read_model, vocabulary_size
from compress.io import sha256
from compress.provenance import install_command
from compress.records.latency import WARM_UP, DeviceError, Latency, Setting, Sustained

VERSION = "1.30.0"
PACKAGE = f"onnxruntime-web@{VERSION}"
TARBALL = f"onnxruntime-web-{VERSION}.tgz"
INTEGRITY = "sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
"""The tarball's hash, as the package's `dist.integrity` gives it."""

WASM: Mapping[str, str] = {
    "ort.wasm.min.mjs": "219e6a1fc8a9938268d18efca3c91d310bd2f4a59bbd13744df5b2b7fc6cee3b",
    "ort-wasm-simd-threaded.mjs": "e13f7f94fc51b4ca72b12faeb1ee95f4ace6dfbc8939bc718aabdc0a27c4299b",
    "ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
"""The files the page loads, and their SHA-256. The first is the entry. 14 MB."""

WEBGPU: Mapping[str, str] = {
    "ort.webgpu.min.mjs": "3dffff71811bc13a3a3d9591c57ca5ee5735b8f5f3eaf789510b02bb040ae3a0",
    "ort-wasm-simd-threaded.asyncify.mjs": "3d1c85995364bb643302fc6fd877a0c3ba5ae72401815e0f24828a53d9191e28",
    "ort-wasm-simd-threaded.asyncify.wasm": "39f9f0894d478800487ed9f7dbe92618498db320cf55c8e3d89adff8dce658da",
}
"""The same for the build that can use WebGPU. 27 MB."""

PATIENCE = 600
"""Seconds for npm: the tarball has 33 MB."""

BY_HAND = (
    f"Where npm is: npm pack {PACKAGE}. Then give the file it wrote, or the folder it unpacks to: --assets {TARBALL}"
)


def runtime(source: Path | None = None, *, webgpu: bool = False) -> list[Path]:
    """Return the files of onnxruntime-web that the page loads, entry first, checked byte for byte.

    source  None: those kept under $COMPRESS_HOME/web, got by npm the first time; a file: the package's tarball; a
            folder: one that has the files, itself or in `dist` or `package/dist`.
    Raises DeviceError: no npm, npm fails, or the files are not those of VERSION.
    """
    needed = WEBGPU if webgpu else WASM
    if source is not None and source.is_dir():
        for place in (source, source / "dist", source / "package" / "dist"):
            if all((place / name).is_file() for name in needed):
                return _check(place, needed)
        raise DeviceError(f"--assets {source}: a folder without {', '.join(needed)}. {BY_HAND}")
    if source is not None:
        return _unpack(source, needed)
    kept = _place(needed)
    if kept.exists():
        if not (changed := _list_changed(kept, needed)):
            return [kept / name for name in needed]
        note(f"{kept}: {', '.join(changed)} is damaged or missing; getting {PACKAGE} again")
    with tempfile.TemporaryDirectory() as folder:
        return _unpack(packed(Path(folder)), needed)


def _place(needed: Mapping[str, str]) -> Path:
    return home() / "web" / VERSION / ("webgpu" if needed is WEBGPU else "wasm")


def packed(folder: Path) -> Path:
    """Let npm fetch the tarball into `folder`, and return its path."""
    npm = shutil.which("npm")
    if npm is None:
        raise DeviceError(
            f"browser: {PACKAGE} is needed, and npm, which gets it, is not on the PATH. Install Node.js. {BY_HAND}"
        )
    command = [npm, "pack", PACKAGE, "--pack-destination", str(folder), "--loglevel", "error"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise DeviceError(f"browser: npm pack {PACKAGE} took over {PATIENCE} s. {BY_HAND}") from None
    if done.returncode != 0 or not (folder / TARBALL).is_file():
        words = " ".join(done.stderr.split())[:600] or "it said nothing"
        raise DeviceError(f"browser: npm pack {PACKAGE} ended with code {done.returncode}: {words}. {BY_HAND}")
    return folder / TARBALL


def _unpack(tarball: Path, needed: Mapping[str, str]) -> list[Path]:
    """Unpack the needed files of the tarball, once it is known to be the right one, to where they are kept."""
    if not tarball.is_file():
        raise DeviceError(f"--assets {tarball}: no such file or folder; expected {TARBALL}. {BY_HAND}")
    with tarball.open("rb") as file:
        found = "sha512-" + base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
    if found != INTEGRITY:
        raise DeviceError(f"{tarball}: not {PACKAGE}: its integrity is {found}; expected {INTEGRITY}. {BY_HAND}")

    def unpack(folder: Path) -> None:
        with tarfile.open(tarball) as package:
            for name in needed:
                member = package.extractfile(f"package/dist/{name}")
                assert member is not None  # its integrity says so
                with member, (folder / name).open("wb") as target:
                    shutil.copyfileobj(member, target)

    return _check(cached(_place(needed), unpack), needed)


def _check(folder: Path, needed: Mapping[str, str]) -> list[Path]:
    for name in _list_changed(folder, needed):
        raise DeviceError(f"{folder / name}: another version than {PACKAGE}, or damaged. Remove it. {BY_HAND}")
    return [folder / name for name in needed]


def _list_changed(folder: Path, needed: Mapping[str, str]) -> list[str]:
    """List the files that are missing, or are not those that are needed."""
    paths = ((folder / name, expected) for name, expected in needed.items())
    return [path.name for path, expected in paths if not path.is_file() or sha256(path) != expected]


@dataclass(frozen=True)
class Fed:
    """One ONNX file, the session entries it asks for, and the numpy types of its inputs by name."""

    path: Path
    entries: Mapping[str, str]
    types: Mapping[str, Any]

    @staticmethod
    def load(path: Path) -> "Fed":
        """Read an ONNX file. Raises DeviceError or ExportError for what is no text encoder in one file."""
        if jobs.runtime_of(path) != "onnxruntime":
            raise DeviceError(f"{path}: a browser runs ONNX files only")
        (whole,) = jobs.parts(path)
        return Fed(path, jobs.logits_job(path)["entries"], jobs.input_types(whole))

    @cached_property
    def vocabulary(self) -> int:
        return vocabulary_size(read_model(self.path), self.path)

    def drawn(self, setting: Setting) -> list[dict[str, Any]]:
        """Draw the inputs that every device times the file with, as the page takes them."""
        return _tensors(feeds(self.types, setting.batch, setting.seq, self.vocabulary))

    def row(self, row: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
        """Encode one text as the page takes it. Raises DeviceError when it lacks an input of the file."""
        if missing := [name for name in self.types if name not in row]:
            raise DeviceError(f"{self.path}: a row has {', '.join(row)}; expected {', '.join(missing)} too")
        return _tensors({name: np.asarray([row[name]], kind) for name, kind in self.types.items()})


def _tensors(arrays: Mapping[str, NDArray[Any]]) -> list[dict[str, Any]]:
    return [
        {"name": name, "type": array.dtype.name, "dims": array.shape, "data": array.ravel().tolist()}
        for name, array in arrays.items()
    ]


def probe() -> bytes:
    """Make an ONNX file that gives back what it gets: opening it starts a runtime, and shows whether it starts at
    all."""
    given, got = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", [given], [got])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return model.SerializeToString()


HEAD = ("file", "p50 ms", "p95 ms", "to first")


def tables(latencies: Sequence[Latency]) -> list[dict[str, Any]]:
    """Lay out one table per setting, in the order measured, each with the ratio of every p50 to the first file's."""
    by_setting: dict[Setting, list[Latency]] = {}
    for one in latencies:
        by_setting.setdefault(one.setting, []).append(one)
    return [
        {
            "title": str(setting),
            "head": HEAD,
            "rows": [
                (
                    one.name + (" (noisy)" if one.noisy else ""),
                    *(f"{value:.2f}" for value in (one.p50_ms, one.p95_ms, one.p50_ms / here[0].p50_ms)),
                )
                for one in here
            ],
        }
        for setting, here in by_setting.items()
    ]


BURST = 5.0
"""Seconds of one step of a sustained measurement: the page shows progress, and is missed when it is gone."""

ROWS_AT_ONCE = 32

HIDDEN = "the page was hidden meanwhile, and browsers slow hidden pages down"


@dataclass(frozen=True)
class Browser:
    """A page that has claimed the link.

    entry  the file of onnxruntime-web that its workers import
    say    is told how far the measuring is
    more   facts from elsewhere, as adb's of a phone
    """

    site: Site
    known: Known
    entry: str
    webgpu: bool
    say: Callable[[str], None]
    name: str = "browser"
    more: Mapping[str, str] = field(default_factory=dict)

    def facts(self) -> dict[str, str]:
        """Return what the browser tells of what it runs on, and what is special about figures from there."""
        known = self.known
        told = {
            "device": known.model,
            "cpu": known.processor,
            "cores": str(known.cores or ""),
            "instructions": "simd" if known.simd else "",
            "threads": "" if known.isolated else "one only: the page is not isolated",
            "memory": f"{known.memory_gb:g} GB or more" if known.memory_gb else "",
            "gpu": known.gpu,
            "system": known.system,
            "browser": known.agent,
            "runtime": f"onnxruntime-web {VERSION}, {'WebGPU' if self.webgpu else 'WebAssembly'}",
            "clock": f"steps of {known.timer_ms:.2g} ms",
            "MB": "of WebAssembly memory",
        }
        return {name: value for name, value in {**told, **self.more}.items() if value}

    def race(
        self, files: Mapping[str, Path], settings: Sequence[Setting], *, rounds: int = 8, runs: int = 15
    ) -> list[Latency]:
        """Race as on every device; the peak memory is WebAssembly's own.

        A sample that would be shorter than 100 steps of the browser's clock is the mean of several forwards. What was
        measured while the page was hidden is flagged as noisy.
        """
        self._check(settings)
        fed = {name: Fed.load(path) for name, path in files.items()}
        found: list[Latency] = []
        for done in race_files(files, settings, rounds, runs, partial(self._pass, fed), say=self._say):
            found += done
            self._ask({"do": "show", "tables": tables(found)}, Done)
        return found

    def sustain(self, files: Mapping[str, Path], setting: Setting, *, seconds: float) -> list[Sustained]:
        """Run each file without pause for `seconds`. Raises DeviceError when the page was hidden, and so slowed."""
        self._check([setting])
        fed = {name: Fed.load(path) for name, path in files.items()}
        return [self._run_sustained(name, file, setting, seconds) for name, file in fed.items()]

    def logits(self, file: Path, rows: Sequence[Mapping[str, Sequence[int]]]) -> list[NDArray[np.float32]]:
        """Compute the file's outputs there, each row by itself: (outputs,), or (tokens, outputs) of a tokenwise
        task."""
        name, fed, found = file.name, Fed.load(file), list[NDArray[np.float32]]()
        self._clear(fed)
        self._open(name, fed, None)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            asked = [fed.row(row) for row in rows[start : start + ROWS_AT_ONCE]]
            words = {"say": f"{name}: answering {len(rows)} rows", "done": start / len(rows)}
            answer, _ = self._ask({"do": "logits", "worker": name, "rows": asked, **words}, Computed, about=name)
            if len(answer.rows) != len(asked):
                raise DeviceError(f"browser: {name}: the page answered {len(answer.rows)} of {len(asked)} rows")
            found += answer.logits()
        return found

    def _check(self, settings: Sequence[Setting]) -> None:
        most = max((setting.threads for setting in settings), default=1)
        if most > 1 and not self.known.isolated:
            raise DeviceError(
                f"browser: {most} threads: this page may have one only, because it came over plain http from another "
                "machine. Measure with --threads 1, or from the same machine: 127.0.0.1, or --device adb."
            )

    def _say(self, words: str) -> None:
        self.say(f"{self.name}: {words}")

    def _pass(self, fed: Mapping[str, Fed], one: Pass) -> dict[str, PassTimes]:
        self._clear(*fed.values())
        found = {}
        for name in one.turns[0]:
            opened = self._open(name, fed[name], one.setting)
            found[name] = PassTimes(opened.init_ms, opened.first_ms)
        for at, turn in enumerate(one.turns):
            words = {"say": f"Measuring: {one}", "done": one.done + one.share * at / len(one.turns)}
            for name in turn:
                timed, hidden = self._time(name, one.setting, {"runs": one.runs, **words})
                found[name].ms += timed.ms
                found[name].peak_rss_mb = timed.heap_mb
                found[name].disturbed = HIDDEN if hidden else found[name].disturbed
        return found

    def _run_sustained(self, name: str, fed: Fed, setting: Setting, seconds: float) -> Sustained:
        self._clear(fed)
        self._open(name, fed, setting)
        minutes: dict[int, list[float]] = {}
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < seconds:
            words = {"say": f"{name}: without pause for {seconds:.0f} s, {setting}", "done": passed / seconds}
            found, hidden = self._time(name, setting, {"seconds": min(BURST, seconds - passed), **words})
            if hidden:
                raise DeviceError(f"browser: {name}: after {passed:.0f} s {HIDDEN}. Measure again with it in front.")
            minutes.setdefault(int(passed // 60), []).extend(found.ms)
        medians = tuple(float(np.median(times)) for _, times in sorted(minutes.items()))
        return Sustained(name, setting, medians, (None,) * len(medians))

    def _clear(self, *coming: Fed) -> None:
        """End all workers, and have the page forget the files it will not need next: a phone's memory is small."""
        self._ask({"do": "clear", "keep": [self.site.offer(fed.path) for fed in coming]}, Done)

    def _open(self, name: str, fed: Fed, setting: Setting | None) -> Opened:
        """Let a worker of that name open the file and warm up at the setting; without one, for logits, it only
        opens."""
        command = {
            "do": "open",
            "worker": name,
            "file": self.site.offer(fed.path),
            "runtime": self.entry,
            "provider": "webgpu" if self.webgpu else "wasm",
            "threads": setting.threads if setting else 1,
            "entries": dict(fed.entries),
            "inputs": fed.drawn(setting) if setting else None,
            "warm_up": WARM_UP,
            "say": f"{name}: opening",
        }
        return self._ask(command, Opened, about=_about(name, setting))[0]

    def _time(self, name: str, setting: Setting, how: Mapping[str, Any]) -> tuple[Timed, bool]:
        command = {"do": "time", "worker": name, "warm_up": WARM_UP_PER_ROUND, **how}
        return self._ask(command, Timed, about=_about(name, setting))

    def _ask(self, command: Mapping[str, Any], kind: type[Answer], *, about: str = "") -> tuple[Answer, bool]:
        """Return the page's answer, and whether the page was hidden while it worked on it."""
        answer = self.site.visitor.ask(command)
        return read(answer, kind, about=about), answer.get("hidden") is True


def _about(name: str, setting: Setting | None) -> str:
    return f"{name} at {setting}" if setting else name


def code(link: str) -> str:
    """Draw the code in half-block characters; return a line that says what to install where `segno` is missing."""
    try:
        segno = importlib.import_module("segno")
    except ModuleNotFoundError:
        return f"For a QR code of this link: {install_command('lan')}"
    drawn = StringIO()
    segno.make(link, error="m").terminal(drawn, compact=True)
    return drawn.getvalue()


@contextmanager
def browser(
    *,
    lan: bool = False,
    timeout: float = 60.0,
    say: Callable[[str], None] = print,
    visit: Callable[[str], None] | None = None,
    assets: Path | None = None,
    webgpu: bool = False,
    name: str = "browser",
    more: Mapping[str, str] | None = None,
) -> Iterator[Browser]:
    """Open a browser by the link this prints, as a Device. The page is told when it is over, whatever happens.

    lan      listen on this machine's network address instead of 127.0.0.1, and show the link as a QR code too
    timeout  seconds to wait for somebody to open the link
    say      is told what the user must do
    visit    opens or shows the link, instead of printing it
    assets   onnxruntime-web's tarball or folder, where npm cannot get it
    webgpu   run on the GPU what WebGPU has kernels for, the rest in WebAssembly
    name     of the device; more: what is known of it beside what the browser tells
    Raises DeviceError when onnxruntime-web cannot be had, nobody comes, or the browser lacks what is asked for.
    """
    files = runtime(assets, webgpu=webgpu)
    site = Site(
        Visitor(), {"worker.js": WEB / "worker.js", "probe.onnx": probe(), **{path.name: path for path in files}}
    )
    with serving(site, lan=lan) as link:
        if visit is not None:
            visit(link)
        else:
            say(f"Open this link in the browser to be measured, and keep its page in front: {link}")
            if lan:
                say(code(link))
                say(
                    "Over plain http from another machine, browsers give a page neither threads nor WebGPU: one thread "
                    "only. A phone on a cable has both: --device adb."
                )
        if not site.visitor.arrives(timeout):
            near = "on a device in this machine's network, if no firewall keeps it out"
            raise DeviceError(
                f"browser: nobody opened the link in {timeout:.0f} s. Open it in a browser "
                f"{near if lan else 'on this machine, or on another with --lan'}; for more time: "
                f"--timeout {max(120.0, 2 * timeout):.0f}."
            )
        last_words = "Stopped: the command ended early. Nothing runs here any more."
        try:
            known = read(site.visitor.ask({"do": "known", "webgpu": webgpu}), Known)
            say(f"Measuring in {known.agent}")
            if webgpu and not known.gpu:
                raise DeviceError(
                    "browser: this browser gives the page no WebGPU. It needs one that has it, and a page from this "
                    "machine itself: the link on 127.0.0.1, or a phone on a cable (--device adb), not --lan."
                )
            yield Browser(site, known, files[0].name, webgpu, say, name, more or {})
            last_words = "Done. You can close this page."
        finally:
            site.visitor.end(last_words)
