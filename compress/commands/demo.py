"""Write a demo of a bundle: a folder for any web server, with a page in which the model
answers."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compress import __version__
from compress.arguments import BundleLike, DataLike, PathName, check_arguments
from compress.benchmark.browser.device import WEB_PACKAGE, load_runtime
from compress.benchmark.browser.server import PageSession, Site, serve_site
from compress.data.text_preparation import DOCUMENT_PROMPT, QUERY
from compress.errors import BundleError, ExportError
from compress.exporters import manifest
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import Precision
from compress.exporters.session import read_model, session_entries
from compress.exporters.tokenizer.text_model import text_file
from compress.io import atomic_folder, hash_files, write_json
from compress.outputs import check_output_folder
from compress.progress import Say
from compress.reporting.html import FOLDER, render

DEMO_FILE = "demo.json"
"""The description of the model for the page; a folder with this file is a demo."""
DEMO_MODEL_FILE = "model_text.onnx"
SERVICE_WORKER = "sw.js"
"""Caches the other files in the browser, if the page is served from a permanent
host."""
LINES = (
    "I forgot my password and cannot log in.",
    "When will my parcel arrive?",
    "The soup was cold and the waiter rude.",
    "Heavy rain is expected over the weekend.",
    "She scored twice in the second half.",
)
"""Example texts to search, until the reader types some."""
ROWS_OFFERED = 4
LONGEST_EXAMPLE = 200
"""The number of rows of the data that the page offers to try, and the maximum
characters of each."""


@dataclass(frozen=True)
class Demo:
    """A demo on disk. sizes: bytes by file name."""

    path: Path
    sizes: Mapping[str, int]

    @property
    def parts(self) -> dict[str, int]:
        """Return the bytes of the model, the engine and the page."""
        model = self.sizes[DEMO_MODEL_FILE]
        engine = sum(
            size for name, size in self.sizes.items() if name.startswith("ort")
        )
        return {
            "model": model,
            "engine": engine,
            "page": sum(self.sizes.values()) - model - engine,
        }


@check_arguments
def demo(
    bundle: BundleLike,
    out: PathName,
    *,
    precision: Precision = "int8",
    data: DataLike | None = None,
    title: str | None = None,
    assets: PathName | None = None,
    say: Say = lambda _: None,
) -> Demo:
    """Write a folder for any web server, with a page in which the model answers texts
    in the browser.

    The folder holds the model, with its tokenizer in the graph, and onnxruntime-web;
    nothing is loaded from elsewhere.

    precision  the file of the bundle to use
    data       examples of the task, as for `distill`: the page offers some of its rows,
               and uses its label names if the model has none
    title      of the page; None: the name of the data, or of the folder
    assets     onnxruntime-web as a tarball or folder, if npm cannot fetch it
    say        called with progress messages

    Raises BundleError or ExportError for a model without a task, a tokenizer that
    cannot be a graph, or a folder that holds something else; DeviceError if
    onnxruntime-web is unavailable. Nothing is written then.
    """
    loaded = Bundle.load(bundle)
    out = Path(out)
    check_out(loaded, out)
    if loaded.leaves_out_prompts and loaded.task.preparation.changes_texts:
        raise ExportError(
            f"{loaded.path}: include_prompt is false in the Pooling of this model, so "
            "that its vectors leave the prompt out, which a page cannot do; expected a "
            "model that pools prompts too, or that has none"
        )
    texts, labels = read_examples(loaded, data)
    engine = load_runtime(None if assets is None else Path(assets))
    say(
        f"{loaded.path}: adding the tokenizer to the model, and comparing the two on "
        "difficult texts"
    )
    with atomic_folder(out) as folder:
        # the page adds them
        proof = text_file(
            loaded, folder / DEMO_MODEL_FILE, precision=precision, prompt=""
        )
        for path in engine:
            shutil.copyfile(path, folder / path.name)
        model = (folder / DEMO_MODEL_FILE).stat().st_size
        weight = sum(path.stat().st_size for path in engine)
        path = loaded.path.resolve()
        task = loaded.task
        classes = f" into {len(task.labels)} labels" if task.labels else ""
        title = title or Path(loaded.report().data).stem
        title = title or (path.parent.name if path.name == "bundle" else path.name)
        page = render(
            "demo/index.html.j2",
            title=title,
            context=f"{task.kind}{classes}, {loaded.manifest.model_type}",
            headline=task.headline,
            inputs=task.text if task.pair else ("Text",),
            lines=LINES if task.vectors else (),
            examples=texts,
            model=model,
            engine=weight,
            total=model + weight,
            precision=precision,
            runtime=WEB_PACKAGE.replace("@", " "),
            max_length=proof.max_length,
            version=__version__,
        )
        (folder / "index.html").write_text(page, encoding="utf-8")
        styles = [
            (FOLDER / name).read_text(encoding="utf-8")
            for name in ("page.css", "demo/demo.css")
        ]
        (folder / "style.css").write_text("".join(styles), encoding="utf-8")
        for name in ("demo.js", "icon.svg"):
            shutil.copyfile(FOLDER / "demo" / name, folder / name)
        icon = {"src": "icon.svg", "sizes": "any", "type": "image/svg+xml"}
        app = {
            "name": title,
            "start_url": ".",
            "display": "standalone",
            "icons": [icon],
        }
        write_json(folder / "app.webmanifest", app)
        prompts = [task.preparation.prompt(name) for name in (QUERY, DOCUMENT_PROMPT)]
        about = {
            "kind": task.kind,
            "form": task.form,
            "labels": labels,
            "examples": texts,
            "prompts": prompts,
        }
        write_json(
            folder / DEMO_FILE,
            {
                "format": 1,
                **about,
                "entries": session_entries(read_model(folder / DEMO_MODEL_FILE)),
            },
        )
        cached = sorted(folder.iterdir())
        constants = {
            "VERSION": hash_files(cached),
            "FILES": [".", *(path.name for path in cached)],
        }
        script = "".join(
            f"const {name} = {json.dumps(value)};\n"
            for name, value in constants.items()
        )
        worker = (FOLDER / "demo" / SERVICE_WORKER).read_text(encoding="utf-8")
        (folder / SERVICE_WORKER).write_text(f"{script}\n{worker}", encoding="utf-8")
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    return Demo(out, sizes)


def read_examples(
    bundle: Bundle, data: DataLike | None
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return texts to try, and the names of the labels that the page shows.

    Both come from the data if given; else they are texts for this kind of task, and
    numbers such as `label 1`. Raises BundleError for data with other labels.
    """
    task = bundle.task
    labels = list(task.labels)
    if all(label.isdigit() for label in labels):
        labels = [f"{task.label} {label}" for label in labels]
    if data is None:
        return list(task.samples), labels
    # imports datasets and pyarrow, which a page without them does not need
    from compress.data import load_task
    from compress.data.audit import texts

    found = load_task(data, kind=task.kind, metric=task.metric)
    named = found.task.labels
    unnamed = all(label.startswith("LABEL_") for label in labels)
    if len(named) != len(labels) or (named != task.labels and not unnamed):
        raise BundleError(
            f"{found.name}: its labels are {', '.join(named)}, but {bundle.path} has "
            f"{', '.join(task.labels)}; expected the data it was made from"
        )
    if unnamed:
        labels = list(named)
    rows = dict.fromkeys(texts(found.measured[1]))
    short = [row for row in rows if sum(map(len, row)) <= LONGEST_EXAMPLE]
    step = max(1, len(short) // ROWS_OFFERED)
    return short[::step][:ROWS_OFFERED], labels


def check_out(bundle: Bundle, out: Path) -> None:
    """Raise ExportError for a folder that must not be replaced, OutputError for one
    that cannot be written."""
    check_output_folder(out, "out")
    if bundle.path.resolve().is_relative_to(out.resolve()):
        raise ExportError(
            f"--out {out}: holds the bundle, which the demo would replace; expected "
            "another folder"
        )
    foreign = out.is_dir() and any(out.iterdir()) and not (out / DEMO_FILE).is_file()
    if foreign or manifest.is_bundle(out):
        raise ExportError(
            f"--out {out}: exists and is not a demo; expected a new folder, or a demo "
            "to replace"
        )


@contextmanager
def serve(demo: Demo, *, lan: bool = False) -> Iterator[str]:
    """Serve a demo, and yield a secret link: only those who have it see the page.

    lan  listen on this machine's network address instead of 127.0.0.1

    Raises DeviceError if there is no address to listen on.
    """
    session = PageSession()
    # nobody else can claim it, and the link works for everyone who has it
    secret = session.claim(session.token)
    files = {name: demo.path / name for name in demo.sizes}
    with serve_site(
        Site(session, {"": demo.path / "index.html", **files}, public={}), lan=lan
    ) as link:
        yield f"{link.partition('#')[0]}{secret}/"
