"""Steps of Megatron models, hybrid ones and a VLM among them, with the fused head on and off: losses and gradients."""

import copy
import dataclasses
import functools
import importlib.util
import math
import os
from collections.abc import Sequence

import harness
import megatron_cases as cases
import torch
from harness import compare_all, compare_step, relative_error, worst_of_all_ranks
from megatron.core import parallel_state
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer import ModuleSpec
from torch import Tensor, nn

from megatron_lce import enable_fused_linear_ce
from megatron_lce.megatron.reasons import find_language_model
from scripts import megatron_layers, megatron_runtime

ALLOWED_16_BIT = 1.5  # times Megatron's own error, per parameter
FEW = 64  # numbers: the ratio of two independent errors of 64 is over 1.5 once in 1,300 times, of 4 once in 5
SPIKES = 2.0**40, float("inf"), 1.0  # what the losses of three steps are multiplied by
LOSS_OF_HEAD = importlib.util.find_spec("megatron.core.transformer.linear_cross_entropy") is not None
OWN_FLAG = (("cross_entropy_loss_fusion", True), ("cross_entropy_fusion_impl", "linear"))


def train(case: cases.Case, device: torch.device, *, fused=False, captured=False, like: list[nn.Module] | None = None):
    """A step over several microbatches, two with an optimizer between them: (losses, gradients, the model's chunks)."""
    chunks = cases.build(case, device)
    if like is not None:
        cases.copy_weights(like, chunks)
    handle = cases.enable(chunks, case, fused)
    if captured and case.main_grad:
        cases.set_main_grad_fusion(chunks)
    forward_step = functools.partial(cases.forward_step, masked=case.masked)
    forward_step = cases.captured_forward_step if captured else forward_step
    with cases.counted_additions() as additions:
        losses = cases.train_step(chunks, forward_step, cases.microbatches(case, device))
        if case.overlap:
            optimizer = megatron_runtime.build_optimizer(chunks, use_distributed_optimizer=True)
            optimizer.step()
            losses = cases.train_step(chunks, forward_step, cases.microbatches(case, device))
    assert additions.called == (case.main_grad and (handle.enabled or (captured and cases.has_head(chunks)))), case
    return losses, cases.gradients(chunks), chunks


