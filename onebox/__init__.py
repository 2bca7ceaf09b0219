"""onebox runs a 100B-class hybrid mixture-of-experts model on one box."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onebox.llm import LLM, Completion, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Commands that plan or inspect start without torch; who asks for these names wants it.
    if name in __all__:
        from onebox import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'onebox' has no attribute {name!r}")
