"""The supernet: one model that contains every smaller one, as its first layers,
dimensions, heads and neurons.

A subnet is a model of the smaller shape without weights of its own, run on slices of
the supernet's weights: it computes the same as `extract`'s result, and its gradients
reach the supernet. No model code is patched, so every family with a slice plan works,
attention and hidden states can be read, and dropout, autocast and DDP behave as usual.

    # units sorted, so that the first are the best
    whole = reorder_units(model, importance)
    net = Supernet(whole)
    half = Sizes.from_request(whole.config, layers=0.5, hidden=0.5, ffn=0.5)
    net.signals(batch, frozenset({"logits"}), half)
    net.score(half, EvaluationBatches.from_evaluator(evaluator, collate))
    net.extract(half).save_pretrained(folder)

Shapes: B batch, L tokens, D width of the embedding, V vocabulary, U tokens that occur.
"""

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import embedding
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from compress.arrays import whole_numbers
from compress.config.reference import options
from compress.config.stages import Stage
from compress.evaluation.evaluator import EvaluationBatches
from compress.io import load_json, write_json
from compress.latency.model import model_cost
from compress.models.loader import load_result
from compress.models.sentence_encoder import SentenceEncoder, project
from compress.models.signals import Signals, read
from compress.models.teacher import Teacher
from compress.nas.config import describe_choice
from compress.nas.costs import CostModel
from compress.nas.space import ShapeChoice
from compress.pruning import importance
from compress.records.search_report import Rung
from compress.slicing.cut import cut, rank_units, slice_model
from compress.slicing.plan import HIDDEN, SlicePlan, parameters_of
from compress.slicing.select import Kept, choose
from compress.slicing.sizes import (
    Sizes,
    inner_weights,
    layer_kinds,
    resize_config,
    select_layers,
)
from compress.tensors import TensorDict, Tensors
from compress.training.context import TrainingContext
from compress.training.embedding_rows import whole_vocabulary
from compress.training.logging import curves
from compress.training.run import Run
from compress.training.stage import plan_steps, run_stage
from compress.training.step import Score

if TYPE_CHECKING:
    from compress.nas.time_budget import TimeBudget

SUPERNET_SIGNALS: Final = frozenset({"logits"})
SKELETONS: Final = 64
"""The number of shapes whose modules are cached; creating them takes some 15 ms."""


@dataclass(frozen=True)
class Lookup:
    """The embeddings of the tokens that occur, looked up once for all subnets that read
    the same batch.

    Each subnet reads the first columns of `table_UD`, so that the gradient of the whole
    table is written once.
    """

    place_V: Tensor
    table_UD: Tensor


