"""The error tree. Each error is a sentence: what is wrong, which thing, what to do about it.

OneboxError
├── UsageError        the command or its arguments are off                                     exit 2
├── UnreadableError   a file or directory cannot be read as what it claims to be               exit 2
├── UnsupportedError  readable, and of a kind that onebox does not know                        exit 1
├── MismatchError     two things that must agree do not (base and source, manifest and file)   exit 1
├── DoesNotFitError   memory or disk is too small; the message carries the numbers             exit 1
└── WriteError        an output could not be written; what was there before is untouched       exit 1

The command line prints the sentence and leaves with the error's exit code; it never shows a traceback for these.
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
    """Anything onebox refuses to do, said in one sentence."""

    exit_code = 1


class UsageError(OneboxError):
    """The command or its arguments are off."""

    exit_code = 2


class UnreadableError(OneboxError):
    """A file or directory cannot be read as what it claims to be."""

    exit_code = 2


class UnsupportedError(OneboxError):
    """Readable, and of a kind that onebox does not know."""


class MismatchError(OneboxError):
    """Two things that must agree do not."""


class DoesNotFitError(OneboxError):
    """Memory or disk is too small; the message carries the numbers."""


class WriteError(OneboxError):
    """An output could not be written; what was there before is untouched."""
