"""guided: token bitmasks from a constraint and a vocabulary, and a post-processor that
masks the logits of a batch.

The package needs neither Ray nor the engine nor a server. A `MaskPool` decides where
masks are computed: `InlinePool` in the calling process, `actors.RayPool` in processes
that may crash.
"""

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
from guided.fields.output_types import constraint_for, parse_as
from guided.pools.inline import InlinePool
from guided.pools.protocol import Grammar, MaskPool
from guided.processors.decode_step import DecodeStep, decode_step
from guided.processors.guided_processor import GuidedProcessor
from guided.processors.logit_post_processor import (
    ApplyReport,
    LogitPostProcessor,
    SampledEdit,
)
from guided.processors.post_processors import PostProcessors
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
    "DecodeStep",
    "Grammar",
    "GuidedError",
    "GuidedProcessor",
    "GuidedSequence",
    "InlinePool",
    "InternalError",
    "InvalidConstraint",
    "InvalidRequest",
    "LogitPostProcessor",
    "MaskPool",
    "MaskTimeout",
    "PoolUnavailable",
    "PostProcessors",
    "SampledEdit",
    "TokenRejected",
    "UnsupportedConstraint",
    "Vocabulary",
    "WorkerDied",
    "constraint_for",
    "decode_step",
    "parse_as",
]
