"""The command line: `kvbridge demo | fit | inspect | plan | generate | push | search | space`, and for the gates
`kvbridge calibrate-gates | tune-gate`.

Commands only read arguments, call the library and print; what they print stands in the library. Wrong arguments are
answered in one line on stderr with exit code 2.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .command_options import AsJson, Source, Target
from .errors import ArtifactError, KVBridgeError
from .fit_command import fit
from .gates_command import calibrate_gates_of
from .space_command import space

app = typer.Typer(
    name="kvbridge",
    help="Hand a conversation from one language model to another by mapping its KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print(data: dict[str, Any], as_json: bool, text: str) -> None:
    typer.echo(json.dumps(data, ensure_ascii=False) if as_json else text)


@app.command()
def demo(
    pair: Annotated[
        str, typer.Option(help="Pair of the bundled family, as SOURCE-to-TARGET: s-to-m, m-to-l ...")
    ] = "s-to-m",
    fit: Annotated[bool, typer.Option("--fit", help="Fit the mapper now instead of loading the bundled one.")] = False,
    prompt: Annotated[str | None, typer.Option(help="A text of your own instead of a Tinytown one.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 24,
    questions: Annotated[int, typer.Option(min=1, help="Questions to answer.")] = 120,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each latency path.")] = 10,
    as_json: AsJson = False,
) -> None:
    """One model of the bundled family goes on from another one's cache, with the numbers that say how well."""
    from .demo import run_demo, to_text

    result = run_demo(
        pair, fit=fit, prompt=prompt, max_new_tokens=max_new_tokens, num_questions=questions, latency_repeats=repeats
    )
    _print(result, as_json, to_text(result))


app.command()(fit)
app.command()(space)
app.command("calibrate-gates")(calibrate_gates_of)


@app.command()
def inspect(
    mapper: Annotated[str, typer.Argument(help="A mapper: folder or Hub id.")],
    revision: Annotated[str | None, typer.Option(help="Hub revision.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what an artifact holds: geometry, support, hashes, scores. Weights are not downloaded."""
    from .hub.inspection import inspect_artifact, to_text

    try:
        facts = inspect_artifact(mapper, revision=revision)
    except (FileNotFoundError, ConnectionError) as error:
        raise ArtifactError(f"{mapper!r} is neither a folder nor a mapper that the Hub gives: {error}") from error
    _print(facts, as_json, to_text(facts))


@app.command()
def plan(
    source: Source,
    target: Target,
    top_k: Annotated[int, typer.Option(min=1, help="Source layers per target layer.")] = 8,
    support: Annotated[str, typer.Option(help="full_head or head_local.")] = "full_head",
    as_json: AsJson = False,
) -> None:
    """Sizes and memory of a pair from its configs alone; no weights are downloaded."""
    from .planning import plan_pair, to_text

    result = plan_pair(source, target, support=support, top_k=top_k)
    _print(result, as_json, to_text(result))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    source: Source,
    target: Target,
    mapper: Annotated[str, typer.Option(help="The mapper: folder or Hub id.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    do_sample: Annotated[bool, typer.Option("--sample", help="Sample instead of greedy decoding.")] = False,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    on_failure: Annotated[
        str, typer.Option(help="error, or prefill: the target then reads the prompt itself.")
    ] = "error",
    as_json: AsJson = False,
) -> None:
    """The source reads the prompt, the target goes on from the mapped cache."""
    from .demo import generate_once

    result = generate_once(
        prompt, source, target, mapper, max_new_tokens, do_sample=do_sample, seed=seed, on_failure=on_failure
    )
    _print(result, as_json, result["text"])


@app.command("tune-gate")
def tune_gate(
    events: Annotated[Path, typer.Argument(help="JSONL file of events, as on_event or the log gave them.")],
    max_kl: Annotated[
        float, typer.Option(help="A handoff is bad where its KL to the own prefill exceeds this (nats).")
    ],
    miss_rate: Annotated[float, typer.Option(help="Wanted share of bad handoffs that pass.")] = 0.05,
    statistic: Annotated[str, typer.Option(help="score, nll or excess.")] = "score",
    kl_field: Annotated[str, typer.Option(help="kl (mean over the suffix) or kl_last (first new token).")] = "kl",
    mapper: Annotated[str | None, typer.Option(help="A mapper that shall carry the threshold.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for that mapper.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fit the likelihood gate's threshold to shadow records."""
    from .guard.tuning import read_events, store_threshold, to_text, tune_gate

    result = tune_gate(read_events(events), max_kl=max_kl, miss_rate=miss_rate, statistic=statistic, kl_field=kl_field)
    if mapper is not None or output is not None:
        store_threshold(result, mapper, output)
    _print(result, as_json, to_text(result))


@app.command()
def push(
    mapper: Annotated[Path, typer.Argument(help="Folder of a saved mapper.")],
    repo: Annotated[str, typer.Argument(help="Model repository of the Hub, NAME or ORGANISATION/NAME.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch; made when it does not exist.")] = None,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Upload a saved mapper to the Hub, whole or not at all."""
    from .hub.publishing import publish_folder

    commit = publish_folder(
        mapper, repo, private=private or None, revision=revision, commit_message=message, create_pr=create_pr
    )
    _print({"commit": commit.oid, "url": commit.commit_url}, as_json, str(commit.commit_url))


@app.command()
def search(
    source: Annotated[str, typer.Argument(help="Hub id of the source model.")],
    target: Annotated[str, typer.Argument(help="Hub id of the target model.")],
    as_json: AsJson = False,
) -> None:
    """List the mappers on the Hub that were made for a pair."""
    from .hub.publishing import search_mappers

    names = [model.id for model in search_mappers(source, target)]
    _print({"mappers": names}, as_json, "\n".join(names) or "No mapper for this pair.")


def main(args: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=args, prog_name="kvbridge", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KVBridgeError, OSError) as error:  # an OSError: what Transformers raises for a model that is not there
        return _complain(str(error))
    except KeyboardInterrupt as interruption:
        return int(getattr(interruption, "exit_code", 130))
    except Exception as error:
        # Typer's own errors (it may vendor Click, so not by class): a message in one line instead of a box of usage.
        if type(error).__name__ == "NoArgsIsHelpError":
            return 2
        if type(error).__name__ == "Abort":
            return int(getattr(error.__cause__, "exit_code", 130))
        if type(error).__module__.startswith("huggingface_hub"):
            return _complain(str(error))
        from .hub.retries import is_connection_error

        if is_connection_error(error):
            return _complain(f"the Hub does not answer as it should: {error}")
        if not hasattr(error, "format_message"):
            raise
        return _complain(error.format_message())


def _complain(message: str) -> int:
    print("kvbridge: " + " ".join(message.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
