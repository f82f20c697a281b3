"""End to end in a real browser, which is only given the link: what it measures, answers, and what becomes of it."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from compress.benchmark.browser import server
from compress.benchmark.browser.device import WEB_PACKAGE, Browser, browser, fetch_tarball
from compress.exporters.int8 import quantize_dynamic
from compress.exporters.onnx import to_onnx
from compress.exporters.session import open_session
from compress.records.latency import DeviceError, Setting
from tests import tiny

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
ROWS = [
    {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": [0] * len(ids)}
    for ids in ([2, *range(5, 5 + length), 3] for length in range(1, 40))
]


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """onnxruntime-web as npm gets it, once for all tests here."""
    if not shutil.which("npm"):
        pytest.skip("needs npm")
    folder = tmp_path_factory.mktemp("npm")
    try:
        return fetch_tarball(folder)
    except DeviceError as error:
        pytest.skip(f"needs {WEB_PACKAGE}: {error}")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    to_onnx(tiny.bert(layers=2, hidden=64), folder / "model.onnx")
    quantize_dynamic(folder / "model.onnx", folder / "small.onnx")
    return {"fp32": folder / "model.onnx", "int8": folder / "small.onnx"}


@contextmanager
def chromium(profile: Path, *flags: str) -> Iterator[tuple[Callable[[str], None], list[subprocess.Popen[bytes]]]]:
    """What opens a link in a Chromium of its own, and the processes that are."""
    program = shutil.which("chromium")
    if not program:
        pytest.skip("needs chromium")
    running: list[subprocess.Popen[bytes]] = []

    def visit(link: str) -> None:
        command = [program, *FLAGS, *flags, f"--user-data-dir={profile}", link]
        silent = subprocess.DEVNULL
        running.append(subprocess.Popen(command, stdout=silent, stderr=silent, start_new_session=True))

    try:
        yield visit, running
    finally:
        for process in running:
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """The whole family: a browser is many processes."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def device(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for the tests that leave it as they found it."""
    with pytest.MonkeyPatch.context() as patch, chromium(tmp_path_factory.mktemp("profile")) as (visit, _):
        patch.setenv("COMPRESS_HOME", str(tmp_path_factory.mktemp("home")))
        with browser(timeout=60, say=lambda _: None, visit=visit, assets=runtime) as found:
            yield found


def test_it_races_files_on_one_thread_and_on_two(device: Browser, files: dict[str, Path]) -> None:
    settings = [Setting(1, 1, 16), Setting(2, 2, 16)]
    found = device.race(files, settings, rounds=2, runs=3)
    assert [(each.name, each.setting) for each in found] == [(name, s) for s in settings for name in files]
    for latency in found:
        assert latency.runs in {3, 6}  # 3 where two passes disagree, as they may on a busy machine
        assert 0 < latency.min_ms <= latency.p50_ms <= latency.p95_ms
        assert latency.init_ms > 0
        assert latency.first_ms > 0
        assert latency.peak_rss_mb is not None
        assert latency.peak_rss_mb > 16  # the runtime itself
        assert "hidden" not in latency.noise


def test_logits_equal_those_of_python(device: Browser, files: dict[str, Path]) -> None:
    """In int8 a rounding now and then falls the other way, with and without VNNI, and moves its row; over all rows that
    is a small part of what int8 itself changes. Which row it is, and how far it goes, is up to the weights."""
    native = {name: _answers(path) for name, path in files.items()}
    found = {name: np.array(device.logits(path, ROWS)) for name, path in files.items()}
    assert np.ptp(native["fp32"]) > 0.1  # so that agreement means something
    np.testing.assert_allclose(found["fp32"], native["fp32"], atol=1e-5)
    moved, rounding = found["int8"] - native["int8"], native["int8"] - native["fp32"]
    assert np.sqrt(np.square(moved).mean()) < 0.2 * np.sqrt(np.square(rounding).mean())
    assert np.abs(moved).max() < np.abs(rounding).max()
    sure = np.abs(np.diff(native["int8"])).ravel() > 2 * np.abs(moved).max()
    assert sure.any()
    assert (np.argmax(found["int8"], 1) == np.argmax(native["int8"], 1))[sure].all()


def _answers(path: Path) -> np.ndarray:
    session = open_session(path)
    return np.array([session.run(None, {key: np.asarray([ids]) for key, ids in row.items()})[0][0] for row in ROWS])


def test_it_keeps_measuring_for_a_while(device: Browser, files: dict[str, Path]) -> None:
    (curve,) = device.sustain({"int8": files["int8"]}, Setting(1, 1, 8), seconds=0.5)
    assert len(curve.minutes) == 1
    assert curve.minutes[0] > 0


def test_facts_describe_the_browser(device: Browser) -> None:
    facts = device.facts()
    assert "Chrome/" in facts["browser"]
    assert "threads" not in facts  # isolated: as many as asked for
    assert facts["cores"].isdigit()
    assert facts["system"] == "Linux" or facts["system"].startswith("Linux ")
    assert device.browser_facts.simd
    assert 0 < device.browser_facts.timer_ms < 0.05


def test_a_file_that_it_cannot_run_is_an_error_and_it_goes_on(
    device: Browser, files: dict[str, Path], tmp_path: Path
) -> None:
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "tokens"])
    table = helper.make_tensor("table", TensorProto.FLOAT, [4, 2], [0.0] * 8)
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["x"]), helper.make_node("Nowhere", ["x"], ["y"])]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [ids], [out], [table])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "foreign.onnx")
    with pytest.raises(DeviceError, match=r"^browser: foreign at 1 thread, batch 1, 8 tokens: .*Nowhere"):
        device.race({"foreign": tmp_path / "foreign.onnx"}, [Setting(1, 1, 8)], rounds=2, runs=1)
    with pytest.raises(DeviceError, match=r"^browser: fp32 at 1 thread, batch 2, 65 tokens: .*65"):
        device.race(files, [Setting(1, 2, 65)], rounds=2, runs=1)  # the model has 64 positions
    assert len(device.logits(files["fp32"], ROWS[:1])) == 1


def test_over_the_network_it_measures_with_one_thread(runtime: Path, files: dict[str, Path], tmp_path: Path) -> None:
    try:
        server.lan_address()
    except DeviceError as error:
        pytest.skip(str(error))
    with (
        chromium(tmp_path / "profile") as (visit, _),
        browser(lan=True, timeout=60, say=lambda _: None, visit=visit, assets=runtime) as found,
    ):
        assert found.facts()["threads"] == "one only: the page is not isolated"
        assert len(found.race(files, [Setting(1, 1, 8)], rounds=2, runs=2)) == 2


def test_a_browser_that_dies_is_missed(
    runtime: Path, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SILENCE", 1.0)
    monkeypatch.setattr(server, "HOLD", 0.25)
    with (
        chromium(tmp_path / "profile") as (visit, running),
        pytest.raises(DeviceError, match="nothing heard from the page"),
        browser(timeout=60, say=lambda _: None, visit=visit, assets=runtime) as found,
    ):
        kill(running[0])
        found.race(files, [Setting(1, 1, 8)], rounds=2, runs=2)
