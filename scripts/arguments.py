"""How the programs' `--help` is laid out."""

import argparse


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The description as it was written, and the default behind each option's text.

    A text that ends in "; None: what is then taken." has that as its default: nobody can type None. An empty default
    stands in the text itself.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default not in (None, "") or action.help is None:
            return super()._get_help_string(action)
        text, _, meaning = action.help.partition("; None: ")
        return f"{text}. (default: {meaning.removesuffix('.')})" if meaning else text
