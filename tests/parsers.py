"""The parser of a command and its parsed arguments, without running the command."""

import argparse
import importlib
from unittest import mock

from omnilead.__main__ import COMMANDS

PARSE = argparse.ArgumentParser.parse_args


class ParsedError(Exception):
    """Raised to leave a command once it has parsed its arguments."""


def parse(command, arguments):
    """The arguments as `omnilead COMMAND` parses them."""
    result = _left(command, arguments, lambda parser, given: PARSE(parser, given))
    return result


def parser_of(command):
    parser = _left(command, [], lambda parser, given: parser)
    return parser


def _left(command, arguments, answer):
    main = importlib.import_module(COMMANDS[command][0]).main

    def instead(parser, given=None):
        raise ParsedError(answer(parser, given))

    with mock.patch.object(argparse.ArgumentParser, "parse_args", instead):
        try:
            main(arguments)
        except ParsedError as left:
            return left.args[0]
    raise AssertionError(f"omnilead {command} has not parsed its arguments")
