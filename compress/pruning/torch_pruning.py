"""Prune families without a slice plan with torch-pruning, which finds dependent
weights, and check its result.

Tried with torch-pruning 1.6.1, transformers 5.24, torch 2.13: two layers with a
classifier, half of everything.

    works     beit, camembert, data2vec-text, flaubert, layoutlm, megatron-bert,
              rembert, roberta-prelayernorm, vit, vit_msn, xlm, xlm-roberta-xl, xmod,
              yoso
    refused   deberta (the first), fnet, ibert, squeezebert: they have no separate
              queries, keys and values
              convbert, longformer: the library raises an error
              big_bird, canine, dinov2, esm, luke, mpnet, mra, nystromformer, roformer
              (not before transformers 5.24): the result is not a valid model of
              that class
              all with grouped keys (granite, phi3, gemma, ...): the library never
              terminates (VainF/Torch-Pruning#527)
              tied weights: the library does not see the tie
              families with a slice plan, which is exact

Other families are tried: either the result loads and computes the same as the cut
model, or PruneError is raised."""

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from compress import families
from compress.errors import PruneError, TeacherError
from compress.models.checkpoints import without_progress_bars
from compress.models.flops import count_parameters
from compress.models.loader import load_model
from compress.slicing.shape import find_setting, setting_name
from compress.tensors import Tensors

_PROJECTIONS = frozenset(
    f"{side}{ending}"
    for sides in (("q", "k", "v"), ("query", "key", "value"))
    for side in sides
    for ending in ("", "_lin", "_proj")
)
_HEADS = ("num_attention_heads", "n_heads", "num_heads")
_FAILS = (
    IndexError,
    TypeError,
    AssertionError,
    KeyError,
    ValueError,
    RuntimeError,
    AttributeError,
)
"""The errors that torch-pruning, or a model that it cut halfway, raises."""


def prune_generic(
    model: PreTrainedModel,
    example_inputs: Tensors,
    *,
    share: float,
    importance: Literal["magnitude", "taylor"] = "magnitude",
    loss: Callable[[PreTrainedModel], Tensor] | None = None,
) -> PreTrainedModel:
    """Make a model of the same class with `share` of its heads, hidden width, embedding
    and neurons; layers stay.

    The share is rounded to whole heads, which keep their size. `model` is not changed.
    taylor: by the gradients of `loss`. Raises PruneError for a model that torch-pruning
    cannot cut, if nothing would be removed, and if the saved result does not load or
    computes something else.
    """
    _check_supported(model)
    heads = int(getattr(model.config, setting_name(model.config, "heads")))
    kept = round(heads * share)
    if not 0 < kept < heads:
        raise PruneError(
            f"share {share}: leaves {kept} of {heads} heads; expected at least one "
            "less, and one left"
        )
    if (importance == "taylor") != (loss is not None):
        raise PruneError(
            "importance taylor needs a loss, and magnitude has no use for one"
        )
    # frozen weights would not be cut
    pruned = copy.deepcopy(model).eval().requires_grad_(True)
    try:
        with _quiet(), torch.enable_grad():  # the library traces the graph of gradients
            _cut(pruned, example_inputs, kept / heads, importance, loss)
            return _reload(pruned, model, example_inputs)
    except (*_FAILS, TeacherError) as error:
        message = str(error).partition("\n")[0]
        raise PruneError(
            f"{type(model).__name__}: torch-pruning {version('torch-pruning')} cannot "
            f"prune it ({type(error).__name__}: {message}); families with a slice "
            f"plan: {families.names('rules')}"
        ) from error


def _check_supported(model: PreTrainedModel) -> None:
    """Raise PruneError for models that torch-pruning would cut wrong, or never
    finish."""
    name = type(model).__name__
    family = model.config.model_type
    if families.find(family).rules:
        raise PruneError(
            f"{name}: {family} has a slice plan, which is exact; use "
            "compress.slicing.cut.slice_model"
        )
    if getattr(model.config, "num_key_value_heads", None) is not None:
        raise PruneError(
            f"{name}: torch-pruning never ends on grouped keys "
            "(VainF/Torch-Pruning#527)"
        )
    names = [each for each, _ in model.named_parameters(remove_duplicate=False)]
    if model.get_output_embeddings() is not None or len(names) > len(
        list(model.parameters())
    ):
        raise PruneError(
            f"{name}: has tied weights, which torch-pruning treats as separate; prune "
            "it without that head"
        )


