"""Cases on one rank, as run_parity.py has them on several: values and gradients of every operation against fp64.

`linear_logits_at`, `support_logprobs` and `linear_topk` are compared over the same ids: repeated, padded, the label's;
sets hold from none to all of a row's.
"""

import functools
import itertools

import pytest
import torch

from megatron_lce.core.divergence_types import KINDS
from tests.cases import BF16, FP32, SOMEWHERE, Ranks, Whole, case
from tests.checks import check_case
from tests.findings import Asserted
from tests.problems import BETAS

FP16 = torch.float16
PER_TOKEN, UNUSABLE = {"temperature": SOMEWHERE[0]}, {"temperature": SOMEWHERE[1]}
TELEMETRY, SKIPPED, COUNTED = {"telemetry": True}, {"skip_ignored": True}, {"skip_ignored": "count"}
MEAN = {"telemetry": "mean_logit"}
SOME, KEPT = {"ignored": 0.3}, {"logits_cache_bytes": 2**30}


def each(name, *dtypes, **words):
    """The case in each dtype, of which fp32 and bf16 are the usual ones."""
    return [case(f"{name}, {dtype}", dtype=dtype, **words) for dtype in dtypes or (FP32, BF16)]


AT, WIDE = {"operation": "linear_logits_at"}, {"operation": "linear_logits_at", "hidden_size": 64, "dtype": BF16}
WIDE_ROWS = {"shape": (3, 4), "hidden_size": 264, "shards": (90,), "candidates": 7}
LARGE = {"shape": (3, 2), "hidden_size": 130, "shards": (400,), "candidates": 5}
ODD = {"shape": (2, 3), "hidden_size": 13, "shards": (90,), "candidates": 33}
IDS = [
    case("one id", **AT, shape=(5,), shards=(90,), candidates=1),
    case("scaled, odd rows", **AT, **WIDE_ROWS, temperature=0.7, logits_scale=1.3),
    case("negative scale", **AT, **LARGE, logits_scale=-1.3, temperature=0.7),
    case("a small workspace", **AT, **WIDE_ROWS | {"shape": (2, 2)}, workspace_bytes=1),
    case("bf16, softcap", **WIDE, shape=(9,), shards=(90,), candidates=40, softcap=3.0, **PER_TOKEN),
    case("bf16, chunks", **WIDE, shape=(3,), shards=(700,), candidates=3, softcap=3.0, workspace_bytes=1),
    case("bf16, negative", **WIDE, shape=(3,), shards=(400,), candidates=3, logits_scale=-0.7, softcap=3.0),
    case("the whole vocabulary", **WIDE, shape=(2, 2), shards=(150,), candidates=150),
    case("fp16, odd rows", **AT, **ODD, dtype=FP16, workspace_bytes=1),
    *each("long sets", **AT, shape=(3,), hidden_size=40, shards=(70,), candidates=150, tail=3, **PER_TOKEN),
    case("far from zero", **AT, shape=(4,), shards=(30,), candidates=30, logit_std=300.0),
    case("softcap", **AT, shape=(3, 2), hidden_size=40, shards=(90,), candidates=9, softcap=3.0, **PER_TOKEN),
    case("an fp32 weight", **AT, shape=(6,), hidden_size=40, shards=(70,), candidates=9, dtype=BF16, fp32_weight=True),
    # Products of 16 bits, of which many are ties.
    case("rounded", **WIDE, shape=(4,), shards=(300,), candidates=30, logits_dtype=BF16),
    case("rounded, scaled", **WIDE, shape=(4,), shards=(50,), candidates=50, logits_dtype=BF16, temperature=0.7),
    case("sliced ids", **AT, shape=(6,), shards=(20,), candidates=2, layout="sliced"),
    case("strided ids and offsets", **AT, shape=(6,), shards=(20,), candidates=2, tail=2, layout="strided"),
]


