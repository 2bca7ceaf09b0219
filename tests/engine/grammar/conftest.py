"""One compiler for all tests of grammars: its checker starts once."""

from collections.abc import Iterator

import pytest

from onebox.engine.grammar.compiler import GrammarCompiler
from tests.engine.grammar.vocabulary import TABLE, VOCAB_SIZE


@pytest.fixture(scope="session")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(TABLE, VOCAB_SIZE)
    yield compiler
    compiler.close()
