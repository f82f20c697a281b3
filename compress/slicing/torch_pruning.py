"""Prune families without a slice plan: torch-pruning finds what is cut together, and its result is checked.

Tried with torch-pruning 1.6.1, transformers 5.23, torch 2.13: two layers with a classifier, half of everything.

    works     beit, camembert, data2vec-text, flaubert, layoutlm, megatron-bert, rembert, roberta-prelayernorm,
              roformer, vit, vit_msn, xlm-roberta-xl, xmod, yoso
    refused   deberta (the first), fnet, ibert, squeezebert: no queries, keys and values of their own
              convbert, longformer: the library stops
              big_bird, canine, dinov2, esm, luke, mpnet, mra, nystromformer: what it gives is no model of that class
              all with grouped keys (granite, phi3, gemma, ...): the library does not end (VainF/Torch-Pruning#527)
              tied weights: it does not see the tie; families with a slice plan: that is exact

A family that is not listed is tried: either the result loads and computes the same as the cut model, or PruneError.
"""

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from compress.errors import PruneError
from compress.slicing.rules import FAMILIES
from compress.slicing.shape import setting_name

_PROJECTIONS = frozenset(
    f"{side}{ending}" for sides in (("q", "k", "v"), ("query", "key", "value")) for side in sides
    for ending in ("", "_lin", "_proj")
)  # fmt: skip
_HEADS = ("num_attention_heads", "n_heads", "num_heads")
_FAILS = (IndexError, TypeError, AssertionError, KeyError, ValueError, RuntimeError, AttributeError)
"""The errors that torch-pruning, or a model that it left half cut, stops with."""


def prune_generic(
    model: PreTrainedModel,
    example_inputs: Mapping[str, Tensor],
    *,
    share: float,
    importance: Literal["magnitude", "taylor"] = "magnitude",
    loss: Callable[[PreTrainedModel], Tensor] | None = None,
) -> PreTrainedModel:
    """Make a model of the same class with `share` of its heads, hidden width, embedding and neurons; layers stay.

    The share is rounded to whole heads, which keep their size. `model` is not changed. taylor: by the gradients of
    `loss`. Raises PruneError for a model that torch-pruning cannot cut, where nothing would be removed, and where the
    saved result does not load, or answers otherwise.
    """
    _refuse(model)
    heads = int(getattr(model.config, setting_name(model.config, "heads")))
    kept = round(heads * share)
    if not 0 < kept < heads:
        raise PruneError(f"share {share}: leaves {kept} of {heads} heads; expected at least one less, and one left")
    if (importance == "taylor") != (loss is not None):
        raise PruneError("importance taylor needs a loss, and magnitude has no use for one")
    pruned = copy.deepcopy(model).eval().requires_grad_(True)  # what is frozen would not be cut
    try:
        with _quiet(), torch.enable_grad():  # the library traces the graph of gradients
            _cut(pruned, example_inputs, kept / heads, importance, loss)
            return _reload(pruned, model, example_inputs)
    except _FAILS as error:
        told = str(error).partition("\n")[0]
        raise PruneError(
            f"{type(model).__name__}: torch-pruning {version('torch-pruning')} cannot prune it "
            f"({type(error).__name__}: {told}); families with a slice plan: {', '.join(FAMILIES)}"
        ) from error


def _refuse(model: PreTrainedModel) -> None:
    """Raise PruneError for what would be cut wrong, or never."""
    name, family = type(model).__name__, model.config.model_type
    if family in FAMILIES:
        raise PruneError(f"{name}: {family} has a slice plan, which is exact; use compress.slicing.cut.slice_model")
    if getattr(model.config, "num_key_value_heads", None) is not None:
        raise PruneError(f"{name}: torch-pruning does not end on grouped keys (VainF/Torch-Pruning#527)")
    names = [each for each, _ in model.named_parameters(remove_duplicate=False)]
    if model.get_output_embeddings() is not None or len(names) > len(list(model.parameters())):
        raise PruneError(f"{name}: has tied weights, whose tie torch-pruning does not see; prune it without that head")


def _cut(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    share: float,
    importance: str,
    loss: Callable[[PreTrainedModel], Tensor] | None,
) -> None:
    """Cut in place, with the numbers of heads in modules and config set right, which the library leaves to others."""
    import torch_pruning

    rules = {
        "magnitude": torch_pruning.importance.GroupMagnitudeImportance,
        "taylor": torch_pruning.importance.GroupTaylorImportance,
    }
    if loss is not None:
        loss(model).backward()
    owners = dict(_attention(model))
    if not owners:
        raise PruneError(f"{type(model).__name__}: has no attention with queries, keys and values of their own")
    heads = {each: count for projections, count in owners.values() for each in projections}
    neurons = _neurons(model)
    removed = 1 - share - 1e-9  # widths are rounded down, heads up
    before = sum(parameter.numel() for parameter in model.parameters())
    pruner = torch_pruning.pruner.BasePruner(
        model, dict(inputs), importance=rules[importance](), pruning_ratio=removed, head_pruning_ratio=removed,
        num_heads=heads, prune_num_heads=True, prune_head_dims=False,  # models keep the scale of the old head size
        ignored_layers=_last(model, inputs), output_transform=_tensors,
        in_channel_groups={}, out_channel_groups={},  # the defaults would hold every pruned model for ever
    )  # fmt: skip
    pruner.step()
    if sum(parameter.numel() for parameter in model.parameters()) == before:
        raise PruneError(f"{type(model).__name__}: torch-pruning {version('torch-pruning')} found nothing to remove")
    for module, (projections, _) in owners.items():
        _set_heads(module, pruner.num_heads[projections[0]], projections[0].out_features)
    query = next(iter(owners.values()))[0][0]
    _write_config(model, query, pruner.num_heads[query], neurons)


