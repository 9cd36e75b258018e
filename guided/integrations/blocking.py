"""Steps of engines that need every mask before they can sample."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from guided.errors import MaskTimeout
from guided.post_processor import ApplyReport, LogitPostProcessor
from guided.sequence import GuidedSequence


def finish_step(
    processor: LogitPostProcessor,
    sequences: Sequence[GuidedSequence],
    logits_rows: Sequence[int],
    finish: Callable[[], ApplyReport],
    limit: float = math.inf,
) -> ApplyReport:
    """Finish a prepared step. A row that is late is prepared again when it is decided.

    Args:
        sequences, logits_rows: as they were prepared.
        finish: `processor.apply` or `processor.collect`.
        limit: seconds after which rows that are late fail. The pool may have a lower limit.

    Returns:
        A report without late rows.
    """
    deadline = time.monotonic() + limit
    report = finish()
    late = set(report.late)
    while late and time.monotonic() < deadline:
        decided = late.intersection(processor.decided())
        if not decided:
            time.sleep(0.001)
            continue
        again = [place for place, sequence in enumerate(sequences) if sequence.sequence_id in decided]
        processor.prepare([sequences[place] for place in again], [logits_rows[place] for place in again])
        retried = finish()
        report.failed |= retried.failed
        late = late - decided | set(retried.late)
    for sequence_id in late:
        report.failed[sequence_id] = MaskTimeout(f"no mask within {limit:g} s, which is as long as the batch waits")
    report.late = []
    return report
