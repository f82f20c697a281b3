"""From a budget to sizes: which shape a model is pruned to, where only what it may cost is said.

Shapes of a grid are predicted from a few measured ones, or counted; of those that fill the budget each is cut at once
and asked (`shortlist`), the best are measured as files, and the one that keeps the budget is taken. What was decided,
and from what, is kept in the run as shape.json: a resumed run decides nothing anew.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from accelerate import PartialState
from rich.console import Console
from rich.table import Table

from compress.bench.device import open_device
from compress.bench.protocol import Setting
from compress.export.bundle import Bundle
from compress.export.onnx import makes_segments
from compress.files import written
from compress.recipe import Recipe, Target
from compress.run import Run
from compress.screen import print_note
from compress.search.latency import exported, race
from compress.stages import Material
from compress.teachers import Teacher

NAME = "shape.json"
WHOLE, SHIPPED = "the whole model", "the shipped file"


@dataclass(frozen=True)
class Candidate:
    """A shape that fills the budget. loss: of the model cut to it at once, before any training; ms: of its file, with
    random weights; None: not measured."""

    name: str
    sizes: Mapping[str, int]
    parameters: int
    loss: float
    predicted_ms: float | None = None
    error_ms: float | None = None
    ms: float | None = None


@dataclass(frozen=True)
class Decision:
    """What was asked, what was found, what is taken.

    where      device, setting and precision of all times; None: nothing was said of time
    limit_ms   what one forward may take; whole_ms: what the unpruned model's takes, as a file of that precision
    shipped_ms of the file that ships, once there is one
    """

    budget: Mapping[str, float]
    where: str | None
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    limit_ms: float | None = None
    whole_ms: float | None = None
    shipped_ms: float | None = None

    @staticmethod
    def read(file: Path) -> "Decision":
        tree = json.loads(file.read_text(encoding="utf-8"))
        candidates = tuple(Candidate(**each) for each in tree["candidates"])
        return Decision(**{**tree, "chosen": Candidate(**tree["chosen"]), "candidates": candidates})

    def write(self, file: Path) -> None:
        with written(file) as partial:
            partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def table(self) -> Table:
        """The candidates, the nearest to the whole model's answers first."""
        table = Table(title="Shapes that fill the budget", box=None, pad_edge=False, caption=self._caption())
        sizes = [name for name in self.chosen.sizes if name != "head_size"]
        for name in (*sizes, "params", "predicted", "measured", "loss as cut"):
            table.add_column(name, justify="right")
        for each in self.candidates:
            predicted = "" if each.predicted_ms is None else f"{each.predicted_ms:.3g} ± {each.error_ms:.1g} ms"
            table.add_row(
                *(str(each.sizes[name]) for name in sizes),
                f"{each.parameters / 1e6:.2f} M",
                predicted,
                "" if each.ms is None else f"{each.ms:.3g} ms",
                f"{each.loss:.4f}",
                style="bold" if each.name == self.chosen.name else "",
            )
        return table

    def _caption(self) -> str:
        said = "Loss as cut: against the whole model's answers, before any training."
        return said if self.where is None else f"{said} {self.where}: at most {self.limit_ms:.3g} ms."

    def verdict(self) -> str:
        """Whether the file that ships keeps what was asked of time, in words."""
        assert self.shipped_ms is not None and self.limit_ms is not None and self.whole_ms is not None
        faster = f"{self.shipped_ms:.3g} ms on {self.where}, {self.whole_ms / self.shipped_ms:.2f} times as fast as "
        over = self.shipped_ms / self.limit_ms - 1
        kept = (
            f"within {self.limit_ms:.3g} ms" if over <= 0 else f"{over:.1%} OVER the {self.limit_ms:.3g} ms asked for"
        )
        return f"budget: {faster}the unpruned model: {kept}"


def to_the_user(device: str, console: Console) -> Callable[[str], None]:
    """What a device says, which matters where the user has something to do: not of this machine, nor over ssh."""
    if device.partition(":")[0] in ("local", "ssh"):
        return lambda _: None
    return partial(console.print, highlight=False, markup=False, soft_wrap=True)


def setting_of(recipe: Recipe) -> Setting:
    """At which the target's times are measured."""
    target = recipe.target
    return Setting(target.threads, target.batch, target.seq or recipe.stages[-1].max_length)


def settled(recipe: Recipe, tutor: Teacher, material: Material, run: Run) -> Recipe:
    """The recipe with sizes as its target, where it has a budget. Raises PruneError for a budget nothing keeps."""
    if not recipe.pruning or not recipe.target.budgets:
        return recipe
    file = run.path / NAME
    decided = file.is_file()
    PartialState().wait_for_everyone()
    if not decided:
        from compress.pruning.choice import decide

        found = decide(recipe, tutor, material, run)
        if run.main:
            assert found is not None, "the first process decides"
            found.write(file)
            material.console.print(found.table())
    PartialState().wait_for_everyone()
    chosen = Decision.read(file).chosen
    sizes = {name: count for name, count in chosen.sizes.items() if name != "head_size"}
    material.console.print(f"pruning to {chosen.name}", highlight=False)
    return recipe.model_copy(update={"target": Target.model_validate(sizes)})


def checked(bundle: Bundle, recipe: Recipe, tutor: Teacher, material: Material, run: Run) -> None:
    """Measure the file that ships, in turns with the unpruned model's, and say whether it keeps the recipe's budget."""
    target, file = recipe.target, run.path / NAME
    if target.max_latency_ms is None and target.speedup is None:
        return
    decision = Decision.read(file)
    segments = makes_segments(material.tokenizer)
    with (
        open_device(target.device, say=to_the_user(target.device, material.console)) as device,
        exported(
            {WHOLE: tutor.model.config}, setting_of(recipe),
            precision=target.precision, kind=material.kind, segments=segments,
        ) as files,
    ):  # fmt: skip
        found = race({**files, SHIPPED: bundle.files()[target.precision]}, device, setting_of(recipe))
    shipped_ms, whole_ms = found[SHIPPED].p50_ms, found[WHOLE].p50_ms
    limit_ms = decision.limit_ms if target.speedup is None else whole_ms / target.speedup  # as the machine is now
    decision = replace(decision, shipped_ms=shipped_ms, whole_ms=whole_ms, limit_ms=limit_ms)
    decision.write(file)
    bundle.attach(NAME, file.read_text(encoding="utf-8"))
    material.console.print(decision.verdict(), highlight=False)
    for each in found.values():
        if each.noisy:
            print_note(material.console, f"{each.name}: {each.noise}")
