"""Answers held to a grammar: the value a request carries, its checks, and a sequence's place in it.

| file | what |
|---|---|
| `value.py` | `Grammar`, a plain value, bounded when created |
| `bounds.py` | those bounds: sizes, depths and counts, without the grammar library |
| `library.py` | the only calls into the grammar library, with its limits |
| `checks.py` | one grammar tried in full: compiled, a first mask, some walks |
| `checker.py`, `check_process.py` | a process for that: a crash or an endless loop costs one request |
| `compiler.py` | `GrammarCompiler`: verdicts and compiled grammars, made on threads of its own |
| `constraint.py` | `Constraint`: one sequence's place in its grammar |
"""
