"""A page is driven as every device is, and whatever it does, the command ends as it should."""

import math
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from compress.benchmark.browser import device, server
from compress.benchmark.browser.device import browser
from compress.commands.bench import bench_visitors
from compress.config.options import DeviceOptions
from compress.errors import ExportError
from compress.exporters.onnx import to_onnx
from compress.records.latency import DeviceError, Setting
from tests import tiny
from tests.benchmark import visiting
from tests.benchmark.visiting import KNOWN, page, request

BRIEF = Setting(1, 1, 8)
ROW = {"input_ids": [2, 9, 3], "attention_mask": [1, 1, 1], "token_type_ids": [0, 0, 0]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    for name in ("a", "b"):
        to_onnx(tiny.bert(layers=1), folder / f"{name}.onnx")
    return {name: folder / f"{name}.onnx" for name in ("a", "b")}


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No runtime is needed where no browser is, and what is lost is missed sooner."""
    monkeypatch.setattr(device, "load_runtime", lambda source, webgpu: [tmp_path / "ort.mjs"])
    monkeypatch.setattr(server, "SILENCE", 0.6)
    monkeypatch.setattr(server, "HOLD", 0.1)


@pytest.fixture
def said() -> list[str]:
    return []


def test_a_race_interleaves_in_two_passes(files: dict[str, Path], said: list[str]) -> None:
    settings = [BRIEF, Setting(2, 3, 4)]
    with page() as visitor, browser(timeout=5, say=said.append, visit=visitor.visit) as found:
        latencies = found.race(files, settings, rounds=4, runs=5)
    assert [(each.name, each.setting) for each in latencies] == [(name, s) for s in settings for name in files]
    assert [each["worker"] for each in visitor.said("open")] == ["a", "b", "a", "b", "b", "a", "b", "a"]
    assert [each["worker"] for each in visitor.said("time")] == list("abba") * 2 + list("baab") * 2
    assert {(each.runs, each.p50_ms, each.init_ms, each.first_ms, each.peak_rss_mb) for each in latencies} == {
        (20, 2.0, 30.0, 9.0, 50.0)
    }
    kept = [each["keep"] for each in visitor.said("clear")]  # a pass begins with new workers, and the files it has
    assert kept == [["files/0.onnx", "files/1.onnx"]] * 4
    assert said == [
        "Measuring in Stand-in 1.0",
        *(f"browser: pass {number} of 2, {setting}" for number in (1, 2) for setting in settings),
    ]
    assert [len(each["tables"]) for each in visitor.said("show")] == [1, 2]
    done = [each["done"] for each in visitor.said("time")]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0.0, 0.875)
    assert visitor.heard[-1]["say"] == "Done. You can close this page."


def test_the_page_is_told_what_every_runner_is_told(files: dict[str, Path]) -> None:
    with page() as visitor, browser(timeout=5, say=print, visit=visitor.visit) as found:
        found.race({"a": files["a"]}, [Setting(2, 3, 4)], rounds=2, runs=7)
        told = visitor.said("open")[0]
        content = request(visitor.link, visitor.base + told["file"]).body
    assert content == files["a"].read_bytes()
    assert (told["threads"], told["provider"], told["runtime"], told["warm_up"]) == (2, "wasm", "ort.mjs", 5)
    assert told["entries"] == {
        "optimization.disable_specified_optimizers": "SkipLayerNormFusion;BiasSkipLayerNormFusion"
    }
    inputs = {each["name"]: each for each in told["inputs"]}
    assert {(each["type"], tuple(each["dims"])) for each in inputs.values()} == {("int64", (3, 4))}
    vocabulary = len(tiny.SPECIAL) + len(tiny.WORDS)
    assert inputs["input_ids"]["data"] == np.random.default_rng(0).integers(0, vocabulary, 12).tolist()
    assert inputs["attention_mask"]["data"] == [1] * 12
    assert [(each["runs"], each["warm_up"]) for each in visitor.said("time")] == [(7, 2)] * 2


def test_logits_come_row_by_row_as_they_were(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.benchmark.browser.device.ROWS_AT_ONCE", 2)
    rows = [{name: [1] * length for name in ROW} for length in (3, 1, 4)]
    with page() as visitor, browser(timeout=5, visit=visitor.visit) as found:
        logits = found.logits(files["a"], rows)
        assert found.logits(files["a"], []) == []
        with pytest.raises(DeviceError, match=r"a row has input_ids; expected attention_mask, token_type_ids too"):
            found.logits(files["a"], [{"input_ids": [1]}])
    assert [row.tolist() for row in logits] == [[3.0, 1.0], [1.0, 1.0], [4.0, 1.0]]
    assert [row.dtype for row in logits] == [np.float32] * 3
    assert [len(each["rows"]) for each in visitor.said("logits")] == [2, 1]
    assert visitor.said("open")[0]["inputs"] is None


def test_starts_and_ends_of_spans_are_stacked_and_infinities_come_over(files: dict[str, Path]) -> None:
    answer = {"rows": [[visiting.tensor([[1.0, 2.0, 3.0]]), visiting.tensor([[4.0, math.inf, math.nan]])]]}
    with page({"logits": lambda _: answer}) as visitor, browser(timeout=5, visit=visitor.visit) as found:
        (spans,) = found.logits(files["a"], [ROW])
    np.testing.assert_array_equal(spans, [[1, 4], [2, math.inf], [3, math.nan]])


def test_a_sustained_measurement_has_a_median_per_minute(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 25))
    monkeypatch.setattr("compress.benchmark.browser.device.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    speeds = iter([1.0, 3.0, 7.0, 7.0])
    answers = {"time": lambda _: {"ms": [next(speeds)] * 4, "heap_mb": 1.0}}
    with page(answers) as visitor, browser(timeout=5, visit=visitor.visit) as found:
        setting = Setting(2, 1, 8)
        (curve,) = found.sustain({"a": files["a"]}, setting, seconds=102)
    assert (curve.name, curve.setting, curve.minutes, curve.temperatures) == ("a", setting, (2.0, 7.0), (None, None))
    assert [each["seconds"] for each in visitor.said("time")] == [5.0, 5.0, 5.0, 2.0]


def test_what_was_measured_while_hidden_is_flagged(files: dict[str, Path]) -> None:
    with page({}, "time") as visitor, browser(timeout=5, visit=visitor.visit) as found:
        (latency,) = found.race({"a": files["a"]}, [BRIEF], rounds=2, runs=2)
        assert (latency.noisy, latency.noise[:19]) == (True, "the page was hidden")
        with pytest.raises(DeviceError, match=r"a: after 0 s the page was hidden .* with it in front"):
            found.sustain({"a": files["a"]}, BRIEF, seconds=5)


def test_facts_are_what_the_browser_tells() -> None:
    with page() as visitor, browser(timeout=5, visit=visitor.visit) as found:
        assert found.name == "browser"
        assert found.facts() == {
            "device": "Phone",
            "cpu": "arm 64 bit",
            "cores": "8",
            "instructions": "simd",
            "memory": "4 GB or more",
            "system": "Android 15",
            "browser": "Stand-in 1.0",
            "runtime": f"onnxruntime-web {device.VERSION}, WebAssembly",
            "clock": "steps of 0.005 ms",
            "MB": "of WebAssembly memory",
        }


def test_texts_from_the_page_cannot_command_a_terminal() -> None:
    evil = {**KNOWN, "agent": "\x1b]0;owned\x07\x1b[2J" + "x" * 5000 + "\n\u202e"}
    with page({"known": lambda _: evil}) as visitor, browser(timeout=5, visit=visitor.visit) as found:
        agent = found.facts()["browser"]
    assert agent.isprintable()
    assert agent.startswith("]0;owned [2Jxxx")
    assert len(agent) == 600


def test_nobody_comes(said: list[str]) -> None:
    links: list[str] = []
    with (
        pytest.raises(DeviceError, match=r"nobody opened the link in 0 s\. Open it in a browser on this machine, or"),
        browser(timeout=0.1, say=said.append, visit=links.append),
    ):
        pytest.fail("nobody is no device")
    assert said == []
    with pytest.raises(ConnectionRefusedError):
        request(links[0], "/")


@pytest.mark.parametrize("error", [KeyboardInterrupt, DeviceError])
def test_a_command_that_ends_early_tells_the_page(error: type[BaseException]) -> None:
    with page() as visitor, pytest.raises(error), browser(timeout=5, visit=visitor.visit):
        raise error
    assert visitor.heard[-1]["say"].startswith("Stopped: ")


def test_a_page_that_leaves_is_an_error_at_once(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SILENCE", 60.0)
    with (
        page() as gone,
        pytest.raises(DeviceError, match=r"left in the middle .* keep the page in front"),
        browser(timeout=5, visit=gone.visit) as found,
    ):
        gone.answers = {"time": lambda _: gone.leave()}
        found.race(files, [BRIEF], rounds=2, runs=1)
    with pytest.raises(ConnectionRefusedError):
        request(gone.link, "/")


def test_a_phone_that_is_lost_is_missed(files: dict[str, Path]) -> None:
    with (
        page({"time": lambda _: None}) as lost,
        pytest.raises(DeviceError, match=r"nothing heard .* phone was locked"),
        browser(timeout=5, visit=lost.visit) as found,
    ):
        found.race(files, [BRIEF], rounds=2, runs=1)
    with pytest.raises(ConnectionRefusedError):
        request(lost.link, "/")


def test_a_step_that_never_ends_is_an_error(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LONGEST", 0.5)
    monkeypatch.setattr(server, "SILENCE", 60.0)
    ended = threading.Event()

    def stuck(_: Mapping[str, Any]) -> dict[str, Any]:
        ended.wait(10)
        return {"ms": [1.0], "heap_mb": 1.0}

    with (
        page({"time": stuck}) as hung,
        pytest.raises(DeviceError, match="has not finished one step in"),
        browser(timeout=5, visit=hung.visit) as found,
    ):
        try:
            found.race(files, [BRIEF], rounds=2, runs=1)
        finally:
            ended.set()


def test_what_the_page_says_went_wrong_comes_back_and_the_page_stays(files: dict[str, Path]) -> None:
    refused = {"open": lambda told: {"error": "no kernel\n\x1b[31m for Foo"} if told["worker"] == "b" else OPENED}
    with page(refused) as visitor, browser(timeout=5, visit=visitor.visit) as found:
        with pytest.raises(DeviceError, match=r"^browser: b at 1 thread, batch 1, 8 tokens: no kernel \[31m for Foo$"):
            found.race(files, [BRIEF], rounds=2, runs=1)
        assert len(found.race({"a": files["a"]}, [BRIEF], rounds=2, runs=1)) == 1


OPENED = {"init_ms": 1.0, "first_ms": 1.0, "forwards": 1}
NONSENSE = [
    {"ms": [], "heap_mb": 1.0},
    {"ms": [1.0, -1.0], "heap_mb": 1.0},
    {"ms": [math.nan], "heap_mb": 1.0},
    {"ms": [1.0]},
    {},
]


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_times_that_cannot_be_are_refused(files: dict[str, Path], nonsense: dict[str, Any]) -> None:
    with (
        page({"time": lambda _: nonsense}) as visitor,
        browser(timeout=5, visit=visitor.visit) as found,
        pytest.raises(DeviceError, match="the page sent an invalid answer"),
    ):
        found.race({"a": files["a"]}, [BRIEF], rounds=2, runs=1)


def test_rows_that_are_missing_are_missed(files: dict[str, Path]) -> None:
    with (
        page({"logits": lambda _: {"rows": []}}) as visitor,
        browser(timeout=5, visit=visitor.visit) as found,
        pytest.raises(DeviceError, match="answered 0 of 1 rows"),
    ):
        found.logits(files["a"], [ROW])


def test_threads_need_an_isolated_page(files: dict[str, Path]) -> None:
    lone = {"known": lambda _: {**KNOWN, "isolated": False}}
    with page(lone) as visitor, browser(timeout=5, visit=visitor.visit) as found:
        for ask in (
            lambda: found.race(files, [BRIEF, Setting(2, 1, 8)], rounds=2, runs=1),
            lambda: found.sustain(files, Setting(2, 1, 8), seconds=1),
        ):
            with pytest.raises(DeviceError, match=r"2 threads: this page may have one only.* --threads 1"):
                ask()
        assert visitor.said("open") == []
        assert len(found.race(files, [BRIEF], rounds=2, runs=1)) == 2
        assert found.facts()["threads"] == "one only: the page is not isolated"


def test_webgpu_that_is_not_there_is_an_error_not_a_slower_figure(files: dict[str, Path]) -> None:
    with (
        page() as visitor,
        pytest.raises(DeviceError, match="gives the page no WebGPU"),
        browser(timeout=5, visit=visitor.visit, webgpu=True),
    ):
        pytest.fail("no device without what was asked for")
    gpu = {"known": lambda _: {**KNOWN, "gpu": "arm valhall"}}
    with page(gpu) as visitor, browser(timeout=5, visit=visitor.visit, webgpu=True) as found:
        found.race({"a": files["a"]}, [BRIEF], rounds=2, runs=1)
        assert found.facts()["gpu"] == "arm valhall"
        assert found.facts()["runtime"].endswith(", WebGPU")
    assert {each["provider"] for each in visitor.said("open")} == {"webgpu"}


def test_what_a_page_cannot_run_is_refused_at_home(files: dict[str, Path], tmp_path: Path) -> None:
    with page() as visitor, browser(timeout=5, visit=visitor.visit) as found:
        with pytest.raises(DeviceError, match="2 rounds"):
            found.race(files, [BRIEF], rounds=1, runs=1)
        with pytest.raises(ExportError, match="no such file"):
            found.race({"x": tmp_path / "x.onnx"}, [BRIEF], rounds=2, runs=1)
        with pytest.raises(DeviceError, match="ONNX files only"):
            found.race({"x": tmp_path / "x.xml"}, [BRIEF], rounds=2, runs=1)
        value = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, [1])
        graph = helper.make_graph([helper.make_node("Identity", ["pixels"], ["y"])], "g", [value], [value])
        onnx.save(helper.make_model(graph), tmp_path / "vision.onnx")
        with pytest.raises(DeviceError, match=r"inputs pixels are not among .* text encoder"):
            found.logits(tmp_path / "vision.onnx", [ROW])
    assert visitor.said("open") == []


def test_the_link_is_shown_and_as_a_code_for_phones(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "qr_code", lambda link: f"code of {link}")
    monkeypatch.setattr(
        device, "serve_site", lambda site, lan: _served("http://10.0.0.1:1/#t" if lan else "http://x/#t")
    )
    for lan in (False, True):
        with (
            pytest.raises(DeviceError, match="this machine's network, if no firewall" if lan else "with --lan"),
            browser(lan=lan, timeout=0.01, say=said.append),
        ):
            pass
    assert [each.split(": ")[-1] for each in said[:3]] == ["http://x/#t", "http://10.0.0.1:1/#t", said[2]]
    assert said[2] == "code of http://10.0.0.1:1/#t"
    assert "one thread only" in said[3]


class _served:  # noqa: N801  # stands for the context manager of that name
    def __init__(self, link: str) -> None:
        self.link = link

    def __enter__(self) -> str:
        return self.link

    def __exit__(self, *_: object) -> None:
        pass


def test_without_segno_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "segno", None)
    assert device.qr_code("http://10.0.0.1:1/#t") == "For a QR code of this link: pip install 'segno>=1.6'"


def test_a_code_is_square_and_of_the_link() -> None:
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


def test_the_token_is_in_no_request(said: list[str]) -> None:
    """What follows '#' is not sent: neither a proxy's log nor a preview of the link has it."""
    with page() as visitor, browser(timeout=5, say=said.append, visit=visitor.visit):
        url = urlsplit(visitor.link)
    assert (url.path, url.query) == ("/", "")
    assert len(url.fragment) == 43
    assert url.fragment not in visitor.base


def test_several_visitors_are_measured_in_turn_each_by_a_link_of_its_own(files: dict[str, Path]) -> None:
    said, links = list[str](), list[str]()
    with page() as first, page() as second:
        waiting = [first, second]

        def say(line: str) -> None:
            said.append(line)
            if found := re.search(r"http://\S+", line):
                links.append(found[0])
                waiting.pop(0).visit(found[0])

        results = list(
            bench_visitors(
                [files["a"]], 2, device=DeviceOptions(device="browser", timeout=5), seq=[8], rounds=2, runs=2, say=say
            )
        )
    assert [result.device for result in results] == ["browser 1", "browser 2"]
    assert [len(result.latencies) for result in results] == [1, 1]
    assert len(set(links)) == 2
    assert [line for line in said if line.endswith("of 2")] == ["browser 1 of 2", "browser 2 of 2"]


def test_visitors_are_of_browsers(files: dict[str, Path]) -> None:
    with pytest.raises(DeviceError, match="--visitors 2: does not apply to --device local"):
        list(bench_visitors([files["a"]], 2, device=DeviceOptions()))