LOW_SOFTCAPS = [(0.5, 1.0), (0.5, 30.0), (239.0, 30.0)]  # and temperatures
BLOCKS = {"torch": 110_000, "triton": 170_000}
LOSS = {"operation": "linear_token_loss"}
MASKED = {"shape": (70, 2), "hidden_size": 64, "shards": (300,), "ignored": 0.4}
WIDE_LOSS = {"shape": (100, 2), "shards": (601,), "ignored": 0.25, **TELEMETRY, **PER_TOKEN}
TOKEN_LOSSES = [
    case("loss, blocks", **LOSS, **WIDE_LOSS | {"shape": (20, 2)}, softcap=4.0, workspace_bytes=BLOCKS),
    case("loss, bf16", **LOSS, **WIDE_LOSS, dtype=BF16),
    case("loss, bf16, padding", **LOSS, **WIDE_LOSS, dtype=BF16, vocab_size=590, workspace_bytes=200_000),
    case("loss, bf16, softcap", **LOSS, **WIDE_LOSS, dtype=BF16, softcap=30.0, workspace_bytes=200_000),
    case("loss, bf16, skipped", **LOSS, **WIDE_LOSS, dtype=BF16, logits_scale=0.7, workspace_bytes=190_000, **SKIPPED),
    *each("loss, the mean alone", **LOSS, **WIDE_LOSS | MEAN, vocab_size=590, workspace_bytes=BLOCKS),
    case("loss, bf16, few at a time", **LOSS, **WIDE_LOSS, dtype=BF16, workspace_bytes=60_000, bits=True),
    # Where 16-bit products are wider than a row and fp32 ones are not, the sum of the weight's gradient has to fit.
    *each("loss, H=1", **LOSS, shape=(5,), hidden_size=1, shards=(40,)),
    *each("loss, H=13", **LOSS, shape=(5,), hidden_size=13, shards=(40,)),
    *(
        case(
            f"loss, bf16, softcap {softcap} / {temperature}",
            **LOSS,
            shape=(60,),
            shards=(600,),
            dtype=BF16,
            softcap=softcap,
            temperature=temperature,
        )
        for softcap, temperature in (*LOW_SOFTCAPS, (30.0, SOMEWHERE[0]))
    ),
    case("loss of candidates", **LOSS, **MASKED, candidates=5),
    case("loss of candidates, bf16", **LOSS, **MASKED, candidates=5, dtype=BF16, workspace_bytes=200_000),
    case("loss of candidates, skipped", **LOSS, **MASKED, candidates=5, dtype=BF16, skip_ignored=True),
    case("loss of candidates, softcap", **LOSS, **MASKED, candidates=5, dtype=BF16, softcap=5.0),
    *each("rounded", **LOSS, shape=(40,), shards=(300,), logits_dtype=BF16),
    *each("an fp32 weight", BF16, FP16, **LOSS, shape=(40,), shards=(300,), fp32_weight=True, entropy=False),
]


def first_label_alone(whole: Whole) -> None:
    whole.labels.view(-1)[1:] = -100


def fp64_temperature(whole: Whole) -> None:
    whole.keywords["temperature"] = whole.keywords["temperature"].double()


def of_shape(shape, hidden_size, columns, *dtypes):
    words = {"shape": shape, "hidden_size": hidden_size, "shards": (columns,)}
    return each(f"{shape} x {hidden_size} x {columns}", *dtypes, **words)


