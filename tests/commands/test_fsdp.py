"""`accelerate launch --use_fsdp --fsdp_version 2`: a teacher that is fine-tuned is split over the processes.

accelerate starts no FSDP on a CPU, so these launches are torchrun's, with the variables that it would set.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from torch import distributed
from transformers import AutoModelForMaskedLM

from compress.config.recipe import Recipe
from compress.errors import RecipeError, RunError
from compress.training import sharding
from compress.training.sharding import Sharding
from tests import children, forks, tiny
from tests.commands.test_processes import STAGES, command, difference, together

REQUEST = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false", "FSDP_ACTIVATION_CHECKPOINTING": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true", "FSDP_MIN_NUM_PARAMS": "100000000", "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
}  # fmt: skip
"""What `accelerate launch --use_fsdp --fsdp_version 2` sets."""


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in REQUEST.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "2")


def says_what_is_split() -> None:
    """Each trainer says the share of its student's numbers that this process holds while it trains."""
    from torch.distributed.tensor import DTensor

    from compress.training.trainer import StepTrainer

    children.does_not_ship()
    train = StepTrainer.train_from

    def saying(trainer: StepTrainer, *args: Any) -> None:
        train(trainer, *args)
        parameters = list(trainer.student.parameters())
        held = sum(each.to_local().numel() if isinstance(each, DTensor) else each.numel() for each in parameters)
        print(f"{trainer.stage.name} holds {held / sum(each.numel() for each in parameters):.1f}")

    StepTrainer.train_from = saying  # type: ignore[method-assign]


def test_a_split_teacher_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the decay of tokens that occur nowhere, which is off here. Its students are trained whole."""
    arguments = [*command(tmp_path / "given", dropout=False), "--gate", "warn", "--set=teacher.weight_decay=0"]
    arguments += ["--set=teacher.micro_batch=4"]
    stages = ("teacher", "stages.0", "stages.1")
    arguments += [f"--set={stage}.{number}" for number in ("steps=8", "eps=1e-4") for stage in stages]
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home-of-whole"))
    together(arguments, tmp_path / "whole", says_what_is_split)
    assert "teacher holds 1.0" in children.said(tmp_path / "whole")
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home-of-split"))
    for name, value in REQUEST.items():
        monkeypatch.setenv(name, value)
    together(arguments, tmp_path / "split", says_what_is_split)
    said = children.said(tmp_path / "split")
    assert said.count("teacher holds 0.5") == 2
    assert said.count("intermediate holds 1.0") == said.count("prediction holds 1.0") == 2
    assert difference(tmp_path / "split", tmp_path / "whole") < 1e-6


def test_a_killed_split_teacher_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its optimiser's state, and the best weights so far; not as a whole one."""
    arguments = [*command(tmp_path / "given", dropout=True), "--set=teacher.checkpoint=4", "--set=teacher.evaluate=2"]
    for name, value in REQUEST.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home-of-whole"))
    together(arguments, tmp_path / "whole")
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home-of-killed"))
    out = tmp_path / "killed"
    killed = children.start_together(arguments, out, children.Waits("teacher", 14), processes=2)
    children.wait_for(killed[0], out, "teacher", 12)
    for child in killed:
        child.kill()
    assert [children.finish(child) for child in killed] == [-signal.SIGKILL] * 2
    assert list((out / "stages" / "teacher" / "checkpoints").iterdir())
    with monkeypatch.context() as patch:
        patch.delenv("ACCELERATE_USE_FSDP")
        refused = children.start_together([*arguments, "--resume"], out, children.does_not_ship, processes=2)
        assert children.finish(refused[0]) == 2
        refused[1].kill()  # as torchrun does
        assert "use_fsdp was True, now None" in children.said(out)
    together([*arguments, "--resume"], out)
    assert difference(out, tmp_path / "whole", STAGES) == 0


