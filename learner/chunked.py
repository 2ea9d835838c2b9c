"""Log-probabilities and entropy straight from the hidden states, without the logits of a whole row.

A row of 32,000 loss-bearing tokens over a vocabulary of 150,000 would have logits of 10 GB in bfloat16, and as much
again for their gradient and for each fp32 copy. Here they exist for `learner.logprob_chunk_tokens` tokens at a time.
The backward pass computes them once more, chunk by chunk, except those of the last chunk, which are kept: a row that
fits one chunk pays for no matrix product twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from infra.errors import LearnerError

_AFTER_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Settings of Hugging Face models that change logits after the output layer (Gemma, Cohere, Granite, Falcon-H1)."""


def target_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    chunk_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi_theta of the targets and the entropy, both [K] fp32 in nats, at the sampling temperature.

    `hidden` [K, H], `weight` [V, H] and `bias` [V] are in the model's dtype and so are their logits; the softmax is
    fp32. `targets` is [K]. The entropy carries no gradient. Gradients of the weight are summed over chunks in fp32.
    """
    arguments = (hidden, weight, bias, targets, temperature, chunk_tokens)
    logps, entropy = _TargetLogprobs.apply(*arguments)  # type: ignore[no-untyped-call]
    return logps, entropy


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logps = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logps)
        probs = None
        for rows in _chunks(len(targets), chunk_tokens):
            probs = None  # before the next chunk's logits, not after them
            log_probs = _log_softmax(hidden[rows], weight, bias, temperature)
            logps[rows] = log_probs.gather(-1, targets[rows, None]).squeeze(-1)
            probs = log_probs.exp()
            entropy[rows] = -torch.linalg.vecdot(probs, log_probs)
            del log_probs
        ctx.save_for_backward(hidden, weight, bias, targets, probs)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, last_probs = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if of_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if of_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if of_bias else None
        grad = grad_logps / ctx.temperature
        for rows in reversed(_chunks(len(targets), ctx.chunk_tokens)):
            probs = last_probs
            if probs is None:
                probs = _log_softmax(hidden[rows], weight, bias, ctx.temperature).exp_()
            last_probs = None
            # d logp / d logits = onehot(target) - probs
            grad_logits = probs * -grad[rows, None]
            del probs
            grad_logits.scatter_add_(1, targets[rows, None], grad[rows, None])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                if hidden.dtype == torch.float32:
                    grad_weight.addmm_(grad_logits.T, hidden[rows])
                else:
                    grad_weight += grad_logits.T @ hidden[rows]
            del grad_logits
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _chunks(tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, min(start + chunk_tokens, tokens)) for start in range(0, tokens, chunk_tokens)]


def _log_softmax(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    logits = linear(hidden, weight, bias).float()
    return logits.div_(temperature).log_softmax(-1)


class LogprobHead(torch.nn.Module):
    """Stands where a model's output layer stood, with the same parameters under the same names.

    It gives log-probabilities and entropies of `targets` instead of logits. As a module of the model, it has its
    weight gathered for it under ZeRO 3, in the forward and the backward pass, as the layer had.
    """

    def __init__(self, layer: torch.nn.Linear, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.targets: torch.Tensor | None = None
        """[K], set before the model runs with `logits_to_keep` [K]."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, K, H] -> [1, K, 2]: log-probability of the target, and entropy (no gradient); fp32, nats."""
        assert self.targets is not None
        found = target_logprobs(hidden[0], self.weight, self.bias, self.targets, self.temperature, self.chunk_tokens)
        return torch.stack(found, -1)[None]


def replace_head(model: Any, temperature: float, chunk_tokens: int) -> LogprobHead:
    """Puts a `LogprobHead` in place of the model's output layer and returns it.

    Raises LearnerError for models whose logits are not those of a plain output layer.
    """
    layer = model.get_output_embeddings()
    changed = {name: getattr(model.config, name, None) for name in _AFTER_HEAD}
    changed = {name: value for name, value in changed.items() if value not in (None, 1)}
    if type(layer) is not torch.nn.Linear or changed:
        why = f"its config has {changed}" if changed else f"its output layer is a {type(layer).__name__}"
        raise LearnerError(
            f"learner.model: logits of a {model.config.model_type} model are not hidden states times a matrix ({why}), "
            "which is all that the learner computes; choose a model of another family"
        )
    head = LogprobHead(layer, temperature, chunk_tokens)
    model.set_output_embeddings(head)
    return head
