"""What a student that begins as its teacher is given: the teacher's largest units, in the teacher's order."""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from compress.errors import StudentError
from compress.shape import Shape
from compress.slicing import Sizes, SlicePlan, choose, cut, magnitude, parameters_of
from compress.students.naming import Weight, weight_of


def narrowed(teacher: PreTrainedModel, student: Shape, layers: Sequence[int]) -> dict[Weight, Tensor]:
    """The weights of these teacher layers, numbered as the student's are, cut to the student's widths.

    Raises StudentError when the student is wider than its teacher. A teacher without weights has none to give.
    """
    theirs, plan = Shape.of(teacher.config), SlicePlan.of(teacher)
    for size in ("hidden", "embedding", "heads", "head_size", "ffn"):
        if getattr(student, size) > getattr(theirs, size):
            raise StudentError(
                f"student: init: teacher can only narrow, but {size} {getattr(student, size)} is more than the "
                f"teacher's {getattr(theirs, size)}; make it smaller (hidden = heads x head size) or use init: scratch"
            )
    if teacher.device.type == "meta":  # a listing builds students for their sizes alone
        return {}
    sizes = Sizes(
        layers=len(layers),
        hidden=student.hidden,
        heads=student.heads,
        head_size=student.head_size,
        ffn=student.ffn,
        embedding=None if plan.sizes.embedding is None else student.embedding,
    )
    kept = choose(plan, magnitude(teacher, plan), sizes, layers=layers)
    weights = cut(plan, parameters_of(teacher), kept)
    return {weight: tensor.detach() for name, tensor in weights.items() if (weight := weight_of(name)) is not None}