SIZES = {"shards": (70,), **SOME}
OPTIONS = [
    {"temperature": 0.3},
    {"temperature": 4, "ignore_index": 3},
    {"logits_scale": 0.25, "entropy": False},
    {"logits_scale": -1.5},
    {"logits_scale": 0.0},
    {"logits_scale": 0.0, "softcap": 5.0, "telemetry": True},
    {"softcap": 2.0},
    {"softcap": 30.0, "temperature": 0.7, "logits_scale": 3.0},
    {"telemetry": True},
    {"telemetry": True, "entropy": False, "softcap": 5.0, "temperature": 2.0},
    {"vocab_size": 37},
    {"vocab_size": 37, "telemetry": True, "softcap": 2.0},
    {"vocab_size": 37, "telemetry": "mean_logit", "softcap": 2.0},
]
SLABS = {"shape": (40,), "shards": (400,), **TELEMETRY}
OUTPUTS = [("logprobs",), ("entropy",), ("lse",), ("mean_logit",), ("entropy", "lse", "mean_logit")]
CROSS_ENTROPY = [
    *of_shape((1,), 1, 1, FP32, BF16, FP16),
    *of_shape((1,), 8, 300),
    *of_shape((5,), 1, 3),
    *of_shape((3,), 64, 1),
    *of_shape((7,), 33, 101, FP32, BF16, FP16),
    *of_shape((130,), 17, 257, FP32, BF16, FP16),
    *of_shape((64,), 128, 256, BF16, FP16),
    *of_shape((2, 3), 12, 40),
    *of_shape((5, 2, 3), 16, 70, FP16),
    *(one for options in OPTIONS for one in each(f"{options}", **SIZES, **options)),
    *(one for names in OUTPUTS for one in each(f"upstream of {names}", **SIZES, **TELEMETRY, upstream=names)),
    *each("temperature per token", shape=(11, 3), **PER_TOKEN, **TELEMETRY),
    case("temperature per token in fp64", shape=(11, 3), **PER_TOKEN, change=fp64_temperature),
    case("unusable temperatures", **UNUSABLE, **TELEMETRY, **SOME),
    case("unowned labels, padding", shards=(70,), vocab_size=61, unowned=True, **TELEMETRY),
    *(one for layout in ("strided", "sliced", "transposed") for one in each(layout, **SIZES, layout=layout)),
    case("shifted, H=40", shards=(70,), hidden_size=40, layout="shifted", dtype=BF16),
    case("blocks and slabs", **SLABS, workspace_bytes={"torch": 50_000, "triton": 120_000}),
    case("blocks and slabs, bf16", **SLABS, dtype=BF16, workspace_bytes=30_000),
    # An epilogue whose maximum starts at 0, or whose masked columns count as 0, shows here.
    *(one for n in (70, 256, 300) for one in each(f"{n} logits near 1e4", shape=(9,), shards=(n,), offset=1e4)),
    *(one for n in (70, 256, 300) for one in each(f"{n} logits near -1e4", shape=(9,), shards=(n,), offset=-1e4)),
    # p = 2^(z - lse) of one fp32 lse would be off by a rounding of lse, the same for a whole row.
    case("gradients far from zero", shape=(40,), shards=(300,), offset=1e5),
    case("a spread of thousands", shape=(17,), shards=(70,), logit_std=2000.0, **TELEMETRY),
    case("a mean of thousands", shape=(17,), shards=(300,), logit_std=2000.0, entropy=False, **MEAN),
    *each("the mean alone", shape=(40,), shards=(600,), vocab_size=590, bits=True, **SOME, **UNUSABLE, **MEAN, **KEPT),
    case("ignored rows with any logits", shape=(17,), shards=(70,), logit_std=2000.0, ignored=0.5),
]
WITHIN = {"shape": (10, 3), "shards": (300,), "bits": True, **TELEMETRY, **PER_TOKEN}
OF_SKIPPING = [
    case("skipped", **WITHIN, **SOME, **SKIPPED),
    case("counted", **WITHIN, **SOME, **COUNTED, dtype=BF16),
    case("counted, all kept", **WITHIN, **SOME, **COUNTED, **KEPT, dtype=BF16),
    case("skipped, all ignored", **WITHIN, **SKIPPED, **KEPT, ignored=1.0, dtype=BF16),
    case("skipped, none ignored", **WITHIN, **SKIPPED, dtype=BF16),
    case("skipped, all but one ignored", **WITHIN, **SKIPPED, change=first_label_alone),
]


def ids_of_nobody(whole: Whole) -> None:
    """In the padding, and behind it."""
    whole.keywords["candidates"][::2, 1], whole.keywords["candidates"][1::2, 2] = 65, 99