def test_other_settings_are_refused_by_name(requested: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "FSDP_VERSION": "1", "FSDP_OFFLOAD_PARAMS": "true", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_ACTIVATION_CHECKPOINTING": "true", "WORLD_SIZE": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError) as caught:
        Sharding.take_request()
    for named in (
        "VERSION is '1', expected 2", "OFFLOAD_PARAMS is 'true'", "AUTO_WRAP_POLICY is 'SIZE_BASED_WRAP'",
        "STATE_DICT_TYPE is 'SHARDED_STATE_DICT'", "ACTIVATION_CHECKPOINTING is 'true'", "there is one process",
    ):  # fmt: skip
        assert named in str(caught.value)


def test_a_request_is_taken_once(requested: None) -> None:
    """transformers would load no weights in other processes than the first, if it saw the request."""
    assert Sharding.take_request() == Sharding(reshard=True)
    assert "ACCELERATE_USE_FSDP" not in os.environ
    assert Sharding.take_request() is None


def test_an_optimiser_of_whole_tensors_is_refused(tmp_path: Path) -> None:
    recipe = Recipe.load(tiny.recipe(tmp_path), ["teacher.optimizer=lamb"])
    with pytest.raises(RecipeError, match=r"teacher\.optimizer: lamb"):
        Sharding().check(recipe)


def test_other_commands_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("a good film\n\nanother film", encoding="utf-8")
    words = ["pretrain", "--teacher", tiny.checkpoint(tmp_path / "teacher"), "--recipe", "distilbert-general"]
    words += ["--set", "stages.0.max_length=16"]
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert children.run([*words, "--corpus", str(corpus)], tmp_path / "run") == 2
    assert "--use_fsdp splits a teacher that `distill` fine-tunes" in children.said(tmp_path / "run")


def _join(rank: int, shared: dict[str, str]) -> None:
    os.environ |= shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    PartialState(cpu=True)


def run_two(function: Callable[..., None], folder: Path) -> None:
    shared = children.meeting(2)
    context = forks.context()
    both = [context.Process(target=function, args=(rank, shared, folder), daemon=True) for rank in range(2)]
    for child in both:
        child.start()
    assert [children.finish(child) for child in both] == [0, 0]


def _round_trip(rank: int, shared: dict[str, str], folder: Path) -> None:
    _join(rank, shared)
    model = tiny.model("bert", head=AutoModelForMaskedLM)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Sharding().split(model)
    gathered = sharding.gather_weights(model)
    file = folder / "model.safetensors"
    if rank == 0:
        assert len(gathered) < len(expected), "tied tensors are kept once"
        assert all(torch.equal(gathered[name], expected[name]) for name in gathered)
        save_file({name: tensor + 1 for name, tensor in gathered.items()}, file)
    sharding.read_weights(model, file)
    again = sharding.gather_weights(model)
    if rank == 0:
        assert all(torch.equal(tensor, expected[name] + 1) for name, tensor in again.items())
        (folder / "done").touch()
        assert load_file(file).keys() == again.keys()


def test_tied_weights_are_gathered_and_read(tmp_path: Path) -> None:
    run_two(_round_trip, tmp_path)
    assert (tmp_path / "done").exists()


def _gradients(rank: int, shared: dict[str, str], folder: Path) -> None:
    _join(rank, shared)
    ids_BL = torch.randint(5, 30, (3, 9), generator=torch.Generator().manual_seed(rank))
    batch = {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL), "labels": torch.arange(3)}
    for family in ("albert", "distilbert", "modernbert", "deberta-v2", "mobilebert", "xlnet", "gpt2", "qwen3"):
        whole = tiny.model(family)
        split = tiny.model(family)
        Sharding().split(split)
        for _ in range(2):
            split(**batch).loss.backward()
            with torch.inference_mode():
                split(**batch)
        whole(**batch).loss.backward()
        names = dict(split.named_parameters())
        for name, parameter in whole.named_parameters():
            if parameter.grad is not None:
                distributed.all_reduce(parameter.grad)
                torch.testing.assert_close(names[name].grad.full_tensor(), parameter.grad)
    (folder / f"done-{rank}").touch()


def test_gradients_of_split_layers_are_those_of_whole_ones(tmp_path: Path) -> None:
    """The sum over two passes is that over two processes; layers may be shared, and are scored in between."""
    run_two(_gradients, tmp_path)
    assert len(list(tmp_path.glob("done-*"))) == 2


def test_a_teacher_that_is_not_fine_tuned_is_not_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = command(tmp_path / "given", dropout=True)
    tiny.checkpoint(tmp_path / "given" / "teacher", tiny.bert(id2label={0: "negative", 1: "positive"}))
    for name, value in REQUEST.items():
        monkeypatch.setenv(name, value)
    arguments += ["--gate", "warn", *(f"--set=stages.{number}.steps=2" for number in range(2))]
    together(arguments, tmp_path / "run")
    assert "--use_fsdp only splits a teacher that is fine-tuned, and none is" in children.said(tmp_path / "run")
