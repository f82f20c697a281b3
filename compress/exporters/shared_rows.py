"""Share the rows of a file between processes, such as those that `torchrun` starts.

Each process reads the whole file and answers every WORLD_SIZE-th batch of it. The first
process writes the output, in order. The others leave their answers, an Arrow file for
each batch, in a hidden folder next to the output, on a disk that all processes share.
They exchange nothing else. No batch is lost, as the first process answers it itself if
no other does; none is there twice, as its number is its name.

Answers left by an interrupted command are used by the next command with the same
request.
"""

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.data.answers import AnswerColumns
from compress.errors import DataError
from compress.io import atomic_file, hash_sample, hash_value
from compress.machine import count_processes, process_rank

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class RowShare:
    """The batches that a process answers.

    rank      the number of this process, from 0
    count     of processes
    folder    for the answers of the others
    digest    of everything that decides the answers; it must be the same in every
              process
    patience  seconds after which the first process answers a batch itself
    missing   the processes whose batches did not arrive in time, which it no longer
              waits for
    """

    rank: int
    count: int
    folder: Path
    digest: str
    patience: float = 60.0
    missing: set[int] = field(default_factory=set)

    @classmethod
    def from_environment(
        cls, source: Path, target: Path, decisive: Mapping[str, Any]
    ) -> "RowShare":
        """Read RANK and WORLD_SIZE.

        decisive   what decides the answers, in addition to the input
        """
        digest = hash_value([dict(decisive), hash_sample(source)])
        folder = target.with_name(f".{target.name}.answers")
        return cls(process_rank(), count_processes(), folder, digest)

    @property
    def writes(self) -> bool:
        """Return True for the process that writes the output."""
        return self.rank == 0

    def owns(self, number: int) -> bool:
        """Check whether this process answers the batch of this number."""
        return number % self.count == self.rank

    def has(self, number: int) -> bool:
        """Check whether a batch was answered before."""
        return self._file(number).exists()

    def leave(self, number: int, answers: "pa.Table") -> None:
        """Leave the answers to a batch for the first process, and the digest."""
        import pyarrow as pa

        self.folder.mkdir(exist_ok=True)
        with atomic_file(self._sign(self.rank)) as partial:
            partial.write_text(self.digest, encoding="utf-8")
        with (
            atomic_file(self._file(number)) as partial,
            pa.ipc.new_file(str(partial), answers.schema) as file,
        ):
            file.write_table(answers)

    def collect(self, number: int) -> AnswerColumns | None:
        """Wait for the batch of another process, and return its answers; None if it
        does not arrive.

        Raises DataError if that process answers something else."""
        import pyarrow as pa

        rank = number % self.count
        patience = 0.0 if rank in self.missing else self.patience
        ends = time.monotonic() + patience
        while not self.has(number):
            if time.monotonic() > ends:
                self._check_sign(rank)
                self.missing.add(rank)
                return None
            time.sleep(0.02)
        self.missing.discard(rank)
        with pa.ipc.open_file(pa.memory_map(str(self._file(number)))) as file:
            table = file.read_all()
        return dict(zip(table.column_names, table.columns, strict=True))

    def finish(self) -> None:
        """Remove the answers."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _check_sign(self, rank: int) -> None:
        sign = self._sign(rank)
        if sign.exists() and sign.read_text(encoding="utf-8") != self.digest:
            raise DataError(
                f"process {rank} has another input, bundle or options than process 0; "
                "expected the same command and the same files on every machine"
            )

    def _sign(self, rank: int) -> Path:
        return self.folder / f"process-{rank}"

    def _file(self, number: int) -> Path:
        return self.folder / f"{self.digest[:16]}-{number}.arrow"