NOBODYS = {"shards": (70,), "vocab_size": 61}
GIVEN = {"hidden_size": 64, "bits": True, "candidates": 5}
NARROW, IN_16_BIT = GIVEN | {"shape": (9,), "shards": (300,)}, {"dtype": BF16, **KEPT}
OF_CANDIDATES = [
    case("candidates", **GIVEN, shape=(7,), shards=(70,)),
    case("softcap", **GIVEN, shape=(3, 2), shards=(300,), softcap=3.0, logits_scale=0.7, **TELEMETRY),
    case("bf16", **GIVEN | {"candidates": 40}, shape=(3, 3), shards=(600,), dtype=BF16, workspace_bytes=2**19),
    case("padding, kept", **NARROW, **IN_16_BIT, vocab_size=290),
    case("softcap, kept", **GIVEN, **IN_16_BIT, shape=(5,), shards=(600,), softcap=4.0),
    case("skipped, kept", **NARROW, **IN_16_BIT, **SKIPPED, **SOME, entropy=False),
    case("alone", **NARROW, **IN_16_BIT, upstream=("candidate_logprobs",)),
    case("broken", shape=(14,), **NOBODYS, candidates=4, unowned=True, **SOME, **UNUSABLE, change=ids_of_nobody),
    case("fp16", **NARROW, **COUNTED, **SOME, dtype=FP16, upstream=("candidate_logprobs", "entropy")),
]
KEPT_FORMS = [
    {},
    {"softcap": 4.0, "temperature": 0.5},
    {"softcap": 5.0, "telemetry": True, "hidden_size": 13, "workspace_bytes": 26_000},  # copies of some columns
    {"vocab_size": 590, "telemetry": True},
    {"softcap": 30.0, "temperature": 0.3, "telemetry": True},  # most exponentials are 0
    # The slope 1 - tanh^2 of cached exponentials was 4.6 % off at softcap 0.5, and 140 % at temperature 30.
    *({"softcap": softcap, "temperature": temperature} for softcap, temperature in LOW_SOFTCAPS),
]
OF_CACHES = [
    case(f"{n} bytes, {form}", dtype=dtype, shape=(100,), shards=(600,), logits_cache_bytes=n, **SOME, **form)
    for n, dtype in ((1, BF16), (2**30, BF16), (2**30, FP16))
    for form in KEPT_FORMS
]
FORMS = [{}, {"temperature": 0.7, "logits_scale": -1.5, **TELEMETRY}]
FORMS += [{"softcap": 3.0, "logits_scale": 0.3, "vocab_size": 290, "temperature": 1.7, **TELEMETRY}]
WIDER = {"shape": (33,), "shards": (300,)}
OF_PRECISION = [
    case("rounded, kept", **WIDER | {"shards": (600,)}, dtype=BF16, logits_dtype=BF16, bits=True, **KEPT),
    *(one for form in FORMS for one in each(f"rounded, {form}", FP32, BF16, FP16, **WIDER, **form, logits_dtype=BF16)),
    *(one for form in FORMS for one in each(f"fp32 weight, {form}", BF16, FP16, **WIDER, **form, fp32_weight=True)),
    *each("fp32 weight, blocks", BF16, FP16, shape=(150,), shards=(600,), fp32_weight=True, workspace_bytes=BLOCKS),
]


def same_logits_doubled(whole: Whole) -> None:
    """Both heads' mass is on one column."""
    (hidden, weight), (of_teacher, weight_of_teacher) = whole.heads
    of_teacher.copy_(2 * hidden)
    weight_of_teacher.copy_(weight)


def sure_heads(whole: Whole) -> None:
    """Both heads are sure of a column in one row, and the teacher of one in another; no probability in most columns."""
    (hidden, weight), (of_teacher, weight_of_teacher) = whole.heads
    for one, of in ((hidden, weight), (of_teacher, weight_of_teacher)):
        one[5] = of[7] * 20
    of_teacher[6] *= 100.0
    of_teacher[8], of_teacher[8, 0] = 0.0, 1e4
    weight_of_teacher[:-100, 0] = -1e4


def nan_in_a_row(head: int, whole: Whole) -> None:
    """Its gradient and the weight's are NaN: a step that is skipped where a gradient is NaN must be skipped."""
    whole.heads[head][0][2, 1] = torch.nan


OF_STUDENT, OF_TEACHER = (functools.partial(nan_in_a_row, head) for head in (0, 1))


def jsd(name, shape, student_size, teacher_size, columns, dtype=FP32, betas=BETAS, **words):
    sizes = {"shape": shape, "hidden_size": student_size, "teacher_size": teacher_size, "shards": (columns,)}
    words = {"operation": "linear_jsd", "logit_std": 2.0, "dtype": dtype, **sizes, **words}
    return [case(f"beta {beta}: {name}", beta=beta, **words) for beta in betas]


