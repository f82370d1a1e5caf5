"""Draw how rows are made of documents, conversations and pairs: `python docs/pictures/packing.py`.

Each picture is drawn from batches that titan makes of a few small examples, so it shows what is so; a test
compares the files. No font is fetched, and colors are readable on light and dark pages.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from titan_preference import Preference
from titancli.data import ByteTokenizer, Chat, JsonLines
from titancli.protocols.batch import IGNORE, Batch
from titancli.registry.component import build

HERE = Path(__file__).parent
CELL, ROW, LEFT, TOP = 13, 34, 12, 34
COLORS = ("#7aa6da", "#e0a458", "#8fbc6f", "#c58fc9", "#d9847c", "#6fb7b7")
"""Of documents, in turn."""
GREY, INK, EDGE = "#b9bec6", "#1f2933", "#8a919c"
SEQ_LEN, END = 48, 256
TEXTS = (
    "to be or not",
    "a rose is a rose by any name",
    "all is well",
    "we are such stuff as dreams",
    "so it goes",
)
TALKS = (("2+2?", "4"), ("Who wrote Faust?", "Goethe"), ("3+4?", "7"))


def conversations() -> list[dict[str, Any]]:
    says = lambda role, text: {"role": role, "content": text}  # noqa: E731
    return [{"messages": [says("user", asked), says("assistant", told)]} for asked, told in TALKS]


def pairs() -> list[dict[str, Any]]:
    return [{"prompt": "2+2?", "chosen": "4", "rejected": "It is 5"}]


def batch(config: Any, examples: list[dict[str, Any]], rows: int, seq_len: int = SEQ_LEN) -> Batch:
    """Return the first batch of a dataset on these examples, read from `path` or `paths`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        file.write_text("".join(json.dumps(row) + "\n" for row in examples), encoding="utf-8")
        place = {"paths": [file]} if config["type"] is JsonLines else {"path": str(file)}
        made = config["type"](**place, shuffle=False, repeat=False, **config.get("fields", {}))
        dataset = build(
            made, tokenizer=build(ByteTokenizer()), seq_len=seq_len, rows=rows, dp_rank=0, dp_size=1, seed=0
        )
        return next(iter(dataset))


PICTURES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]], int]] = {
    "stream": (
        "packing = “stream”: rows are cut from one stream; a document may go on in the next row",
        {"type": JsonLines, "fields": {"document_mask": True}},
        [{"text": text} for text in TEXTS],
        2,
    ),
    "best-fit": (
        "packing = “best_fit”: whole documents, padded to seq_len",
        {"type": JsonLines, "fields": {"document_mask": True, "packing": "best_fit"}},
        [{"text": text} for text in TEXTS],
        2,
    ),
    "chat-packed": (
        "chat, pack = true: whole conversations share rows and do not see each other",
        {"type": Chat, "fields": {"pack": True}},
        conversations(),
        2,
    ),
    "chat-single": (
        "chat, pack = false: one conversation a row, padded to seq_len",
        {"type": Chat, "fields": {"pack": False}},
        conversations(),
        3,
    ),
    "chat-longest": (
        "padding = “longest”: as long as the longest of the batch, in multiples of 64; seq_len is 96",
        {"type": Chat, "fields": {"pack": False, "padding": "longest"}},
        conversations(),
        3,
    ),
    "pairs": (
        "preference: the chosen answer, and below it the rejected one",
        {"type": Preference},
        pairs(),
        2,
    ),
}
"""By file name: title, dataset, its rows, and the rows of a batch."""


def documents(made: Batch, row: int) -> list[int]:
    """Return the document of each position of a row; -1 is padding."""
    tokens, targets = made["tokens"][row].tolist(), made["targets"][row].tolist()
    used = max((place + 1 for place, target in enumerate(targets) if target != IGNORE), default=0)
    ids = made["document_ids"][row].tolist() if "document_ids" in made else [0] * len(tokens)
    order = {one: number for number, one in enumerate(dict.fromkeys(ids[:used]))}
    return [order[one] if place < used else -1 for place, one in enumerate(ids)]


def drawn(name: str) -> str:
    """Return a picture as SVG."""
    title, config, examples, rows = PICTURES[name]
    made = batch(config, examples, rows, 96 if name == "chat-longest" else SEQ_LEN)
    width = made["tokens"].shape[1]
    lines = [_text(LEFT, 18, title, weight="600")]
    first = 0
    for row in range(rows):
        found = documents(made, row)
        goes_on = name == "stream" and row > 0 and int(made["tokens"][row - 1, -1]) < END
        first -= goes_on
        lines += _row(made, row, found, first, goes_on=goes_on)
        first += max(found, default=-1) + 1
    height = TOP + rows * ROW + 26
    lines.append(_legend(TOP + rows * ROW + 14))
    size = f'width="{2 * LEFT + width * CELL}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="10">\n'
        f'<rect width="100%" height="100%" rx="6" fill="#ffffff"/>\n' + "\n".join(lines) + "\n</svg>\n"
    )


def _row(made: Batch, row: int, found: list[int], first: int, *, goes_on: bool) -> Iterator[str]:
    """Draw a row: tokens with a target are strong, others pale, padding is grey; documents begin with a line.

    Args:
        first: number of its first document, for the color.
        goes_on: whether that began in the row before.
    """
    tokens, targets = made["tokens"][row].tolist(), made["targets"][row].tolist()
    y = TOP + row * ROW
    for place, document in enumerate(found):
        x = LEFT + place * CELL
        color = GREY if document < 0 else COLORS[(first + document) % len(COLORS)]
        strength = 0.25 if document < 0 else 1.0 if targets[place] != IGNORE else 0.35
        yield (
            f'<rect x="{x}" y="{y}" width="{CELL}" height="22" fill="{color}" fill-opacity="{strength}" '
            f'stroke="{EDGE}" stroke-width="0.5"/>'
        )
        if document >= 0:
            yield _text(x + CELL / 2, y + 15, _shown(tokens[place]), anchor="middle")
        begins = not goes_on if place == 0 else found[place - 1] != document
        if document >= 0 and begins:
            yield f'<line x1="{x}" x2="{x}" y1="{y - 4}" y2="{y + 26}" stroke="{INK}" stroke-width="2"/>'


def _shown(token: int) -> str:
    return "■" if token == END else {10: "⏎", 32: "·"}.get(token, chr(token))


def _text(x: float, y: float, text: str, *, weight: str = "400", anchor: str = "start") -> str:
    style = f'fill="{INK}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y}" {style}>{escape(text)}</text>'


def _legend(y: int) -> str:
    return _text(
        LEFT,
        y,
        "strong: the next token is a target · pale: context · grey: padding · ■ end marker · | a document",
    )


if __name__ == "__main__":
    for name in PICTURES:
        (HERE / f"packing-{name}.svg").write_text(drawn(name), encoding="utf-8")
