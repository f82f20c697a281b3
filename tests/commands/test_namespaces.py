"""Two machines as torchrun sees them: network namespaces with addresses, host names, files and caches of their own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import equal

from tests import children, tiny

ADDRESS = "10.231.55."
NAMES = tuple(f"compress-{os.getpid()}-node{number}" for number in (0, 1))  # another suite may run on this machine
STEPS = 150


@pytest.fixture
def network() -> Iterator[None]:
    if not hasattr(os, "geteuid") or os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    with ExitStack() as made:
        for name in NAMES:
            subprocess.run(["ip", "netns", "add", name], check=True)
            made.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
            made.callback(end_machine, name, signal.SIGKILL)
        ends = ["type", "veth", "peer", "name", "link0", "netns", NAMES[1]]
        subprocess.run(["ip", "link", "add", "link0", "netns", NAMES[0], *ends], check=True)
        for number, name in enumerate(NAMES):
            for words in (
                ["address", "add", f"{ADDRESS}{number + 1}/24", "dev", "link0"],
                ["link", "set", "link0", "up"],
                ["link", "set", "lo", "up"],
            ):
                subprocess.run(["ip", "-n", name, *words], check=True)
        yield


def launch(place: Path, number: int, arguments: list[str]) -> "subprocess.Popen[str]":
    """Start a machine's torchrun, in a session of its own."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESS}1:29555", "--rdzv-id", "test"]
    rendezvous += ["--rdzv-conf", "is_host=" + str(int(number == 0)), "--local-addr", f"{ADDRESS}{number + 1}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *rendezvous]
    machine = ["ip", "netns", "exec", NAMES[number], "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"']
    environment = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "link0"}
    with (place / "said.txt").open("a", encoding="utf-8") as output:
        return subprocess.Popen(
            [*machine, NAMES[number], *torchrun, "-m", "compress", *arguments],
            env={**os.environ, **environment, "COMPRESS_HOME": str(place / "home")},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def end_machine(name: str, end: signal.Signals) -> None:
    """End everything that runs on a machine."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
    for process in map(int, listed.stdout.split()):
        with suppress(ProcessLookupError):
            os.kill(process, end)


def steps(run: Path) -> int:
    """The steps of the last stage so far."""
    log = run / "log.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    return max((entry["step"] for entry in entries if entry["stage"] == "general"), default=0)


def wait_for_steps(count: int, run: Path, machines: list["subprocess.Popen[str]"]) -> None:
    patience = time.monotonic() + children.PATIENCE
    while steps(run) < count:
        assert all(machine.poll() is None for machine in machines), said(run.parents[1])
        assert time.monotonic() < patience, said(run.parents[1])
        time.sleep(0.05)


def said(folder: Path) -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("*/said.txt")))


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_machine_that_ends_and_comes_back(network: None, tmp_path: Path, end: signal.Signals) -> None:
    """The weights are those of two processes of one machine that nobody ended; the second machine never writes a
    run."""
    given = tmp_path / "given"
    given.mkdir()
    text = "\n\n".join(["the story was sharp but slow . a film is never quite dull ."] * 40)
    (given / "corpus.txt").write_text(text, encoding="utf-8")
    tiny.checkpoint(given / "teacher")
    settings = {"steps": STEPS, "batch": 8, "micro_batch": 4, "max_length": 32, "evaluate": 0}
    settings |= {"checkpoint": 5}
    command = ["pretrain", "--recipe", "distilbert-general", "--precision", "fp32", "--set=teacher_lm.steps=4"]
    command += ["--set=teacher_lm.max_length=32", "--set=teacher_lm.batch=8"]
    command += [f"--set=stages.0.{name}={value}" for name, value in settings.items()]

    def arguments(place: Path) -> list[str]:
        return [*command, "--teacher", str(place / "teacher"), "--corpus", str(place / "corpus.txt")]

    whole = children.start_together(arguments(given), given / "run", processes=2)
    assert [children.finish(child) for child in whole] == [0, 0], children.said(given / "run")
    places = [tmp_path / name for name in NAMES]
    for place in places:
        shutil.copytree(given, place, ignore=shutil.ignore_patterns("run*"))
    first = places[0] / "run"
    machines = [
        launch(place, number, [*arguments(place), "--out", str(place / "run")]) for number, place in enumerate(places)
    ]
    wait_for_steps(11, first, machines)
    end_machine(NAMES[1], end)
    ended = [machine.wait(children.PATIENCE) for machine in machines]
    assert ended == [1, -signal.SIGKILL if end is signal.SIGKILL else 1], "torchrun's own"
    says = "another process of this launch has ended" if end is signal.SIGKILL else "interrupted"
    assert says in said(tmp_path)
    assert "/compress/cli/" not in said(tmp_path), "a traceback of ours"
    shutil.rmtree(places[1] / "home")
    again = [
        launch(place, number, [*arguments(place), "--out", str(place / "run"), "--resume"])
        for number, place in enumerate(places)
    ]
    assert [machine.wait(children.PATIENCE) for machine in again] == [0, 0], said(tmp_path)
    ours, theirs = (load_file(run / "student" / "model.safetensors") for run in (first, given / "run"))
    assert all(equal(ours[name], theirs[name]) for name in theirs)
    assert not (places[1] / "run").exists()
