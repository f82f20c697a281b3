"""Prune a model to given sizes or a budget: cut, recover, ship and measure."""

from dataclasses import replace

from compress.arguments import with_keywords_of
from compress.benchmark.devices import open_device
from compress.commands import preflight
from compress.commands.distill import run_distillation
from compress.config.options import PruneOptions, SettingOptions
from compress.config.recipe import Recipe
from compress.exporters.artifact import Bundle
from compress.jobs.checks import join_processes, load_functions
from compress.jobs.request import DistillRequest, PruneArguments
from compress.jobs.target import set_target


@with_keywords_of(PruneArguments)
def prune(arguments: PruneArguments) -> Bundle:
    """Prune `model`, let it recover with its unpruned self as teacher, and ship it,
    measured, as a bundle in `out`.

    model    a checkpoint with a head for the task, an alias or encoder that is
             fine-tuned first, or a bundle's folder
    recipe   name, path of a .yaml, or a Recipe, with stages that prune
    target   the sizes to keep, or a budget or a share of the score for which sizes are
             found (see `pruning.budget`, `jobs.path`); default: the recipe's own
    setting  the device and the setting for a budget of latency or speed-up
    The other arguments are as for `distill`.

    Raises PruneError for a target that this model cannot reach, and a CompressError for
    anything else that is wrong."""
    request = preflight.prune_request(arguments)
    request = resolve_target(request, arguments.target, arguments.setting)
    return run_pruning(request, arguments.max_drop)


def run_pruning(request: DistillRequest, max_drop: float | None = None) -> Bundle:
    """Distil a model into its pruned self, with a device that can be reached."""
    assert isinstance(request.recipe, Recipe), "its target was resolved"
    target = request.recipe.target
    by_hand = target.device.partition(":")[0] in ("browser", "adb")
    if target.needs_device and not by_hand:
        # fail before hours of training
        with open_device(target.device, say=lambda _: None):
            pass
    return run_distillation(request, max_drop)


def resolve_target(
    request: DistillRequest,
    target: PruneOptions,
    setting: SettingOptions,
) -> DistillRequest:
    """Return the request with this target in its recipe, and with the user's own
    functions loaded. Raises PruneError."""
    assert isinstance(request.recipe, Recipe), "it was checked"
    options = request.options
    processes = join_processes().num_processes
    recipe = load_functions(request.recipe, processes, options.allow_code)
    recipe = set_target(recipe, target.values, setting.values, options.overrides)
    return replace(request, recipe=recipe)