def _attention(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[list[nn.Linear], int]]]:
    """Yield the modules with queries, keys and values, and their numbers of heads."""
    for module in model.modules():
        count = next((found for name in _HEADS if isinstance(found := getattr(module, name, None), int)), None)
        projections = [
            each for name, each in module.named_children() if name in _PROJECTIONS and isinstance(each, nn.Linear)
        ]
        if count is not None and len(projections) == 3:
            yield module, (projections, count)


def _neurons(model: PreTrainedModel) -> list[nn.Linear]:
    """List the products that compute a feed-forward block's neurons, where the config says how many there are."""
    name = _name_size(model.config, "ffn")
    wanted = None if name is None else getattr(model.config, name)
    hidden = getattr(model.config, setting_name(model.config, "hidden"))
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return [each for each in linear if (each.out_features, each.in_features) == (wanted, hidden)]


def _set_heads(module: Any, count: int, width: int) -> None:
    for name in _HEADS:
        if isinstance(getattr(module, name, None), int):
            setattr(module, name, count)
    for name, value in (("attention_head_size", width // count), ("all_head_size", width)):
        if hasattr(module, name):
            setattr(module, name, value)


def _write_config(model: PreTrainedModel, query: nn.Linear, heads: int, neurons: Sequence[nn.Linear]) -> None:
    """Write the sizes that the weights have now; a size that is missed shows when the result is loaded."""
    config: Any = model.config
    setattr(config, setting_name(config, "hidden"), query.in_features)
    setattr(config, setting_name(config, "heads"), heads)
    if neurons:
        setattr(config, setting_name(config, "ffn"), neurons[0].out_features)
    if (name := _name_size(config, "embedding")) is not None:
        table: Any = model.get_input_embeddings()
        setattr(config, name, table.weight.shape[-1])


def _name_size(config: Any, size: str) -> str | None:
    try:
        return setting_name(config, size)
    except KeyError:
        return None


def _last(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[nn.Module]:
    """Find the product that computes the logits: its outputs are classes, which stay."""
    given: list[tuple[nn.Module, Tensor]] = []  # tensors, lest another takes the place of one that is gone
    hooks = [
        module.register_forward_hook(lambda module, _, out: given.append((module, out)))
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        logits = getattr(model(**inputs), "logits", None)
    for hook in hooks:
        hook.remove()
    return [] if logits is None else [module for module, out in given if out.data_ptr() == logits.data_ptr()]


def _tensors(out: Any) -> list[Tensor]:
    """Return all outputs, so that a pooler is cut as well, which no other output needs."""
    return [each for each in out.values() if isinstance(each, Tensor)]


def _reload(pruned: PreTrainedModel, model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> PreTrainedModel:
    """Save and load `pruned`, check that it computes the same, and make it trainable where `model` is, in its mode."""
    _check_shapes(pruned)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        pruned.save_pretrained(folder)
        loaded: PreTrainedModel = type(model).from_pretrained(folder).eval()
        expected = _tensors(pruned(**inputs))
        found = _tensors(nn.Module.to(loaded, pruned.device)(**inputs))
    same = (torch.allclose(a, b, atol=1e-4) for a, b in zip(found, expected, strict=False))
    if len(found) != len(expected) or not all(same):
        raise PruneError(f"{type(model).__name__}: the pruned model computes something else once saved and loaded")
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in loaded.named_parameters():
        parameter.requires_grad_(trainable[name])
    return loaded.train(model.training)


def _check_shapes(pruned: PreTrainedModel) -> None:
    """Raise PruneError where a model of the config would have other weights, classes included."""
    with init_empty_weights():
        expected = type(pruned)(pruned.config).state_dict()
    for name, tensor in pruned.state_dict().items():
        shape = tuple(expected[name].shape) if name in expected else None
        if tuple(tensor.shape) != shape:
            raise PruneError(
                f"{type(pruned).__name__}: torch-pruning {version('torch-pruning')} gives {name} the shape "
                f"{tuple(tensor.shape)}, which in a model of this class is {shape}: the result could not be loaded"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's warnings and the report of a load that fails: our error says it."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
