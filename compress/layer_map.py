"""Which layers of a student and its teacher are compared."""

from collections.abc import Sequence

from compress.errors import ObjectiveError


def layer_pairs(layers: str | Sequence[tuple[int, int]], students: int, teachers: int) -> list[tuple[int, int]]:
    """0-based (student layer, teacher layer) pairs for M student and N teacher layers. Raises ObjectiveError.

    uniform  m -> floor((m + 1) N / M) - 1: TinyBERT's g(m) = m N / M, where M need not divide N
    skip     uniform without the final layer: PKD-Skip
    first    m -> m; top: m -> N - M + m: TinyBERT's bottom and top strategies
    last     only the last of each: MiniLM
    spread   uniform, also where the student is the deeper one: n <- floor((n + 1) M / N) - 1 for each teacher layer n
    pairs    as given; negative numbers count from the end
    """
    if not isinstance(layers, str):
        for student, teacher in layers:
            if not (-students <= student < students and -teachers <= teacher < teachers):
                raise ObjectiveError(
                    f"layers: [{student}, {teacher}] does not exist: the student has {students} layers, the teacher "
                    f"{teachers}, numbered from 0"
                )
        pairs = [(student % students, teacher % teachers) for student, teacher in layers]
    elif layers == "last":
        pairs = [(students - 1, teachers - 1)]
    elif layers == "spread" and students > teachers:
        pairs = [((n + 1) * students // teachers - 1, n) for n in range(teachers)]
    elif students > teachers:
        raise ObjectiveError(
            f"layers: {layers} maps {students} student layers onto only {teachers} of the teacher; give explicit pairs"
        )
    elif layers == "first":
        pairs = [(m, m) for m in range(students)]
    elif layers == "top":
        pairs = [(m, teachers - students + m) for m in range(students)]
    else:
        pairs = [(m, (m + 1) * teachers // students - 1) for m in range(students - (layers == "skip"))]
    if not pairs:
        raise ObjectiveError(f"layers: {layers!r} leaves no layer to compare of the student's {students}")
    return pairs


def pairs_of_subnet(pairs: Sequence[tuple[int, int]], layers: Sequence[int]) -> list[tuple[int, int]]:
    """The (student layer, teacher layer) pairs of a subnet that has these of the student's layers, in its own numbers.

    A layer is compared with what it is compared with in the whole student; where none of them is, the last one with
    what the student's last compared layer is.
    """
    mine = [(m, teacher) for m, source in enumerate(layers) for student, teacher in pairs if student == source]
    return mine if mine or not pairs else [(len(layers) - 1, max(pairs)[1])]
