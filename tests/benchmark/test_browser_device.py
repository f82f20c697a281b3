"""A page is driven like every other device, and the command ends properly whatever the page does."""

import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from compress.benchmark.browser import device, server
from compress.benchmark.browser.device import Browser, browser
from compress.commands.bench import bench, bench_visitors
from compress.config.options import DeviceOptions
from compress.errors import CompressError
from compress.exporters.onnx import to_onnx
from compress.records.latency import DeviceError, Setting
from tests import tiny
from tests.benchmark import fake_page
from tests.benchmark.fake_page import FACTS, Page, page, request

BRIEF = Setting(1, 1, 8)
ROW = {"input_ids": [2, 9, 3], "attention_mask": [1, 1, 1], "token_type_ids": [0, 0, 0]}
OPENED = {"init_ms": 1.0, "first_ms": 1.0, "forwards": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    for name in ("a", "b"):
        to_onnx(tiny.bert(layers=1), folder / f"{name}.onnx")
    return {name: folder / f"{name}.onnx" for name in ("a", "b")}


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No runtime is needed without a browser, and a lost page is noticed sooner."""
    monkeypatch.setattr(device, "load_runtime", lambda source, webgpu: [tmp_path / "ort.mjs"])
    monkeypatch.setattr(server, "SILENCE", 0.6)
    monkeypatch.setattr(server, "HOLD", 0.1)


@contextmanager
def opened(
    answers: Mapping[str, Callable[[Mapping[str, Any]], Any]] | None = None,
    *hidden: str,
    say: Callable[[str], None] = lambda _: None,
    error: str = "",
    webgpu: bool = False,
) -> Iterator[tuple[Page, Browser]]:
    """Open a fake page as a device; with `error`, expect a DeviceError that matches it."""
    with page(answers, *hidden) as visitor:
        if not error:
            with browser(timeout=5, say=say, visit=visitor.visit, webgpu=webgpu) as found:
                yield visitor, found
        else:
            with (
                pytest.raises(DeviceError, match=error),
                browser(timeout=5, say=say, visit=visitor.visit, webgpu=webgpu) as found,
            ):
                yield visitor, found


def test_race_interleaves_files_in_two_passes(files: dict[str, Path]) -> None:
    settings, messages = [BRIEF, Setting(2, 3, 4)], list[str]()
    with opened(say=messages.append) as (visitor, found):
        latencies = found.race(files, settings, rounds=4, runs=5)
    assert [(each.name, each.setting) for each in latencies] == [(name, s) for s in settings for name in files]
    assert [each["worker"] for each in visitor.said("open")] == ["a", "b", "a", "b", "b", "a", "b", "a"]
    assert [each["worker"] for each in visitor.said("time")] == list("abba") * 2 + list("baab") * 2
    assert {(each.runs, each.p50_ms, each.init_ms, each.first_ms, each.peak_rss_mb) for each in latencies} == {
        (20, 2.0, 30.0, 9.0, 50.0)
    }
    kept = [each["keep"] for each in visitor.said("clear")]  # a pass begins with new workers
    assert kept == [["files/0.onnx", "files/1.onnx"]] * 4
    assert messages == [
        "Measuring in Stand-in 1.0",
        *(f"browser: pass {number} of 2, {setting}" for number in (1, 2) for setting in settings),
    ]
    assert [len(each["tables"]) for each in visitor.said("show")] == [1, 2]
    done = [each["done"] for each in visitor.said("time")]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0.0, 0.875)
    assert visitor.heard[-1]["say"] == "Done. You can close this page."


def test_page_gets_the_job_of_every_runner(files: dict[str, Path]) -> None:
    with opened() as (visitor, found):
        found.race({"a": files["a"]}, [Setting(2, 3, 4)], rounds=2, runs=7)
        command = visitor.said("open")[0]
        content = request(visitor.link, visitor.base + command["file"]).body
    assert content == files["a"].read_bytes()
    assert [command[name] for name in ("threads", "provider", "runtime", "warm_up")] == [2, "wasm", "ort.mjs", 5]
    entries = {"optimization.disable_specified_optimizers": "SkipLayerNormFusion;BiasSkipLayerNormFusion"}
    assert command["entries"] == entries
    inputs = {each["name"]: each for each in command["inputs"]}
    assert {(each["type"], tuple(each["dims"])) for each in inputs.values()} == {("int64", (3, 4))}
    vocabulary = len(tiny.SPECIAL) + len(tiny.WORDS)
    assert inputs["input_ids"]["data"] == np.random.default_rng(0).integers(0, vocabulary, 12).tolist()
    assert inputs["attention_mask"]["data"] == [1] * 12
    assert [(each["runs"], each["warm_up"]) for each in visitor.said("time")] == [(7, 2)] * 2


def test_logits_come_row_by_row(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "ROWS_PER_MESSAGE", 2)
    rows = [{name: [1] * length for name in ROW} for length in (3, 1, 4)]
    with opened() as (visitor, found):
        logits = found.logits(files["a"], rows)
        assert found.logits(files["a"], []) == []
    assert [row.tolist() for row in logits] == [[3.0, 1.0], [1.0, 1.0], [4.0, 1.0]]
    assert [row.dtype for row in logits] == [np.float32] * 3
    assert [len(each["rows"]) for each in visitor.said("logits")] == [2, 1]
    assert visitor.said("open")[0]["inputs"] is None


def test_spans_are_stacked_and_infinities_kept(files: dict[str, Path]) -> None:
    answer = {"rows": [[fake_page.tensor([[1.0, 2.0, 3.0]]), fake_page.tensor([[4.0, math.inf, math.nan]])]]}
    with opened({"logits": lambda _: answer}) as (_, found):
        (spans,) = found.logits(files["a"], [ROW])
    np.testing.assert_array_equal(spans, [[1, 4], [2, math.inf], [3, math.nan]])


def test_sustained_runs_have_a_median_per_minute(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    clock, speeds, setting = iter(range(0, 10_000, 25)), iter([1.0, 3.0, 7.0, 7.0]), Setting(2, 1, 8)
    monkeypatch.setattr(device, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    with opened({"time": lambda _: {"ms": [next(speeds)] * 4, "heap_mb": 1.0}}) as (visitor, found):
        (curve,) = found.sustain({"a": files["a"]}, setting, seconds=102)
    assert (curve.name, curve.setting, curve.minutes, curve.temperatures) == ("a", setting, (2.0, 7.0), (None, None))
    assert [each["seconds"] for each in visitor.said("time")] == [5.0, 5.0, 5.0, 2.0]


def test_hidden_pages_are_flagged(files: dict[str, Path]) -> None:
    with opened({}, "time") as (_, found):
        (latency,) = found.race({"a": files["a"]}, [BRIEF], rounds=2, runs=2)
        assert (latency.noisy, latency.noise[:19]) == (True, "the page was hidden")
        with pytest.raises(DeviceError, match=r"a: after 0 s the page was hidden .* with it in front"):
            found.sustain({"a": files["a"]}, BRIEF, seconds=5)


def test_facts() -> None:
    with opened() as (_, found):
        assert found.name == "browser"
        assert found.facts() == {
            "device": "Phone",
            "cpu": "arm 64 bit",
            "cores": "8",
            "instructions": "simd",
            "memory": "4 GB or more",
            "system": "Android 15",
            "browser": "Stand-in 1.0",
            "runtime": f"onnxruntime-web {device.WEB_VERSION}, WebAssembly",
            "clock": "steps of 0.005 ms",
            "MB": "of WebAssembly memory",
        }
    hostile = {**FACTS, "agent": "\x1b]0;owned\x07\x1b[2J" + "x" * 5000 + "\n\u202e"}
    with opened({"known": lambda _: hostile}) as (_, found):
        agent = found.facts()["browser"]
    assert agent.isprintable()
    assert agent.startswith("]0;owned [2Jxxx")
    assert len(agent) == 600


def test_nobody_opens_the_link() -> None:
    links, messages = list[str](), list[str]()
    with (
        pytest.raises(DeviceError, match="nobody opened the link"),
        browser(timeout=0.1, say=messages.append, visit=links.append),
    ):
        pytest.fail("nobody is no device")
    assert messages == []
    with pytest.raises(ConnectionRefusedError):
        request(links[0], "/")


@pytest.mark.parametrize("error", [KeyboardInterrupt, DeviceError])
def test_the_page_learns_that_the_command_was_stopped(error: type[BaseException]) -> None:
    with page() as visitor, pytest.raises(error), browser(timeout=5, visit=visitor.visit):
        raise error
    assert visitor.heard[-1]["say"].startswith("Stopped: ")


def test_lost_pages_are_errors(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with opened({"time": lambda _: None}, error="nothing heard .* phone was locked") as (lost, found):
        found.race(files, [BRIEF], rounds=2, runs=1)
    monkeypatch.setattr(server, "SILENCE", 60.0)
    with opened(error=r"left in the middle .* keep the page in front") as (gone, found):
        gone.answers = {"time": lambda _: gone.leave()}
        found.race(files, [BRIEF], rounds=2, runs=1)
    for each in (lost, gone):
        with pytest.raises(ConnectionRefusedError):
            request(each.link, "/")


def test_a_step_that_never_ends_is_an_error(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "COMMAND_TIMEOUT", 0.5)
    monkeypatch.setattr(server, "SILENCE", 60.0)
    ended = threading.Event()

    def stuck(_: Mapping[str, Any]) -> dict[str, Any]:
        ended.wait(10)
        return {"ms": [1.0], "heap_mb": 1.0}

    with opened({"time": stuck}, error="has not finished one step in") as (_, found):
        try:
            found.race(files, [BRIEF], rounds=2, runs=1)
        finally:
            ended.set()


def test_the_page_survives_an_error_that_it_reports(files: dict[str, Path]) -> None:
    refuse = {"open": lambda job: {"error": "no kernel\n\x1b[31m for Foo"} if job["worker"] == "b" else OPENED}
    with opened(refuse) as (_, found):
        with pytest.raises(DeviceError, match=r"^browser: b at 1 thread, batch 1, 8 tokens: no kernel \[31m for Foo$"):
            found.race(files, [BRIEF], rounds=2, runs=1)
        assert len(found.race({"a": files["a"]}, [BRIEF], rounds=2, runs=1)) == 1


INVALID = [
    {"ms": [], "heap_mb": 1.0}, {"ms": [1.0, -1.0], "heap_mb": 1.0}, {"ms": [math.nan], "heap_mb": 1.0},
    {"ms": [1.0]}, {},
]  # fmt: skip


@pytest.mark.parametrize("invalid", INVALID)
def test_invalid_times_are_refused(files: dict[str, Path], invalid: dict[str, Any]) -> None:
    with opened({"time": lambda _: invalid}, error="the page sent an invalid answer") as (_, found):
        found.race({"a": files["a"]}, [BRIEF], rounds=2, runs=1)


def test_missing_rows_are_noticed(files: dict[str, Path]) -> None:
    with opened({"logits": lambda _: {"rows": []}}, error="answered 0 of 1 rows") as (_, found):
        found.logits(files["a"], [ROW])


def test_threads_need_an_isolated_page(files: dict[str, Path]) -> None:
    with opened({"known": lambda _: {**FACTS, "isolated": False}}) as (visitor, found):
        for ask in (
            lambda: found.race(files, [BRIEF, Setting(2, 1, 8)], rounds=2, runs=1),
            lambda: found.sustain(files, Setting(2, 1, 8), seconds=1),
        ):
            with pytest.raises(DeviceError, match=r"2 threads: this page may have one only.* --threads 1"):
                ask()
        assert visitor.said("open") == []
        assert len(found.race(files, [BRIEF], rounds=2, runs=1)) == 2
        assert found.facts()["threads"] == "one only: the page is not isolated"


def test_webgpu_never_falls_back(files: dict[str, Path]) -> None:
    with pytest.raises(DeviceError, match="gives the page no WebGPU"), opened(webgpu=True):
        pytest.fail("no device without WebGPU")
    with opened({"known": lambda _: {**FACTS, "gpu": "arm valhall"}}, webgpu=True) as (visitor, found):
        found.race({"a": files["a"]}, [BRIEF], rounds=2, runs=1)
        assert found.facts()["gpu"] == "arm valhall"
        assert found.facts()["runtime"].endswith(", WebGPU")
    assert {each["provider"] for each in visitor.said("open")} == {"webgpu"}


def test_unsuitable_files_are_refused_before_they_are_sent(files: dict[str, Path], tmp_path: Path) -> None:
    with opened() as (visitor, found):
        for given, rounds in ((files, 1), ({"x": tmp_path / "x.onnx"}, 2), ({"x": tmp_path / "x.xml"}, 2)):
            with pytest.raises(CompressError):
                found.race(given, [BRIEF], rounds=rounds, runs=1)
    assert visitor.said("open") == []


def test_the_link_is_shown_with_a_qr_code_for_phones(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def serve(site: server.Site, lan: bool) -> Iterator[str]:
        yield "http://10.0.0.1:1/#t" if lan else "http://x/#t"

    monkeypatch.setattr(device, "qr_code", lambda link: f"code of {link}")
    monkeypatch.setattr(device, "serve_site", serve)
    messages: list[str] = []
    for lan, hint in ((False, "with --lan"), (True, "this machine's network, if no firewall")):
        with pytest.raises(DeviceError, match=hint), browser(lan=lan, timeout=0.01, say=messages.append):
            pass
    assert [each.split(": ")[-1] for each in messages[:2]] == ["http://x/#t", "http://10.0.0.1:1/#t"]
    assert messages[2] == "code of http://10.0.0.1:1/#t"
    assert "one thread only" in messages[3]


def test_without_segno_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "segno", None)
    assert device.qr_code("http://10.0.0.1:1/#t") == "For a QR code of this link: pip install 'segno>=1.6'"


def test_qr_code_is_square_and_depends_on_the_link() -> None:
    pytest.importorskip("segno", reason="needs segno, of the extra lan")
    lines = device.qr_code("http://192.168.178.20:54321/#" + "t" * 43).splitlines()
    assert {len(line) for line in lines} == {len(lines[0])}
    assert abs(2 * len(lines) - len(lines[0])) <= 1  # a character is two modules high
    assert device.qr_code("http://192.168.178.21:54321/#" + "t" * 43).splitlines() != lines


def test_the_page_makes_no_markup_of_texts() -> None:
    script = (server.WEB / "page.js").read_text(encoding="utf-8")
    assert "textContent" in script
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "setHTML"):
        assert way not in script


def test_the_token_is_in_no_request() -> None:
    """What follows '#' is not sent: neither a proxy's log nor a preview of the link has it."""
    with opened() as (visitor, _):
        url = urlsplit(visitor.link)
    assert (url.path, url.query) == ("/", "")
    assert len(url.fragment) == 43
    assert url.fragment not in visitor.base


def test_several_visitors_are_measured_in_turn_by_separate_links(files: dict[str, Path]) -> None:
    messages, links = list[str](), list[str]()
    with page() as first, page() as second:
        waiting = [first, second]

        def say(line: str) -> None:
            messages.append(line)
            if match := re.search(r"http://\S+", line):
                links.append(match[0])
                waiting.pop(0).visit(match[0])

        options = DeviceOptions(device="browser", timeout=5)
        measure = partial(bench, [files["a"]], device=options, seq=[8], rounds=2, runs=2, say=say)
        results = list(bench_visitors(measure, 2, device="browser", say=say))
    assert [result.device for result in results] == ["browser 1", "browser 2"]
    assert [len(result.latencies) for result in results] == [1, 1]
    assert len(set(links)) == 2
    assert [line for line in messages if line.endswith("of 2")] == ["browser 1 of 2", "browser 2 of 2"]
