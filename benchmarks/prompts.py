"""Prompts of a chosen token count, cut out of the public-domain texts under data/.

Every prompt starts at another paragraph, so no two share their first chunk: a hit is always a hit
on the same prompt's own KV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

DATA_DIRECTORY = Path(__file__).resolve().parent / "data"
# Its answers name people of the passage, so they depend on what the passage says.
QUESTION = "Describe the main character of the story in your own words."

# Successive prompts out of one text start this far apart: far more than the first chunk, little
# enough that the 60 kB texts give dozens of prompts of 7k tokens (about 31 kB each).
START_STRIDE_CHARS = 3500

TokenCounter = Callable[[str], int]


class TextExhausted(Exception):
    """More or longer prompts were asked for than the texts hold."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message: a passage and a question about it."""

    name: str
    text: str
    target_tokens: int


def load_texts(directory: Path = DATA_DIRECTORY) -> dict[str, str]:
    """Name -> text of every shipped text, in the order of their names."""
    texts = {path.stem: path.read_text("utf-8") for path in sorted(directory.glob("*.txt"))}
    if not texts:
        raise TextExhausted(f"no texts in {directory.name}/")
    return texts


def passages(texts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(name, rest of the text from there) for one prompt after the other, no start used twice."""
    starts = dict.fromkeys(texts, 0)
    while True:
        advanced = False
        for name, text in texts.items():
            start = starts[name]
            if start >= len(text):
                continue
            yield f"{name}@{start}", text[start:]
            starts[name] = _next_paragraph(text, start + START_STRIDE_CHARS)
            advanced = True
        if not advanced:
            return


def _next_paragraph(text: str, position: int) -> int:
    gap = text.find("\n\n", position)
    return len(text) if gap < 0 else gap + 2


def build_prompts(
    targets_tokens: list[int], *, count_tokens: TokenCounter, chunk_tokens: int
) -> list[Prompt]:
    """One prompt per entry of `targets_tokens`, in that order, all different from the start.

    Lengths come out within a few tokens of the target and are never a multiple of `chunk_tokens`
    (see cut_to_tokens). Raises TextExhausted when the texts cannot give that many.
    """
    source = passages(load_texts())
    prompts = []
    for target in targets_tokens:
        # A start near the end of a text may be too late for a long prompt: take the next one.
        for name, passage in source:
            text = cut_to_tokens(
                passage, target, count_tokens=count_tokens, chunk_tokens=chunk_tokens
            )
            if text is not None:
                prompts.append(Prompt(name, text, target))
                break
        else:
            raise TextExhausted(f"{len(targets_tokens)} prompts wanted, {len(prompts)} found")
    return prompts


def cut_to_tokens(
    passage: str,
    target_tokens: int,
    *,
    count_tokens: TokenCounter,
    chunk_tokens: int,
    tolerance_tokens: int = 8,
) -> str | None:
    """The message over the start of `passage` that counts about `target_tokens`; None if too short.

    `count_tokens` counts a whole message as the server will (chat template included). The result
    is never a whole number of chunks: there vLLM computes the last token again and a local hit
    ends one block earlier than a restored one, so the two could not be compared at equal depth.
    """
    words = passage.split(" ")
    low, high = 0, len(words)
    if count_tokens(_message(words, high)) < target_tokens:
        return None
    while low < high:
        middle = (low + high) // 2
        counted = count_tokens(_message(words, middle))
        if abs(counted - target_tokens) <= tolerance_tokens and counted % chunk_tokens:
            return _message(words, middle)
        if counted < target_tokens:
            low = middle + 1
        else:
            high = middle
    while count_tokens(_message(words, low)) % chunk_tokens == 0:
        low -= 1
    return _message(words, low)


def _message(words: list[str], count: int) -> str:
    return " ".join(words[:count]).rstrip() + "\n\n" + QUESTION


def full_chunk_tokens(prompt_tokens: int, chunk_tokens: int) -> int:
    """Tokens of a prompt that a restore can give: its whole chunks, but never its last token.

    The model needs at least one token to compute, so a prompt of exactly n chunks hits one token
    less than it has.
    """
    return min(prompt_tokens // chunk_tokens * chunk_tokens, max(prompt_tokens - 1, 0))
