"""The choice in words: what to ship and why, and what keeps that honest."""

from collections.abc import Iterator

from compress.bench.protocol import NOISE_FACTOR
from compress.classes import describe
from compress.report import units
from compress.report.candidates import OWN, Candidate
from compress.report.compare import Choice, Limits, Pick, View, median, timing
from compress.report.significance import SHARES

MOST_NAMED = 3
"""Candidates a sentence names before it counts."""


def headline(choice: Choice, limits: Limits, chosen: Pick) -> str:
    """One sentence: the pick, what it was picked for, and a faster one where these rows cannot tell them apart."""
    one, metric = chosen.candidate, units.metric(choice.task.metric)
    if one is None:
        return _nothing(choice, limits)
    facts = _facts(choice, one, choice.view)
    cheapest = limits.min_score is not None and limits.budget_ms is None and limits.max_mb is None
    asked = _asked(limits, metric)
    if cheapest:
        how = "the fastest" if median(one, choice.view) is not None else "the smallest"
        said = f"{one.name} is {how} with {metric} of at least {units.score(limits.min_score)}: {facts}"
    elif asked:
        said = f"{asked}, {one.name} scores best: {facts}"
    else:
        said = f"{one.name} scores best: {facts}"
    if chosen.thrifty and choice.basis and not cheapest:
        took = units.measure(median(chosen.thrifty, choice.view), "ms")
        said += (
            f"; on {choice.basis.rows:,} rows {chosen.thrifty.name} cannot be told from it, and takes {took} "
            f"for {units.measure(chosen.thrifty.size_mb, 'MB')}"
        )
    return said + "."


def remarks(choice: Choice, chosen: Pick) -> tuple[str, ...]:
    """Ties, verdicts, baselines, and what the figures cannot bear."""
    return (
        *_ties(choice, chosen),
        *_proof(chosen.candidate),
        *_fallen(chosen),
        *_baselines(choice, chosen.candidate),
        *_other_rows(choice),
        *_times(choice),
        *_joined(choice),
        *_absent(choice),
    )


def where(choice: Choice) -> str:
    """What is compared, in words."""
    files, bundles = len(choice.candidates), len(choice.bundles)
    counted = f"{files} file{'s' * (files != 1)} of {bundles} bundle{'s' * (bundles != 1)}"
    return f"{counted}, {units.metric(choice.task.metric)} on {choice.basis}" if choice.basis else counted


def named(candidates: tuple[Candidate, ...], choice: Choice | None = None) -> str:
    """The first few by name, with their score of `choice`; the others by number."""
    shown = [
        f"{one.name} ({units.score(choice.score(one))})" if choice else one.name for one in candidates[:MOST_NAMED]
    ]
    rest = len(candidates) - len(shown)
    if rest:
        return f"{', '.join(shown)} and {rest} more"
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else "".join(shown)


def _facts(choice: Choice, one: Candidate, view: View | None) -> str:
    costs = [(median(one, view), "ms"), (one.size_mb, "MB")]
    known = " and ".join(units.measure(value, unit) for value, unit in costs if value is not None)
    return f"{units.metric(choice.task.metric)} {units.score(choice.score(one))}" + (f" at {known}" if known else "")


def _asked(limits: Limits, metric: str) -> str:
    costs = [(limits.budget_ms, "ms"), (limits.max_mb, "MB")]
    within = " and ".join(f"{value:g}{units.GAP}{unit}" for value, unit in costs if value is not None)
    least = f"with {metric} of at least {units.score(limits.min_score)}" if limits.min_score is not None else ""
    return " and ".join(part for part in (f"Within {within}" if within else "", least) if part)


def _nothing(choice: Choice, limits: Limits) -> str:
    scored = [one for one in choice.candidates if choice.score(one) is not None]
    if not scored:
        return "No candidate has a score."
    asked = _asked(limits, units.metric(choice.task.metric))
    best = max(units.score(choice.score(one)) for one in scored)
    times = [took for one in scored if (took := median(one, choice.view)) is not None]
    sizes = [one.size_mb for one in scored if one.size_mb is not None]
    fastest = f"the fastest takes {units.measure(min(times), 'ms')}" if times else "none was timed"
    ends = [f"the best score is {best}", fastest]
    ends += [f"the smallest has {units.measure(min(sizes), 'MB')}"] if sizes else []
    return f"{asked}, there is nothing: {', '.join(ends)}."


