"""Low-rank adapters: what trains beside frozen weights, and the whole weights that engines and exports get.

The layers are PEFT's, put into the model in place, so that its own names stay: `x.weight` becomes `x.base_layer.weight`
with `x.lora_A.default.weight` [r, in] and `x.lora_B.default.weight` [out, r] beside it. Whoever takes the policy gets
W + alpha / r B A under the name `x.weight`; nobody but the learner knows of adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from configs.schema import LoraConfig
from infra.errors import LearnerError

if TYPE_CHECKING:
    import torch

_BASE = ".base_layer."
_ADAPTER = (".lora_A.", ".lora_B.")


def add_adapters(model: Any, config: LoraConfig) -> None:
    """Freezes `model` and puts adapters beside the linear layers named in `config.target_modules`, in place.

    The same on every rank and at every start: A is random from a fixed seed, B is 0, so the policy is the start model's
    until the first step. Raises LearnerError where a name fits no layer, or one that is not linear.
    """
    import peft
    import torch

    wanted = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(config.target_modules),
        lora_dropout=0.0,  # the engines sample without dropout
        bias="none",
    )
    names = ", ".join(config.target_modules)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            peft.inject_adapter_in_model(wanted, model)
    except ValueError as error:
        raise LearnerError(
            f"learner.lora.target_modules={names} cannot be adapted in {model.config.model_type} ({error}); "
            "name linear layers of this model, without its output layer"
        ) from error
    suffixes = {name.rpartition(".")[2] for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    missing = {name.rpartition(".")[2] for name in config.target_modules} - suffixes
    bad = [name for name, layer in model.named_modules() if hasattr(layer, "lora_A") and not _linear(layer)]
    if missing or bad:
        why = f"no layer is called {', '.join(sorted(missing))}" if missing else f"{bad[0]} is not linear"
        raise LearnerError(f"learner.lora.target_modules={names}: {why}; name linear layers of this model")
    model.register_state_dict_post_hook(_only_adapters)


def _only_adapters(_model: Any, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
    """DeepSpeed leaves frozen parameters out of a checkpoint, but not the second name of a tied one."""
    for name in [name for name in state if not any(part in name for part in _ADAPTER)]:
        del state[name]


def _linear(layer: Any) -> bool:
    import torch

    return type(layer.base_layer) is torch.nn.Linear


def whole_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter, Any]]:
    """(Hugging Face name, parameter, adapted layer that changes it or None), each once, without gathering anything."""
    adapted = {f"{name}{_BASE}weight": layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    for name, parameter in model.named_parameters():
        if not any(part in name for part in _ADAPTER):
            yield name.replace(_BASE, "."), parameter, adapted.get(name)


def adapter_of(layer: Any) -> list[torch.nn.Parameter]:
    """A [r, in] and B [out, r] of an adapted layer."""
    return [layer.lora_A["default"].weight, layer.lora_B["default"].weight]


def merged(layer: Any) -> torch.Tensor:
    """W + alpha / r B A in the weight's dtype, added up in fp32; all three must be whole (ZeRO 3: gathered)."""
    import torch

    weight = layer.base_layer.weight
    with torch.no_grad():
        a, b = (part.float() for part in adapter_of(layer))
        return torch.addmm(weight.float(), b, a, alpha=layer.scaling["default"]).to(weight.dtype)
