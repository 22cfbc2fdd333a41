"""The trace file: trees and chains of one draft, every node with its acceptance, as one safetensors file.

Log probabilities are float32: a replay must make the very decisions that a server makes on float32 confidences, and
float16 resolves a joint log probability of -9 to .004 only, some 4 parts in 1,000 of P. Entropy and margin are float32
too, but kept once per distribution, and depth and rank follow from the column: 14 KB per tree of 1,010 draft nodes.
Chains that a server recorded are there for fitting, which needs no such precision: their statistics are coarse.

The file holds no prompt: numbers stand for prompts and for the sources they come from, and only drafted tokens are
named.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from c2t_plugin.errors import C2TError
from c2t_plugin.output import write_whole
from c2t_plugin.tensor_file import read_tensors
from c2t_plugin.traces import coarse, forest
from c2t_plugin.traces.forest import TABLES, Forest
from c2t_plugin.traces.stored import (
    COARSE,
    FORMAT,
    OPTIONAL,
    READABLE,
    REMEDY,
    STATES,
    VERSION,
    check,
    checksum,
    forest_of,
)

if TYPE_CHECKING:
    from c2t_plugin.classifier import NodeClassifier

# of the files that a server writes
SUFFIX = ".traces"


@dataclass(frozen=True)
class Traces:
    """Decoding states with their drafts; row i of everything is the same state.

    tree: whole trees; where only chains were drafted, the chains again, which are whole trees of k = 1.
    chain: the greedy chains, which a tree need not hold to the end.
    prompt: (states,) int32 number of the prompt. The states of a prompt are consecutive rows.
    step: (states,) int16 new tokens before the root, ascending within a prompt. A server visits some states only: then
    steps are left out.
    novel: (states,) bool, see novel_tokens.
    header: draft, pair, top_m, prompts, seed, provenance.
    group: (states,) int32 number of the source that the prompt comes from, a file for example, the same for all states
    of a prompt; None where that is not known. Prompts of one group are alike, so intervals are drawn over groups.
    """

    tree: Forest
    chain: Forest
    prompt: Tensor
    step: Tensor
    novel: Tensor
    header: Mapping[str, Any]
    group: Tensor | None = None

    def __post_init__(self) -> None:
        states = {len(self.tree), len(self.chain), *(len(value) for value in self.states().values())}
        if len(states) != 1:
            raise C2TError(f"the tables of one trace file have {sorted(states)} states; all must have the same number")
        runs = self.prompt.unique_consecutive()
        if len(runs) != len(runs.unique()):
            raise C2TError("the states of a prompt must stand together, and some prompt comes twice")
        same = self.prompt[1:] == self.prompt[:-1]
        if (same & (self.step[1:] <= self.step[:-1])).any():
            raise C2TError("the states of a prompt must stand in the order of their steps, each step once")
        if self.group is not None and (same & (self.group[1:] != self.group[:-1])).any():
            raise C2TError("all states of a prompt must have the same group")

    def __len__(self) -> int:
        return len(self.prompt)

    def check_top_m(self, classifier: NodeClassifier) -> None:
        """C2TError unless the entropies here are those that the classifier was fitted with."""
        if classifier.spec.top_m != self.header["top_m"]:
            raise C2TError(f"the classifier's top_m is {classifier.spec.top_m}, the traces' {self.header['top_m']}")

    def __getitem__(self, rows: Tensor) -> Traces:
        """The states of these rows (bool mask, or ascending int64 indices)."""
        states = {name: value[rows] for name, value in self.states().items()}
        return Traces(self.tree[rows], self.chain[rows], header=self.header, **states)

    def states(self) -> dict[str, Tensor]:
        """The tables of one value per state, by name; without groups where they are not known."""
        found = {name: getattr(self, name) for name in (*STATES, *OPTIONAL)}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def first(self) -> Tensor:
        """(prompts,) int64: row of each prompt's first state, in the order of the file."""
        counts = self.prompt.unique_consecutive(return_counts=True)[1]
        return counts.cumsum(0) - counts

    @property
    def owner(self) -> Tensor:
        """(states,) int64: place of each state's prompt, counted in the order of the file."""
        return self.prompt.unique_consecutive(return_inverse=True)[1]

    @property
    def groups(self) -> Tensor:
        """(prompts,) int64: group of each prompt, counted from 0; each prompt is its own where none is recorded."""
        first = self.first
        if self.group is None:
            return torch.arange(len(first))
        return self.group[first].unique(return_inverse=True)[1]

    def following(self, rows: Tensor, accepted: Tensor) -> Tensor:
        """Where serving goes on: the first state of the same prompt at least `accepted` + 1 tokens later.

        rows, accepted: integers of one shape. Returns rows, int64; past the prompt's last state that is the row where
        the next prompt starts, or the number of states.
        """
        return torch.searchsorted(self._place, self._place[rows] + accepted + 1)

    @cached_property
    def _place(self) -> Tensor:
        """(states,) int64, ascending: prompt and step in one number; a step fits 16 bits."""
        return self.owner * 2**17 + self.step.long()