BOTH_HEADS = {"student_logits_scale": 1.5, "student_softcap": 2.0}
BOTH_HEADS |= {"teacher_logits_scale": -0.5, "teacher_softcap": 5.0}
STUDENT, KNOWN = {"return_student": True, **SOME}, {"weighted": True}
IN_BLOCKS = {"workspace_bytes": 200_000}
KNOWN_BLOCKS = {**KNOWN, **SOME, **PER_TOKEN, "workspace_bytes": 100_000}
OF_FP32 = KNOWN_BLOCKS | {"teacher_dtype": FP32}
WIDE_VOCABULARY = (5, 2), 24, 40, 2000
SETS = [kinds for number in (1, 2, 4) for kinds in itertools.combinations(KINDS, number)]
CAPPED = {"student_softcap": 3.0, "teacher_softcap": 3.0}
OF_SETS = [
    one
    for kinds, caps in itertools.product(SETS, ({}, CAPPED))
    for one in jsd(
        f"{'+'.join(kinds)}{', capped' * bool(caps)}", (12,), 24, 40, 1300, betas=(0.3,), kinds=kinds,
        change=sure_heads, **SOME, **PER_TOKEN, **caps,
    )
]  # fmt: skip
OF_JSD = [
    *jsd("one of each", (1,), 1, 1, 1),
    *jsd("one of each, bf16", (1,), 1, 1, 1, BF16, (0.5,)),
    *jsd("two columns, fp16", (5,), 1, 3, 2, FP16),
    *jsd("one column", (3,), 64, 8, 1),
    *jsd("odd, fp16", (7,), 33, 20, 101, FP16, (0, 0.5)),
    *jsd("odd, bf16", (7,), 33, 20, 101, BF16, (0.5, 1)),
    *jsd("several tiles, none of them full at the end", (70,), 17, 24, 130),
    *jsd("several tiles, bf16", (130,), 17, 24, 257, BF16),
    *jsd("full tiles", (64,), 64, 128, 128, betas=(0, 1)),
    *jsd("full tiles, fp16", (128,), 64, 128, 256, FP16, (0.5,)),
    *jsd("two dimensions", (2, 3), 12, 40, 70),
    *jsd("three dimensions, bf16", (5, 2, 3), 16, 16, 300, BF16),
    *jsd("temperature", (33,), 24, 40, 130, betas=(0.1, 0.9), temperature=0.5),
    *jsd("temperature, bf16", (33,), 24, 40, 130, BF16, (0.1, 0.9), temperature=4.0),
    *jsd("an fp32 teacher", (9,), 24, 40, 70, BF16, teacher_dtype=FP32),
    *jsd("an fp16 teacher", (9,), 24, 40, 70, teacher_dtype=FP16),
    *jsd("ignored, padding", (11, 3), 24, 16, 70, vocab_size=37, ignore_index=3, **SOME, **PER_TOKEN),
    *jsd("the teacher's temperature", (9,), 24, 40, 130, temperature=1.5, teacher_temperature=0.7, teacher_softcap=5.0),
    *jsd("the teacher's, unusable", (9,), 24, 40, 130, temperature=1.5, teacher_temperature=SOMEWHERE[1]),
    *jsd("the teacher's, weighted", (9,), 24, 40, 130, **PER_TOKEN, **KNOWN, teacher_temperature=2.0),
    *jsd("the teacher's per token, weighted", (9,), 24, 40, 130, **KNOWN, teacher_temperature=SOMEWHERE[0]),
    *jsd("unusable temperatures", (11, 3), 24, 16, 70, **SOME, **UNUSABLE),
    *jsd("a scale and a softcap", (9,), 24, 40, 130, student_logits_scale=0.3, teacher_softcap=3.0, **PER_TOKEN),
    *jsd("a softcap and a scale", (9,), 24, 40, 130, student_softcap=2.0, teacher_logits_scale=0.5, **PER_TOKEN),
    *jsd("both of both heads", (9,), 24, 40, 130, **BOTH_HEADS, **PER_TOKEN),
    *jsd("both of both heads, bf16", (9,), 24, 40, 130, BF16, **BOTH_HEADS, **PER_TOKEN),
    *jsd("the student's outputs", *WIDE_VOCABULARY, **STUDENT, student_softcap=6.0, temperature=1.7),
    *jsd("the student's, blocks", *WIDE_VOCABULARY, **STUDENT, **SKIPPED, workspace_bytes=2**17),
    *jsd("the student's, known weights", *WIDE_VOCABULARY, **STUDENT, **KNOWN, **COUNTED, workspace_bytes=2**17),
    *jsd("all kinds", (7, 3), 24, 40, 300, kinds=KINDS, **SOME, **PER_TOKEN),
    *jsd("all kinds, bf16", (9,), 24, 40, 130, BF16, (0.5,), kinds=KINDS, **BOTH_HEADS, **PER_TOKEN),
    *jsd("all kinds, known weights", (70,), 24, 40, 130, kinds=KINDS, **KNOWN, **STUDENT),
    *jsd("known weights, blocks, softcap", (75, 2), 24, 16, 90, BF16, **KNOWN_BLOCKS, student_softcap=3.0),
    *jsd("known weights, blocks, scale", (75, 2), 24, 16, 90, BF16, (1,), **KNOWN_BLOCKS, student_logits_scale=0.7),
    *jsd("known weights, an fp32 teacher", (75, 2), 24, 16, 90, BF16, (0,), **OF_FP32, **SKIPPED, vocab_size=70),
    *jsd("known weights, a bf16 teacher", (75, 2), 24, 16, 90, betas=(0.5,), teacher_dtype=BF16, **KNOWN_BLOCKS),
    *jsd("all kinds, known weights, blocks", (300,), 24, 16, 90, BF16, (0.3,), kinds=KINDS, **KNOWN, **IN_BLOCKS),
    *jsd("tv", (33,), 24, 40, 130, betas=(0.5,), kinds=("tv",), temperature=0.5, vocab_size=37),
    *jsd("tv, skipped, the student's", (33,), 24, 40, 130, BF16, (0.5,), kinds=("tv",), **STUDENT, **SKIPPED),
    *jsd("tv and KL, counted", (33,), 24, 40, 130, betas=(0.5,), kinds=("tv", "reverse_kl"), **SOME, **COUNTED),
    *jsd("kinds, unusable", (11, 3), 24, 16, 70, betas=(0.5,), kinds=("tv", "forward_kl"), **SOME, **UNUSABLE),
    *jsd("kinds, underflow", (16,), 8, 8, 130, betas=(0.5,), kinds=("tv", "forward_kl"), logit_std=300.0),
    *jsd("kinds, very negative logits", (8,), 8, 8, 70, betas=(0.5,), kinds=KINDS, offset=-1e4),
    *jsd("skipped", (10, 3), 24, 16, 300, betas=(0.5,), teacher_dtype=BF16, **SOME, **SKIPPED, **PER_TOKEN),
    *jsd("counted, bf16", (10, 3), 24, 16, 300, BF16, (1,), **SOME, **COUNTED, **PER_TOKEN),
    *jsd("skipped, all ignored", (10, 3), 24, 16, 300, BF16, (0.5,), ignored=1.0, **SKIPPED, **PER_TOKEN),
    *jsd("skipped, none ignored", (10, 3), 24, 16, 300, BF16, (0,), **SKIPPED, **PER_TOKEN),
    *jsd("skipped, all but one ignored", (10, 3), 24, 16, 300, betas=(0,), **SKIPPED, change=first_label_alone),
    *jsd("NaN in the student's hidden", (6,), 8, 12, 20, change=OF_STUDENT),
    *jsd("NaN in the teacher's hidden", (6,), 8, 12, 20, change=OF_TEACHER),
    *jsd("NaN in the student's hidden, known weights", (6,), 8, 12, 20, **KNOWN, change=OF_STUDENT),
    *jsd("NaN in the teacher's hidden, known weights", (6,), 8, 12, 20, **KNOWN, change=OF_TEACHER),
    # Each head's mass is on columns that are impossible to the other, or on the same one.
    *jsd("probabilities that underflow", (16,), 8, 8, 130, betas=(0, 0.1, 0.9, 1), logit_std=300.0),
    *jsd("the same column", (16,), 8, 8, 130, betas=(0, 0.1, 0.9, 1), logit_std=300.0, change=same_logits_doubled),
    *jsd("very negative logits", (8,), 8, 8, 70, offset=-1e4),
]
ALL = [*CROSS_ENTROPY, *OF_SKIPPING, *OF_CANDIDATES, *OF_CACHES, *OF_PRECISION, *OF_JSD, *OF_SETS, *IDS, *TOKEN_LOSSES]


@pytest.mark.parametrize("one", ALL, ids=lambda one: f"{one.operation}-{one.name}")
def test_values_and_gradients(one, backend, device):
    check_case(one, Ranks(backend, None, device), Asserted())
