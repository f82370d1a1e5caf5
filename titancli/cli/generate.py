"""`titan generate`: text from a run, a checkpoint, or a Hugging Face folder."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from titancli.cli.output import note, print_json
from titancli.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from titancli.protocols.samples import Completion


class Number(click.ParamType):
    """A finite number in a range; click's own lets nan through."""

    name = "number"

    def __init__(self, said: str, low: float, high: float = math.inf, *, or_zero: bool = False) -> None:
        self._said, self._low, self._high, self._or_zero = said, low, high, or_zero

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if (self._low <= number <= self._high and math.isfinite(number)) or (self._or_zero and number == 0):
            return number
        return self.fail(f"{value!r} is not {self._said}", param, ctx)


@click.command("generate", short_help="Generate text with a trained model.")
@click.argument("src", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option(
    "--prompts",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='Read prompts from FILE: one per line, or as {"prompt": …} in *.jsonl.',
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    default=256,
    metavar="N",
    show_default=True,
    help="Maximum length.",
)
@click.option(
    "--temperature",
    type=Number("0, or at least 0.001", 0.001, or_zero=True),
    default=0.8,
    show_default=True,
    help="Lower is less random; 0 is greedy decoding.",
)
@click.option("--top-k", type=click.IntRange(1), metavar="K", help="Sample from the K most probable tokens.")
@click.option(
    "--top-p",
    type=Number("above 0 and at most 1", math.ulp(0), 1.0),
    default=1.0,
    help="Nucleus sampling: cumulative probability of the tokens to sample from.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Random seed.")
@click.option("--stop", metavar="TEXT", multiple=True, help="Stop before TEXT; may be repeated.")
@click.option(
    "-n", "--samples", type=click.IntRange(1), default=1, metavar="N", help="Completions per prompt."
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=16,
    metavar="N",
    show_default=True,
    help="Completions per batch.",
)
@click.option("--chat", is_flag=True, help="Treat the prompt as a user message: apply the chat template.")
@click.option("--system", metavar="TEXT", help="With --chat: the system message.")
@click.option("--bos/--no-bos", default=None, help="Start with the BOS token.  [default: as in training]")
@click.option(
    "--tokenizer",
    metavar="FOLDER|NAME",
    help="Tokenizer folder or component (such as byte).  [default: SRC's]",
)
@click.option("--model-component", metavar="NAME", help="Model component for a Hugging Face folder.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Compute dtype.  [default: bfloat16 on a GPU, float32 on the CPU]",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end.")
def command(src: Path, prompt: str | None, file: Path | None, as_json: bool, **options: Any) -> int:
    """Generate text with a trained model.

    SRC is RUN (its newest good checkpoint), RUN/checkpoints/step-N, or a Hugging Face folder with
    config.json and *.safetensors. Without PROMPT, or with "-", the prompt is read from standard input.

    \b
    titan generate runs/mine "def main("
    titan generate runs/tuned --chat "What is 2 + 3?"
    titan generate ./Llama-3.2-1B --prompts questions.jsonl --temperature 0 --json
    """
    from titancli.generate.prompts import read_prompts

    if "" in options["stop"]:
        raise UsageError("--stop: the text must not be empty", hint="remove it")
    if options["samples"] > 1 and options["temperature"] == 0:
        raise UsageError(
            f"-n {options['samples']} with temperature 0 gives identical completions",
            hint="use a --temperature above 0",
        )
    if options["system"] is not None and not options["chat"]:
        raise UsageError("--system needs a chat", hint="add --chat")
    if options["chat"] and options["bos"] is not None:
        raise UsageError("--chat: the chat template already decides how a text starts", hint="remove --bos")
    return _generate(src, read_prompts(prompt, file), as_json, **options)


def _generate(
    src: Path,
    texts: list[str],
    as_json: bool,
    *,
    device: str,
    dtype: str | None,
    tokenizer: str | None,
    model_component: str | None,
    bos: bool | None,
    chat: bool,
    system: str | None,
    temperature: float,
    top_k: int | None,
    top_p: float,
    **rest: Any,
) -> int:
    import torch

    from titancli.generate.complete import complete
    from titancli.generate.source import choose_device, encode, encode_chat, find_source, load_model, of_turns
    from titancli.protocols.samples import SamplingParams

    place = choose_device(device)
    dtype = dtype or ("float32" if place.type == "cpu" else "bfloat16")
    started = time.monotonic()
    source = find_source(src, tokenizer=tokenizer, component=model_component, say=note)
    source = of_turns(source) if chat else source
    prompts = encode_chat(source, texts, system=system) if chat else encode(source, texts, bos=bos)
    params = SamplingParams(
        max_tokens=rest["max_new_tokens"],
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=rest["stop"],
        seed=rest["seed"],
    )
    samples = rest["samples"]
    length = max(map(len, prompts)) + params.max_tokens
    model = load_model(source, seq_len=length, device=place, dtype=getattr(torch, dtype))
    loaded = time.monotonic()
    note(f"{source.name} from {source.folder}, {dtype} on {place.type}: loaded in {loaded - started:.1f} s")
    show = _Show(len(prompts), samples, as_json)
    how = {"samples": samples, "batch_size": rest["batch_size"]}
    how |= {"device": place, "on_text": show.text, "on_done": show.completions}
    try:
        made = complete(source, model, prompts, params, **how)
    except KeyboardInterrupt:
        note("")
        raise
    seconds = time.monotonic() - loaded
    tokens = sum(len(completion.tokens) for completion in made)
    if as_json:
        facts = {"source": str(source.folder), "model": source.name, "device": place.type, "dtype": dtype}
        settings: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        settings |= {**rest, "bos": source.bos if bos is None else bos, "chat": chat, "system": system}
        rows = _rows(texts, prompts, made, samples)
        timing = {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
        print_json("generation", {**facts, "settings": settings, "prompts": rows, **timing})
    note(f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.4g} tokens/s; {_ends(made)}")
    return EXIT_OK


def _rows(
    texts: list[str], prompts: list[list[int]], made: list[Completion], samples: int
) -> list[dict[str, Any]]:
    return [
        {
            "prompt": text,
            "tokens": len(prompt),
            "completions": [_told(c) for c in made[number * samples : (number + 1) * samples]],
        }
        for number, (text, prompt) in enumerate(zip(texts, prompts, strict=True))
    ]


def _told(made: Completion) -> dict[str, Any]:
    return {"text": made.text, "tokens": len(made.tokens), "finish_reason": made.finish}


def _ends(made: list[Completion]) -> str:
    """Return how the completions ended: `ended by length`, or a count for each reason."""
    reasons = [completion.finish for completion in made]
    if len(reasons) == 1:
        return f"end: {reasons[0]}"
    return "ends: " + ", ".join(f"{reason}: {reasons.count(reason)}" for reason in sorted(set(reasons)))


class _Show:
    """Prints text to stdout: as it is generated if there is one completion, else each under a heading."""

    def __init__(self, prompts: int, samples: int, as_json: bool) -> None:
        self._prompts, self._samples, self._as_json = prompts, samples, as_json
        self._single = prompts * samples == 1
        self._done = 0

    def text(self, text: str) -> None:
        if self._single and not self._as_json:
            sys.stdout.write(text)
            sys.stdout.flush()

    def completions(self, made: list[Completion]) -> None:
        for completion in made:
            text = completion.text
            if not self._as_json:
                if not self._single:
                    print(self._heading())
                    sys.stdout.write(text)
                sys.stdout.write("" if text.endswith("\n") else "\n")
            self._done += 1
        sys.stdout.flush()
        total = self._prompts * self._samples
        hidden = self._as_json or not sys.stdout.isatty()  # else the text itself is the progress
        if not self._single and hidden and sys.stderr.isatty():
            end = "\n" if self._done == total else ""
            print(f"\r\x1b[K{self._done}/{total} completions", end=end, file=sys.stderr, flush=True)

    def _heading(self) -> str:
        """Return a heading such as `head` prints above each of several files."""
        prompt, sample = divmod(self._done, self._samples)
        said = [f"prompt {prompt + 1}"] if self._prompts > 1 else []
        said += [f"sample {sample + 1}"] if self._samples > 1 else []
        return f"==> {', '.join(said)} <=="
