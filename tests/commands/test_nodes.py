"""Machines that share no folder train what the processes of one machine do.

Each has a process, the files of the command under paths of its own, and its own caches; the run is in the first one's
folder alone.
"""

import datetime
import os
import shutil
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from tests import children
from tests.commands.test_processes import STAGES, command, difference, together


def nodes(tmp_path: Path, arguments: list[str], name: str, count: int = 2) -> list[children.Node]:
    """Give each of the machines its own copy of what the command reads."""
    given = tmp_path / "given"
    made = []
    for number in range(count):
        place = tmp_path / f"node{number}"
        if not place.exists():
            shutil.copytree(given, place)
        own = [word.replace(str(given), str(place)) for word in arguments]
        made.append(children.Node(own, place / name, place / "home"))
    return made


def finish(started: list[Any], machines: list[children.Node]) -> None:
    ended = [children.finish(child) for child in started]
    assert ended == [0] * len(machines), "\n".join(children.said(node.out) for node in machines)


def test_machines_that_share_nothing(tmp_path: Path) -> None:
    """The second one receives the fine-tuned teacher, and later it and the stages that are done."""
    arguments = command(tmp_path / "given", dropout=True)
    machines = nodes(tmp_path, arguments, "run")
    finish(children.start_nodes(machines, children.does_not_ship), machines)
    together(arguments, tmp_path / "one-machine")
    assert difference(machines[0].out, tmp_path / "one-machine") == 0
    assert not machines[1].out.exists()
    shutil.rmtree(machines[1].home)
    again = [children.Node([*node.arguments, "--resume"], node.out, node.home) for node in machines]
    finish(children.start_nodes(again, children.does_not_ship), again)
    assert "kept from an earlier run" in children.said(machines[0].out)
    assert difference(machines[0].out, tmp_path / "one-machine") == 0


def test_a_killed_machine_continues(tmp_path: Path) -> None:
    """It has lost its caches, and its processes the weights and random states of the checkpoint."""
    arguments = [*command(tmp_path / "given", dropout=True), "--set=stages.1.checkpoint=4"]
    together(arguments, tmp_path / "whole")
    machines = nodes(tmp_path, arguments, "run")
    place = children.Waits("prediction", 12)
    killed = children.start_nodes(machines, place)
    children.wait_for(killed[0], machines[0].out, place.stage, 8)
    killed[1].kill()
    killed[0].kill()
    for child in killed:
        children.finish(child)
    assert list((machines[0].out / "stages" / "prediction" / "checkpoints").iterdir())
    shutil.rmtree(machines[1].home)
    again = [children.Node([*node.arguments, "--resume"], node.out, node.home) for node in machines]
    finish(children.start_nodes(again, children.does_not_ship), again)
    assert difference(machines[0].out, tmp_path / "whole", STAGES[1:]) == 0


TIMEOUT = 2.0
"""Seconds after which a collective ends the processes that wait in it."""


def prepares_and_ships_slowly() -> None:
    """The first process reads data, caches a teacher's answers and ships for longer than a collective may take."""
    import compress.jobs.loading
    import compress.jobs.shipping
    import compress.training.stage
    from compress.jobs.loading import load_task
    from compress.training.stage import teacher_cache

    def slowly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == "0":
            time.sleep(1.5 * TIMEOUT)
        return function(*args, **kwargs)

    join = distributed.init_process_group
    distributed.init_process_group = partial(join, timeout=datetime.timedelta(seconds=TIMEOUT))
    compress.jobs.loading.load_task = partial(slowly, load_task)
    compress.training.stage.teacher_cache = partial(slowly, teacher_cache)
    children.does_not_ship()
    ship = compress.jobs.shipping.Bundle.write
    compress.jobs.shipping.Bundle.write = partial(slowly, ship)


def test_preparation_may_outlast_the_timeout_of_collectives(tmp_path: Path) -> None:
    arguments = [*command(tmp_path / "given", dropout=True), "--set=stages.1.cache_teacher=true"]
    arguments += [f"--set={stage}.steps=2" for stage in ("teacher", "stages.0", "stages.1")]
    together([*arguments, "--gate", "warn"], tmp_path / "run", prepares_and_ships_slowly)
    assert (tmp_path / "run" / "stages" / "prediction" / "model").is_dir()


@pytest.mark.parametrize("lacking", [True, False], ids=["lacking", "changed"])
def test_machines_with_other_data_are_refused_by_name(tmp_path: Path, lacking: bool) -> None:
    """In the first seconds, by every process that has come, with the rank and the machine that differ."""
    machines = nodes(tmp_path, command(tmp_path / "given", dropout=True), "run")
    file = tmp_path / "node1" / "data" / "train.tsv"
    text = file.read_text(encoding="utf-8")
    if lacking:
        (tmp_path / "node1" / "data" / "dev.tsv").unlink()
    file.write_text(text.replace("a", "b", 1), encoding="utf-8")
    ended = [children.finish(child) for child in children.start_nodes(machines)]
    assert ended == [2, 2]
    for node in machines:
        assert f"in process 1 on {socket.gethostname()}" in children.said(node.out)
        assert "data train.tsv: " in children.said(node.out)
    assert not machines[0].out.exists()


def test_a_machine_without_the_data_says_which_it_is(tmp_path: Path) -> None:
    machines = nodes(tmp_path, command(tmp_path / "given", dropout=True), "run")
    shutil.rmtree(tmp_path / "node1" / "data")
    first, second = children.start_nodes(machines)
    assert children.finish(second) == 2
    first.kill()  # as torchrun does
    assert f"error: process 1 on {socket.gethostname()}: " in children.said(machines[1].out)
