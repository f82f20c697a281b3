"""`compress distill` in a process of its own that ends where a test wants it to."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests import forks

PATIENCE = 120.0
"""Seconds until a child that does not do what it should is given up."""

Accident = Callable[[], None]
"""What is changed in the child before it runs."""


def start(
    arguments: Sequence[str],
    out: Path,
    accident: Accident | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """`compress ARGUMENTS --out OUT`; what it says is in `said(out)`."""
    environment = {**os.environ, **(environment or {})}
    arguments = [*arguments, "--out", str(out)]
    child = forks.context().Process(target=_command, args=(arguments, environment, accident), daemon=True)
    child.start()
    return child


def start_together(
    arguments: Sequence[str], out: Path, accident: Accident | None = None, *, processes: int
) -> list[BaseProcess]:
    """As torchrun would start them, on the processor."""
    shared = meeting(processes)
    return [
        start(arguments, out, accident, environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]


@dataclass(frozen=True)
class Node:
    """A machine of one process: its own command, folder of the run, and caches."""

    arguments: Sequence[str]
    out: Path
    home: Path


def start_nodes(nodes: Sequence[Node], accident: Accident | None = None) -> list[BaseProcess]:
    """As torchrun would start them on machines that share nothing, with one process each."""
    shared = meeting(len(nodes)) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return [
        start(
            node.arguments,
            node.out,
            accident,
            environment=shared | {"RANK": str(rank), "COMPRESS_HOME": str(node.home)},
        )
        for rank, node in enumerate(nodes)
    ]


def meeting(processes: int) -> dict[str, str]:
    """The variables that all processes of a launch have."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    return shared | {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}


def finish(child: BaseProcess) -> int:
    """The exit code; the negative number of the signal that killed it."""
    child.join(PATIENCE)
    if child.exitcode is None:
        child.kill()
        raise TimeoutError(f"the child did not end within {PATIENCE:.0f} s")
    return child.exitcode


def run(arguments: Sequence[str], out: Path, accident: Accident | None = None) -> int:
    return finish(start(arguments, out, accident))


def wait_for(child: BaseProcess, out: Path, stage: str, step: int) -> None:
    """Until the log of the run shows that `stage` has done `step`."""
    log, patience = out / "log.jsonl", time.monotonic() + PATIENCE
    while child.is_alive() and time.monotonic() < patience:
        lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        if any(entry["stage"] == stage and entry["step"] >= step for entry in entries):
            return
        time.sleep(0.01)
    raise AssertionError(f"the child never came to step {step} of {stage}: {said(out)}")


def said(out: Path) -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(out.parent.glob(f"{out.name}-*.txt")))


def _output(out: Path, rank: str | int = 0) -> Path:
    return out.with_name(f"{out.name}-{rank}.txt")


def _command(arguments: list[str], environment: dict[str, str], accident: Accident | None) -> None:
    os.environ.update(environment)
    sys.argv = ["compress", *arguments]
    file = _output(Path(arguments[-1]), environment.get("RANK", 0)).open("w", encoding="utf-8", buffering=1)
    sys.stdout = sys.stderr = file
    if accident is not None:
        accident()
    from compress.cli import main

    main()


# Accidents


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Waits:
    """In the middle of a stage, after so many steps, to be killed."""

    stage: str
    after: int

    def __call__(self) -> None:
        from compress.training import stopping
        from compress.training.trainer import StepTrainer

        stopping.GRACE_SECONDS = 1.0
        compute_loss = StepTrainer.compute_loss

        def waiting(trainer: StepTrainer, *args: Any, **kwargs: Any) -> Any:
            if (trainer.stage.name, trainer.state.global_step) == (self.stage, self.after):
                time.sleep(PATIENCE)
            return compute_loss(trainer, *args, **kwargs)

        StepTrainer.compute_loss = waiting  # type: ignore[method-assign]


def trains_slowly() -> None:
    """Steps of a twentieth of a second, to be told to end between them."""
    from compress.training.trainer import StepTrainer

    compute_loss = StepTrainer.compute_loss

    def slow(trainer: StepTrainer, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return compute_loss(trainer, *args, **kwargs)

    StepTrainer.compute_loss = slow  # type: ignore[method-assign]


def dies_after_half_an_optimiser() -> None:
    """Of the second checkpoint of a stage."""
    import torch

    save = torch.save

    def half(value: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        save(value, path, *args, **kwargs)
        if str(path).endswith("intermediate/.partial/checkpoint-8/optimizer.pt"):
            os.truncate(path, Path(path).stat().st_size // 2)
            die()

    torch.save = half


def _dies_at_rename(of: str, to: str, *, before: bool) -> None:
    """Before or after a file or folder with `of` in its path gets a name that ends with `to`."""
    for name in ("rename", "replace"):
        move = getattr(Path, name)

        def moved(self: Path, target: Path, move: Any = move) -> Any:
            here = of in str(self) and str(target).endswith(to)
            if here and before:
                die()
            result = move(self, target)
            if here:
                die()
            return result

        setattr(Path, name, moved)


def dies_before_a_checkpoint_has_its_name() -> None:
    _dies_at_rename("prediction", "checkpoint-10", before=True)


def dies_before_the_older_checkpoint_goes() -> None:
    _dies_at_rename("prediction", "checkpoint-10", before=False)


def dies_with_new_best_weights_and_an_old_checkpoint() -> None:
    _dies_at_rename("prediction", "best.safetensors", before=False)


def dies_before_a_result_has_its_name() -> None:
    """All steps are done and in a checkpoint."""
    _dies_at_rename("intermediate", "model", before=True)


def dies_between_two_stages() -> None:
    _dies_at_rename("intermediate", "model", before=False)


def dies_before_the_teacher_is_kept() -> None:
    """Its stage is done."""
    _dies_at_rename("/home/teachers/", "", before=True)


def does_not_ship() -> None:
    """Ends well when the last stage is done: export and measuring take longer than a tiny training."""
    import compress.commands.distill
    import compress.jobs.shipping
    from compress.training.processes import from_first

    class NoBundle:
        @staticmethod
        def write(*_: Any, **__: Any) -> None:
            from_first(lambda: None)  # as its bundle
            sys.exit(0)

        @staticmethod
        def load(_: Path) -> None:
            """All but the first process come here."""

    compress.commands.distill.Bundle = compress.jobs.shipping.Bundle = NoBundle  # type: ignore[misc,assignment]