def check_training(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """The flag on against off: the loss of every token and the accumulated gradient of every parameter."""
    compare_step(report, case.name, train(case, device, fused=True), train(case, device))


def check_own_flag(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """Our flag, and capture, on a model of Megatron's dev branch that has Megatron's flag, too."""
    losses, expected, _ = train(case, device)
    asking = dataclasses.replace(case, config=(*case.config, *OWN_FLAG))
    for name, way in {"and ours": {"fused": True}, "captured": {"captured": True}}.items():
        found = train(asking, device, **way)
        kept = {key: value for key, value in losses.items() if key in found[0]}  # MTP's acceptance is not counted
        compare_step(report, f"{case.name}: own flag, {name}", found, (kept, expected))


def check_captured_training(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """The same loss through `capture_lm_head`, in Megatron's schedule."""
    compare_step(report, f"{case.name}: captured", train(case, device, captured=True), train(case, device))


def check_16_bit(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """Our error against fp32 with the same weights, beside Megatron's own."""
    _, native, chunks = train(case, device)
    _, fused, _ = train(case, device, fused=True)
    _, exact, _ = train(cases.in_fp32(case), device, like=chunks)
    check_errors(f"{case.name}: gradients", fused, [native], exact, report)


def check_errors(name: str, fused: dict, natives: Sequence[dict], exact: dict, report: harness.Report) -> None:
    """Our error of every gradient over the largest of Megatron's own.

    Where its is 0, at a weight without a gradient, ours must be.
    """
    ratios = {}
    for key in exact:
        error, *others = (relative_error(*of_module(key, grads, exact)) for grads in (fused, *natives))
        ratios[key] = error / max(others) if max(others) else math.inf if error else 0.0
    count, worst, ratio = worst_of_all_ranks(ratios)
    detail = f"{count} tensors, worst {worst}: {ratio:.2f} times Megatron's error, allowed {ALLOWED_16_BIT}"
    report.check(name, ratio <= ALLOWED_16_BIT, detail)


def of_module(key: str, found: dict, exact: dict) -> tuple[Tensor, Tensor]:
    """Both gradients of this name; where they are of few numbers, all gradients of its module in one vector."""
    module = key.rpartition(".")[0] + "."
    together = [other for other in exact if other.startswith(module)] if exact[key].numel() < FEW else [key]
    return torch.cat([found[name].flatten() for name in together]), torch.cat([exact[n].flatten() for n in together])


def scaled_steps(
    case: cases.Case, device: torch.device, *, fused: bool = False
) -> tuple[list[tuple[bool, float]], dict]:
    """Steps under Megatron's dynamic loss scaler whose losses are multiplied by `SPIKES`.

    Returns (whether the optimizer stepped, the scale behind it) of each, and the last one's gradients.
    """
    chunks = cases.build(case, device)
    optimizer = megatron_runtime.build_optimizer(
        chunks, case.dtype, initial_loss_scale=cases.LOSS_SCALE, hysteresis=1, use_distributed_optimizer=case.overlap
    )
    cases.enable(chunks, case, fused)
    steps, grads = [], {}
    for spike in SPIKES:

        def forward_step(batches, model, spike=spike):
            output, loss_of = cases.forward_step(batches, model, masked=case.masked)

            def spiked(losses):
                loss, report = loss_of(losses)
                return loss * spike, report

            return output, spiked

        cases.train_step(chunks, forward_step, cases.microbatches(case, device))
        scale = float(optimizer.get_loss_scale())
        grads = {name: grad / scale for name, grad in cases.gradients(chunks).items()}
        stepped, *_ = optimizer.step()
        steps.append((stepped, float(optimizer.get_loss_scale())))
    return steps, grads


def check_loss_scaler(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """Two overflows that flag and native both skip, and then gradients like those of `check_16_bit`."""
    native_steps, native = scaled_steps(case, device)
    steps, fused = scaled_steps(case, device, fused=True)
    scale = cases.LOSS_SCALE
    expected = [(False, scale / 2), (False, scale / 4), (True, scale / 4)]
    right = steps == native_steps == expected
    report.check(f"{case.name}: overflows are skipped", right, f"native {native_steps}, flag {steps}")
    _, exact, _ = train(cases.in_fp32(case), device, like=cases.build(case, device))
    check_errors(f"{case.name}: gradients under the loss scaler", fused, [native], exact, report)


def check_weighted_loss(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """Under `known_loss` a loss that weights tokens raises on every rank at first; later its gradients are NaN."""
    batch = cases.microbatches(case, device)[0]
    weights = torch.linspace(1, 2, batch["labels"].numel(), device=device).view_as(batch["labels"])
    for name, first in (("first", weights), ("later", torch.ones_like(weights))):
        chunks = cases.build(case, device)
        enable_fused_linear_ce(chunks, known_loss=True)

        def steps(model=chunks[0], first=first):
            for factors in (first, weights):
                losses, _ = cases.forward_step(iter([batch]), model)
                (losses * factors).sum().backward()

        message = harness.message_of(steps)
        if name == "first":
            report.check(f"{case.name}: weighted at first", "one upstream gradient" in message, message)
        else:
            broken = bool(cases.gradients(chunks)["0.output_layer.weight"].isnan().all())
            report.check(f"{case.name}: weighted later", message == "no error" and broken, message)
            message = harness.message_of(steps)
            report.check(f"{case.name}: the pass after", "the last backward pass are NaN" in message, message)


def check_loss_terms(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """z-loss and label smoothing over a vocabulary with padding, against a loss of gathered logits in fp64."""
    z, e, size = 1e-2, 0.2, cases.VOCAB_SIZE - 3

    def of_logits(labels: Tensor, logits: Tensor) -> Tensor:
        whole = gather_from_tensor_model_parallel_region(logits)[..., :size].double()
        picked = whole.log_softmax(-1).gather(-1, labels.T.clamp(min=0)[..., None])[..., 0]
        losses = -(1 - e) * picked - e * whole.log_softmax(-1).mean(-1) + z * whole.logsumexp(-1) ** 2
        return losses.T.float()

    def step(backend: str | None) -> tuple[dict, dict]:
        chunks = cases.build(case, device)
        if backend is None:
            find_language_model(chunks).compute_language_model_loss = of_logits
        else:
            options = {"vocab_size": size, "skip_masked": case.masked, "known_loss": case.known, "backend": backend}
            enable_fused_linear_ce(chunks, on_unsupported="raise", z_loss=z, label_smoothing=e, **options)
        batches = cases.microbatches(case, device)
        for batch in batches:
            batch["labels"] %= size  # also of masked ones, which Megatron computes
        losses = cases.train_step(chunks, functools.partial(cases.forward_step, masked=case.masked), batches)
        losses.pop("correct_values", None)  # of MTP heads: Megatron's argmax may lie in the padding, the fused one not
        return losses, cases.gradients(chunks)

    expected = step(None)
    runs_triton = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"  # as the test sets it
    for backend in ("torch", "triton") if runs_triton else ("torch",):
        compare_step(report, f"{case.name}: loss terms, {backend}", step(backend), expected)


def check_other_models(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """Flag on against off for a hybrid model and, where it has what the case asks for, for LLaVA around a GPTModel."""
    ways = {"hybrid": (hybrid_model, text_loss)}
    if not (case.sequence_parallel or case.mtp):
        ways["LLaVA"] = llava_model, image_loss
    batch = cases.microbatches(case, device)[0]
    for name, (build, loss_of) in ways.items():
        found = []
        for fused in (False, True):
            # HybridModel does not know Megatron's own flag, and ours does not mind it
            own_flag = OWN_FLAG if fused and name == "hybrid" and LOSS_OF_HEAD else ()
            options = cases.gpt_options(dataclasses.replace(case, config=(*case.config, *own_flag)))
            model = build(options).to(device)
            handle = enable_fused_linear_ce(model, use_fused_linear_ce=fused)
            assert handle.enabled == fused, handle.reasons
            losses = loss_of(model, batch)
            losses.sum().backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            found.append({"losses": losses.detach(), **gradients})
        compare_all(report, f"{name} {case.name}: losses and gradients", found[1], found[0])


IMAGE_TOKEN = -200  # LLaVA's own


def hybrid_model(options: megatron_runtime.GptOptions, spec: ModuleSpec | None = None, layers: str = "*") -> nn.Module:
    """HybridModel, or MambaModel before megatron-core 0.18, of attention layers: Mamba's own need CUDA kernels.

    `layers`: by their letters, what each of the options' layers stands for; `spec`: of the stack that has them.
    """
    num_layers = len(layers) * options.num_layers
    config = megatron_runtime.transformer_config(dataclasses.replace(options, num_layers=num_layers))
    layer = megatron_layers.gpt_layer_spec()
    if importlib.util.find_spec("megatron.core.models.hybrid") is not None:
        from megatron.core.models.hybrid.hybrid_block import HybridStack as Stack
        from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules as Submodules
        from megatron.core.models.hybrid.hybrid_model import HybridModel as Model

        spec_name, pattern_name = "hybrid_stack_spec", "hybrid_layer_pattern"
        mtp = {"mtp_block_spec": megatron_layers.mtp_block_spec(config)} if options.mtp_layers else {}
    else:
        from megatron.core.models.mamba.mamba_model import MambaModel as Model
        from megatron.core.ssm.mamba_block import MambaStack as Stack
        from megatron.core.ssm.mamba_block import MambaStackSubmodules as Submodules

        spec_name, pattern_name, mtp = "mamba_stack_spec", "hybrid_override_pattern", {}
    if spec is None:  # without the final norm of the stack, which is TransformerEngine's
        submodules = Submodules(attention_layer=layer, **mtp)
        spec = ModuleSpec(Stack, params={"post_layer_norm": False}, submodules=submodules)
    torch.manual_seed(options.seed)
    return Model(
        config=config,
        vocab_size=options.vocab_size,
        max_sequence_length=options.max_sequence_length,
        share_embeddings_and_output_weights=options.tied,
        position_embedding_type="rope",
        **{spec_name: spec, pattern_name: layers * options.num_layers + f"/{layers}" * options.mtp_layers},
    )


def llava_model(options: megatron_runtime.GptOptions) -> LLaVAModel:
    """LLaVAModel as on a pipeline stage behind its vision encoder, which hands over image embeddings."""
    config = megatron_runtime.transformer_config(options)
    vision = copy.deepcopy(config)
    vision.vision_model_type = "clip"
    config.language_model_type = ""
    torch.manual_seed(options.seed)
    return LLaVAModel(
        language_transformer_config=config,
        language_transformer_layer_spec=megatron_layers.gpt_block_spec(config),
        language_vocab_size=options.vocab_size,
        language_max_sequence_length=options.max_sequence_length,
        language_position_embedding_type="rope",
        share_embeddings_and_output_weights=options.tied,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=megatron_layers.gpt_layer_spec(),
        drop_vision_class_token=True,
        vision_projection_config=copy.deepcopy(config),
        vision_projection_layer_spec=None,
        img_h=28,
        img_w=28,
        patch_dim=14,
        add_encoder=False,
    )


def text_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Loss per token [b, s], zero where masked."""
    mtp = {"loss_mask": batch["loss_mask"]} if model.config.mtp_num_layers else {}
    losses = model(batch["tokens"], batch["positions"], None, labels=batch["labels"], **mtp)
    return torch.where(batch["loss_mask"].bool(), losses, 0.0)


def image_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The same with one image of four patches in each sample; LLaVA gives its positions the label -100."""
    tokens = batch["tokens"].clone()
    tokens[:, 2] = IMAGE_TOKEN
    images = torch.zeros(len(tokens), 3, 28, 28, device=tokens.device)
    hidden_size = model.language_model.config.hidden_size
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    model.encoder_hidden_state = torch.randn(4, len(tokens), hidden_size, generator=generator).to(tokens.device)
    losses, loss_mask = model(images, tokens, batch["positions"], None, batch["labels"], batch["loss_mask"])
    return torch.where(loss_mask.bool(), losses, 0.0)
