"""What proposes shapes: Optuna's samplers, with the settings that several objectives and several workers ask for."""

from collections.abc import Sequence

import numpy as np
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler

from compress.errors import SearchError, did_you_mean
from compress.search.reach import quiet

SAMPLERS = ("tpe", "nsga2", "gp", "random")
POPULATION = 24
"""Of NSGA-II: a generation is that many completed trials, and a search has some hundred of them."""


def make_sampler(name: str, seed: int | None = None, stream: Sequence[int] = ()) -> BaseSampler:
    """The sampler of that name, whose draws depend on `seed` and `stream`; without a seed, on chance.

    Two that propose to the same study need different streams, or they draw the same. Raises SearchError.

    tpe     of the parameters together (by default Optuna takes them one by one where there are several objectives), in
            groups that occur together, away from what is running elsewhere
    nsga2   evolution; wants hundreds of trials
    gp      a Gaussian process: the fewest trials, some seconds for each
    random
    """
    drawn = None if seed is None else int(np.random.SeedSequence([seed, *stream]).generate_state(1)[0])
    with quiet():
        if name == "tpe":
            return TPESampler(seed=drawn, multivariate=True, group=True, constant_liar=True)
        if name == "nsga2":
            return NSGAIISampler(seed=drawn, population_size=POPULATION)
        if name == "gp":
            return GPSampler(seed=drawn, warn_independent_sampling=False)
        if name == "random":
            return RandomSampler(seed=drawn)
    raise SearchError(f"no sampler {name!r}.{did_you_mean(name, SAMPLERS)}")