# A small target falls into loops, in which every draft is right; so many repeated tokens are one.
NOVELTY = 8


def novel_tokens(token_ids: Sequence[int], size: int = NOVELTY) -> list[bool]:
    """Of every token, whether it and the size - 1 before it occur together nowhere earlier; the first ones do not."""
    found: list[bool] = novel_mask(torch.tensor(token_ids, dtype=torch.int64), size).tolist()
    return found


def novel_mask(token_ids: Tensor, size: int = NOVELTY) -> Tensor:
    """(tokens,) bool of (tokens,) int64, as novel_tokens; in a few sorts, since prompts have 100,000 tokens."""
    tokens = len(token_ids)
    if tokens < size:
        return torch.ones(tokens, dtype=torch.bool)
    # equal runs of `width` tokens have the same number, by where they start
    number, width = token_ids.unique(return_inverse=True)[1], 1
    while width < size:
        more = min(width, size - width)
        number, width = (number[:-more] * tokens + number[more:]).unique(return_inverse=True)[1], width + more
    places = torch.arange(len(number))
    first = torch.full((tokens,), tokens).scatter_reduce(0, number, places, "amin")
    return torch.cat([torch.ones(size - 1, dtype=torch.bool), first[number] == places])


def join_traces(parts: Sequence[Traces], header: Mapping[str, Any]) -> Traces:
    """One of all states, in order. C2TError if some parts have groups and others none, or a prompt is in two parts."""
    kinds = {tuple(part.states()) for part in parts}
    if len(kinds) != 1:
        raise C2TError("some of the traces to join have groups and others none; collect them the same way")
    states = {name: torch.cat([part.states()[name] for part in parts]) for name in parts[0].states()}
    tree, chain = (forest.join([getattr(part, name) for part in parts]) for name in ("tree", "chain"))
    return Traces(tree, chain, header=header, **states)


def merge_traces(parts: Sequence[Traces]) -> Traces:
    """All states of several recordings of one draft; their prompts are numbered anew. The header is the first one's.

    Groups are kept only where all have them, and then mean the same. Raises C2TError unless all have the same pair,
    top_m and shapes.
    """
    kinds = [
        ([part.header[name] for name in ("pair", "top_m")], part.tree.k, part.tree.layers, part.chain.layers)
        for part in parts
    ]
    if any(kind != kinds[0] for kind in kinds):
        raise C2TError("traces of different drafts, top_m or shapes cannot be joined; take them one by one")
    before = [0, *itertools.accumulate(len(part.first) for part in parts)]
    grouped = all(part.group is not None for part in parts)
    numbered = [
        dataclasses.replace(part, prompt=(part.owner + n).int(), group=part.group if grouped else None)
        for part, n in zip(parts, before, strict=False)
    ]
    return join_traces(numbered, parts[0].header)


def save_traces(traces: Traces, path: str | os.PathLike[str], *, coarsely: bool = False) -> None:
    """Write the file whole or not at all. coarsely: chains alone, which are the trees too, see coarse."""
    path = Path(path)
    dtypes = {**STATES, **OPTIONAL}
    tensors = {name: value.to(dtypes[name]).contiguous() for name, value in traces.states().items()}
    parts = {"chain": traces.chain} if coarsely else {"tree": traces.tree, "chain": traces.chain}
    for part, own in parts.items():
        tables = {name: getattr(own, name) for name in TABLES}
        # the two may share memory, which safetensors refuses
        chosen = coarse.packed(tables) if coarsely else tables
        tensors |= {f"{part}.{name}": value.contiguous().clone() for name, value in chosen.items()}
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "shape": json.dumps({part: {"k": own.k, "layers": own.layers} for part, own in parts.items()}),
        "statistics": COARSE if coarsely else "float32",
        "header": json.dumps(dict(traces.header), sort_keys=True),
    }
    metadata["checksum"] = checksum(tensors, metadata)
    write_whole(path, partial(save_file, tensors, metadata=metadata))


def load_traces(path: str | os.PathLike[str]) -> Traces:
    """Read a trace file of this version or an older one, or all of a directory as one.

    C2TError if a file is missing, damaged or of another format.
    """
    path = Path(path)
    # os.path, since Path raises where a name is too long or a folder may not be searched
    if os.path.isdir(path):
        files = sorted(path.glob(f"*{SUFFIX}"))
        if not files:
            raise C2TError(f"{path} holds no trace file (*{SUFFIX})")
        return merge_traces([load_traces(file) for file in files])
    if not os.path.isfile(path):
        raise C2TError(f"trace file not found: {path}; write one with `c2t collect`")
    tensors, metadata = read_tensors(path, FORMAT, READABLE, REMEDY)
    shapes, header = check(path, tensors, metadata)
    parts = {part: forest_of(path, part, shape, tensors) for part, shape in shapes.items()}
    states = {name: tensors[name] for name in (*STATES, *OPTIONAL) if name in tensors}
    return Traces(parts.get("tree", parts["chain"]), parts["chain"], header=header, **states)