class Supernet:
    """Runs, scores and extracts the subnets of `model`, whose units should be sorted by
    importance.

    depth: the rule of `sizes.select_layers` for which layers a shallower subnet has:
    even, uniform (DynaBERT's own), first, last. Raises PruneError for a family without
    a slice plan and for sizes that are not within the model's.
    """

    def __init__(self, model: PreTrainedModel, *, depth: str = "even") -> None:
        self.model = model
        self.plan = SlicePlan.from_model(model)
        self.depth = depth
        self._skeletons: OrderedDict[Any, _Skeleton] = OrderedDict()

    def layers(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the supernet's layers that a subnet of these sizes has."""
        return tuple(select_layers(self.depth, sizes.layers, self.plan.sizes.layers))

    def kept(self, sizes: Sizes) -> Kept:
        """Return the units of a subnet: the first of every group."""
        return choose(self.plan, None, sizes, layers=self.depth)

    def lookup(self, batch: Tensors) -> Lookup:
        """Look up the embeddings of a batch, to be shared by all subnets that run on
        it."""
        return self._look_up(batch["input_ids"].unique())

    def signals(
        self,
        batch: Tensors,
        wants: frozenset[str],
        sizes: Sizes,
        *,
        lookup: Lookup | None = None,
        at_BL: Tensor | None = None,
    ) -> Signals:
        """Compute a subnet's signals on a batch, as `models.signals.read` does, in the
        supernet's mode."""
        kept = self.kept(sizes)
        lookup = lookup or self.lookup(batch)
        skeleton = self._skeleton(kept).train(self.model.training)
        return skeleton.run(
            self._weights(skeleton, kept, lookup), lookup, batch, wants, at_BL
        )

    def extract(self, sizes: Sizes) -> PreTrainedModel:
        """Extract the subnet as a plain transformers model with weights of its own."""
        with whole_vocabulary(self.model):
            return slice_model(self.model, self.kept(sizes))

    @torch.no_grad()
    def logits(
        self, sizes: Sizes, batches: EvaluationBatches, *, bf16: bool = False
    ) -> list[Tensor]:
        """Compute a subnet's logits for each batch, in eval mode and without gradients.
        bf16: under autocast."""
        kept = self.kept(sizes)
        device = next(self.model.parameters()).device
        skeleton = self._skeleton(kept).eval()
        with (
            whole_vocabulary(self.model),
            torch.autocast(device.type, torch.bfloat16, enabled=bf16),
        ):
            lookup = self._look_up(batches.tokens_U)
            weights = self._weights(skeleton, kept, lookup)
            # autocast caches casts of a model's own weights only: slices would be cast
            # for every batch
            if bf16:
                weights |= {
                    name: weights[name].to(torch.bfloat16) for name in skeleton.products
                }
            signals = [
                skeleton.run(weights, lookup, batch, SUPERNET_SIGNALS)
                for batch in batches.batches
            ]
        return [
            each.logits.float().cpu() for each in signals if each.logits is not None
        ]

    def score(
        self, sizes: Sizes, batches: EvaluationBatches, *, bf16: bool = False
    ) -> float:
        """Compute the task's metric of a subnet on these batches."""
        return batches.score(self.logits(sizes, batches, bf16=bf16))

    def _look_up(self, tokens_U: Tensor) -> Lookup:
        table: Any = self.model.get_input_embeddings()
        place_V = tokens_U.new_zeros(self.model.config.vocab_size)
        place_V[tokens_U] = torch.arange(len(tokens_U), device=tokens_U.device)
        return Lookup(place_V, table(tokens_U))

    def _weights(self, skeleton: "_Skeleton", kept: Kept, lookup: Lookup) -> TensorDict:
        tables = {f"{name}.weight": lookup.table_UD for name in skeleton.tables}
        return cut(self.plan, parameters_of(self.model) | tables, kept)

    def _skeleton(self, kept: Kept) -> "_Skeleton":
        """Create the modules of this shape, on the supernet's device and with its kind
        of attention."""
        config = self.model.config
        device = next(self.model.parameters()).device
        key = (
            kept.sizes,
            tuple(layer_kinds(config, kept.layers) or ()),
            config._attn_implementation,
            device,
        )
        if key not in self._skeletons:
            smaller = resize_config(config, kept.sizes, layers=kept.layers)
            smaller._attn_implementation = config._attn_implementation
            with torch.device(device), init_empty_weights(include_buffers=False):
                self._skeletons[key] = _Skeleton(type(self.model)(smaller), device)
        self._skeletons.move_to_end(key)
        if len(self._skeletons) > SKELETONS:
            self._skeletons.popitem(last=False)
        return self._skeletons[key]


class _Skeleton(nn.Module):
    """A model of some shape that has buffers of its own, and weights that are passed to
    each call.

    names: of the weights; tables: of the word embedding; products: of the matrices of
    linear layers.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        super().__init__()
        words = model.get_input_embeddings()
        self.tables = [
            name
            for name, each in model.named_modules(remove_duplicate=False)
            if each is words
        ]
        placed = _PlacedEmbedding(words.weight, device)  # type: ignore[arg-type]
        for name in self.tables:
            model.set_submodule(name, placed)
        self.model = model
        self.names = [name for name, _ in model.named_parameters()]
        self.products = [
            name
            for name in self.names
            if isinstance(
                model.get_submodule(name.rpartition(".")[0]), nn.Linear | Conv1D
            )
        ]

    def run(
        self,
        weights: Tensors,
        lookup: Lookup,
        batch: Tensors,
        wants: frozenset[str],
        at_BL: Tensor | None = None,
    ) -> Signals:
        """Run on `weights`, by the supernet's names; those that this shape does not
        have are ignored."""
        tensors = {f"model.{name}": weights[name] for name in self.names}
        tensors[f"model.{self.tables[0]}.place_V"] = lookup.place_V
        signals: Signals = functional_call(self, tensors, (batch, wants, at_BL))
        return signals

    def forward(
        self, batch: Tensors, wants: frozenset[str], at_BL: Tensor | None
    ) -> Signals:
        return read(self.model, batch, wants, at_BL=at_BL)


class _PlacedEmbedding(nn.Module):
    """A word embedding with only some of the vocabulary's rows: `place_V` is the row of
    each token."""

    def __init__(self, weight: nn.Parameter, device: torch.device) -> None:
        super().__init__()
        self.weight = weight
        self.place_V: Tensor
        self.register_buffer(
            "place_V", torch.empty(0, dtype=torch.long, device=device), persistent=False
        )

    def forward(self, ids_BL: Tensor) -> Tensor:
        return embedding(self.place_V[ids_BL], self.weight)


# ---- training

LADDER = "ladder.json"
BACKWARD = 3.0
"""FLOPs of a training step relative to its forward pass (Kaplan et al. 2020,
arXiv:2001.08361, Sec. 2.1)."""
RUNGS = 4
LEAST_SCORINGS = 5
"""Subnets on the ladder, and the least number of times they are scored: a curve of
size, or data, needs four points."""
DRAWN = 200
"""Subnets that training draws from, at most."""


def score_subnets(
    score: Score, subnets: Sequence[Sizes], *, depth: str = "even"
) -> Score:
    """Wrap a score of the whole model: return the mean of these subnets' scores, and
    each of them."""

    def score_all(student: PreTrainedModel) -> Mapping[str, float]:
        net = Supernet(student, depth=depth)
        scores = [score(net.extract(sizes))["score"] for sizes in subnets]
        return {
            "score": fmean(scores),
            **{f"subnet_{at}": value for at, value in enumerate(scores)},
        }

    return score_all


@dataclass(frozen=True)
class Ladder:
    """Subnets that are scored whenever the supernet is: the smallest, the largest, and
    some evenly between."""

    rungs: tuple[ShapeChoice, ...]
    costs: CostModel

    @staticmethod
    def from_choices(costs: CostModel, among: Sequence[ShapeChoice]) -> "Ladder":
        by_size = sorted(
            among, key=lambda choice: inner_weights(costs.shapes.sizes(choice))
        )
        places = (round(at * (len(by_size) - 1) / (RUNGS - 1)) for at in range(RUNGS))
        rungs = {
            describe_choice(choice): choice
            for choice in map(by_size.__getitem__, places)
        }
        return Ladder(tuple(rungs.values()), costs)

    def score_rungs(self, score: Score) -> Score:
        """Wrap a score of the whole model: return the mean of the rungs' scores, and
        each of them."""
        return score_subnets(
            score, [self.costs.shapes.sizes(choice) for choice in self.rungs]
        )


def load_ladder(run: Run) -> tuple[Rung, ...]:
    """Load the ladder's scores from the supernet's training; empty if there was no
    supernet, or no ladder."""
    file = run.path / LADDER
    if not file.is_file():
        return ()
    ladder = load_json(file, "Remove it: the page then shows no ladder")
    return tuple(
        Rung(
            "supernet",
            size,
            int(examples),
            examples * ladder["flops"],
            point[f"eval_subnet_{at}"],
        )
        for point in curves(run.path / "log.jsonl").get(ladder["stage"], [])
        if "eval_subnet_0" in point
        for examples in [point["step"] * ladder["batch"]]
        for at, size in enumerate(ladder["body_parameters"])
    )


def train_supernet(
    costs: CostModel,
    among: Sequence[ShapeChoice],
    *,
    task_teacher: Teacher,
    training: TrainingContext,
    run: Run,
    time_budget: "TimeBudget",
) -> PreTrainedModel:
    """Train the supernet of this search on subnets drawn from `among`, or load that of
    an earlier session."""
    stage = costs.search.space.supernet
    assert stage is not None, "a space of a supernet has its stage"
    if run.done(stage.name, training.console):
        return load_result(run.result(stage.name), stage.head, training.kind)
    stage = draw_from(stage, among, costs)
    whole, origin_D = put_in_order(costs, stage, task_teacher, training, run.seed)

    def probe(short: Stage, scratch: Run) -> None:
        run_stage(
            short,
            copy.deepcopy(whole),
            task_teacher,
            training,
            scratch,
            origin_D=origin_D,
        )

    (stage,) = time_budget.fit("supernet", [stage], training.data, probe)
    stage = with_looks(stage, len(training.data.train))
    ladder = Ladder.from_choices(costs, among)
    sizes = [costs.cost(choice).body_parameters for choice in ladder.rungs]
    flops = _flops_per_example(costs, among, stage, training)
    write_json(
        run.path / LADDER,
        {
            "stage": stage.name,
            "batch": stage.batch,
            "body_parameters": sizes,
            "flops": flops,
        },
    )
    return run_stage(
        stage,
        whole,
        task_teacher,
        training,
        run,
        origin_D=origin_D,
        wrap_score=ladder.score_rungs,
    )


def with_looks(stage: Stage, rows: int) -> Stage:
    """Let the stage be scored at least LEAST_SCORINGS times."""
    epochs = plan_steps(stage, max(1, rows // stage.batch)) * stage.batch / rows
    evaluate = max(stage.evaluate, ceil(LEAST_SCORINGS / max(1.0, epochs)))
    return stage.model_copy(update={"evaluate": evaluate})


def draw_from(stage: Stage, among: Sequence[ShapeChoice], costs: CostModel) -> Stage:
    """Let the stage's step draw from these subnets, if it has an option for that."""
    step = stage.step
    if step is None or "among" not in options(step.function) or "among" in step.options:
        return stage
    shapes = dict.fromkeys(costs.shapes.sizes(choice) for choice in among)
    plain = [
        {name: count for name, count in each.plain().items() if name != "head_size"}
        for each in shapes
    ]
    return stage.model_copy(
        update={"step": replace(step, options={**step.options, "among": plain[:DRAWN]})}
    )


def put_in_order(
    costs: CostModel,
    stage: Stage,
    task_teacher: Teacher,
    training: TrainingContext,
    seed: int,
) -> tuple[PreTrainedModel, torch.Tensor]:
    """Sort the teacher's units, the most important first; return the model, and its
    dimensions by teacher index."""
    space = costs.search.space
    model = copy.deepcopy(task_teacher.model)
    if isinstance(model, SentenceEncoder):
        project(model)  # so that narrower subnets give vectors as wide as the teacher's
    plan = SlicePlan.from_model(model)
    rated = importance.compute_importance(
        space.importance,
        model.requires_grad_(True),
        plan,
        training.sample(stage, space.rows, seed),
        training.collate,
        batch=stage.batch,
        teacher=task_teacher,
        bf16=training.bf16,
        console=training.console,
    )
    kept = importance.check_agreement(rank_units(plan, rated))
    whole = slice_model(model, kept).requires_grad_(True)
    return whole, kept.indices.get(HIDDEN, torch.arange(plan.sizes.hidden))


def _flops_per_example(
    costs: CostModel,
    among: Sequence[ShapeChoice],
    stage: Stage,
    training: TrainingContext,
) -> float:
    """Estimate the FLOPs of an example of mean length: the teacher's forward pass, and
    both passes of the subnets."""
    tokens = whole_numbers(training.rows(stage, 0), "length").mean()
    subnets = [costs.cost(choice).flops_per_token for choice in among[:DRAWN]]
    step: Mapping[str, Any] = stage.step.options if stage.step else {}
    whole = model_cost(costs.shapes.teacher, kind=costs.kind).flops_per_token
    always = whole * step.get("largest", True) + min(subnets) * step.get(
        "smallest", True
    )
    return tokens * (
        whole + BACKWARD * (always + step.get("random", 2) * fmean(subnets))
    )
