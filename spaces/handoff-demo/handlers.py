"""Between the page and `actions`: values of components in, values of components out, errors as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import actions
import figures
import gradio as gr
import markup
from prompts import MAX_CHARACTERS, explain
from race import Settings
from zero import ON_ZERO

HIDDEN = gr.update(visible=False)
CUSTOM = "custom"
EXAMPLES = 5


def settings_of(
    tokens: float, temperature: float, top_p: float, seed: float, has_read: bool, readable: bool
) -> Settings:
    """Settings from the controls; cleared number fields count as zero."""
    return Settings(int(tokens or 1), float(temperature or 0), float(top_p or 1), int(seed or 0), has_read, readable)


def begin(request: gr.Request) -> Any:
    """The stop event of a visitor's new run (events do not travel to another process)."""
    event = actions.visitors.get(request.session_hash).begin()
    return None if ON_ZERO else event


def choose_pair(choice: str | None) -> tuple[Any, ...]:
    """Load the chosen pair, or show the fields for another one."""
    if choice is None or choice == CUSTOM:
        return (gr.update(), gr.update(visible=choice == CUSTOM), "", gr.update(), *[gr.update()] * EXAMPLES)
    return _loaded(lambda: actions.pairs.load(choice), custom=False)


def load_custom(source: str, target: str, mapper: str, revision: str) -> tuple[Any, ...]:
    """Load a pair by Hub ids or folders."""
    return _loaded(lambda: actions.pairs.load_custom(source, target, mapper, revision), custom=True)


def _loaded(load: Any, custom: bool) -> tuple[Any, ...]:
    try:
        pair = load()
    except Exception as error:
        return (gr.update(), gr.update(), markup.message(explain(error)), gr.update(), *[gr.update()] * EXAMPLES)
    buttons = [
        gr.update(value=pair.examples[place][0], visible=True) if place < len(pair.examples) else HIDDEN
        for place in range(EXAMPLES)
    ]
    who = gr.update(choices=[(pair.source_name, "source"), (pair.target_name, "target")], value="source")
    return (pair.key, gr.update(visible=custom), markup.pair_card(actions.facts(pair)), who, *buttons)


def example(key: str, place: int) -> Any:
    """The text of an example of the chosen pair."""
    try:
        return actions.pairs.load(key).examples[place][1]
    except Exception:
        return gr.update()


def count_tokens(key: str, prompt: str) -> str:
    """How long the prompt is, while it is typed, and what an example's answer is."""
    try:
        pair = actions.pairs.load(key)
        length = len(pair.tokenizer(prompt[:MAX_CHARACTERS])["input_ids"]) if prompt.strip() else 0
    except Exception:
        return ""
    return markup.counter(length, pair.max_tokens, pair.answer_to(prompt))


def race(
    key: str,
    prompt: str,
    tokens: float,
    temperature: float,
    top_p: float,
    seed: float,
    has_read: bool,
    readable: bool,
    request: gr.Request,
) -> Iterator[tuple[Any, ...]]:
    """message, native pane, handoff pane, strip, heat map, results' visibility."""
    stop = begin(request)
    try:
        pair = actions.pairs.load(key)
        settings = settings_of(tokens, temperature, top_p, seed, has_read, readable)
        snapshot = None
        for kind, frame in actions.race_frames(key, prompt, settings, stop):
            if kind == "race":
                snapshot = frame
                yield (*_panes(pair, frame, prompt), gr.update(), gr.update(), HIDDEN)
                continue
            heat = frame.cosines and figures.cosine_map(frame.cosines)
            shown = gr.update(value=heat, visible=True) if heat else HIDDEN
            yield (*_panes(pair, snapshot, prompt), markup.strip(frame.tokens), shown, gr.update(visible=True))
    except Exception as error:
        yield (markup.message(explain(error)), *[gr.update()] * 4, gr.update())
    finally:
        _end(request, stop)


