"""What vLLM's schedulers count of steps without a draft."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = pytest.mark.vllm

from c2t_plugin.engines.vllm.metrics import plain  # noqa: E402
from c2t_plugin.engines.vllm.verified import CountingMixin  # noqa: E402


class Requests(dict[str, SimpleNamespace]):
    """A scheduler as far as CountingMixin reads it."""

    def __init__(self, **outputs: int | None) -> None:
        """outputs: by request, how many tokens it has; None where it has ended."""
        made = {
            name: SimpleNamespace(num_output_tokens=tokens, is_finished=lambda ended=tokens is None: ended)
            for name, tokens in outputs.items()
        }
        super().__init__(made)


class Stock:
    """vLLM's scheduler as far as CountingMixin calls it. stats: whether it is asked for statistics."""

    def __init__(self, requests: Requests, *, stats: bool = True) -> None:
        self.requests, self.stats = requests, stats

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        for each in self.requests.values():
            each.num_output_tokens = 99
        return self.make_stats(None)

    def make_stats(self, drafts: Any) -> Any:
        return SimpleNamespace(waiting_lora_adapters={}) if self.stats else None


class Counting(CountingMixin, Stock):  # type: ignore[misc]
    """What is tested: over another base than vLLM's."""


def step(drafts: dict[str, list[int]], tokens: dict[str, list[int]]) -> tuple[Any, Any]:
    """What was scheduled and what came of it, of the requests of `tokens`."""
    scheduled = SimpleNamespace(scheduled_spec_decode_tokens=drafts, num_scheduled_tokens=dict.fromkeys(tokens, 1))
    places = {name: row for row, name in enumerate(tokens)}
    return scheduled, SimpleNamespace(req_id_to_index=places, sampled_token_ids=list(tokens.values()))


def test_a_scheduler_counts_tokens_that_came_without_a_draft():
    running = Requests(plain=3, empty=1, drafted=2, first=0, chunk=0, resumed=4, ended=None)
    found = Counting(running).update_from_output(
        *step(
            {"drafted": [5], "empty": []},
            {
                **{"plain": [1], "empty": [1], "drafted": [5, 6], "first": [1], "chunk": []},
                **{"resumed": [], "ended": [1], "aborted": [1]},
            },
        )
    )
    assert found.waiting_lora_adapters == plain(2) == {"c2t:plain_steps": 2}


def test_what_is_counted_waits_for_statistics():
    scheduler = Counting(Requests(plain=3), stats=False)
    assert scheduler.update_from_output(*step({}, {"plain": [1]})) is None
    scheduler.stats = True
    assert scheduler.update_from_output(*step({}, {"plain": [1]})).waiting_lora_adapters == plain(2)
    assert scheduler.make_stats(None).waiting_lora_adapters == {}
