"""The error classes. Each message is one sentence: what is wrong, with which file or flag, and how to fix it.

OneboxError
├── UsageError        the command or its arguments are invalid                                 exit 2
├── UnreadableError   a file or directory is absent, unreadable or malformed                   exit 2
├── UnsupportedError  readable, but of a kind that onebox does not support                     exit 1
├── MismatchError     two inputs that must agree do not (base and source, manifest and file)   exit 1
├── DoesNotFitError   memory or disk is too small; the message gives the sizes                 exit 1
└── WriteError        an output could not be written; existing files are unchanged             exit 1

The command line prints the message and exits with the error's exit code, without a traceback.
"""

__all__ = [
    "DoesNotFitError",
    "MismatchError",
    "OneboxError",
    "UnreadableError",
    "UnsupportedError",
    "UsageError",
    "WriteError",
]


class OneboxError(Exception):
    """An input or request that onebox rejects, with a message of one sentence."""

    exit_code = 1


class UsageError(OneboxError):
    """The command or its arguments are invalid."""

    exit_code = 2


class UnreadableError(OneboxError):
    """A file or directory is absent, unreadable or malformed."""

    exit_code = 2


class UnsupportedError(OneboxError):
    """Readable, but of a kind that onebox does not support."""


class MismatchError(OneboxError):
    """Two inputs that must agree do not."""


class DoesNotFitError(OneboxError):
    """Memory or disk is too small; the message gives the sizes."""


class WriteError(OneboxError):
    """An output could not be written; existing files are unchanged."""
