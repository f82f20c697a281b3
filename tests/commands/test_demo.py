"""A demo is one folder that answers in a real browser as the bundle does, without a network; or it is refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification

from benchmarks.chromium import NEEDED, Tab, open_tab
from compress.benchmark.browser.device import WASM
from compress.commands import demo as command
from compress.commands.demo import DEMO_FILE, SERVICE_WORKER, Demo, demo, read_examples, serve
from compress.data.answers import Answer, Marked, Prediction
from compress.data.task import Task
from compress.data.text_preparation import TextPreparation
from compress.exporters import generation
from compress.exporters.artifact import Bundle
from compress.exporters.predictor import NearestTexts
from compress.models.sentence_settings import SentenceSettings
from compress.records.latency import DeviceError
from tests import generative, tiny
from tests.benchmark.fake_page import request
from tests.benchmark.test_browser_chromium import runtime
from tests.command import refused, run
from tests.commands.test_embedding import encoder
from tests.reporting.pages import HOSTILE, Elements

__all__ = ["runtime"]  # a fixture
in_chromium = pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"needs {' and '.join(NEEDED)}")
HEADS: dict[str, Any] = {"tagging": AutoModelForTokenClassification, "qa": AutoModelForQuestionAnswering}
PROMPTS = TextPreparation({"query": "sad ", "document": "good "})
TASKS = {
    "classification": Task("classification", ("sentence",), "label", ("bad", HOSTILE, *"cdefg"), "accuracy"),
    "multilabel": Task("multilabel", ("sentence",), "labels", ("funny", "sad", "long"), "f1"),
    "regression": Task("regression", ("premise", "hypothesis"), "score", (), "pearson"),
    "ranking": Task("ranking", ("query", "passage"), "score", (), "ndcg@10"),
    "tagging": Task("tagging", ("words",), "tags", ("O", "B-one", "I-one", "B-two", "I-two"), "f1"),
    "qa": Task("qa", ("question", "context"), "answers", (), "f1"),
    "embedding": Task("embedding", ("text",), "similarity", (), "spearman", width=32, preparation=PROMPTS),
}


def write(folder: Path, task: Task) -> Bundle:
    if task.kind in HEADS:
        model = tiny.model("bert", head=HEADS[task.kind], labels=task.outputs)
        return tiny.bundle(folder / task.kind / "bundle", model=model, task=task, max_length=64)
    model = encoder(SentenceSettings.pooled(32)) if task.kind == "embedding" else tiny.bert(task.outputs)
    return tiny.bundle(folder / task.kind / "bundle", model=model, task=task)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    folder = tmp_path_factory.mktemp("bundles")
    return {kind: write(folder, task) for kind, task in TASKS.items()}


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches of all tests here, so that a tokenizer is taken apart once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def home(shared_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPRESS_HOME", str(shared_home))
    return shared_home


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the engine's names: what is written does not depend on what is in them."""
    files = [tmp_path / "engine" / name for name in WASM]
    files[0].parent.mkdir()
    for file in files:
        file.write_text(f"export const name = '{file.name}';")
    monkeypatch.setattr(command, "load_runtime", lambda assets: files)


def test_a_demo_is_complete_and_self_contained(bundles: dict[str, Bundle], engine: None, tmp_path: Path) -> None:
    made = demo(bundles["classification"].path.parent, tmp_path / "site")  # of a run's folder
    assert {path.name: path.stat().st_size for path in made.path.iterdir()} == made.sizes
    assert sum(made.parts.values()) == sum(made.sizes.values())
    page = (made.path / "index.html").read_text()
    elements = Elements(page.replace("<!doctype html>", "")).found
    asked = [attrs[key] for _, attrs in elements for key in ("src", "href") if key in attrs]
    script = (made.path / "demo.js").read_text()
    asked += re.findall(r'(?:from |fetch\(|create\(|register\()"(?:\./)?([^"]+)"', script)
    assert len(asked) == 8 and set(asked) <= made.sizes.keys()
    assert not [name for name in made.sizes if name.endswith(("html", "css", "js")) and name != "ort.wasm.min.mjs"
                and re.search(r"https?://|@import|url\(", (made.path / name).read_text())]  # fmt: skip
    (kept,) = re.findall(r"^const FILES = (.*);$", (made.path / SERVICE_WORKER).read_text(), re.MULTILINE)
    assert set(json.loads(kept)) == {".", *made.sizes} - {SERVICE_WORKER}
    assert json.loads((made.path / DEMO_FILE).read_text())["labels"] == list(TASKS["classification"].labels)
    assert json.loads((made.path / "app.webmanifest").read_text())["name"] == "classification"


