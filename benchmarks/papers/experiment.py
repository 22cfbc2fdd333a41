"""What an experiment is, what it is given and what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.pair_files import file_hash
from c2t_plugin.lab.plans import CollectPlan, TreeShape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from c2t_plugin.classifier import NodeClassifier
    from c2t_plugin.traces.file import Traces

Cell = str | int | float | None
Row = Mapping[str, Cell]

TREES = {"train": 10_000, "held-out": 5_000}
# of every other kind of text
OTHER_TREES = 1_000
# Enough that every table has its shape; the figures then mean little.
QUICK_TREES = 120


@dataclass
class Bench:
    """The pair, its traces and its classifiers, each made or read when first asked for and then kept.

    pair: pair directory. traces_dir: where trace files are looked for and, where one is missing, collected to.
    seed: of everything random in an experiment. quick: small traces, to see an experiment run. prefix: of the names of
    trace files, for another pair than the first. files: what was read of the pair so far, by name: the hash of a
    classifier's file, and of the weights that a draft's traces were recorded with.
    """

    pair: Path
    traces_dir: Path
    seed: int = 0
    quick: bool = False
    prefix: str = ""
    files: dict[str, str] = field(default_factory=dict, repr=False)
    _traces: dict[tuple[str, str], Traces] = field(default_factory=dict, repr=False)
    _classifiers: dict[str, NodeClassifier] = field(default_factory=dict, repr=False)

    def traces(self, draft: str, prompts: str = "held-out") -> Traces:
        """Whole trees of 1,011 nodes and chains of one draft. prompts: kind of text, as in CollectPlan."""
        key = (draft, prompts)
        if key not in self._traces:
            trees = QUICK_TREES if self.quick else TREES.get(prompts, OTHER_TREES)
            plan = CollectPlan(draft=draft, shape=TreeShape(), trees=trees, prompts=prompts, seed=self.seed)
            kind, size = f"-{prompts}" if prompts != "train" else "", "-quick" if self.quick else ""
            self._traces[key] = self.collected(f"{draft}{kind}{size}", plan)
        self.read_pair(draft, self._traces[key].header["pair"])
        return self._traces[key]

    def collected(self, name: str, plan: CollectPlan) -> Traces:
        """The trace file of a name, collected by the plan if there is none. C2TError if other weights recorded it."""
        from c2t_plugin.lab.collect import collect_to
        from c2t_plugin.lab.pairs import describe_pair
        from c2t_plugin.traces.file import load_traces

        path = self.traces_dir / f"{self.prefix}{name}.traces"
        if not path.is_file():
            return collect_to(path, self.pair, plan)
        traces = load_traces(path)
        if traces.header["pair"] != describe_pair(self.pair, plan.draft):
            raise C2TError(f"{path} was recorded with other weights than {self.pair}; remove it or name another")
        return traces

    def live(self, draft: str) -> Path:
        """The pair's directory, for models that are run."""
        from c2t_plugin.lab.pairs import describe_pair

        self.read_pair(draft, describe_pair(self.pair, draft))
        return self.pair

    def read_pair(self, draft: str, pair: Mapping[str, str]) -> None:
        """Note which weights were used. pair: what the header of traces says of it."""
        self.files[f"{self.prefix}{draft}"] = pair["draft"].rpartition(":")[2]
        self.files[f"{self.prefix}target"] = pair["target"].rpartition(":")[2]

    def classifier(self, draft: str) -> NodeClassifier:
        """The classifier that ships with this draft of the pair."""
        from c2t_plugin.classifier import FILE_NAME, load_classifier

        path = self.read(self.pair / draft / FILE_NAME)
        if draft not in self._classifiers:
            self._classifiers[draft] = load_classifier(path)
        return self._classifiers[draft]

    def read(self, path: Path) -> Path:
        """Note which version of a draft's file was used, and return its path."""
        if path.is_file():
            self.files[f"{self.prefix}{path.parent.name}/{path.name}"] = file_hash(path)
        return path


@dataclass(frozen=True)
class Findings:
    """rows: of the table, each with all of the experiment's columns; None prints as nothing.

    remark: one or two sentences that follow from the rows, or nothing. figure: the picture, if there is one.
    """

    rows: Sequence[Row]
    remark: str = ""
    figure: Figure | None = None


@dataclass(frozen=True)
class Experiment:
    """One table or figure of a paper.

    name: on the command line. title: of the table. source: paper and number. columns: of the rows, in order; those of
    the paper's own figures start with "paper". run: does the work.
    """

    name: str
    title: str
    source: str
    columns: tuple[str, ...]
    run: Callable[[Bench], Findings]

    def findings(self, bench: Bench) -> Findings:
        """Run it. C2TError if its rows do not have its columns, which is a mistake in the experiment."""
        found = self.run(bench)
        for row in found.rows:
            if set(row) != set(self.columns):
                raise C2TError(f"{self.name}: a row has the keys {sorted(row)}, its columns are {sorted(self.columns)}")
        return found


@dataclass
class Registry:
    """All experiments by name, in the order of the papers."""

    modules: tuple[str, ...]

    @cached_property
    def experiments(self) -> dict[str, Experiment]:
        from importlib import import_module

        listed = [experiment for module in self.modules for experiment in import_module(module).EXPERIMENTS]
        found = {experiment.name: experiment for experiment in listed}
        if len(found) != len(listed):
            raise C2TError("two experiments have one name")
        return found

    def chosen(self, names: Sequence[str]) -> list[Experiment]:
        """The named experiments, all of them for `all`. C2TError for a name that there is not."""
        if list(names) == ["all"]:
            return list(self.experiments.values())
        unknown = [name for name in names if name not in self.experiments]
        if unknown:
            raise C2TError(f"no experiment {', '.join(unknown)}; `python -m benchmarks.papers --list` lists them")
        return [self.experiments[name] for name in names]