def _ties(choice: Choice, chosen: Pick) -> Iterator[str]:
    if chosen.candidate is None or choice.basis is None:
        return
    rows = choice.basis.rows
    if chosen.level:
        yield (
            f"{rows:,} rows cannot tell {choice.task.metric} {units.score(choice.score(chosen.candidate))} from that "
            f"of {named(chosen.level, choice)} (95{units.GAP}%, answers taken as independent)."
        )
    elif choice.task.metric not in SHARES and len(choice.candidates) > 1:
        metric = units.metric(choice.task.metric)
        yield f"How far apart two values of {metric} must be on {rows:,} rows is not known from them alone."


def _proof(one: Candidate | None) -> Iterator[str]:
    if one is not None and one.certified is False:
        yield f"{one.name} is not certified: {one.reason}."


def _fallen(chosen: Pick) -> Iterator[str]:
    """Say which classes the pick has lost, and the faster one that is named beside it."""
    for one in (chosen.candidate, chosen.thrifty):
        if one is not None and one.fallen:
            yield f"{one.name} finds {describe(one.fallen)}."


def _baselines(choice: Choice, one: Candidate | None) -> Iterator[str]:
    own = choice.score(one) if one else None
    level = [(score, name) for name, score in choice.baselines if own is not None and score >= own]
    if one and level:
        score, name = max(level)
        beside = f"{units.score(own)} against {units.score(score)}"
        yield f"{one.name} is no better than the baseline {name} ({beside})."


def _other_rows(choice: Choice) -> Iterator[str]:
    other = tuple(one for one in choice.candidates if one.scores and choice.score(one) is None)
    if other:
        rows = sorted({str(basis) for one in other for basis in one.scores})
        verb = "is" if len(other) == 1 else "are"
        yield f"{named(other)} {verb} scored on other rows ({'; '.join(rows)}): shown, and not compared."


def _times(choice: Choice) -> Iterator[str]:
    view = choice.view
    if view is None:
        yield "Nothing was timed: give this the result files of `compress bench` too."
        return
    if view.place == OWN and len({one.bundle for one in choice.timed(view)}) > 1:
        spread = _spread(choice, view)
        drift = f" The same teacher took {spread} in them." if spread else ""
        yield (
            f"Latencies are of the runs’ own races, not of one race of all.{drift} `compress bench` of all these "
            "bundles at once compares them fairly."
        )
    noisy = tuple(one for one in choice.candidates if (found := timing(one, view)) and found.noisy)
    if noisy:
        verb = "was" if len(noisy) == 1 else "were"
        yield (
            f"The machine changed speed while {named(noisy)} {verb} timed (noisy, ~) at {view.name}: take these times "
            "as approximate."
        )
    if busy := [found.busy for one in choice.candidates if (found := timing(one, view)) and found.busy]:
        yield f"The machine was not quiet at {view.name}: {max(busy)}. Alone the files are faster."


def _joined(choice: Choice) -> Iterator[str]:
    by_name = tuple(one for one in choice.candidates if one.by_name)
    if by_name:
        yield (
            f"Figures of {named(by_name)} were joined by the file’s name: their report or result is older than the "
            "SHA-256 that tells whether they are of the very file that is there. `compress bench` measures again."
        )


def _spread(choice: Choice, view: View) -> str:
    """From the least to the most that the same teacher took in the runs' own races, where that is more than noise."""
    at = view.setting
    races: dict[str, list[float]] = {}
    for bundle in choice.bundles:
        report = bundle.report
        for row in report.of_role("teacher") if report else ():
            for one in (row.latency or {}).values():
                if (one["threads"], one["batch"], one["seq"]) == (at.threads, at.batch, at.seq):
                    races.setdefault(row.name, []).append(one["p50_ms"])
    wide = [times for times in races.values() if max(times) > NOISE_FACTOR * min(times)]
    if not wide:
        return ""
    times = max(wide, key=lambda times: max(times) / min(times))
    return f"{units.three_digits(min(times))} to {units.measure(max(times), 'ms')}"


def _absent(choice: Choice) -> Iterator[str]:
    unscored = tuple(one for one in choice.candidates if not one.scores)
    if unscored:
        yield f"{named(unscored)} {'has' if len(unscored) == 1 else 'have'} no score."
    untimed = tuple(one for one in choice.candidates if choice.view and timing(one, choice.view) is None)
    if untimed and choice.view:
        yield f"Not timed at {choice.view.name}: {named(untimed)}."
    if choice.unmatched:
        shown = ", ".join(choice.unmatched[:MOST_NAMED])
        rest = len(choice.unmatched) - MOST_NAMED
        yield f"Of no bundle given here, and left out: {shown}{f' and {rest} more' if rest > 0 else ''}."
