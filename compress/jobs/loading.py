"""Load the task of a command, whose data may be asked for several times."""

from dataclasses import asdict, dataclass, field

from compress.config.options import DataOptions
from compress.data import load_task
from compress.data.task import TaskData


@dataclass(frozen=True)
class TaskLoader:
    """Loads the task of a source once for each way to read it.

    source, seed  as for `load_task`
    """

    source: str
    seed: int
    loaded: dict[str, TaskData] = field(default_factory=dict)

    def load(self, columns: DataOptions, *, unlabelled: bool) -> TaskData:
        """Load the task, or return it if it was loaded with the same options. Raises
        DataError."""
        key = repr((columns, unlabelled))
        if key not in self.loaded:
            self.loaded[key] = load_task(
                self.source, **asdict(columns), seed=self.seed, unlabelled=unlabelled
            )
        return self.loaded[key]
