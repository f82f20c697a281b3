"""The templates for schedulers start every process with its rank, continue a run, and end as the scheduler expects it:
with stand-ins for the scheduler's commands."""

import os
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from compress.config.loader import folder

TEMPLATES = folder().parent / "docs" / "templates"
pytestmark = pytest.mark.skipif(not TEMPLATES.is_dir(), reason="the documents are in a checkout only")
SRUN = """#!/bin/bash
shift
worst=0
for rank in 0 1 2 3; do
    SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 2)) "$@" || worst=$?
done
exit $worst
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf 'node0\\nnode1\\n'; else echo "$@" >> "$LOG"; fi
"""
PROGRAM = """#!/bin/bash
echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR $@" >> "$LOG"
exit $CODE
"""
TORCHRUN = """#!/bin/bash
trap 'echo ended >> "$LOG"; exit 1' TERM
echo "$@" >> "$LOG"
for _ in $(seq $TICKS); do sleep 0.1; done
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "compress": PROGRAM, "torchrun": TORCHRUN}.items():
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    own = {"PATH": f"{programs}:{os.environ['PATH']}", "LOG": str(tmp_path / "log"), "RUN": str(tmp_path / "run")}
    own |= {"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]"}
    return own | {"USER": "me", "CODE": "0", "NODES": "2", "GPUS": "8", "MASTER": "a.b", "JOB_COMPLETION_INDEX": "1"}


def lines(environment: dict[str, str]) -> list[str]:
    return Path(environment["LOG"]).read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(("code", "began"), [(0, False), (143, True), (2, True)])
def test_slurm(environment: dict[str, str], code: int, began: bool) -> None:
    """Only what was ended by SIGTERM is queued again."""
    run = Path(environment["RUN"])
    if began:
        run.mkdir()
        (run / "run.json").touch()
    ended = subprocess.run(["bash", TEMPLATES / "slurm.sh"], env=environment | {"CODE": str(code)}, check=False)
    assert ended.returncode == code
    given = f"node0 distill --out {run} --teacher bert-base --recipe tinybert --data glue/sst2{' --resume' * began}"
    started = [f"{rank}/4 {rank % 2}/2 {given}" for rank in range(4)]
    assert lines(environment) == started + ["requeue 7"] * (code == 143)


@pytest.mark.parametrize("evicted", [False, True])
def test_kubernetes(environment: dict[str, str], evicted: bool) -> None:
    """A pod that is evicted ends with 143, which the policy of failures ignores, once torchrun has ended."""
    service, job = yaml.safe_load_all((TEMPLATES / "kubernetes.yaml").read_text(encoding="utf-8"))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    assert job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [143]
    ticks = {"TICKS": "300" if evicted else "1"}
    pod = subprocess.Popen([*container["command"], *container["args"]], env=environment | ticks)
    if evicted:
        patience = time.monotonic() + 20
        while not Path(environment["LOG"]).exists() and time.monotonic() < patience:
            time.sleep(0.05)
        pod.terminate()
    assert pod.wait(30) == (143 if evicted else 0)
    given = "--nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr a.b --master-port 29500 -m compress distill"
    given += f" --teacher bert-base --recipe tinybert --data glue/sst2 --out {environment['RUN']}"
    assert lines(environment) == [given] + ["ended"] * evicted


def test_skypilot_has_a_command_that_bash_reads(tmp_path: Path) -> None:
    template = yaml.safe_load((TEMPLATES / "skypilot.yaml").read_text(encoding="utf-8"))
    subprocess.run(["bash", "-n", "-c", template["run"]], check=True)