def test_every_field_has_a_label_and_names_are_escaped(engine: None, tmp_path: Path) -> None:
    task = Task("classification", (HOSTILE, "other"), "label", ("no", "yes"), "accuracy")
    made = demo(write(tmp_path, task).path, tmp_path / "site")
    elements = Elements((made.path / "index.html").read_text()).found
    assert [tag for tag, _ in elements].count("script") == 1
    fields = [attrs["id"] for tag, attrs in elements if tag == "textarea"]
    assert fields == [attrs["for"] for tag, attrs in elements if tag == "label"] == ["text-0", "text-1"]
    assert [attrs.get("role") for tag, attrs in elements if attrs.get("id") == "status"] == ["status"]


@pytest.mark.parametrize("kind", TASKS)
def test_every_kind_of_task_has_texts_to_try(kind: str, bundles: dict[str, Bundle]) -> None:
    samples, labels = read_examples(bundles[kind], None)
    assert samples and labels == list(TASKS[kind].labels)
    assert all(len(texts) == 1 + TASKS[kind].pair for texts in samples)
    assert bundles[kind].predict([texts if len(texts) == 2 else texts[0] for texts in samples])


def test_the_data_give_texts_to_try_and_names_of_labels(engine: None, tmp_path: Path) -> None:
    data = tiny.reviews(tmp_path / "reviews")
    rows = {line.split("\t")[0] for line in (tmp_path / "reviews" / "dev.tsv").read_text().splitlines()[1:]}
    unnamed = write(tmp_path / "unnamed", replace(tiny.SENTIMENT, labels=("LABEL_0", "LABEL_1")))
    words = ["demo", str(unnamed.path), "--data", data, "--title", "Is it <good>?", "--out", str(tmp_path / "site")]
    assert run(*words).code == 0
    about = json.loads((tmp_path / "site" / DEMO_FILE).read_text())
    assert about["labels"] == ["negative", "positive"]
    assert len(about["examples"]) == 4 and {text for (text,) in about["examples"]} <= rows
    page = (tmp_path / "site" / "index.html").read_text()
    assert '<h1 class="headline">Is it &lt;good&gt;?</h1>' in page
    assert all(f">{text}</button>" in page for (text,) in about["examples"])
    other = write(tmp_path / "other", replace(tiny.SENTIMENT, labels=("no", "yes")))
    words = ["demo", str(other.path), "--data", data, "--out", str(tmp_path / "other.site")]
    assert refused(run(*words), tmp_path, "negative, positive", "no, yes")
    numbers = write(tmp_path / "numbers", replace(tiny.SENTIMENT, labels=("0", "1")))
    assert read_examples(numbers, None)[1] == ["label 0", "label 1"]


def test_replacing_a_demo_changes_its_worker(bundles: dict[str, Bundle], engine: None, tmp_path: Path) -> None:
    first = demo(bundles["classification"].path, tmp_path / "site").path / SERVICE_WORKER
    before = first.read_text()
    demo(bundles["classification"].path, tmp_path / "site")
    assert first.read_text() == before
    demo(bundles["classification"].path, tmp_path / "site", precision="fp32")
    assert first.read_text() != before
    assert [path.name for path in tmp_path.iterdir() if "site" in path.name] == ["site"]


def generator(folder: Path) -> Path:
    parts = {"model": generative.gpt2(), "tokenizer": generative.gpt2_tokenizer(), "max_length": 16}
    return generation.write(folder / "bundle", **parts, card={"name": "tiny"}).path


CASES: dict[str, Any] = {
    "no bundle": (lambda folder: folder, "no manifest.json"),
    "generation": (generator, "kind generative; expected"),
}


