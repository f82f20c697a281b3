"""`compress demo`: from a bundle to a folder that any web server can serve: a page in which the model answers."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compress import __version__
from compress.benchmark.browser.device import PACKAGE, load_runtime
from compress.benchmark.browser.server import PageSession, Site, serve_site
from compress.errors import ExportError
from compress.exporters import manifest
from compress.exporters.artifact import Bundle, Precision
from compress.exporters.session import read_model, session_entries
from compress.exporters.tokenizer import text_file
from compress.io import atomic_folder, hash_files, write_json
from compress.reporting.html import FOLDER, render

NAME = "demo.json"
"""What the page reads about its model, and what a folder is known by as a demo."""
MODEL = "model_text.onnx"
SERVICE_WORKER = "sw.js"
"""Keeps the other files in the browser, where the page comes from a host that lasts."""
HEADLINES = {
    "classification": "The model in this page labels what you type.",
    "multilabel": "The model in this page says which labels fit what you type.",
    "regression": "The model in this page gives a number to what you type.",
    "ranking": "The model in this page says how well a passage answers a query.",
    "tagging": "The model in this page labels the words of what you type.",
    "qa": "The model in this page finds the answer to a question in a text.",
    "embedding": "The model in this page finds what is nearest in meaning to what you type.",
}
"""What a page's model does, for each kind of task."""
LINES = (
    "I forgot my password and cannot log in.",
    "When will my parcel arrive?",
    "The soup was cold and the waiter rude.",
    "Heavy rain is expected over the weekend.",
    "She scored twice in the second half.",
)
"""Texts that others are compared with, until the reader types some."""


@dataclass(frozen=True)
class Demo:
    """A demo on disk. sizes: the bytes of each file, by its name."""

    path: Path
    sizes: Mapping[str, int]

    @property
    def parts(self) -> dict[str, int]:
        """Sum the bytes of the model, the engine and the page."""
        model, engine = self.sizes[MODEL], sum(size for name, size in self.sizes.items() if name.startswith("ort"))
        return {"model": model, "engine": engine, "page": sum(self.sizes.values()) - model - engine}


def demo(
    bundle: str | Path,
    out: str | Path,
    *,
    precision: Precision = "int8",
    assets: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Demo:
    """Write a page that answers texts in the browser into the folder `out`, which any web server can serve.

    The folder holds the model with its tokenizer inside, and onnxruntime-web; the page loads nothing from elsewhere.

    precision  the bundle's file that answers
    assets     onnxruntime-web's tarball or folder, where npm cannot get it
    say        is told what is being done

    Raises BundleError or ExportError for a model that has no task, for a tokenizer that no graph can
    hold, and for a folder with something else in it; DeviceError where onnxruntime-web cannot be had. Nothing is
    written then.
    """
    loaded, out = Bundle.load(Path(bundle)), Path(out)
    _check(loaded, out)
    engine = load_runtime(assets)
    say(f"{loaded.path}: putting the tokenizer into the model, and comparing the two on hard texts")
    with atomic_folder(out) as folder:
        proof = text_file(loaded, folder / MODEL, precision=precision)
        for path in engine:
            shutil.copyfile(path, folder / path.name)
        model, weight = (folder / MODEL).stat().st_size, sum(path.stat().st_size for path in engine)
        place, task = loaded.path.resolve(), loaded.task
        classes = f" into {len(task.labels)} labels" if task.labels else ""
        title = place.parent.name if place.name == "bundle" else place.name
        page = render(
            "demo/index.html.j2",
            title=title,
            context=f"{task.kind}{classes}, {loaded.manifest.model_type}",
            headline=HEADLINES[task.kind],
            inputs=task.text if task.pair else ("Text",),
            lines=LINES if task.kind == "embedding" else (),
            model=model,
            engine=weight,
            total=model + weight,
            precision=precision,
            runtime=PACKAGE.replace("@", " "),
            max_length=proof.max_length,
            version=__version__,
        )
        (folder / "index.html").write_text(page, encoding="utf-8")
        styles = [(FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "demo/demo.css")]
        (folder / "style.css").write_text("".join(styles), encoding="utf-8")
        for name in ("demo.js", "icon.svg"):
            shutil.copyfile(FOLDER / "demo" / name, folder / name)
        icon = {"src": "icon.svg", "sizes": "any", "type": "image/svg+xml"}
        app = {"name": title, "start_url": ".", "display": "standalone", "icons": [icon]}
        write_json(folder / "app.webmanifest", app)
        about = {"kind": task.kind, "labels": task.labels, "prompts": task.prompts}
        write_json(folder / NAME, {"format": 1, **about, "entries": session_entries(read_model(folder / MODEL))})
        kept = sorted(folder.iterdir())
        constants = {"VERSION": hash_files(kept), "FILES": [".", *(path.name for path in kept)]}
        script = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in constants.items())
        worker = (FOLDER / "demo" / SERVICE_WORKER).read_text(encoding="utf-8")
        (folder / SERVICE_WORKER).write_text(f"{script}\n{worker}", encoding="utf-8")
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    return Demo(out, sizes)


def _check(bundle: Bundle, out: Path) -> None:
    """Raise ExportError for a folder that is to stay as it is."""
    if bundle.path.resolve().is_relative_to(out.resolve()):
        raise ExportError(f"--out {out}: holds the bundle, which the demo would replace; expected another folder")
    foreign = out.is_dir() and any(out.iterdir()) and not (out / NAME).is_file()
    if foreign or (out.exists() and not out.is_dir()) or manifest.is_bundle(out):
        raise ExportError(f"--out {out}: exists and is no demo; expected a new folder, or a demo to replace")


@contextmanager
def serve(made: Demo, *, lan: bool = False) -> Iterator[str]:
    """Serve a demo, and yield the link to it, a part of which is secret: who has the link sees the page, nobody else.

    lan  on this machine's network address instead of 127.0.0.1

    Raises DeviceError where there is no address to listen on.
    """
    session = PageSession()
    secret = session.claim(session.token)  # so that nobody else can, and the link serves all who have it
    files = {name: made.path / name for name in made.sizes}
    with serve_site(Site(session, {"": made.path / "index.html", **files}, public={}), lan=lan) as link:
        yield f"{link.partition('#')[0]}{secret}/"
