"""A client that measures: prompts to a running server through the openai package, and what it counted.

Answers are read as lines and not as the package's objects, which take four times the processor: a client that cannot
follow would slow plain decoding most, whose answers come in the most pieces.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import httpx
import openai

from benchmarks.serving.answers import Ask, Completion, Pass, Prompts
from benchmarks.serving.watching import Watch
from c2t_plugin.errors import C2TError

# of Linux, about the thread that reads it: nanoseconds that it ran, that it waited for a processor, and how often
SCHEDULED = Path("/proc/thread-self/schedstat")
REQUEST_TIMEOUT_S = 300.0
FLUSH_TIMEOUT_S = 10.0
# With top_p, what a temperature leaves open: vLLM would fill it in from the model's generation_config.
NOTHING_ELSE = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class Client(ABC):
    """Talks to one server; each engine's own says how it counts and how it is controlled.

    url: its address without /v1. max_tokens: output tokens per request; exactly so many if `whole`, which ignores the
    end-of-text token.
    """

    # what the server calls the model
    model = "default"
    # fields of a request that ask for its counts
    counting: ClassVar[Mapping[str, object]] = {}
    # how often a pass asks what runs, 0 for never
    watched_every_s: float = 0.05
    # output tokens of the first, second, ... prompt of a pass, from the start again after the last; none: max_tokens
    lengths: Sequence[int] = ()

    def __init__(self, url: str, max_tokens: int, whole: bool = True) -> None:
        self.max_tokens = max_tokens
        self.whole = whole
        self._url = url
        # made once, since that takes longer than a small model's answer
        self._tls = httpx.create_ssl_context(trust_env=False)
        self._http = httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT_S, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def complete(self, prompt: Sequence[int], temperature: float = 0.0) -> Completion:
        """One completion of a prompt given as token ids. Raises C2TError if the server fails."""
        return self.answers([prompt], 1, _nothing, temperature)[0]

    def run(self, prompts: Prompts, concurrency: int, advance: Callable[[], None], temperature: float = 0.0) -> Pass:
        """Send all prompts, `concurrency` at a time, to a server with an empty cache; advance() after each answer."""
        return self._pass(lambda: self.answers(prompts, concurrency, advance, temperature))

    def arrive(self, asks: Sequence[Ask], temperature: float = 0.0) -> Pass:
        """Send each request at its time, whatever became of those before, to a server with an empty cache."""
        return self._pass(lambda: _run(self._arriving(asks, temperature)))

    def _pass(self, answers: Callable[[], tuple[Completion, ...]]) -> Pass:
        self.flush()
        with Watch(self.running, self.watched_every_s) as watch:
            start, used, waited = time.perf_counter(), time.process_time(), _waited_s()
            completions = answers()
            seconds = time.perf_counter() - start
            share = (time.process_time() - used) / seconds
            waiting = (_waited_s() - waited) / seconds
        return Pass(completions, seconds, watch.most, watch.mean, share, waiting)

    def pieces(self, prompt: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """One greedy answer, up to where the model ends it: the token ids that came together, as they come.

        An engine sends what a step yields at once; a client that is slow to read may find two steps in one piece.
        """
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": self.max_tokens, "temperature": 0.0}
        body |= {"stream": True, "return_token_ids": True}
        try:
            with self._http.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                rest = b""
                for piece in answer.iter_bytes():
                    events, rest = _whole_events(rest + piece)
                    for event in events:
                        if new := _token_ids(event):
                            yield tuple(new)
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            raise C2TError(f"the server did not stream an answer: {error}") from error

    def top_two_gap(self, prompt: Sequence[int]) -> float:
        """How far the second-best next token's logit is below the best one's."""
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0.0, "logprobs": 2}
        answer = self._request("POST", "/v1/completions", json=body).json()
        try:
            best, second = sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True)[:2]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise C2TError(f"an answer with two logprobs was expected, got {json.dumps(answer)[:300]}") from error
        return float(best - second)

    def answers(
        self, prompts: Prompts, concurrency: int, advance: Callable[[], None], temperature: float
    ) -> tuple[Completion, ...]:
        """Completions of all prompts, in their order. Raises C2TError if the server fails."""
        return _run(self._answers(prompts, concurrency, advance, temperature))

    async def _answers(
        self, prompts: Prompts, concurrency: int, advance: Callable[[], None], temperature: float
    ) -> tuple[Completion, ...]:
        found: dict[int, Completion] = {}
        left = iter(enumerate(prompts))
        async with self._connected() as to:

            async def one_after_the_other() -> None:
                for place, prompt in left:
                    tokens = self.lengths[place % len(self.lengths)] if self.lengths else None
                    found[place] = await self._answer(to, prompt, temperature, tokens)
                    advance()

            await asyncio.gather(*(one_after_the_other() for _ in range(min(concurrency, len(prompts)))))
        return tuple(found[place] for place in range(len(prompts)))

    async def _arriving(self, asks: Sequence[Ask], temperature: float) -> tuple[Completion, ...]:
        async with self._connected() as to:
            start = time.perf_counter()

            async def at_its_time(ask: Ask) -> Completion:
                await asyncio.sleep(max(0.0, ask.at - (time.perf_counter() - start)))
                return await self._answer(to, ask.prompt, temperature, ask.max_tokens)

            return tuple(await asyncio.gather(*map(at_its_time, asks)))

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[openai.AsyncOpenAI]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        http = httpx.AsyncClient(verify=self._tls, timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"{self._url}/v1", api_key="none", max_retries=0, http_client=http
        ) as to:
            yield to

    async def _answer(
        self, to: openai.AsyncOpenAI, prompt: Sequence[int], temperature: float, max_tokens: int | None = None
    ) -> Completion:
        start = time.perf_counter()
        token_ids: list[int] = []
        first_s = last_s = 0.0
        counted = 0, 0, 0
        extra = {"ignore_eos": self.whole, "return_token_ids": True, **NOTHING_ELSE, **self.counting}
        async with to.completions.with_streaming_response.create(
            model=self.model,
            prompt=list(prompt),
            max_tokens=max_tokens or self.max_tokens,
            temperature=temperature,
            top_p=1.0,
            stream=True,
            extra_body=extra,
        ) as stream:
            async for answer in _events(stream.iter_bytes()):
                counted = self.counted(answer) or counted
                if new := _token_ids(answer):
                    last_s = time.perf_counter() - start
                    first_s = first_s or last_s
                    token_ids += new
        if not token_ids:
            raise C2TError("the server ended an answer without a token; its log says why")
        return Completion(tuple(token_ids), *counted, first_s, last_s)

    def counted(self, answer: Mapping[str, Any]) -> tuple[int, int, int] | None:
        """verify_steps, accepted and candidates of a request, where an event of its answer tells them."""
        return None

    @abstractmethod
    def running(self) -> int:
        """How many requests the server runs now, those that wait not counted."""

    @abstractmethod
    def flush(self) -> None:
        """Empty the prefix cache, so that no pass profits from the one before."""

    @abstractmethod
    def control(self, beta: float, max_depth: int) -> None:
        """Change the threshold and the longest chain of a running C2T server."""

    @abstractmethod
    def c2t_state(self) -> dict[str, Any]:
        """What a C2T server says about itself: beta, max_depth and its counters."""

    def learnt(self) -> dict[str, Any]:
        """What the planner of a C2T server has learnt, see `told.state_of`: at least seen, discarded, nll and auc, and
        of a network that is trained the swaps."""
        state: dict[str, Any] = self.c2t_state()["planner"]["learnt"]
        return state

    def _request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **arguments).raise_for_status()
        except httpx.HTTPError as error:
            raise C2TError(f"the server did not answer {path}: {error}") from error


def _run(answers: Coroutine[Any, Any, tuple[Completion, ...]]) -> tuple[Completion, ...]:
    """C2TError if the server fails."""
    try:
        return asyncio.run(answers)
    except (openai.OpenAIError, httpx.HTTPError, json.JSONDecodeError) as error:
        raise C2TError(f"the server did not answer a completion request: {error}") from error


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream of server-sent events. C2TError if one of them is an error."""
    rest = b""
    async for piece in pieces:
        events, rest = _whole_events(rest + piece)
        for event in events:
            yield event


def _whole_events(text: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """The objects of a stream's whole lines, and the line that has not ended. C2TError if one of them is an error.

    Lines end at a newline only: Unicode has more ends of lines, which a text may hold.
    """
    *lines, rest = text.split(b"\n")
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
    for event in events:
        if "error" in event:
            raise C2TError(f"the server ended an answer with an error: {event['error']}")
    return events, rest


def _token_ids(event: Mapping[str, Any]) -> list[int]:
    return [token for choice in event["choices"] for token in choice.get("token_ids") or ()]


def _waited_s() -> float:
    """Seconds that this thread was ready and had no processor; 0 where nothing counts them."""
    return int(SCHEDULED.read_text().split()[1]) / 1e9 if SCHEDULED.exists() else 0.0


def _nothing() -> None:
    pass
