"""Situations that real users ran into, each with its right outcome: tested here, or taken by a later issue.

A case without `later` has a test: `SHP-01` is `test_shp_01_…` in `test_shape.py`, and so on by kind; a case with both
`later` and `here` has the part that is within reach as a test. Sources are where people met the situation.
"""

from __future__ import annotations

from dataclasses import dataclass

FILES = {
    "SHP": "test_shape.py", "CFG": "test_config.py", "NUM": "test_numerics.py", "CKP": "test_checkpoint.py",
    "MEM": "test_memory.py", "PIP": "test_pipeline.py", "ROB": "test_robustness.py", "TOP": "test_topology.py",
    "UX": "test_ux.py", "MOE": "test_moe.py",
}  # fmt: skip
"""Kind of a case, by the letters of its id, and the file of its tests."""

GH = "https://github.com/"


@dataclass(frozen=True)
class Case:
    id: str
    situation: str
    outcome: str
    source: str
    """Path on github.com."""
    later: str = ""
    """The issue that takes it, and why; empty when all of it is tested here."""
    here: bool = False
    """Whether a part of a later case is tested here all the same."""

    @property
    def is_tested(self) -> bool:
        return not self.later or self.here

    @property
    def test(self) -> str:
        """File, and how the names of its tests begin."""
        kind, number = self.id.split("-")
        return f"tests/cases/{FILES[kind]}::test_{kind.lower()}_{number}_"

    @property
    def url(self) -> str:
        return GH + self.source


