"""Choose, create and replace the heads of models: a stage names its head, and `head:
task` means the head of the kind of task."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from compress import families
from compress.errors import CompressError, StudentError
from compress.kinds import Kind, find

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from compress.config.stages import Head

OTHER_HEADS: Final[Mapping["Head", str]] = {
    "encoder": "AutoModel",
    "masked_lm": "AutoModelForMaskedLM",
    "pretraining": "AutoModelForPreTraining",
    "causal_lm": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
LANGUAGE: Final[tuple["Head", ...]] = (
    "masked_lm",
    "pretraining",
    "causal_lm",
    "seq2seq",
)
"""Heads that predict tokens, and are scored by perplexity."""


def auto(head: "Head", kind: Kind | None) -> Any:
    """Return transformers' Auto class of a head, for `task` that of the kind of task.
    Raises StudentError."""
    import transformers

    if head != "task":
        return getattr(transformers, OTHER_HEADS[head])
    if kind is None:
        raise StudentError("a stage with `head: task` needs a task: pass --data")
    return find(kind).auto_class()


def model_class(
    config: "PreTrainedConfig", head: "Head", kind: Kind | None
) -> "type[PreTrainedModel]":
    """Return the class that the family of `config` has for this head. Raises
    StudentError if it has none."""
    found = find_class(auto(head, kind), config)
    if found is None:
        raise StudentError(
            f"{config.model_type} has no {head} head in transformers "
            f"({auto(head, kind).__name__}); choose another family for the student, or "
            "another `head` for the stage"
        )
    return found


def find_class(
    auto_class: Any, config: "PreTrainedConfig"
) -> "type[PreTrainedModel] | None":
    """Return the class that an Auto class has for the family of `config`, or None.

    Of several (Funnel has two encoders), return the one that `architectures` names,
    else the first.
    """
    found = auto_class._model_mapping.get(type(config), None)
    if not isinstance(found, tuple):
        chosen: type[PreTrainedModel] | None = found
        return chosen
    names = config.architectures or []
    return next((each for each in found if each.__name__ in names), found[0])


def class_for(auto: Any, config: "PreTrainedConfig") -> "type[PreTrainedModel]":
    """Return the class of a model: the class itself, or an Auto class's for the family
    of `config`.

    Raises StudentError for a family without one.
    """
    from transformers import PreTrainedModel

    if issubclass(auto, PreTrainedModel):
        own: type[PreTrainedModel] = auto
        return own
    found = find_class(auto, config)
    if found is None:
        raise StudentError(
            f"{config.model_type} models have no {auto.__name__} class; choose another "
            "checkpoint"
        )
    return found


def create(
    config: "PreTrainedConfig", head: "Head", kind: Kind | None
) -> "PreTrainedModel":
    """Create a model with weights drawn from torch's generator. Raises StudentError if
    its family has no such head, or refuses a setting of the config."""
    model_class(config, head, kind)
    with naming_refusals(config):
        model = auto(head, kind).from_config(adapt_labels(config, head))
    return restore_labels(config, model)


@contextmanager
def naming_refusals(config: "PreTrainedConfig") -> Iterator[None]:
    """Re-raise as StudentError whatever transformers raises for a setting."""
    try:
        yield
    except CompressError:
        raise
    except Exception as error:  # each family has its own
        why = " ".join(str(error).split())[:200]
        raise StudentError(
            f"transformers cannot build a {config.model_type} with these settings: "
            f"{why}; correct student.config, or the config.json"
        ) from error


def output_layer(model: "nn.Module") -> "nn.Linear | None":
    """Return the layer that computes the number of a regression: the last linear layer
    with a single output."""
    from torch import nn

    layers = [
        each
        for each in model.modules()
        if isinstance(each, nn.Linear) and each.out_features == 1
    ]
    return layers[-1] if layers else None


def fit_new_output(model: "nn.Module", mean: float, unit: float) -> None:
    """Initialise the new head of a regression at the mean of the labels, with weights
    in their unit.

    A head is new if its bias is zero, as the library creates it; others are unchanged.
    """
    layer = output_layer(model)
    if layer is not None and layer.bias is not None and not layer.bias.detach().any():
        layer.bias.data.fill_(mean)
        layer.weight.data.mul_(unit)


def under(
    model: "PreTrainedModel", head: "Head", kind: Kind | None
) -> "PreTrainedModel":
    """Return `model` if it has this head, else a new model with this head and the
    encoder's weights.

    Head weights of the same name and shape are kept (the masked language model of a
    next-sentence model), the others are drawn from torch's generator.
    """
    from compress.models.init_weights import strip_prefix
    from compress.models.sharing import share_again

    if type(model) is model_class(model.config, head, kind):
        return model
    config = copy.deepcopy(model.config)
    config._attn_implementation = None
    other = create(config, head, kind)
    source = strip_prefix(model, model.state_dict())
    for name, tensor in strip_prefix(other, other.state_dict()).items():
        if name in source and source[name].shape == tensor.shape:
            tensor.copy_(source[name])
    share_again(other)
    return other.to(model.device)  # type: ignore[arg-type]  # transformers wraps `to` and loses self


def adapt_labels(config: "PreTrainedConfig", head: "Head") -> "PreTrainedConfig":
    """Set two labels for a head for pairs of segments that has as many outputs as the
    config has labels."""
    if head == "pretraining" and families.find(config.model_type).pair_labels:
        config = copy.deepcopy(config)
        config.num_labels = 2
    return config


def restore_labels(
    config: "PreTrainedConfig", model: "PreTrainedModel"
) -> "PreTrainedModel":
    """Keep the task's labels in the model's config, for the head that comes with the
    task."""
    model.config.id2label = config.id2label
    model.config.label2id = config.label2id
    return model
