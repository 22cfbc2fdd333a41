"""Traces of served requests: drafts as they were scored, labelled by what the target wrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from c2t_plugin.classifier import load_classifier
from c2t_plugin.engines.served_traces import start_recorder
from c2t_plugin.engines.vllm.config import Settings


class Request(Protocol):
    """The tokens of a request, as model runner V1 keeps them."""

    @property
    def prompt_token_ids(self) -> Sequence[int] | Tensor | None: ...

    @property
    def output_token_ids(self) -> Sequence[int]: ...


class ServedTraces:
    """Between vLLM's model runner and the recorder.

    V1 drafts before it appends a step's tokens to its requests, so a draft is kept until `settle`, which the worker
    calls when the scheduler fetches the drafts. vLLM names ended requests at the next step, before it forgets them.
    """

    def __init__(self, settings: Settings, vllm_config: Any, requests: Mapping[str, Request]) -> None:
        """requests: those that run, by their names, always as they are now."""
        self._requests = requests
        spec, target = vllm_config.speculative_config, vllm_config.model_config
        self._recorder = start_recorder(
            str(settings.trace_dir),
            settings.trace_share,
            settings.trace_limit,
            settings.trace_precision,
            command="vllm",
            base=settings.base,
            target=target.model,
            draft=spec.model,
            # a head that the target carries comes with it
            revision=target.revision if spec.model == target.model else spec.revision,
            top_m=load_classifier(settings.classifier).spec.top_m,
            d_max=spec.num_speculative_tokens,
        )
        self._kept: tuple[Tensor, list[list[int]], list[str]] | None = None
        # with the recorder; 0 of those that are not recorded
        self._numbers: dict[str, int] = {}

    def any_chosen(self, names: Iterable[str]) -> bool:
        """Whether one of these requests belongs to the recorded share; each is decided on once."""
        names = list(names)
        with self._recorder.guarding():
            for name in names:
                if name not in self._numbers:
                    self._numbers[name] = self._recorder.admit(name)
        return any(self._numbers.get(name) for name in names)

    def keep(self, stats: Tensor, drafted: list[list[int]], names: Iterable[str]) -> None:
        """One draft of the batch. stats: (rows, d_max, 4), see ChainScorer.stats. drafted: of every row, d_max ids."""
        self._kept = stats.cpu(), drafted, list(names)

    def forget(self) -> None:
        """Drop the kept draft: it is of requests that are none, with which vLLM has warmed up."""
        self._kept = None
        self._numbers.clear()

    def settle(self) -> None:
        """Hand the kept draft over, now that the runner knows its root as the newest token of each request."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        with self._recorder.guarding():
            for stats, drafted, name in zip(*kept, strict=True):
                number, request = self._numbers.get(name), self._requests.get(name)
                if number and request is not None:
                    new_tokens = len(request.output_token_ids)
                    # none: a part of a prompt, whose draft nobody takes
                    if new_tokens:
                        self._recorder.add(number, new_tokens - 1, stats, drafted)

    def finish(self, names: Iterable[str]) -> None:
        """These requests have ended; to be called while the runner still has them."""
        with self._recorder.guarding():
            for name in names:
                number, request = self._numbers.pop(name, 0), self._requests.get(name)
                if number and request is not None:
                    prompt = request.prompt_token_ids
                    self._recorder.finish(number, [] if prompt is None else prompt, request.output_token_ids)
                elif number:
                    self._recorder.forget(number)

    def close(self) -> None:
        """Write what is left, of requests that have not ended too: nothing is behind what they have written so far."""
        self.finish(list(self._requests))
        self._recorder.close()


@dataclass(frozen=True)
class _StateOfV2:
    tokens: Tensor
    prompt_len: int

    @property
    def prompt_token_ids(self) -> Tensor:
        # a copy, since the row is the next request's soon
        return self.tokens[: self.prompt_len].to("cpu", copy=True)

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :].tolist()


class RequestsOfV2(Mapping[str, Request]):
    """Model runner V2's requests, which it keeps as rows of tensors, in the shape of V1's."""

    def __init__(self, states: Any) -> None:
        """states: vLLM's RequestState."""
        self._states = states

    def __getitem__(self, name: str) -> Request:
        row = self._states.req_id_to_index[name]
        total = int(self._states.total_len.gpu[row])
        return _StateOfV2(self._states.all_token_ids.gpu[row, :total], int(self._states.prompt_len.np[row]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._states.req_id_to_index)

    def __len__(self) -> int:
        return len(self._states.req_id_to_index)