# fmt: off
CASES = (
    Case("SHP-01", "two key/value heads and a wide tp; the reshape inside attention dies late",
         "refused when planning: field, value, degree, legal set", "pytorch/torchtitan/issues/2574"),
    Case("SHP-03", "28 query and 4 key/value heads on the 8 devices of a node",
         "legal tp 1, 2, 4; the free plan uses all 8", "THU-KEG/AdaptThink/issues/1"),
    Case("SHP-05", "three devices, 40 heads, a vocabulary that three does not divide",
         "all used by a data axis, never by tp; a padded vocabulary only at rest", "vllm-project/vllm/issues/596"),
    Case("SHP-06", "an odd sequence length where tp would also cut the sequence",
         "the sequence stays whole; loss and gradients of one device", "pytorch/torchtitan/issues/1306"),
    Case("SHP-08", "packed documents whose lengths do not fit the sequence cut",
         "any lengths, without padding, and exact", "NVIDIA-NeMo/Megatron-Bridge/pull/1867"),
    Case("SHP-10", "a second model in one process inherits the first one's head count",
         "no state between models: the same plan, byte for byte", "deepspeedai/DeepSpeed/issues/8291"),
    Case("SHP-11", "a vocabulary of 65,535 padded for tp and then saved padded",
         "no padded row in parameters or state; exact gradients", "hpcaitech/ColossalAI/issues/6167"),
    Case("SHP-13", "a global size multiplied by the degree again",
         "75,968 local rows of 151,936 at tp=2", "NVIDIA-NeMo/Megatron-Bridge/pull/5353"),
    Case("SHP-15", "a batch of 32 cut by 32 x 8 ranks on one dim: most ranks hold nothing",
         "never among the candidates; at rest the dim without empty pieces first", "meta-pytorch/autoparallel/pull/22"),
    Case("SHP-16", "a scalar parameter is sharded and fails at init or when saved",
         "whole on every rank, gradient summed", "pytorch/pytorch/pull/132934"),
    Case("SHP-18", "6 and 5 rows over 4 ranks: an empty rank, or 8 rows back",
         "pieces 2+2+2+0 and 3+3+3+1 give back the tensor, exact gradients", "pytorch/pytorch/issues/143372"),
    Case("SHP-20", "an even cut through a group of quantisation scales",
         "refused: 29 groups do not divide by 2", "jundot/omlx/pull/2844"),
    Case("SHP-21", "2,880 columns look divisible by 8 but are 90 blocks of 32",
         "only divisors of 90 for block-quantised weights", "jundot/omlx/pull/2844"),
    Case("SHP-23", "speech models with 6 or 20 heads, tp 4 or 8 by habit",
         "refused with the legal set", "NVIDIA/TensorRT-Model-Connect/pull/108"),
    Case("SHP-25", "a fused, transposed query/key/value weight cut into contiguous halves",
         "stored and cut in any way, the gradients of one device", "BlackSamorez/tensor_parallel/pull/103"),
    Case("SHP-26", "a fused projection with segments of unequal width, cut across their borders",
         "gathered before the split, exact", "tenstorrent/tt-forge-models/pull/798"),
    Case("SHP-28", "197 image tokens (one is the class) and a request to cut them in two",
         "refused by name; tp leaves tokens whole; the free plan splits the batch", "huggingface/diffusers/pull/14023"),
    Case("SHP-29", "49,155 rows over 5 ranks read with wrong strides",
         "five slices of 9,831 that give back the tensor", "huggingface/transformers/issues/37051"),
    Case("CFG-01", "head size computed as hidden / heads although the config states it",
         "stated head size in shapes, totals and FLOPs", "pytorch/torchtitan/issues/1920"),
    Case("CFG-03", "rotary base at the top level or in a sub-dict, by version",
         "one plan for both spellings; a base left out is reported", "vllm-project/vllm/pull/28542"),
    Case("CFG-05", "a vision-language config, flat or nested",
         "the same parameters for both", "huggingface/transformers/issues/48392"),
    Case("CFG-06", "a config without heads or vocabulary, only what differs from the class",
         "class defaults, and a line that says which", "huggingface/transformers/issues/48392"),
    Case("CFG-08", "a bare Infinity in the file, and a layer count that the pattern contradicts",
         "read and counted right; a wrong count refused with both numbers", "ai-dynamo/aiconfigurator"),
    Case("CFG-10", "encoder-decoder with names of its own, three tied embeddings, wide attention",
         "24 + 24 blocks, inner width 16,384, ties counted once", "adapter-hub/adapters/issues/470"),
    Case("CFG-11", "intermediate_size of a state-space model is not a feed-forward",
         "2.8e9 parameters, no feed-forward", "state-spaces/mamba/issues/442"),
    Case("CFG-13", "a model named twice with contradicting sizes",
         "one source of sizes; contradictions refused; the plan says the shape", "PKU-DAIR/Hetu-Galvatron/issues/5"),
    Case("NUM-01", "ranks average over their own valid tokens, then over ranks",
         "the mean over all valid tokens of the global batch", "huggingface/transformers/pull/34191"),
    Case("NUM-03", "replicated norm weights see a part of the tokens when the sequence is cut",
         "their gradients are pending sums that get reduced", "NVIDIA/Megatron-LM/issues/1446"),
    Case("NUM-05", "an expert's gradient averaged over too few ranks",
         "the gradients of one device", "pytorch/pytorch/issues/160285"),
    Case("NUM-06", "replicated gradients counted once a rank in the norm",
         "sqrt(9+16+16), and the largest for the infinite norm", "pytorch/torchtitan/issues/596"),
    Case("NUM-08", "dropout masks and initial values change with the layout",
         "dropout and initial values the same under all; others refused", "pytorch/pytorch/issues/168058"),
    Case("NUM-10", "gradients summed in 16 bit along long rings",
         "reduced in fp32, as the plan says", "pytorch/pytorch/issues/106395"),
    Case("NUM-11", "embedding and head are one tensor but drift apart",
         "one parameter with two names, both uses in its gradient", "NVIDIA/Megatron-LM/issues/299"),
    Case("NUM-13", "a weight used twice is counted twice by a split backward",
         "the gradient of one device", "pytorch/pytorch/pull/181365"),
    Case("NUM-15", "weight decay by number of dims fails on flattened parameters",
         "parameters keep their shapes and names", "mlfoundations/open_clip/pull/358"),
    Case("NUM-16", "router detached by a collective without gradient",
         "gradients, zero and not absent, for unused experts", "NVIDIA-NeMo/Automodel/pull/2995"),
    Case("NUM-18", "sliding windows lost or permuted when the sequence is cut",
         "the masks of one device", "PrimeIntellect-ai/prime-rl/pull/2828"),
    Case("CKP-01", "weights resumed on other ranks without the moments",
         "training goes on as if uninterrupted; a missing moment is an error", "areal-project/AReaL/pull/1468"),
    Case("CKP-03", "counts per rank in shared metadata",
         "everything by name; loads under any number of ranks", "radixark/Megatron-LM/pull/66"),
    Case("CKP-05", "six values over four ranks: the empty one cannot load",
         "2+2+2+0 saved, loaded by 1, 3 and 4", "pytorch/pytorch/issues/108869"),
    Case("CKP-06", "layers saved under numbers of their stage",
         "global numbers", "ISEEKYAN/Megatron-LM/pull/53"),
    Case("ROB-01", "a plan for one sequence and batch used for another",
         "refused, naming the input or the rows; another search, another time", "microsoft/nnscaler/issues/28"),
    Case("ROB-03", "the model changed after the plan was saved, or the file is old or damaged",
         "the first difference, the version, line and column", "halide/Halide/issues/4068"),
    Case("ROB-05", "unordered groups decide the order of collectives",
         "one total order on all members", "NVIDIA/Megatron-LM/pull/6616"),
    Case("ROB-06", "a pin and a memory limit that exclude each other: 'infeasible'",
         "the limit, the pins, the memory that is enough, does it fit without", "meta-pytorch/autoparallel/pull/475"),
    Case("ROB-08", "inputs in nested dicts, split otherwise than assumed",
         "a layout for each leaf, and the leaf's name in errors", "meta-pytorch/autoparallel/pull/333"),
    Case("ROB-10", "axes of size one vanish and are asked for later",
         "one device: no axis, no collective, the model's own numbers", "pytorch/torchtitan/issues/2184"),
    Case("ROB-11", "planning dies for want of a host file",
         "asks for --cluster, exit code 2", "deepspeedai/DeepSpeed/issues/4993"),
    Case("ROB-13", "a sample plan of other hardware taken for a recommendation",
         "refused elsewhere, with every field that differs", "PKU-DAIR/Hetu-Galvatron/issues/2"),
    Case("UX-01", "global batch, micro-batches and ranks do not fit; rows are dropped",
         "refused with the nearest legal values; every plan keeps the batch", "OpenRLHF/OpenRLHF/issues/584"),
    Case("UX-03", "a floor division of heads hides a bad degree",
         "refused when planning with all legal degrees", "vipshop/cache-dit/pull/581"),
    Case("UX-05", "'no configuration found' and no reason",
         "bytes of weights and state, and how many devices would hold them", "huggingface/transformers/issues/27830"),
    Case("UX-06", "bare numbers in a cost file",
         "each with unit, kind and source; memory follows the job", "Hsword/Hetu/issues/70"),
    Case("MEM-01", "how many bytes a parameter takes, and which are divided",
         "four parts, 7.5 bytes at 8 ranks with a sharded optimizer", "NVIDIA/Megatron-LM/issues/654"),
    Case("MEM-03", "adapter tuning runs out of memory by logits, not weights",
         "the largest term first", "huggingface/trl/issues/4100"),
    Case("MEM-05", "memory divided by stages although the cut is uneven",
         "the heaviest stage", "NVIDIA-NeMo/Megatron-Bridge/pull/5077"),
    Case("MEM-06", "expert parameters divided by tp instead of by expert ranks",
         "separate divisors", "NVIDIA-NeMo/Megatron-Bridge/pull/3744"),
    Case("MEM-08", "fp32 logits of a large vocabulary are the largest tensor",
         "counted where the head is", "ISEEKYAN/Megatron-LM/pull/132"),
    Case("MEM-10", "a replicated embedding output looks free",
         "activations are in the memory limit", "meta-pytorch/autoparallel/pull/22"),
    Case("MEM-11", "profiling one operator runs out of memory and ends the run",
         "that entry has no price, the rest goes on, and the report lists it", "microsoft/nnscaler/issues/7"),
    Case("MEM-13", "predicted to fit, but the allocator holds more",
         "a reserve, stated", "NVIDIA-NeMo/RL/issues/2319"),
    Case("MEM-15", "all micro-batches alive to normalise by tokens",
         "memory independent of accumulation", "meta-pytorch/torchtune/pull/1875"),
    Case("MEM-16", "tied parameters counted once an alias",
         "once; buffers counted", "huggingface/transformers/pull/46625"),
    Case("MEM-18", "operators that were not timed are free when recompute is planned",
         "no free operators", "pytorch/torchtitan/pull/4636"),
    Case("TOP-01", "a group with one rank a host priced at the speed inside a host",
         "the slowest link on the path", "meta-pytorch/autoparallel/pull/527"),
    Case("TOP-03", "algorithm and bus bandwidth confused",
         "the field says which", "NVIDIA/nccl-tests/issues/159"),
    Case("TOP-05", "devices of a node at unequal distance from the network",
         "the slowest member", "NVIDIA/nccl/issues/1435"),
    Case("TOP-06", "Gbit for GB, microseconds for milliseconds",
         "units required and sane", "aliyun/SimAI/issues/34"),
    Case("TOP-08", "6, 7 or 12 devices",
         "a plan for any count", "mindspore-ai/mindspore/issues/75"),
    Case("TOP-10", "devices of unequal memory and speed",
         "an unequal split by a search; refused by a plan of like devices", "ml-explore/mlx-lm/pull/1137"),
    Case("TOP-11", "an environment variable that one overlap needs and another forbids",
         "the plan says what it needs", "pytorch/torchtitan/issues/1147"),
    Case("TOP-13", "latency left out: many small collectives win",
         "latency counted", "pytorch/pytorch/pull/119897"),
    Case("PIP-01", "fewer micro-batches than stages hangs",
         "refused, or another schedule; the share of time idle told", "pytorch/torchtitan/issues/775"),
    Case("PIP-03", "30 layers over 4 stages lose two",
         "all placed, once", "NVIDIA/Megatron-LM/issues/1304"),
    Case("PIP-05", "a leftover stage option shrinks the model",
         "contradictions refused, both named", "NVIDIA/Megatron-LM/issues/1778"),
    Case("PIP-06", "depths that no stage count divides",
         "balanced uneven cuts: no stage 15 % above the mean", "modelscope/ms-swift/issues/5737"),
    Case("PIP-08", "a boundary tensor without gradient stalls the schedule",
         "a fixed list of sends", "pytorch/pytorch/issues/152827"),
    Case("PIP-10", "interleaving with the wrong number of micro-batches",
         "checked", "pytorch/torchtitan/pull/781"),
    Case("PIP-11", "fill time left out of the objective",
         "fill and steady state", "microsoft/nnscaler/issues/30"),
    Case("PIP-13", "an even cut fills the end devices and leaves others half empty",
         "balanced bytes where only they fit; a given cut kept", "ollama/ollama/issues/12010"),
    Case("MOE-01", "160 experts over 64 ranks",
         "refused with the legal set", "pytorch/torchtitan/pull/4258"),
    Case("MOE-03", "expert degree multiplied into the world size",
         "folded over the other axes", "pytorch/torchtitan/pull/4831"),
    Case("MOE-05", "ranks without tokens skip a gather",
         "every rank joins every collective", "hiyouga/LlamaFactory/issues/9628"),
    Case("MOE-06", "two overlapping collectives deadlock",
         "one total order", "NVIDIA/Megatron-LM/issues/5749"),
    Case("MOE-08", "node-limited routing planned by formulas for free routing",
         "the model's own routing", "NVIDIA-NeMo/Megatron-Bridge/pull/3928"),
)
# fmt: on