@pytest.mark.parametrize("case", CASES)
def test_bundles_without_a_task_are_refused(case: str, engine: None, tmp_path: Path) -> None:
    make, expected = CASES[case]
    result = run("demo", str(make(tmp_path)), "--out", str(tmp_path / "site"))
    assert result.code == 2 and expected in result.err and not (tmp_path / "site").exists()


def test_foreign_folders_are_not_replaced(bundles: dict[str, Bundle], engine: None, tmp_path: Path) -> None:
    bundle = bundles["classification"].path
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "letter.txt").write_text("dear")
    letters = tmp_path / "letters"
    for out in (letters, letters / "letter.txt", bundle, bundle.parent, bundles["ranking"].path):
        assert refused(run("demo", str(bundle), "--out", str(out)), tmp_path, "--out", "expected")
    assert (tmp_path / "letters" / "letter.txt").read_text() == "dear"
    assert Bundle.load(bundle)


def test_useless_options_are_refused(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    bundle = str(bundles["classification"].path)
    assert refused(run("demo", bundle), tmp_path, "--serve")
    assert refused(run("demo", bundle, "--out", str(tmp_path / "site"), "--lan"), tmp_path, "--lan")
    assert refused(run("demo", bundle, "--out", str(tmp_path / "site"), "--no-open"), tmp_path, "--no-open")


def test_a_missing_engine_is_explained(
    bundles: dict[str, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "empty"))
    result = run("demo", str(bundles["classification"].path), "--out", str(tmp_path / "site"))
    assert refused(result, tmp_path, "npm pack onnxruntime-web@", "--assets")
    assert not (tmp_path / "site").exists()


def test_as_json(bundles: dict[str, Bundle], engine: None, tmp_path: Path) -> None:
    result = run("demo", str(bundles["classification"].path), "--out", str(tmp_path / "site"), "--json")
    expected = json.loads(result.out)
    assert list(expected) == ["schema", "path", "files", "link"] and expected["schema"] == "compress.demo/1"
    assert expected["files"] == {path.name: path.stat().st_size for path in (tmp_path / "site").iterdir()}


def test_only_the_secret_link_is_served(bundles: dict[str, Bundle], engine: None, tmp_path: Path) -> None:
    made = demo(bundles["classification"].path, tmp_path / "site")
    with serve(made) as link:
        inside = urlsplit(link).path
        for name in ("", *made.sizes):
            reply = request(link, f"{inside}{name}")
            assert reply.status == 200, name
            assert reply.body == (made.path / (name or "index.html")).read_bytes()
            assert "worker-src 'self'" in reply.headers["Content-Security-Policy"]
        for path in ("/", "/index.html", "/page.js", f"{inside[:-2]}/", "/nonsense/index.html"):
            assert request(link, path).status == 403, path
        assert request(link, f"{inside}../manifest.json").status == 404
        assert request(link, inside, headers={"Host": "elsewhere.example"}).status == 403


def test_control_c_ends_a_served_demo_and_leaves_nothing(
    bundles: dict[str, Bundle], tmp_path: Path, runtime: Path
) -> None:
    words = ["demo", str(bundles["classification"].path), "--serve", "--no-open", "--assets", str(runtime), "--quiet"]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "compress", *words], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        (link,) = re.findall(r"http://127\.0\.0\.1:\d+/\S+/", process.stdout.readline())
        assert request(link, urlsplit(link).path).status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert list((tmp_path / "tmp").glob("compress*")) == []


@pytest.fixture(scope="module")
def demos(
    bundles: dict[str, Bundle], runtime: Path, shared_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Demo]:
    """A demo of each kind, with the engine."""
    folder = tmp_path_factory.mktemp("sites")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(shared_home))
        return {
            kind: demo(bundle.path, folder / kind, precision="fp32", assets=runtime)
            for kind, bundle in bundles.items()
        }  # fmt: skip


def answers(tab: Tab) -> list[list[str]]:
    """What the list under the answer says: names and figures."""
    rows = "[...document.querySelectorAll('#scores li:not(.rest)')]"
    found: list[list[str]] = tab.see(f"{rows}.map(row => [...row.children].slice(0, 2).map(cell => cell.textContent))")
    return found


