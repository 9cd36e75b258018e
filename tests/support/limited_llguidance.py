"""An llguidance backend with low parser limits: an ambiguous grammar soon puts its matchers into the error state."""

from __future__ import annotations

import llguidance

from guided.backends import Adapter
from guided.backends.llguidance import LLGuidanceBackend
from guided.vocabulary import Vocabulary

NAME = "limited-llguidance"
ADAPTER = Adapter("limited_llguidance", "LimitedLLGuidance", frozenset({"grammar"}))


class LimitedLLGuidance(LLGuidanceBackend):
    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary, llguidance.LLParserLimits(step_max_items=400))
