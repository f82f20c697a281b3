"""Quantisation-aware training of a bundle's model: a run of the recipe q8bert, with the bundle as its teacher."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console

from compress import digest
from compress.data.cache import home
from compress.data_of import data_of
from compress.export.bundle import Bundle
from compress.objects import DataLike, data_path
from compress.pipeline import distill

RECIPE = "q8bert"


@contextmanager
def trained_for_int8(
    bundle: Bundle,
    data: DataLike,
    *,
    recipe: str = RECIPE,
    overrides: Sequence[str] = (),
    text: Sequence[str] | None = None,
    label: str | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> Iterator[Bundle]:
    """Yield a new bundle: the model trained to answer in int8 as it does in float, and its static int8 file.

    It learns from itself in float, on the train split of `data`; a recipe with a `step` of its own and `overrides` say
    how long. The run with the bundle in it is kept under $COMPRESS_HOME/qat until the caller is done with it:
    interrupted, the same call goes on from its last checkpoint. Raises BundleError for a bundle whose task `data` is
    not.
    """
    data = data_path(data)
    task = data_of(bundle, data, text=text, label=label, seed=seed).task
    length = f"stages.0.max_length={bundle.manifest.max_length}"
    asked = [asdict(stamp) for stamp in bundle.manifest.files.values()]
    key = digest.of_value([asked, data, recipe, list(overrides), text, label, seed])
    run = home() / "qat" / key[:24]
    yield distill(
        teacher=str(bundle.path), recipe=recipe, data=data, out=run, overrides=[length, *overrides], text=text,
        label=label, kind=task.kind, metric=task.metric, seed=seed, resume=(run / "run.json").is_file(),
        gate="warn", console=console,
    )  # fmt: skip
    shutil.rmtree(run)