def _panes(pair: Any, snapshot: Any, prompt: str) -> tuple[str, str, str]:
    answer = pair.answer_to(prompt)
    head = markup.message("Stopped. What was written until then stays.", "note") if snapshot.stopped else ""
    note = markup.report_note(snapshot.handoff.report, snapshot.source_seconds, snapshot.source_counted)
    native_note = f'<span class="kv-chip kv-native">{snapshot.prompt_tokens:,} native</span>'
    return (
        head,
        markup.pane(
            snapshot.native, "native", "Full prefill", f"{pair.target_name} reads it all", native_note, answer
        ),
        markup.pane(
            snapshot.handoff,
            "handoff",
            "Handoff",
            f"{pair.source_name} has read, {pair.target_name} goes on",
            note,
            answer,
        ),
    )


def chat(
    key: str,
    folder: str | None,
    said: list[dict[str, Any]] | None,
    text: str,
    model: str,
    tokens: float,
    temperature: float,
    seed: float,
    request: gr.Request,
) -> Iterator[tuple[Any, ...]]:
    """message, chatbot, input box, cache strip, switch line, folder.

    Args:
        said: what the chatbot shows; answers in it carry a line about who wrote them.
    """
    stop, visitor = begin(request), request.session_hash
    same = gr.update()
    try:
        folder = folder or actions.new_chat_folder()
        pair = actions.pairs.load(key)
        settings = settings_of(tokens, temperature, 1.0, seed, True, True)
        names = {"source": pair.source_name, "target": pair.target_name}
        said = [*(said or [])]
        grown = [*said, {"role": "user", "content": text}] if (text or "").strip() else said
        yield "", grown, "", same, same, folder
        for view in actions.chat_frames(key, visitor, folder, text, model, settings, stop):
            answer = view.messages[-1]["content"]
            if not view.done:
                yield "", [*grown, {"role": "assistant", "content": answer}], same, same, same, folder
                continue
            signed = f"{answer}\n\n*{markup.signature(names[view.model], view.switch)}*"
            line = markup.switch_line(view.switch, names, view.seconds_to_first, view.tokens_per_second)
            strip = markup.cache_strip(view.pieces, names[view.model])
            yield "", [*grown, {"role": "assistant", "content": signed}], same, strip, line, folder
    except Exception as error:
        # The session has taken the message back too.
        yield markup.message(explain(error)), said, text, same, same, folder
    finally:
        _end(request, stop)


def new_chat(request: gr.Request) -> tuple[Any, ...]:
    """Forget the conversation: message, chatbot, cache strip, switch line, folder."""
    visitor = actions.visitors.get(request.session_hash)
    visitor.stop()
    visitor.chat = None
    return "", [], "", "", None


def damage(key: str, prompt: str, amount: float, tokens: float, request: gr.Request) -> Iterator[tuple[Any, ...]]:
    """One damage: message, verdict card, curve."""
    yield from _damage(key, prompt, amount, tokens, False, request)


def damage_sweep(
    key: str, prompt: str, amount: float, tokens: float, request: gr.Request
) -> Iterator[tuple[Any, ...]]:
    """One damage, then the curve over all of them."""
    yield from _damage(key, prompt, amount, tokens, True, request)


def _damage(
    key: str, prompt: str, amount: float, tokens: float, sweep: bool, request: gr.Request
) -> Iterator[tuple[Any, ...]]:
    stop = begin(request)
    try:
        for kind, frame in actions.damage_frames(key, prompt, amount, int(tokens or 1), sweep, stop):
            if kind == "verdict":
                yield "", markup.verdict_card(*frame), gr.update()
            else:
                yield "", gr.update(), gr.update(value=figures.damage_curve(frame, amount), visible=True)
    except Exception as error:
        yield markup.message(explain(error)), gr.update(), gr.update()
    finally:
        _end(request, stop)


def latency(key: str, prompt: str, repeats: float) -> tuple[Any, ...]:
    """message, chart, remarks."""
    try:
        result = actions.latency(key, prompt, int(repeats or 1))
    except Exception as error:
        return markup.message(explain(error)), gr.update(), gr.update()
    return "", gr.update(value=figures.latency_bars(result), visible=True), markup.latency_note(result)


def stop(request: gr.Request) -> None:
    """Stop what runs for this visitor."""
    actions.visitors.get(request.session_hash).stop()


def leave(request: gr.Request) -> None:
    """The page was closed."""
    actions.visitors.forget(request.session_hash)


def _end(request: gr.Request, event: Any) -> None:
    if event is not None:
        # Also where the page went away in the middle: the generations must not go on alone.
        event.set()
        actions.visitors.get(request.session_hash).end(event)
