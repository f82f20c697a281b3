"""What a page may answer. It runs on somebody else's machine: all is checked, and texts are made harmless."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, FiniteFloat, PositiveInt, TypeAdapter, ValidationError

from compress.bench.protocol import DeviceError
from compress.terminal import one_line

Text = Annotated[str, BeforeValidator(lambda value: one_line(value) if isinstance(value, str) else value)]
Milliseconds = Annotated[FiniteFloat, Field(ge=0)]


@dataclass(frozen=True)
class Known:
    """What the browser tells of itself; '' and 0 where it does not.

    timer_ms  the least step its clock shows
    isolated  whether the page may share memory between threads
    """

    agent: Text
    cores: Annotated[int, Field(ge=0)]
    memory_gb: Annotated[FiniteFloat, Field(ge=0)]
    isolated: bool
    simd: bool
    timer_ms: Milliseconds
    processor: Text
    system: Text
    model: Text
    gpu: Text


@dataclass(frozen=True)
class Opened:
    """init_ms: reading and opening the file; first_ms: the first forward; forwards: how many one sample is the mean
    of, so that the clock's step is at most 1 % of what it times."""

    init_ms: Milliseconds
    first_ms: Milliseconds
    forwards: PositiveInt


@dataclass(frozen=True)
class Timed:
    """ms: per forward, of each sample; heap_mb: what WebAssembly's memory has grown to, 10^6 bytes."""

    ms: Annotated[list[Annotated[FiniteFloat, Field(gt=0)]], Field(min_length=1)]
    heap_mb: Annotated[FiniteFloat, Field(ge=0)]


@dataclass(frozen=True)
class Output:
    """One tensor of float32 for one row: its shape, and its bytes (little-endian) in base64."""

    dims: Annotated[tuple[Annotated[int, Field(ge=1, lt=2**31)], ...], Field(min_length=2, max_length=3)]
    data: str

    def row(self) -> NDArray[np.float32]:
        """Decode the row, infinities and nan too, so that overflows show. Raises ValueError for another shape."""
        values = np.frombuffer(base64.b64decode(self.data, validate=True), "<f4").reshape(self.dims)
        if len(values) != 1:
            raise ValueError(f"{len(values)} rows, not 1")
        return values[0]


@dataclass(frozen=True)
class Computed:
    """The outputs of the file, row by row."""

    rows: list[Annotated[list[Output], Field(min_length=1)]]

    def logits(self) -> list[NDArray[np.float32]]:
        """Decode every row; starts and ends of spans side by side. Raises DeviceError for tensors that are none."""
        try:
            rows = [[output.row() for output in outputs] for outputs in self.rows]
            return [arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=-1) for arrays in rows]
        except ValueError as error:
            raise DeviceError(f"browser: the page sent a tensor that is none: {error}") from None


@dataclass(frozen=True)
class Done:
    """Nothing to tell."""


Answer = TypeVar("Answer", Known, Opened, Timed, Computed, Done)


def read(answer: Mapping[str, Any], kind: type[Answer], *, about: str = "") -> Answer:
    """The page's answer as `kind`; `about`: what was asked. Raises DeviceError for an error, in the page's own words,
    and for nonsense."""
    device = f"browser: {about}" if about else "browser"
    if "error" in answer:
        raise DeviceError(f"{device}: {one_line(str(answer['error'])) or 'the page failed without a word'}")
    try:
        return TypeAdapter(kind).validate_python(answer.get("ok"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise DeviceError(f"{device}: the page answered what cannot be: {where}: {first['msg']}") from None
