"""One model in which every smaller one is contained: its first layers, dimensions, heads and neurons.

A subnet is a model of the smaller shape without weights of its own, run on slices of the whole's: what it computes is
what `extract` returns, and its gradients reach the whole. No code of a model is patched, so that every family with a
slice plan serves, its attention and hidden states can be read, and dropout, autocast and DDP are as ever.

    whole = ordered(model, importance)          # units sorted, so that the first are the best
    net = Supernet(whole)
    half = Sizes.from_request(whole.config, layers=0.5, hidden=0.5, ffn=0.5)
    net.signals(batch, frozenset({"logits"}), half)
    net.score(half, EvaluationBatches.from_evaluator(exam, collate))
    net.extract(half).save_pretrained(folder)

Shapes: B batch, L tokens, D width of the embedding, V vocabulary, U tokens that occur.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import embedding
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from compress.errors import PruneError
from compress.evaluation.evaluator import EvaluationBatches
from compress.models.signals import Signals, read
from compress.slicing.cut import cut, slice_model
from compress.slicing.plan import SlicePlan, parameters_of
from compress.slicing.select import Kept, prefix
from compress.slicing.sizes import Sizes, resize_config, select_layers
from compress.training.embedding_rows import whole_vocabulary

LOGITS: Final = frozenset({"logits"})
SKELETONS: Final = 64
"""How many shapes' modules are kept; making one anew takes some 15 ms."""


@dataclass(frozen=True)
class Lookup:
    """The embeddings of the tokens that occur, looked up once for all subnets that read the same batch.

    Each subnet reads the first columns of `table_UD`, so that the gradient of the whole table is written once.
    """

    place_V: Tensor
    table_UD: Tensor


