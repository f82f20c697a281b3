"""Answer a stream of texts: each as soon as it is read, in memory that does not grow, whatever the stream holds."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from compress.data.text import LONGEST
from compress.errors import BundleError, DataError
from compress.export.marking import Answer, Marked
from compress.export.predictor import Prediction, Predictor


@dataclass(frozen=True)
class Answered:
    """One text of a stream, and what the model says of it; or, in `error`, why it was not asked."""

    text: str
    answer: Prediction | Answer | Marked | None
    error: str = ""


def lines(stream: BinaryIO) -> Iterator[bytes]:
    """Read lines without their ends; of one that is longer than LONGEST, its beginning."""
    while line := stream.readline(LONGEST + 2):
        rest = line
        while len(rest) > LONGEST and not rest.endswith(b"\n"):
            rest = stream.readline(LONGEST + 2)
        yield line.removesuffix(b"\n").removesuffix(b"\r")


def answers(
    predictor: Predictor, texts: Iterable[bytes], *, second: str | None = None, unit: str = "line"
) -> Iterator[Answered]:
    """Answer each text, or its pair with `second`; `unit` and its number name one that is no text.

    Raises BundleError, naming it too, where the model itself fails.
    """
    for number, raw in enumerate(texts, start=1):
        where = f"{unit} {number:,}"
        try:
            text = decode(raw, where)
        except DataError as error:
            yield Answered("", None, str(error))
            continue
        try:
            (answer,) = predictor.predict([text if second is None else (text, second)])
        except BundleError as error:
            raise BundleError(f"{where}: {error}") from error
        yield Answered(text, answer)


def decode(raw: bytes, where: str) -> str:
    """Decode UTF-8. Raises DataError, naming `where` and the byte, for what is none, or is too long."""
    if len(raw) > LONGEST:
        raise DataError(f"{where}: is longer than {LONGEST:,} bytes; expected one text a line")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8; convert the text, for example "
            "with: iconv -f latin1 -t utf-8"
        ) from None
