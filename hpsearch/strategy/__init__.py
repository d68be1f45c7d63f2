"""Every legal way to split every op. No torch, no prices."""

from hpsearch.strategy.attention import Message, attention_messages, head_repeats, is_attention
from hpsearch.strategy.data_axes import DataPlacements, Followed, propagate_all
from hpsearch.strategy.experts import check_experts, expert_counts, legal_ep, slot_messages, token_messages
from hpsearch.strategy.heads import check_degree, head_counts, is_legal_tp, legal_tp
from hpsearch.strategy.micro_batches import WHY_WHOLE, check_micro_batches
from hpsearch.strategy.search_space import Edge, Node, Reader, SearchSpace, enumerate_space
from hpsearch.strategy.sequence import along_axis, propagate_sequence, rules_along, sequence_lengths

__all__ = [
    "WHY_WHOLE",
    "DataPlacements",
    "Edge",
    "Followed",
    "Message",
    "Node",
    "Reader",
    "SearchSpace",
    "along_axis",
    "attention_messages",
    "check_degree",
    "check_experts",
    "check_micro_batches",
    "enumerate_space",
    "expert_counts",
    "head_counts",
    "head_repeats",
    "is_attention",
    "is_legal_tp",
    "legal_ep",
    "legal_tp",
    "propagate_all",
    "propagate_sequence",
    "rules_along",
    "sequence_lengths",
    "slot_messages",
    "token_messages",
]