def ask(tab: Tab, *texts: str) -> str:
    """Type texts, and return the answer to them."""
    tab.see("document.querySelector('#ms').textContent = 'asked'")
    for number, text in enumerate(texts):
        tab.type(f"#text-{number}", text)
    tab.wait("/ ms$/.test(document.querySelector('#ms').textContent)")
    return str(tab.see("document.querySelector('#label').textContent"))


@pytest.mark.slow
@in_chromium
def test_predictions_match_the_bundle(demos: dict[str, Demo], bundles: dict[str, Bundle], tmp_path: Path) -> None:
    text, pair = f"a good film {HOSTILE}", ("a good film", "this was not dull")
    with serve(demos["classification"]) as link, open_tab(tmp_path / "profile", link) as tab:
        tab.wait("document.querySelector('#label').textContent.startsWith('Type')")
        assert tab.see("document.activeElement.id") == "text-0", "one can type at once"
        tab.do("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        (expected,) = bundles["classification"].predict([text], precision="fp32")
        assert isinstance(expected, Prediction)
        assert ask(tab, text) == expected.label
        ranked = sorted(expected.scores.items(), key=lambda each: -each[1])[:5]
        assert answers(tab) == [[label, f"{100 * share:.1f} %"] for label, share in ranked]
        assert tab.see("document.querySelector('#scores .rest').textContent") == "and 2 more"
        tab.wait(f"document.querySelector('#status').textContent.startsWith({json.dumps(expected.label)})")
        assert tab.see("document.querySelectorAll('img').length") == 0, "texts stay texts"
        tab.type("#text-0", "")
        tab.wait("document.querySelector('#label').textContent === 'Type a text.'")
        assert answers(tab) == []
        for width in (390, 1280):
            tab.look(tmp_path / f"{width}.png", width=width, height=800)
            assert tab.see("document.documentElement.scrollWidth") <= width
        light = tab.see("getComputedStyle(document.body).backgroundColor")
        tab.look(tmp_path / "dark.png", width=390, height=800, dark=True)
        assert tab.see("getComputedStyle(document.body).backgroundColor") != light
        assert {urlsplit(each).netloc for each in tab.requests} == {urlsplit(link).netloc}
        assert tab.problems == []

    with serve(demos["multilabel"]) as link, open_tab(tmp_path / "second", link) as tab:
        (expected,) = bundles["multilabel"].predict([text], precision="fp32")
        assert isinstance(expected, Prediction)
        assert set(ask(tab, text).split(", ")) == set((expected.label or "none of its labels").split(", "))
        assert dict(answers(tab)) == {label: f"{100 * share:.1f} %" for label, share in expected.scores.items()}

    for kind in ("regression", "ranking"):
        with serve(demos[kind]) as link, open_tab(tmp_path / kind, link) as tab:
            tab.type("#text-0", pair[0])
            tab.wait("document.querySelector('#label').textContent === 'Type both texts.'")
            (expected,) = bundles[kind].predict([pair], precision="fp32")
            assert isinstance(expected, Prediction)
            assert ask(tab, *pair) == f"{expected.score:.3f}".replace("-", "−")
            samples = bundles[kind].task.samples
            for _ in samples:
                tab.press("Tab")
                assert tab.see("document.activeElement.className || document.activeElement.tagName") == "BUTTON"
            tab.press("Tab")
            assert tab.see("document.activeElement.tagName") == "BODY", "nothing else to reach by keys"
            tab.see("document.querySelector('#ms').textContent = 'asked', document.querySelector('button').click()")
            tab.wait("/ ms$/.test(document.querySelector('#ms').textContent)")
            assert tab.see("[...document.querySelectorAll('textarea')].map(each => each.value)") == list(samples[0])
            (expected,) = bundles[kind].predict([samples[0]], precision="fp32")
            assert isinstance(expected, Prediction)
            shown = tab.see("document.querySelector('#label').textContent")
            assert shown == f"{expected.score:.3f}".replace("-", "−")


@pytest.mark.slow
@in_chromium
def test_the_nearest_of_the_lines_are_found(demos: dict[str, Demo], bundles: dict[str, Bundle], tmp_path: Path) -> None:
    lines, text = ["this was a dull plot", "a great actor", "never too slow !"], "a very good actor"
    with serve(demos["embedding"]) as link, open_tab(tmp_path / "profile", link) as tab:
        tab.wait("document.querySelector('#label').textContent.startsWith('Type')")
        assert tab.see("document.querySelector('#lines').value").split("\n") == [*command.LINES, ""]
        tab.type("#lines", "\n".join(lines))
        nearest = NearestTexts.from_texts(bundles["embedding"].open("fp32"), lines).predict([text])[0].texts
        assert ask(tab, text) == nearest[0][0]
        assert answers(tab) == [[line, f"{cosine:.3f}".replace("-", "−")] for line, cosine in nearest]


@pytest.mark.slow
@in_chromium
def test_tags_and_answers_match_the_bundle(demos: dict[str, Demo], bundles: dict[str, Bundle], tmp_path: Path) -> None:
    text = f"🙂 This film was the great actor\u200b story, cafe\u0301 movie! @fun {HOSTILE} a dull plot"
    (expected,) = bundles["tagging"].predict([text], precision="fp32")
    assert isinstance(expected, Marked) and len(expected.marks) > 5
    with serve(demos["tagging"]) as link, open_tab(tmp_path / "profile", link) as tab:
        tab.wait("document.querySelector('#label').textContent.startsWith('Type')")
        ask(tab, text)
        marks = tab.see(
            "[...document.querySelectorAll('mark')].map(each => [...each.childNodes].map(n => n.textContent))"
        )
        assert marks == [[mark.text, " ", mark.label] for mark in expected.marks]
        plain = "[...document.querySelector('#label').childNodes].map(n => (n.firstChild ?? n).textContent).join('')"
        assert tab.see(plain) == text
        assert answers(tab) == [
            [f"{mark.label}: {mark.text}", f"{100 * mark.score:.1f} %"] for mark in expected.marks[:5]
        ]
        tab.wait("document.querySelector('#status').textContent.startsWith('" + expected.marks[0].label + ": ')")
        colours = "getComputedStyle(document.querySelector('mark')).backgroundColor"
        light = tab.see(colours)
        for dark in (False, True):
            tab.look(tmp_path / f"{dark}.png", width=390, height=800, dark=dark)
            assert tab.see("document.documentElement.scrollWidth") <= 390
        assert tab.see(colours) != light
        assert tab.problems == []

    question, context = "what was dull ?", "🙂 the story was quite dull, but a cafe\u0301 scene is fun"
    (found,) = bundles["qa"].predict([(question, context)], precision="fp32")
    assert isinstance(found, Answer) and found.text
    with serve(demos["qa"]) as link, open_tab(tmp_path / "second", link) as tab:
        tab.type("#text-0", question)
        tab.wait("document.querySelector('#label').textContent === 'Type both texts.'")
        assert ask(tab, question, context) == found.text
        assert tab.see("document.querySelector('#score').textContent") == f"{100 * found.score:.1f} %"


@contextmanager
def any_web_server(folder: Path) -> Iterator[str]:
    """Serve a folder as any static host does, quietly."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://localhost:{server.server_port}"  # where a page may be kept
        finally:
            server.shutdown()


@pytest.mark.slow
@in_chromium
def test_the_page_works_offline_after_one_visit(demos: dict[str, Demo], tmp_path: Path) -> None:
    made, texts = demos["classification"], ("a good film", "a bad film", "never dull")  # the last one may be restored
    with any_web_server(made.path.parent) as host:
        opened = open_tab(tmp_path / "profile", f"{host}/{made.path.name}/")
        tab = opened.__enter__()
        before = [ask(tab, text) for text in texts]
        tab.wait("navigator.serviceWorker.getRegistration().then(found => found?.active?.state === 'activated')")
    try:
        tab.do("Page.reload")
        tab.wait("document.querySelector('#ms')?.textContent === '—' && document.readyState === 'complete'")
        assert [ask(tab, text) for text in texts] == before
    finally:
        opened.__exit__(None, None, None)


def test_a_port_that_cannot_be_had_is_an_error(
    bundles: dict[str, Bundle], engine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = demo(bundles["classification"].path, tmp_path / "site")
    monkeypatch.setattr("compress.benchmark.browser.server.LOOPBACK", "192.0.2.1")  # nobody's
    with pytest.raises(DeviceError, match="cannot listen"), serve(made):
        pass
