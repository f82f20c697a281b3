"""Which teacher layers a shallower student starts from."""

from collections.abc import Sequence

from compress.errors import StudentError


def copied_layers(rule: str | Sequence[int], students: int, teachers: int) -> list[int]:
    """0-based teacher layer for each student layer. Raises StudentError.

    even     first, last and evenly between, halves rounded to even: 6 of 12 are DistilBERT's 0 2 4 7 9 11
    uniform  every N/M-th, ending with the last: what TinyBERT's hidden map compares
    first    0 .. M-1; last: N-M .. N-1
    """
    if not isinstance(rule, str):
        layers = [layer % teachers if -teachers <= layer < teachers else -1 for layer in rule]
        if len(layers) != students or -1 in layers:
            raise StudentError(
                f"student.copy_layers: {list(rule)} must name {students} layers, each of 0..{teachers - 1}"
            )
        return layers
    if students > teachers:
        raise StudentError(
            f"student.copy_layers: {rule}: the student's {students} layers cannot all come from the teacher's "
            f"{teachers}; list the layers to copy (one may be named twice), or use init: scratch"
        )
    if rule == "even":
        return [round(m * (teachers - 1) / max(students - 1, 1)) for m in range(students)]
    if rule == "uniform":
        return [(m + 1) * teachers // students - 1 for m in range(students)]
    return list(range(students)) if rule == "first" else list(range(teachers - students, teachers))
