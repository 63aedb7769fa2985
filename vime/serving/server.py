"""What an engine's process runs: vLLM's server, with an answer to generation requests that costs next to nothing.

    python -m vime.serving.server FLAGS_OF_VLLM_SERVE...

Nothing of vLLM is changed. It has two doors for this, and both are used: ``--middleware`` takes a class of ours into
every API server process, and ``ServingTokens`` leaves to a method how a finished request is answered.

Written for vLLM 0.32; ``tests/serving`` fails where a later version no longer fits.
"""

from __future__ import annotations

MIDDLEWARE = "vime.serving.compact.CompactAnswers"


def main() -> None:
    """``vllm serve``, whose command is broken in the CPU build: its parser imports what that build lacks."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    configure_logging_from_args(args)
    args.middleware = [*args.middleware, MIDDLEWARE]
    command = ServeSubcommand()
    command.validate(args)
    command.cmd(args)


if __name__ == "__main__":
    main()