class Supernet:
    """Runs, scores and extracts the subnets of `model`, which need be `ordered` for its prefixes to be good.

    depth: which layers fewer layers are, as `sizes.select_layers` names it: even, uniform (DynaBERT's own rule),
    first, last. Each method takes other `layers` of the whole, as many as `sizes` has. Raises PruneError for a family
    without a slice plan and for sizes that are not within the model's.
    """

    def __init__(self, model: PreTrainedModel, plan: SlicePlan | None = None, *, depth: str = "even") -> None:
        self.model, self.plan, self.depth = model, plan or SlicePlan.from_model(model), depth
        self._skeletons: OrderedDict[Any, _Skeleton] = OrderedDict()

    def layers(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the layers of the whole that a subnet of these sizes has."""
        return tuple(select_layers(self.depth, sizes.layers, self.plan.sizes.layers))

    def kept(self, sizes: Sizes, layers: Sequence[int] | None = None) -> Kept:
        """Keep the first units of every group, and these layers. Raises PruneError where they are not as many as
        asked."""
        if layers is not None and len(layers) != sizes.layers:
            raise PruneError(f"layers {list(layers)}: {sizes.layers} are asked for")
        return prefix(self.plan, sizes, layers=self.layers(sizes) if layers is None else layers)

    def lookup(self, batch: Mapping[str, Tensor]) -> Lookup:
        """Prepare what `signals` looks up if it is not given: give the same to all subnets that run on one batch."""
        return self._look_up(batch["input_ids"].unique())

    def signals(
        self,
        batch: Mapping[str, Tensor],
        wants: frozenset[str],
        sizes: Sizes,
        layers: Sequence[int] | None = None,
        *,
        lookup: Lookup | None = None,
        at_BL: Tensor | None = None,
    ) -> Signals:
        """Compute what a subnet shows of a batch, as `models.signals.read` does; in train mode where the whole is."""
        kept = self.kept(sizes, layers)
        lookup = lookup or self.lookup(batch)
        skeleton = self._skeleton(kept).train(self.model.training)
        return skeleton.run(self._weights(skeleton, kept, lookup), lookup, batch, wants, at_BL)

    def extract(self, sizes: Sizes, layers: Sequence[int] | None = None) -> PreTrainedModel:
        """Extract the subnet as a plain transformers model with weights of its own."""
        with whole_vocabulary(self.model):
            return slice_model(self.model, self.kept(sizes, layers))

    @torch.no_grad()
    def logits(
        self, sizes: Sizes, sheets: EvaluationBatches, layers: Sequence[int] | None = None, *, bf16: bool = False
    ) -> list[Tensor]:
        """Compute a subnet's logits for each batch of `sheets`, in eval mode and without gradients. bf16: under
        autocast."""
        kept, device = self.kept(sizes, layers), next(self.model.parameters()).device
        skeleton = self._skeleton(kept).eval()
        with whole_vocabulary(self.model), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            lookup = self._look_up(sheets.tokens_U)
            weights = self._weights(skeleton, kept, lookup)
            if bf16:  # autocast keeps its casts of a model's own weights only: slices would be cast for every batch
                weights |= {name: weights[name].to(torch.bfloat16) for name in skeleton.products}
            shown = [skeleton.run(weights, lookup, batch, LOGITS).logits for batch in sheets.batches]
        return [logits.float().cpu() for logits in shown if logits is not None]

    def score(
        self, sizes: Sizes, sheets: EvaluationBatches, layers: Sequence[int] | None = None, *, bf16: bool = False
    ) -> float:
        """Compute the task's metric of a subnet on the examples of `sheets`."""
        return sheets.score(self.logits(sizes, sheets, layers, bf16=bf16))

    def _look_up(self, tokens_U: Tensor) -> Lookup:
        table: Any = self.model.get_input_embeddings()
        place_V = tokens_U.new_zeros(self.model.config.vocab_size)
        place_V[tokens_U] = torch.arange(len(tokens_U), device=tokens_U.device)
        return Lookup(place_V, table(tokens_U))

    def _weights(self, skeleton: "_Skeleton", kept: Kept, lookup: Lookup) -> dict[str, Tensor]:
        tables = {f"{name}.weight": lookup.table_UD for name in skeleton.tables}
        return cut(self.plan, parameters_of(self.model) | tables, kept)

    def _skeleton(self, kept: Kept) -> "_Skeleton":
        """Make the modules of this shape, on the whole's device and with its kind of attention."""
        attention, device = self.model.config._attn_implementation, next(self.model.parameters()).device
        key = (kept.sizes, attention, device)
        if key not in self._skeletons:
            self._skeletons[key] = _Skeleton.of(self.model, kept.sizes, attention, device)
        self._skeletons.move_to_end(key)
        if len(self._skeletons) > SKELETONS:
            self._skeletons.popitem(last=False)
        return self._skeletons[key]


class _Skeleton(nn.Module):
    """A model of some shape whose weights are given at each call; buffers are its own.

    names: those of the weights; tables, places: those of the word embedding, and of where tokens are in it.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        super().__init__()
        words = model.get_input_embeddings()
        self.tables = [name for name, each in model.named_modules(remove_duplicate=False) if each is words]
        placed = _Placed(words.weight, device)  # type: ignore[arg-type]
        for name in self.tables:
            model.set_submodule(name, placed)
        self.model = model
        self.names = [name for name, _ in model.named_parameters()]
        self.products = [
            name for name in self.names if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear | Conv1D)
        ]

    @staticmethod
    def of(model: PreTrainedModel, sizes: Sizes, attention: str, device: torch.device) -> "_Skeleton":
        config = resize_config(model.config, sizes)
        config._attn_implementation = attention
        with torch.device(device), init_empty_weights(include_buffers=False):
            return _Skeleton(type(model)(config), device)

    def run(
        self,
        weights: Mapping[str, Tensor],
        lookup: Lookup,
        batch: Mapping[str, Tensor],
        wants: frozenset[str],
        at_BL: Tensor | None = None,
    ) -> Signals:
        """`weights` by the model's names; what is theirs and no weight of this shape is left out."""
        given = {f"model.{name}": weights[name] for name in self.names}
        given[f"model.{self.tables[0]}.place_V"] = lookup.place_V
        shown: Signals = functional_call(self, given, (batch, wants, at_BL))
        return shown

    def forward(self, batch: Mapping[str, Tensor], wants: frozenset[str], at_BL: Tensor | None) -> Signals:
        return read(self.model, batch, wants, at_BL=at_BL)


class _Placed(nn.Module):
    """A word embedding that holds some of the vocabulary's rows: `place_V` says where each token's is."""

    def __init__(self, weight: nn.Parameter, device: torch.device) -> None:
        super().__init__()
        self.weight = weight
        self.place_V: Tensor
        self.register_buffer("place_V", torch.empty(0, dtype=torch.long, device=device), persistent=False)

    def forward(self, ids_BL: Tensor) -> Tensor:
        return embedding(self.place_V[ids_BL], self.weight)
