"""A page on which one language model goes on from what another has read. Run it with `python app.py`."""

from __future__ import annotations

import zero  # noqa: F401  (before anything touches CUDA)

# isort: split
import argparse
from functools import partial
from pathlib import Path
from typing import Any

import actions
import gradio as gr
import handlers
import markup
from handlers import CUSTOM, EXAMPLES
from zero import ON_ZERO

HERE = Path(__file__).resolve().parent
TITLE = "One model reads, another answers"
INTRO = f"""<div class="kv-hero"><h1>{TITLE}</h1>
<p>A small model has read a long prompt. Then a larger one should go on. It can read everything again, or take over
the small one's <b>KV cache</b>, mapped to its own. Here you see both, and how far they are apart.</p>
<p class="kv-key"><span class="kv-chip kv-native">native</span> read by the model itself
<span class="kv-chip kv-mapped">mapped</span> taken over from the other model</p></div>"""
OPENINGS = (
    "Here is some news. Karen owns the violin. Karen lives in Sydney. Mark has the drum. Who has the drum?",
    "Listen. Alice has a friend named Maria. Maria works as a singer. Who is the friend of Alice?",
    "In which city is the violin?",
)
THEME: Any = gr.themes.Soft(
    primary_hue="orange",
    secondary_hue="cyan",
    neutral_hue="slate",
    font=["ui-sans-serif", "system-ui", "sans-serif"],
    font_mono=["ui-monospace", "monospace"],
).set(
    block_title_background_fill="transparent",
    block_title_text_color="*body_text_color",
    block_title_text_color_dark="*body_text_color",
    body_background_fill="#f4f6f9",
    block_background_fill="#ffffff",
    block_title_padding="0",
)


def slot(name: str) -> gr.HTML:
    """A place for HTML that takes no room while it is empty."""
    return gr.HTML(elem_id=name, elem_classes="kv-slot", padding=False)


