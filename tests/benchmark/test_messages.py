"""What is refused before and while measuring, in the words of tests/messages/benchmark.txt."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from compress.benchmark import android, arguments, jobs, ssh
from compress.benchmark.browser import device as pages
from compress.benchmark.browser.device import BrowserModel, browser
from compress.benchmark.browser.server import parse_answer
from compress.benchmark.devices import open_device
from compress.benchmark.race import race_files
from compress.benchmark.ssh import Address
from compress.commands.bench import bench, bench_visitors, choose_formats
from compress.config.options import DeviceOptions
from compress.exporters.onnx import to_onnx
from compress.records.bench_result import BenchResult
from compress.records.latency import Setting
from tests import messages, tiny
from tests.benchmark.test_adb import install

Calls = dict[str, Callable[[], object]]
WORDS = {
    "--seq": (partial(arguments.parse_numbers, "seq"), ["", "two", "1,", "1.5", "-1", "²"]),
    "--sustain": (arguments.parse_duration, ["5", "0m", "-1m", "5 minutes", ""]),
    "--affinity": (arguments.parse_cpus, ["a", "3-1", "1,,2", "f0", "-"]),
    "--max-slower": (partial(arguments.parse_percentage, "max-slower"), ["5", "0.05", "-5%", "%", "five%"]),
    "ssh:": (Address.parse, ["-oProxyCommand=x", "me@-x", "pi:port", "a b", "pi:", "::1", "@pi"]),
    "device": (partial(open_device, say=print), ["adb:", "ssh", "local:x", "phone", ""]),
}
PHONES = {
    "none": {}, "two": {"A": "device", "B": "device"}, "unauthorized": {"A": "unauthorized"},
    "offline": {"A": "offline"}, "no permissions": {"A": "no permissions (user in plugdev group)"},
    "another state": {"A": "host"},
}  # fmt: skip
LOST = {
    "Permission denied (publickey).": 255, "Host key verification failed.": 255, "Connection refused": 255,
    "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @": 255, "Could not resolve hostname pi": 255,
    "Broken pipe": 255, "python3: not found": 127, "mktemp: No space left": 73, "Killed": 9, "": None,
}  # fmt: skip
SESSIONS = {"not JSON": "{", "no object": "[]"}


def words() -> Calls:
    return {f"{name} {text!r}": partial(parse, text) for name, (parse, texts) in WORDS.items() for text in texts} | {
        f"setting without {name}": partial(Setting, **{name: 0}) for name in ("threads", "batch", "seq")
    }


def phones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    def connect(state: str, name: str) -> object:
        place = folder / state
        place.mkdir()
        install(place, monkeypatch, devices=PHONES[state])
        return open_device(name, native=program, say=print)

    program = folder / "onnxruntime_perf_test"
    program.touch()
    (folder / "perf").touch()
    by_name = partial(android.phone_program, android.Adb("A", 1), affinity=(), say=print)
    return {
        **{f"phones: {state}": partial(connect, state, "adb") for state in PHONES},
        "phone that is not there": lambda: open_device("adb:C", say=print),
        "affinity of a phone's browser": lambda: open_device("adb", affinity=(1,), say=print),
        "no such program": lambda: by_name(binary=folder / "benchmark_model"),
        "program of another name": lambda: by_name(binary=folder / "perf"),
        "output without figures": lambda: android.parse_run("onnxruntime_perf_test", "a\nb\nc\nAborted\n"),
        "output of an older build": lambda: android.parse_run("benchmark_model", "count=15 min=32825 max=49060 avg=3"),
    }


def browsers(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    def npm(script: str, seconds: float = 600) -> object:
        program = folder / "bin" / "npm"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}")
        monkeypatch.setattr(pages, "NPM_TIMEOUT", seconds)
        return pages.load_runtime()

    value = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["pixels"], ["y"])], "g", [value], [value])
    onnx.save(helper.make_model(graph), folder / "vision.onnx")
    (folder / "other.tgz").write_bytes(b"")
    (folder / "dist").mkdir()
    lone: Callable[..., Any] = partial(parse_answer, kind=pages.RoundTimes, about="a at 1 thread")
    return {
        "npm fails": lambda: npm("echo 'npm error network' >&2; exit 7"),
        "npm writes nothing": lambda: npm("exit 0"),
        "npm hangs": lambda: npm("while :; do :; done", 0.3),
        "tarball that is not there": lambda: pages.load_runtime(folder / "absent.tgz"),
        "another tarball": lambda: pages.load_runtime(folder / "other.tgz"),
        "folder without the runtime": lambda: pages.load_runtime(folder / "dist"),
        "another format for a browser": lambda: BrowserModel.load(folder / "x.xml"),
        "no text encoder": lambda: BrowserModel.load(folder / "vision.onnx"),
        "row without an input": lambda: BrowserModel.load(model).encode_row({"input_ids": [1]}),
        "the page reports an error": lambda: lone({"error": "no kernel\n\x1b[31m for Foo"}),
        "the page reports nothing": lambda: lone({"error": ""}),
        "the page answers nonsense": lambda: lone({"ok": {"ms": [1.0, -1.0], "heap_mb": 1.0}}),
    }


def no_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    def without_path(name: str) -> object:
        monkeypatch.setenv("PATH", str(folder / "none"))
        return open_device(name, say=print)

    def without_npm() -> object:
        monkeypatch.setenv("PATH", "")
        return pages.load_runtime()

    def nobody(*, lan: bool) -> object:
        monkeypatch.setattr(pages, "load_runtime", lambda *_, **__: [Path("ort.mjs")])
        monkeypatch.setattr(pages, "qr_code", lambda link: "code")
        return browser(lan=lan, timeout=0.05, say=lambda _: None)

    return {
        "no adb": lambda: without_path("adb"), "no ssh": lambda: without_path("ssh:pi"), "no npm": without_npm,
        "nobody opens the link": lambda: nobody(lan=False),
    }  # fmt: skip


def files(folder: Path, model: Path) -> Calls:
    def openvino(session: str | None, *, weights: bool = True) -> object:
        (folder / "a.xml").write_text("<net/>")
        if weights:
            (folder / "a.bin").touch()
        if session is not None:
            (folder / "a.session.json").write_text(session)
        return jobs.timing_job(folder / "a.xml")

    def result(content: str) -> object:
        (folder / "x.json").write_text(content)
        return BenchResult.from_json(folder / "x.json")

    (folder / "model.bin").touch()
    outside = folder / "outside.onnx"
    onnx.save_model(onnx.load(model), outside, save_as_external_data=True, location="weights", size_threshold=0)
    rows: Any = {"input_ids": [2], "prompt_length": 1}
    return {
        "OpenVINO without weights": lambda: openvino(None, weights=False),
        "OpenVINO without a vocabulary": lambda: openvino(None),
        **{f"OpenVINO properties, {name}": partial(openvino, session) for name, session in SESSIONS.items()},
        "logits of .tflite": lambda: jobs.logits_job(folder / "a.tflite"),
        "weights elsewhere": lambda: BrowserModel.load(outside),
        "no such file": lambda: jobs.timing_job(folder / "absent.onnx"),
        "no such program file": lambda: jobs.timing_job(folder / "model.pte"),
        "more threads than cores": lambda: jobs.check_settings("local", "2 of 4", {}, [Setting(threads=3)]),
        "more tokens than positions": lambda: jobs.check_settings("local", "", {"m": model}, [Setting(seq=4000)]),
        "prompts on a phone": lambda: jobs.refuse_prompt_length(rows, "m"),
        "file given twice": lambda: arguments.list_files([Path("x.onnx"), Path("x.onnx")]),
        "another ending": lambda: arguments.list_files([folder / "model.bin"]),
        "one round": lambda: race_files({"x": model}, [Setting()], 1, 1, pytest.fail, say=print),
        "too many tokens": lambda: Setting(1, 10**9, 128),
        "result without JSON": lambda: result("{"),
        "result of another format": lambda: result('{"format": 2}'),
        "result without fields": lambda: result('{"format": 1}'),
    }


def commands(bundle: Path) -> Calls:
    given: dict[str, Any] = {"precision": "", "calibrated": False, "rows": 1}
    quick: dict[str, Any] = {"rounds": 2, "runs": 1}
    return {
        "--formats misspelt": lambda: choose_formats("onnx,onxn", **given),
        "--formats coreml": lambda: choose_formats("onnx,coreml", **given),
        "--formats npu without data": lambda: choose_formats("npu", **given),
        "--formats ort in a precision": lambda: choose_formats("ort", **{**given, "precision": "w8a16"}),
        "--formats on a browser": lambda: bench([bundle], formats="onnx", device=DeviceOptions(device="browser")),
        "--seq above the maximum": lambda: bench([bundle], formats="onnx", seq=(17,), **quick),
        "--formats that cannot be exported": lambda: bench([bundle], formats="onnx", precision="w8", **quick),
        "--data without --formats": lambda: bench([bundle], data="intents", **quick),
        "--precision that is not there": lambda: arguments.list_files([bundle], "int9"),
        "--native elsewhere": lambda: open_device("local", native=bundle, say=print),
        "--visitors elsewhere": lambda: list(bench_visitors(pytest.fail, 2, device="local", say=print)),
    }


def connections() -> Calls:
    where = Address("me@pi", "22")
    return {
        f"ssh ends with {code}, {output!r}": lambda code=code, output=output: ssh._explain_loss(
            code, output, where, "python3", 60.0
        )
        for output, code in LOST.items()
    }


@pytest.mark.skipif(os.name == "nt", reason="its programs are no shell scripts")
def test_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model.onnx"
    to_onnx(tiny.bert(layers=1), model)
    bundle = tiny.bundle(tmp_path / "bundle").path
    calls = words() | files(tmp_path, model) | commands(bundle) | connections()
    calls |= phones(tmp_path, monkeypatch) | browsers(tmp_path, model, monkeypatch) | no_program(tmp_path, monkeypatch)
    messages.check("benchmark", calls, {str(tmp_path): "TMP"})
