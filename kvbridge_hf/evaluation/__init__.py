"""Judging a handoff: how good it is, what it is compared with, and what it costs."""

from .bootstrap import Interval, PairedBootstrap, paired_bootstrap
from .controls import BridgeHandoff, Handoff, OwnCache, UnmappedHandoff, as_handoff
from .documents import Document, split_documents
from .errors import EvaluationError
from .flops import PrefillCost, handoff_flops, map_flops_per_token
from .judge import Judge, Judgement
from .latency import LatencyStats, measure_latency
from .markdown import to_markdown
from .questions import Question, load_questions
from .report import build_report, judge_handoff
from .retention import floor_normalised_retention, gap_recovered, retention

__all__ = [
    "BridgeHandoff",
    "Document",
    "EvaluationError",
    "Handoff",
    "Interval",
    "Judge",
    "Judgement",
    "LatencyStats",
    "OwnCache",
    "PairedBootstrap",
    "PrefillCost",
    "Question",
    "UnmappedHandoff",
    "as_handoff",
    "build_report",
    "floor_normalised_retention",
    "gap_recovered",
    "handoff_flops",
    "judge_handoff",
    "load_questions",
    "map_flops_per_token",
    "measure_latency",
    "paired_bootstrap",
    "retention",
    "split_documents",
    "to_markdown",
]
