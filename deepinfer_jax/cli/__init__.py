"""The command line: one module per verb.

Separate because it is the only part that prints and exits. Refused input is one line on standard
error and exit code 2; a warning is one line as well.
Read next: `generate.py`, `layout.py`, `params.py`.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ..sampling_params import InvalidOutputError

EXIT_FAILED = 1
"""Exit code for a model whose output was no distribution."""

EXIT_REFUSED = 2
"""Exit code for input that is refused."""

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C."""


class _Parser(argparse.ArgumentParser):
    """Refuses words in one line, as everything else is refused."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_REFUSED, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: words after the program's name, the process's own by default.

    Returns:
        The exit code: 0 done, 1 invalid model output, 2 input refused, 130 interrupted.
    """
    from . import batch, calibrate, costs, doctor, generate, layout, params

    parser = _Parser(
        prog="deepinfer_jax",
        description="Offline inference for DeepSeek-V4.1-Flash in JAX.",
        epilog='example: deepinfer_jax generate "Once upon a time"',
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for module in (generate, batch, costs, calibrate, layout, params, doctor):
        module.add_parser(verbs)
    options = parser.parse_args(arguments)
    try:
        with _plain_warnings(options.verb):
            return options.run(options)
    except KeyboardInterrupt:
        print(f"deepinfer_jax {options.verb}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except (ValueError, NotImplementedError) as error:
        print(f"deepinfer_jax {options.verb}: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except InvalidOutputError as error:
        print(f"deepinfer_jax {options.verb}: {error}", file=sys.stderr)
        return EXIT_FAILED


@contextmanager
def _plain_warnings(verb: str) -> Iterator[None]:
    """Print what a user is warned of in one line, without the place in the source."""
    with warnings.catch_warnings():
        as_before = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any, **names: Any) -> None:
            if category is RuntimeWarning:
                print(f"deepinfer_jax {verb}: warning: {message}", file=sys.stderr)
            else:
                as_before(message, category, *rest, **names)

        warnings.showwarning = show
        yield
