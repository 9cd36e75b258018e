"""guided: a constraint and a vocabulary in, a token bitmask out; and the post-processor that masks a batch's logits.

It runs without Ray, without the engine, without a server. Where masks are computed is a `MaskPool`'s business:
`InlinePool` (here) in the caller, `actors.RayPool` in processes that may be lost.
"""

from guided.bundle import ProcessorBundle
from guided.constraint import KINDS, Constraint, ConstraintKind
from guided.errors import (
    BackendError,
    CompileTimeout,
    ConstraintTooLarge,
    DeadEnd,
    GuidedError,
    InternalError,
    InvalidConstraint,
    InvalidRequest,
    MaskTimeout,
    PoolUnavailable,
    TokenRejected,
    UnsupportedConstraint,
    WorkerDied,
)
from guided.inline import InlinePool
from guided.limits import Limits
from guided.pool import Grammar, MaskPool
from guided.processor import ApplyReport, GuidedProcessor, LogitPostProcessor
from guided.sequence import GuidedSequence
from guided.vocabulary import Vocabulary

__all__ = [
    "KINDS",
    "ApplyReport",
    "BackendError",
    "CompileTimeout",
    "Constraint",
    "ConstraintKind",
    "ConstraintTooLarge",
    "DeadEnd",
    "Grammar",
    "GuidedError",
    "GuidedProcessor",
    "GuidedSequence",
    "InlinePool",
    "InternalError",
    "InvalidConstraint",
    "InvalidRequest",
    "Limits",
    "LogitPostProcessor",
    "MaskPool",
    "MaskTimeout",
    "PoolUnavailable",
    "ProcessorBundle",
    "TokenRejected",
    "UnsupportedConstraint",
    "Vocabulary",
    "WorkerDied",
]
