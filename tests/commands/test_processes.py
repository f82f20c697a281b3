"""Several processes are one: `torchrun --nproc_per_node 2 -m compress distill ...` trains what one process would.

A stage's batch is that of all processes together. `accelerate launch --multi_gpu --num_processes 2 -m compress ...` is
the same; with `--cpu` accelerate starts one process only, whatever number it is given.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from compress.data.collate import LengthGrouped, TokenBudget
from compress.errors import RunError
from compress.training.stage import check_processes
from tests import children, learning, tiny

STAGES = ("teacher", "intermediate", "prediction")


def command(folder: Path, *, dropout: bool) -> list[str]:
    """100 rows of unequal lengths: the last of seven batches of 16 has to be filled."""
    folder.mkdir()
    config = {} if dropout else learning.NO_DROPOUT
    teacher = tiny.checkpoint(folder / "teacher", tiny.bert(initializer_range=0.1, **config).bert)
    recipe, data = tiny.recipe(folder), tiny.reviews(folder / "data", train=100)
    return ["distill", "--teacher", teacher, "--recipe", recipe, "--data", data, "--precision", "fp32"]


def together(arguments: list[str], out: Path, accident: children.Accident = children.does_not_ship) -> None:
    started = children.start_together(arguments, out, accident, processes=2)
    ended = [children.finish(child) for child in started]
    assert ended == [0, 0], children.said(out)


def difference(one: Path, other: Path, stages: Sequence[str] = STAGES) -> float:
    """The largest of any weight of any stage."""
    file = Path("model", "model.safetensors")
    pairs = [[load_file(run / "stages" / stage / file) for run in (one, other)] for stage in stages]
    return max((ours[name] - theirs[name]).abs().max().item() for ours, theirs in pairs for name in theirs)


def test_two_processes_train_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 x 8 is 1 x 16, and 2 x 4 accumulated twice: losses per example, per token and on relations of tokens.

    The gradient of the keys' biases is zero but for rounding, which Adam blows up to whole steps unless eps is larger.
    """
    arguments = command(tmp_path / "given", dropout=False)
    stages = ("teacher", "stages.0", "stages.1")
    arguments += [f"--set={stage}.{number}" for number in ("steps=8", "eps=1e-4") for stage in stages]
    arguments += ["--gate", "warn"]
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home-of-one"))
    assert children.run(arguments, tmp_path / "one", children.does_not_ship) == 0, children.said(tmp_path / "one")
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home-of-two"))
    together([*arguments, "--set=stages.1.micro_batch=4"], tmp_path / "two")
    assert difference(tmp_path / "one", tmp_path / "two") < 1e-6


def test_killed_processes_resume_exactly(tmp_path: Path) -> None:
    """Within the second epoch; each process has random numbers of its own for dropout. The teacher is kept."""
    arguments = command(tmp_path / "given", dropout=True)
    together(arguments, tmp_path / "whole")
    place = children.Waits("prediction", 12)
    killed = children.start_together(arguments, tmp_path / "killed", place, processes=2)
    children.wait_for(killed[0], tmp_path / "killed", place.stage, place.after)
    killed[0].terminate()
    killed[1].kill()
    assert [children.finish(child) for child in killed] == [143, -signal.SIGKILL]
    assert "interrupted. Continue with, launched as 2 processes: compress distill" in children.said(tmp_path / "killed")
    together([*arguments, "--resume"], tmp_path / "killed")
    assert difference(tmp_path / "killed", tmp_path / "whole", STAGES[1:]) == 0


