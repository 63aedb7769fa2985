"""``vime data check FILE`` says which rows are bad and why; ``vime data show FILE`` prints prompts as the
model will see them; ``vime data mask FILE`` prints dialogues with the tokens that --loss-type sft_loss trains.

The flags are those of ``train.py``, so that what they say here holds there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from vime.data import jsonl
from vime.data.chat import PromptEncoder
from vime.data.dialogue import MASK_TYPES
from vime.data.jsonl import Keys, PromptFile
from vime.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Returns 0 where every row can be used, else 1.

    Raises:
        UserError: the file or the tokenizer cannot be read.
    """
    options = _parser().parse_args(argv)
    keys = Keys(input=options.input_key, label=options.label_key, metadata=options.metadata_key, tools=options.tool_key)
    file = jsonl.load(options.file, keys, needs_label=options.needs_label)
    if options.action == "mask":
        return _mask(file, options)
    encoder = _encoder(options)
    return _show(file, encoder, options.n) if options.action == "show" else _check(file, keys, encoder, options)


def _check(file: PromptFile, keys: Keys, encoder: PromptEncoder | None, options: argparse.Namespace) -> int:
    file.require_labels(keys)
    problems = {row.line: row.reason for row in file.bad}
    limit, too_long = options.rollout_max_prompt_len, 0
    if encoder is not None:
        for row in file.rows:
            try:
                length = next(encoder.lengths([(row.prompt, row.metadata)]))
                too_long += limit is not None and length > limit
            except UserError as error:  # the template refuses the prompt
                problems[row.line] = str(error)
    for line in jsonl.listing(file.path, [jsonl.BadRow(*problem) for problem in sorted(problems.items())], file.total):
        print(line)
    print(_summary(file, len(problems), too_long, limit))
    return 1 if problems or file.total in (0, too_long) else 0


def _summary(file: PromptFile, bad: int, too_long: int, limit: int | None) -> str:
    total = file.total
    labels = sum(row.label is not None for row in file.rows)
    verdict = f"{bad} of {total} rows are bad" if bad else f"ok: {total} rows" if total else "there are no rows"
    dropped = f", {too_long} over {limit} tokens would be dropped" if limit is not None else ""
    return f"{file.path}: {verdict}, {labels} with a label{dropped}"


def _show(file: PromptFile, encoder: PromptEncoder | None, count: int) -> int:
    file.require_good()
    for row in file.rows[:count]:
        prompt = encoder.render(row.prompt, row.metadata) if encoder else row.prompt
        tokens = f", {len(encoder.encode(prompt))} tokens" if encoder and isinstance(prompt, str) else ""
        print(f"--- {file.path}:{row.line}{tokens}, label {row.label!r}, metadata {sorted(row.metadata)}")
        print(prompt if isinstance(prompt, str) else json.dumps(prompt, indent=2, ensure_ascii=False))
    return 0


def _mask(file: PromptFile, options: argparse.Namespace) -> int:
    if options.hf_checkpoint is None:
        raise UserError("vime data mask needs a tokenizer: add --hf-checkpoint")
    from vime.cli import mask
    from vime.data.dialogue import DialogueEncoder
    from vime.data.tokenizer import load_tokenizer

    file.require_good()
    tokenizer = load_tokenizer(options.hf_checkpoint, trust_remote_code=options.trust_remote_code)
    encoder = DialogueEncoder(
        tokenizer,
        mask_type=options.loss_mask_type,
        template_kwargs=options.apply_chat_template_kwargs,
        tool_key=options.tool_key,
    )
    return 1 if mask.show(file, tokenizer, encoder, count=options.n, tokens=options.tokens) else 0


def _encoder(options: argparse.Namespace) -> PromptEncoder | None:
    if options.hf_checkpoint is None:
        if options.apply_chat_template or options.rollout_max_prompt_len is not None:
            raise UserError("--apply-chat-template and --rollout-max-prompt-len need a tokenizer: add --hf-checkpoint")
        return None
    from vime.data.tokenizer import load_tokenizer

    return PromptEncoder(
        load_tokenizer(options.hf_checkpoint, trust_remote_code=options.trust_remote_code),
        apply_chat_template=options.apply_chat_template,
        template_kwargs=options.apply_chat_template_kwargs,
        tool_key=options.tool_key,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vime data", description=__doc__, allow_abbrev=False)
    parser.add_argument("action", choices=("check", "show", "mask"))
    parser.add_argument("file", metavar="FILE", help="a .jsonl file; FILE@[a:b] for rows a to b-1")
    parser.add_argument("--input-key", default="input", help="key of the prompt (default: input)")
    parser.add_argument("--label-key", help="key of the right answer")
    parser.add_argument("--metadata-key", default="metadata", help="key of further data (default: metadata)")
    parser.add_argument("--tool-key", default="tools", help="key of the tool definitions (default: tools)")
    parser.add_argument(
        "--needs-label", action="store_true", help="a row without a label is bad, as with a rule reward"
    )
    parser.add_argument("--hf-checkpoint", help="folder of the tokenizer")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code in that folder")
    parser.add_argument("--apply-chat-template", action="store_true", help="render through the chat template")
    parser.add_argument("--apply-chat-template-kwargs", type=json.loads, default={}, help="its arguments, as JSON")
    parser.add_argument("--rollout-max-prompt-len", type=int, help="count prompts of more tokens")
    parser.add_argument("--loss-mask-type", choices=MASK_TYPES, default="qwen", help="which turns are trained")
    parser.add_argument("--tokens", action="store_true", help="`mask` writes one line a token")
    parser.add_argument("-n", type=int, default=3, help="how many rows `show` and `mask` print (default: 3)")
    return parser
