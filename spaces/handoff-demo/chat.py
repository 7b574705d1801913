"""A conversation that moves between the two models of a pair, turn by turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import Job
from pairs import Pair
from prompts import MAX_CHARACTERS, Unsuitable, check_length, pieces
from race import READING_PAUSE, TICK, Settings
from transformers import StoppingCriteriaList

from kvbridge_hf import HandoffPolicy, HandoffSession
from kvbridge_hf.session import SwitchReport

SYSTEM = "You are a good friend."


@dataclass(frozen=True)
class Piece:
    """One token of the conversation in the answering model's cache.

    Args:
        origin: `"native"` where the model read or wrote it itself, `"mapped"` where it came from the other one,
            `"unread"` where its cache does not hold it (the newest token never is).
    """

    text: str
    origin: str


@dataclass(frozen=True)
class View:
    """The conversation at one moment."""

    messages: list[dict[str, str]]
    pieces: list[Piece]
    model: str
    switch: SwitchReport | None
    seconds_to_first: float | None
    tokens_per_second: float | None
    done: bool


def plain_render(tokenizer: Any) -> Any:
    """How to write a conversation for a tokenizer without a chat template."""

    def render(messages: Sequence[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        lines = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
        text = "\n".join([*lines, "Assistant:"] if add_generation_prompt else lines)
        return list(tokenizer(text)["input_ids"])

    return render


class Chat:
    """One visitor's conversation.

    Args:
        pair: the pair.
        folder: where the conversation is kept between turns, if each turn runs in a process of its own (ZeroGPU).
    """

    def __init__(self, pair: Pair, folder: Path | None = None):
        self.pair, self.folder = pair, folder
        self.session = self._new_session()
        self.session.send("system", SYSTEM)

    def turn(self, text: str | None, model: str, settings: Settings, stop: threading.Event | None) -> Iterator[View]:
        """Send a message and let `"source"` or `"target"` answer; yields the conversation while the answer grows.

        Raises:
            Unsuitable: the message is empty, or the conversation has become too long.
        """
        text = (text or "").strip()
        if not text:
            raise Unsuitable("Say something first, or click one of the openings.")
        if len(text) > MAX_CHARACTERS:
            raise Unsuitable(f"That is {len(text):,} characters; a message may have {MAX_CHARACTERS:,}.")
        self._restore()
        session, before = self.session, len(self.session.messages)
        session.send("user", text)
        try:
            room = self.pair.max_tokens - settings.max_new_tokens - 8  # the words of a chat template around an answer
            try:
                check_length(session.input_ids.shape[1], room, settings.max_new_tokens)
            except Unsuitable as error:
                raise Unsuitable(f"The conversation has grown too long. Start a new one. ({error})") from None
            yield from self._answer(model, settings, stop)
        except BaseException:
            # What has no answer is taken back, so that it can be sent again.
            session.truncate(before)
            raise
        self._keep()

    def _answer(self, model: str, settings: Settings, stop: threading.Event | None) -> Iterator[View]:
        session, switches = self.session, len(self.session.reports)

        def work(job: Job) -> str:
            return session.generate(
                model,
                streamer=job.streamer,
                stopping_criteria=StoppingCriteriaList([job.criterion]),
                **settings.for_generate(),
            )

        job = Job(work, seed=settings.seed, stop=stop, pause=READING_PAUSE if settings.readable else 0.0)
        messages = self.messages
        try:
            job.start()
            while not job.done:
                answer = self.pair.tokenizer.decode(list(job.tokens), skip_special_tokens=True).strip()
                yield View(
                    [*messages, {"role": "assistant", "content": answer or "…"}],
                    [],
                    model,
                    None,
                    job.first_token,
                    job.tokens_per_second,
                    False,
                )
                time.sleep(TICK)
        finally:
            if not job.done:
                job.stop.set()
                job.join()
        if job.error is not None:
            raise job.error
        if len(session.messages) == len(messages) + self._hidden:
            raise Unsuitable("Stopped before the answer began.")
        switch = session.reports[-1] if len(session.reports) > switches else None
        yield View(self.messages, self.pieces(model), model, switch, job.first_token, job.tokens_per_second, True)

    @property
    def _hidden(self) -> int:
        return sum(message["role"] == "system" for message in self.session.messages)

    @property
    def messages(self) -> list[dict[str, str]]:
        """What was said, without the system message."""
        return [dict(message) for message in self.session.messages if message["role"] != "system"]

    def pieces(self, model: str) -> list[Piece]:
        """The conversation's tokens as they stand in a model's cache."""
        tokens = self.session.input_ids[0].tolist()
        origins = ["unread"] * len(tokens)
        for span in self.session.spans(model):
            for place in range(span.start, min(span.stop, len(tokens))):
                origins[place] = "native" if span.origin is None else "mapped"
        return [Piece(text, origin) for text, origin in zip(pieces(self.pair.tokenizer, tokens), origins, strict=True)]

    def _new_session(self) -> HandoffSession:
        return HandoffSession(**self._parts())

    def _parts(self) -> dict[str, Any]:
        pair = self.pair
        mappers = {("source", "target"): pair.mapper}
        if pair.back is not None:
            mappers["target", "source"] = pair.back
        return {
            "models": {"source": pair.source, "target": pair.target},
            "mappers": mappers,
            "tokenizer": pair.tokenizer,
            "policy": HandoffPolicy(on_failure="prefill"),
            "render": None if getattr(pair.tokenizer, "chat_template", None) else plain_render(pair.tokenizer),
        }

    def _restore(self) -> None:
        if self.folder is not None and (self.folder / "session").is_dir():
            self.session = HandoffSession.load(self.folder / "session", **self._parts())

    def _keep(self) -> None:
        if self.folder is not None:
            self.session.save(self.folder / "session")


__all__ = ["Chat", "Piece", "View", "plain_render"]