def build() -> gr.Blocks:
    """The whole page, with the pairs that [`actions.configure`] offers."""
    choices = [*actions.pairs.bundled(), ("another pair, by Hub ids …", CUSTOM)]
    first = choices[0][1]
    with gr.Blocks(title=TITLE) as page:
        key = gr.State(first)
        gr.HTML(INTRO)
        with gr.Row(equal_height=False):
            choice = gr.Dropdown(choices, value=first, label="Pair", scale=1, min_width=290, elem_id="pair")
            with gr.Column(scale=2, min_width=300):
                card = slot("pair-card")
        with gr.Group(visible=first == CUSTOM) as custom:
            with gr.Row():
                mapper = gr.Textbox(label="Mapper", placeholder="org/mapper", min_width=200)
                source = gr.Textbox(label="Source (empty: the mapper's)", min_width=200)
                target = gr.Textbox(label="Target (empty: the mapper's)", min_width=200)
                revision = gr.Textbox(label="Revision of the mapper", min_width=120)
            load = gr.Button("Load this pair", elem_id="load")

        with gr.Column(elem_id="prompt-area") as prompt_area:
            prompt = gr.Textbox(
                actions.pairs.first_prompt(),  # so that the first click on "Run both" shows something
                label="What the source has read",
                lines=5,
                max_lines=12,
                placeholder="A story, with a question or the start of a sentence at its end …",
                elem_id="prompt",
            )
            counter = slot("counter")
            with gr.Row(elem_classes="kv-examples"):
                examples = [gr.Button(visible=False, size="sm", min_width=80) for _ in range(EXAMPLES)]

        with gr.Tabs():
            with gr.Tab("Side by side", id="race") as race_tab:
                with gr.Row():
                    go = gr.Button("Run both", variant="primary", min_width=140, elem_id="run")
                    halt = gr.Button("Stop", variant="stop", min_width=100, elem_id="stop")
                with gr.Accordion("Settings, the same for both", open=False, elem_id="settings"):
                    with gr.Row():
                        tokens = gr.Slider(1, 256, 32, step=1, label="New tokens, at most", min_width=180)
                        temperature = gr.Slider(0, 2, 0, step=0.05, label="Temperature (0: greedy)", min_width=180)
                        top_p = gr.Slider(0.05, 1, 1, step=0.05, label="Top p", min_width=180)
                        seed = gr.Number(0, precision=0, label="Seed", min_width=100)
                    with gr.Row():
                        has_read = gr.Checkbox(True, label="The source has read the prompt before")
                        readable = gr.Checkbox(True, label="Reading speed (times do not see it)")
                message = slot("race-message")
                with gr.Row(equal_height=True, elem_classes="kv-panes"):
                    native = gr.HTML(
                        markup.pane(None, "native", "Full prefill", "the target reads it all"),
                        elem_id="native",
                        min_width=280,
                        padding=False,
                    )
                    handoff = gr.HTML(
                        markup.pane(None, "handoff", "Handoff", "the source has read, the target goes on"),
                        elem_id="handoff",
                        min_width=280,
                        padding=False,
                    )
                with gr.Row(visible=False) as results:
                    with gr.Column(min_width=300):
                        gr.Markdown("### The handoff's answer, token by token")
                        strip = slot("strip")
                    with gr.Column(min_width=300):
                        gr.Markdown("### What each attention head read: cosine to the target's own")
                        heat = gr.Plot(show_label=False, elem_id="heat")

            with gr.Tab("Chat", id="chat") as chat_tab:
                gr.Markdown("Choose who answers before each message. The other one takes over what was said so far.")
                bot = gr.Chatbot(
                    show_label=False, height=380, elem_id="bot", placeholder="Nothing was said yet.", buttons=[]
                )
                with gr.Row():
                    who = gr.Radio(
                        [("source", "source"), ("target", "target")],
                        value="source",
                        label="Who answers next",
                        elem_id="who",
                        min_width=220,
                    )
                    said = gr.Textbox(label="Your message", scale=3, lines=2, min_width=240, elem_id="said")
                with gr.Row():
                    send = gr.Button("Send", variant="primary", min_width=100, elem_id="send")
                    chat_halt = gr.Button("Stop", variant="stop", min_width=80)
                    fresh = gr.Button("New conversation", min_width=120, elem_id="fresh")
                with gr.Row(elem_classes="kv-examples"):
                    openings = [gr.Button(text, size="sm", min_width=120) for text in OPENINGS]
                chat_message = slot("chat-message")
                switch_line, cache_strip = slot("switch"), slot("cache")
                folder = gr.State(None)

            with gr.Tab("Guard", id="damage") as damage_tab:
                gr.Markdown(
                    "Noise on what is mapped, as a wrong or broken mapper would give. The gates look at the result "
                    "before the target starts; when one says no, the target reads the prompt itself."
                )
                with gr.Row():
                    amount = gr.Slider(0, 2, 0.5, step=0.05, label="Damage", scale=3, min_width=220, elem_id="amount")
                    sweep = gr.Button("Try all damages", min_width=140, elem_id="sweep")
                    damage_halt = gr.Button("Stop", variant="stop", min_width=80)
                damage_message, verdict = slot("damage-message"), slot("verdict")
                curve = gr.Plot(visible=False, show_label=False, elem_id="curve")

            with gr.Tab("Latency", id="latency") as latency_tab:
                gr.Markdown(
                    "Four ways to the target's first logits for the text above, timed in turns on this machine."
                )
                with gr.Row():
                    repeats = gr.Slider(3, 50, 10, step=1, label="Rounds", scale=3, min_width=220)
                    measure = gr.Button("Measure", variant="primary", min_width=140, elem_id="measure")
                latency_message = slot("latency-message")
                bars = gr.Plot(visible=False, show_label=False, elem_id="bars")
                remarks = slot("remarks")

        # The pair
        chosen = [key, custom, card, who, *examples]
        page.load(handlers.choose_pair, choice, chosen, show_progress="hidden").then(
            handlers.count_tokens, [key, prompt], counter, show_progress="hidden"
        )
        new_pair = [
            choice.change(handlers.choose_pair, choice, chosen),
            load.click(handlers.load_custom, [source, target, mapper, revision], chosen),
        ]
        talk = [chat_message, bot, cache_strip, switch_line, folder]
        for event in new_pair:
            event.then(handlers.new_chat, None, talk, show_progress="hidden")
        for place, button in enumerate(examples):
            button.click(partial(handlers.example, place=place), key, prompt, show_progress="hidden")
        prompt.change(
            handlers.count_tokens, [key, prompt], counter, show_progress="hidden", trigger_mode="always_last"
        )
        # The conversation has a text of its own.
        for tab in (race_tab, chat_tab, damage_tab, latency_tab):
            tab.select(partial(gr.update, visible=tab is not chat_tab), None, prompt_area, show_progress="hidden")

        # Side by side
        run = go.click(
            handlers.race,
            [key, prompt, tokens, temperature, top_p, seed, has_read, readable],
            [message, native, handoff, strip, heat, results],
            show_progress="hidden",
        )
        # Conversation
        turns = [
            event(
                handlers.chat,
                [key, folder, bot, said, who, tokens, temperature, seed],
                [chat_message, bot, said, cache_strip, switch_line, folder],
                show_progress="hidden",
            )
            for event in (send.click, said.submit)
        ]
        for event in (fresh.click, bot.clear):
            event(handlers.new_chat, None, talk, show_progress="hidden")
        for text, button in zip(OPENINGS, openings, strict=True):
            button.click(partial(str, text), None, said, show_progress="hidden")
        # Damage
        shown = [damage_message, verdict, curve]
        damages = [
            event(handler, [key, prompt, amount, tokens], shown, show_progress="minimal")
            for event, handler in ((amount.release, handlers.damage), (sweep.click, handlers.damage_sweep))
        ]
        # Latency
        measure.click(handlers.latency, [key, prompt, repeats], [latency_message, bars, remarks])
        # Stopping: a run looks for it after each token; in another process it has to be ended from outside.
        running = [run, *turns, *damages]
        for button in (halt, chat_halt, damage_halt):
            button.click(handlers.stop, None, None, queue=False, cancels=running if ON_ZERO else None)
        page.unload(handlers.leave)
    return page


def launch(family: Path | None = None, **kwargs: Any) -> gr.Blocks:
    """Build the page and serve it; see Gradio's `launch` for the keyword arguments."""
    actions.configure(family)
    page = build().queue(default_concurrency_limit=8, max_size=32)
    page.launch(theme=THEME, css_paths=[HERE / "style.css"], footer_links=["gradio", "settings"], **kwargs)
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default=None, help="address to listen on")
    parser.add_argument("--port", type=int, default=None)
    parser.add_argument("--family", type=Path, default=None, help="folder of the bundled family")
    arguments = parser.parse_args()
    launch(arguments.family, server_name=arguments.host, server_port=arguments.port)