def _cut(
    model: PreTrainedModel,
    inputs: Tensors,
    share: float,
    importance: str,
    loss: Callable[[PreTrainedModel], Tensor] | None,
) -> None:
    """Cut the model in place, and update the numbers of heads in its modules and
    config, which the library leaves."""
    import torch_pruning

    rules = {
        "magnitude": torch_pruning.importance.GroupMagnitudeImportance,
        "taylor": torch_pruning.importance.GroupTaylorImportance,
    }
    if loss is not None:
        loss(model).backward()
    attentions = dict(_find_attention(model))
    if not attentions:
        raise PruneError(
            f"{type(model).__name__}: has no attention with queries, keys and values "
            "of their own"
        )
    config: Any = model.config
    ffn = find_setting(config, "ffn")
    hidden = setting_name(config, "hidden")
    neurons = (
        []
        if ffn is None
        else [
            module
            for module in model.modules()
            if isinstance(module, nn.Linear)
            and (module.out_features, module.in_features)
            == (getattr(config, ffn), getattr(config, hidden))
        ]
    )
    removed = 1 - share - 1e-9  # widths are rounded down, heads up
    before = count_parameters(model)
    pruner = torch_pruning.pruner.BasePruner(
        model,
        dict(inputs),
        importance=rules[importance](),
        pruning_ratio=removed,
        head_pruning_ratio=removed,
        num_heads={
            each: count
            for projections, count in attentions.values()
            for each in projections
        },
        # models keep the scale of the old head size
        prune_num_heads=True,
        prune_head_dims=False,
        ignored_layers=_find_classifier(model, inputs),
        output_transform=_tensors,
        # the defaults would keep every pruned model alive
        in_channel_groups={},
        out_channel_groups={},
    )
    pruner.step()
    if count_parameters(model) == before:
        raise PruneError(
            f"{type(model).__name__}: torch-pruning {version('torch-pruning')} found "
            "nothing to remove"
        )
    for module, ((query, *_), _) in attentions.items():
        heads = pruner.num_heads[query]
        width = query.out_features
        names = dict.fromkeys(_HEADS, heads) | {
            "attention_head_size": width // heads,
            "all_head_size": width,
        }
        for name, value in names.items():
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, value)
    # A size that is missed here shows when the result is loaded.
    (query, *_), _ = next(iter(attentions.values()))
    setattr(config, hidden, query.in_features)
    setattr(config, setting_name(config, "heads"), pruner.num_heads[query])
    if ffn is not None and neurons:
        setattr(config, ffn, neurons[0].out_features)
    if (name := find_setting(config, "embedding")) is not None:
        table: Any = model.get_input_embeddings()
        setattr(config, name, table.weight.shape[-1])


def _find_attention(
    model: nn.Module,
) -> Iterator[tuple[nn.Module, tuple[list[nn.Linear], int]]]:
    """Yield the modules with projections of queries, keys and values, and their numbers
    of heads."""
    for module in model.modules():
        count = next(
            (n for name in _HEADS if isinstance(n := getattr(module, name, None), int)),
            None,
        )
        projections = [
            each
            for name, each in module.named_children()
            if name in _PROJECTIONS and isinstance(each, nn.Linear)
        ]
        if count is not None and len(projections) == 3:
            yield module, (projections, count)


def _find_classifier(model: PreTrainedModel, inputs: Tensors) -> list[nn.Module]:
    """Find the layer that computes the logits: its outputs are classes, which stay."""
    # tensors are kept, as another could take the memory of one freed
    outputs = list[tuple[nn.Module, Tensor]]()
    hooks = [
        module.register_forward_hook(
            lambda module, _, out: outputs.append((module, out))
        )
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        logits = getattr(model(**inputs), "logits", None)
    for hook in hooks:
        hook.remove()
    return (
        []
        if logits is None
        else [module for module, out in outputs if out.data_ptr() == logits.data_ptr()]
    )


def _tensors(out: Any) -> list[Tensor]:
    """Return all outputs, so that a pooler that no other output depends on is cut
    too."""
    return [each for each in out.values() if isinstance(each, Tensor)]


def _reload(
    pruned: PreTrainedModel, model: PreTrainedModel, inputs: Tensors
) -> PreTrainedModel:
    """Save and load `pruned`, check that it computes the same, and give it the
    trainable weights and the mode of `model`."""
    with init_empty_weights():
        plain = type(pruned)(pruned.config).state_dict()
    for name, tensor in pruned.state_dict().items():
        shape = tuple(plain[name].shape) if name in plain else None
        if tuple(tensor.shape) != shape:
            raise PruneError(
                f"{type(pruned).__name__}: torch-pruning {version('torch-pruning')} "
                f"gives {name} the shape {tuple(tensor.shape)}, which in a model of "
                f"this class is {shape}: the result could not be loaded"
            )
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        pruned.save_pretrained(folder)
        loaded: PreTrainedModel = load_model(Path(folder), type(model)).model
        expected = _tensors(pruned(**inputs))
        outputs = _tensors(nn.Module.to(loaded, pruned.device)(**inputs))
    same = (
        torch.allclose(a, b, atol=1e-4) for a, b in zip(outputs, expected, strict=False)
    )
    if len(outputs) != len(expected) or not all(same):
        raise PruneError(
            f"{type(model).__name__}: the pruned model computes something else once "
            "saved and loaded"
        )
    trainable = {
        name: parameter.requires_grad for name, parameter in model.named_parameters()
    }
    for name, parameter in loaded.named_parameters():
        parameter.requires_grad_(trainable[name])
    return loaded.train(model.training)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's warnings and transformers' report of a failed load, which
    our error repeats."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with without_progress_bars(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