@pytest.mark.parametrize(("began", "now"), [(2, 1), (1, 2)])
def test_another_number_of_processes_continues(began: int, now: int, tmp_path: Path) -> None:
    """From a checkpoint in the middle of the last stage, to the weights of an uninterrupted run but for rounding."""
    arguments = command(tmp_path / "given", dropout=False)
    stages = ("teacher", "stages.0", "stages.1")
    arguments += ["--gate", "warn", "--set=stages.1.checkpoint=4"]
    arguments += [f"--set={stage}.{number}" for number in ("steps=8", "eps=1e-4") for stage in stages]
    together(arguments, tmp_path / "whole")
    out = tmp_path / "killed"
    killed = children.start_together(arguments, out, children.Waits("prediction", 6), processes=began)
    children.wait_for(killed[0], out, "prediction", 5)
    for child in killed:
        child.kill()
        children.finish(child)
    assert list((out / "stages" / "prediction" / "checkpoints").iterdir())
    resumed = children.start_together([*arguments, "--resume"], out, children.does_not_ship, processes=now)
    assert [children.finish(child) for child in resumed] == [0] * now, children.said(out)
    assert f"trained by {began}, then {now} processes" in children.said(out)
    assert difference(out, tmp_path / "whole", STAGES[1:]) < 1e-6


def test_batches_of_tokens_need_as_many_processes_as_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows they have depends on it."""
    lengths = [3, 4, 5, 6] * 4
    for rank in range(2):
        (tmp_path / f"rng_state_{rank}.pth").touch()
    check_processes("text", LengthGrouped(lengths, 4, seed=0, whole=True), tmp_path)
    with pytest.raises(RunError, match=r"stage text: 2 processes began it and 1 would continue it.*expected 2"):
        check_processes("text", TokenBudget(lengths, 16, seed=0), tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_processes("text", TokenBudget(lengths, 16, seed=0), tmp_path)


@pytest.mark.parametrize("told", [[1], [0, 1]], ids=["second", "both"])
def test_sigterm_ends_all_processes_with_a_checkpoint(told: list[int], tmp_path: Path) -> None:
    """Of the step at which it comes, though none is due; a second signal, as torchrun's, changes nothing."""
    arguments = [
        *command(tmp_path / "given", dropout=True),
        "--set=stages.1.steps=40",
        "--set=stages.1.checkpoint=1000",
    ]
    together(arguments, tmp_path / "whole")
    out = tmp_path / "run"
    started = children.start_together(arguments, out, children.trains_slowly, processes=2)
    children.wait_for(started[0], out, "prediction", 5)
    for rank in [*told, *told]:
        started[rank].terminate()
    assert [children.finish(child) for child in started] == [143, 143], children.said(out)
    (checkpoint,) = (out / "stages" / "prediction" / "checkpoints").iterdir()
    assert 5 <= int(checkpoint.name.rpartition("-")[2]) < 40
    assert "Traceback" not in children.said(out)
    together([*arguments, "--resume"], out)
    assert difference(out, tmp_path / "whole", STAGES[1:]) == 0


@pytest.mark.slow
def test_torchrun_ships_a_bundle(tmp_path: Path) -> None:
    """The command of the README, measured and shipped by the first process: few steps, and times at one length."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "compress"]
    arguments = [*launch, *command(tmp_path / "given", dropout=True), "--out", str(tmp_path / "run"), "--gate", "warn"]
    arguments += [f"--set={stage}.steps=2" for stage in ("teacher", "stages.0", "stages.1")]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("bundle:") == 1
    assert (tmp_path / "run" / "bundle" / "report.json").is_file()


def test_two_processes_share_a_papers_mechanism(tmp_path: Path) -> None:
    """ELECTRA's generator and discriminator, of which one process keeps the result for both."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(
        "\n\n".join(["the story was sharp but slow . a film is never quite dull ."] * 40), encoding="utf-8"
    )
    teacher = tiny.checkpoint(tmp_path / "teacher")
    sizes = {"layers": 2, "hidden": 16, "ffn": 32, "heads": 2, "embedding": 8}
    settings = {"steps": 4, "batch": 8, "micro_batch": 2, "max_length": 32, "evaluate": 0, "step.width": 1.0}
    arguments = ["pretrain", "--teacher", teacher, "--recipe", "electra-small", "--corpus", str(corpus)]
    arguments += ["--precision", "fp32", *(f"--set=student.{size}={count}" for size, count in sizes.items())]
    together([*arguments, *(f"--set=stages.0.{name}={value}" for name, value in settings.items())], tmp_path / "run")
    kept = load_file(tmp_path / "run" / "student" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in kept.values())
