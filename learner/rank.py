"""One data-parallel rank: the model, its DeepSpeed engine and one optimiser step per batch (M5).

`RankCore` is a plain class; `learner.group` runs one in each Ray actor, tests run one in their own process. All ranks
call the same methods in the same order: most of them are collective.

The gradient is the exact sum of the weighted token losses over all ranks and micro-batches. DeepSpeed would divide by
the world size (undone by scaling the loss) and by the accumulation steps (not used: the boundary is set by hand, so the
number of micro-batches may change from step to step).
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from configs.schema import LearnerConfig, LossConfig, RatioMaskLoss
from infra.errors import ConfigError, LearnerError
from learner.attention import PACKED
from learner.lora import adapter_of, add_adapters, merged, whole_parameters
from learner.loss import TokenLoss, nll, ppo_clip, ratio_mask
from learner.packing import Row, Sample, build_row
from learner.phases import BACKWARD, FORWARD, OPTIMIZER, PACK, PhaseClock
from learner.rank_setup import join, load_model
from learner.rank_state import load_rng, on_disk, save_rng

if TYPE_CHECKING:
    import torch

    from rollout.trajectory import Payload

Objective = LossConfig | Literal["nll"]

_STATE = "learner.json"
_TAG = "state"
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSums:
    """Statistics of one rank's loss-bearing tokens, as sums: they add up over micro-batches and ranks."""

    loss: float
    """This rank's part of the batch's loss, which is a sum over ranks."""
    tokens: int
    entropy: float
    ratio: float
    masked: int
    fresh: int
    """Tokens sampled by the very weights that are trained here; the gap below is over them."""
    gap: float
    """Sum of |log pi_theta - log mu|."""
    gap_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What the optimiser did; the same on every rank."""

    grad_norm: float
    """Global norm before clipping; inf or nan where the step was skipped."""
    lr: float
    skipped: bool
    """The gradient was not finite, so the weights were left as they were."""


def deepspeed_config(config: LearnerConfig, parameters: int) -> dict[str, Any]:
    """The DeepSpeed configuration of a rank that trains that many parameters."""
    optimizer = config.optimizer
    params: dict[str, Any] = {
        "lr": optimizer.lr,
        "betas": list(optimizer.betas),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }
    if not config.offload_optimizer:  # DeepSpeed's own Adams compile kernels at start; torch's are as fast
        params["torch_adam"] = True
    zero: dict[str, Any] = {"stage": config.zero_stage}
    if config.zero_stage:
        # DeepSpeed allocates whole buckets, half a billion elements by default, whatever the size of the model.
        bucket = min(parameters, 500_000_000)
        zero |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket, "overlap_comm": config.device == "cuda"}
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.grad_clip,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": zero,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    if config.dtype == "bfloat16":
        result |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return result


def check_learner(config: LearnerConfig) -> None:
    """Raises ConfigError for combinations DeepSpeed cannot train well."""
    if config.dtype == "bfloat16" and config.zero_stage == 0:
        raise ConfigError(
            "learner.zero_stage=0 with learner.dtype=bfloat16 would accumulate gradients in bfloat16; "
            "set learner.zero_stage to 1 or more (fp32 master weights and accumulation), or dtype to float32"
        )
    if config.offload_optimizer and (config.zero_stage == 0 or config.device == "cpu"):
        raise ConfigError(
            f"learner.offload_optimizer=true has no effect with device={config.device}, zero_stage="
            f"{config.zero_stage}; it needs device cuda and zero_stage >= 1: remove it or change those"
        )


class RankCore:
    """The model and optimiser of one rank. Raises LearnerError where the start model or the process group is bad."""

    def __init__(
        self,
        config: LearnerConfig,
        objective: Objective,
        temperature: float,
        *,
        rank: int = 0,
        world_size: int = 1,
        store: Any = None,
    ) -> None:
        """`store` is the ranks' common one (`open_store`); None is right for a world of one."""
        check_learner(config)
        self.config = config
        self.objective = objective
        self.temperature = temperature
        self.rank = rank
        self.world_size = world_size
        self.steps = 0
        """Optimiser steps applied; drives the warm-up."""
        self.payloads: Sequence[Payload] = ()
        """What the next step trains on; see learner/payloads.py."""
        self.phases = PhaseClock(cuda=config.device == "cuda")
        self.publisher: Any = None
        """The `learner.publish.Publisher` of the engines published to last."""
        deepspeed = join(config.device, rank, world_size, store)
        import torch

        from learner.chunked import replace_head

        self.device = torch.device("cuda", 0) if config.device == "cuda" else torch.device("cpu")
        model = load_model(config)
        self.head = replace_head(model, temperature, config.logprob_chunk_tokens)
        if config.lora is not None:
            add_adapters(model, config.lora)
        with contextlib.redirect_stdout(io.StringIO()):  # the bf16 optimiser prints its memory use, forced
            self.engine: Any = deepspeed.initialize(
                model=model,
                model_parameters=[p for p in model.parameters() if p.requires_grad],
                config=deepspeed_config(config, sum(p.numel() for p in model.parameters() if p.requires_grad)),
            )[0]
        self.engine.train()

    # ---- one step ---------------------------------------------------------------------------------------------------

    def step(
        self, rows: Sequence[Sequence[Sample]], *, version: int, lr_scale: float = 1.0
    ) -> tuple[TokenSums, Applied]:
        """One optimiser step over the batch. `rows` are this rank's; every rank must bring the same number.

        `version` is the policy version of the weights as they are now (for the log-probability gap).
        """
        sums = self.accumulate(rows, version=version)
        with self.phases.part(OPTIMIZER):
            return sums, self.apply(lr_scale=lr_scale)

    def accumulate(self, rows: Sequence[Sequence[Sample]], *, version: int) -> TokenSums:
        """Forward and backward over all rows; afterwards the batch's gradient is complete on all ranks."""
        import torch

        sums = torch.zeros(7, dtype=torch.float64, device=self.device)
        gap_max = torch.zeros((), device=self.device)
        for index, samples in enumerate(rows):
            self.engine.set_gradient_accumulation_boundary(index == len(rows) - 1)
            with self.phases.part(PACK):
                packed = build_row(samples)
                row = self._to_device(packed)
            with self.phases.part(FORWARD):
                logps, entropy = self._logprobs(row, packed.boundaries)
                token = self._token_loss(logps, row)
                loss = (token.loss * row["weights"]).sum()
            with self.phases.part(BACKWARD):
                self.engine.backward(loss * self.world_size, scale_wrt_gas=False)
            with torch.no_grad():
                fresh = row["versions"] == version
                gap = (logps - row["logprobs"]).abs().where(fresh, 0.0)
                parts = (
                    loss,
                    fresh.numel(),
                    entropy.sum(),
                    token.ratio.sum(),
                    token.masked.sum(),
                    fresh.sum(),
                    gap.sum(),
                )
                sums += torch.stack([torch.as_tensor(part, device=self.device).double() for part in parts])
                gap_max = torch.maximum(gap_max, gap.max()) if gap.numel() else gap_max
        loss_sum, tokens, entropy_sum, ratio, masked, fresh_tokens, gap_sum = sums.tolist()
        return TokenSums(
            loss=loss_sum,
            tokens=int(tokens),
            entropy=entropy_sum,
            ratio=ratio,
            masked=int(masked),
            fresh=int(fresh_tokens),
            gap=gap_sum,
            gap_max=float(gap_max),
        )

    def gradients(self) -> dict[str, torch.Tensor]:
        """The full gradient of every parameter that trains, fp32 on the CPU; between `accumulate` and `apply` only.
        Collective."""
        from deepspeed.utils import safe_get_full_grad

        trained = [(name, p) for name, p in self.engine.module.named_parameters() if p.requires_grad]
        return {name: safe_get_full_grad(p).detach().float().cpu() for name, p in trained}

    def apply(self, *, lr_scale: float = 1.0) -> Applied:
        """The optimiser step on the accumulated gradient: clip, AdamW. A gradient that is not finite is thrown away."""
        warmup = self.config.optimizer.warmup_steps
        lr = self.config.optimizer.lr * lr_scale * min(1.0, (self.steps + 1) / (warmup + 1))
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        if self.config.zero_stage == 0:
            grad_norm = self._plain_grad_norm()
            applied = math.isfinite(grad_norm)
            if applied:
                self.engine.step()
            else:  # plain AdamW would write the NaN into every weight; the ZeRO optimisers check for themselves
                self.engine.zero_grad()
        else:
            self.engine.step()
            grad_norm = float(self.engine.get_global_grad_norm())
            applied = self.engine.was_step_applied()
        self.steps += applied
        return Applied(grad_norm=grad_norm, lr=lr, skipped=not applied)

    def _plain_grad_norm(self) -> float:
        import torch

        grads = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads])))

    def _logprobs(self, row: dict[str, torch.Tensor], boundaries: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """log pi_theta of the row's targets and the entropy where they were sampled, both [K]."""
        attention = self.engine.module.config._attn_implementation
        self.head.targets = row["targets"]
        found = self.engine(
            input_ids=row["token_ids"][None],
            position_ids=row["position_ids"][None],
            use_cache=False,
            logits_to_keep=row["predictors"],
            **({"cu_seq_lens_q": boundaries} if attention == PACKED else {}),
        ).logits[0]
        return found[:, 0], found[:, 1].detach()

    def _token_loss(self, logps: torch.Tensor, row: dict[str, torch.Tensor]) -> TokenLoss:
        if self.objective == "nll":
            return nll(logps)
        config = self.objective.objective
        if isinstance(config, RatioMaskLoss):
            return ratio_mask(logps, row["logprobs"], row["advantages"], config)
        return ppo_clip(logps, row["logprobs"], row["advantages"], config)

    def _to_device(self, row: Row) -> dict[str, torch.Tensor]:
        import torch

        arrays = {name: getattr(row, name) for name in Row.__dataclass_fields__ if name != "boundaries"}
        return {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}

    # ---- weights and state ------------------------------------------------------------------------------------------

    def policy_parameters(self) -> list[tuple[str, Any]]:
        """(Hugging Face name, parameter) as `named_full_parameters` yields them, not gathered and without adapters."""
        return [(name, parameter) for name, parameter, _ in whole_parameters(self.engine.module)]

    def named_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole parameter) one by one, on this rank's device; tied ones once, adapters merged into
        what they adapt. Collective.

        Under ZeRO 3 a parameter is gathered while it is yielded, so copy what is to be kept.
        """
        import deepspeed

        for name, parameter, adapted in whole_parameters(self.engine.module):
            parts = [parameter] if adapted is None else [parameter, *adapter_of(adapted)]
            with deepspeed.zero.GatheredParameters(parts, enabled=self.config.zero_stage == 3):
                yield name, parameter.data if adapted is None else merged(adapted)

    def save(self, folder: str, version: int = 0) -> None:
        """Writes weights, optimiser state and counters for an exact resume with the same ranks. Collective.

        With `learner.lora` the frozen weights are left out: they are the start model's.

        `version` is the policy version of the weights; `load` gives it back. Raises StorageError where the disk takes
        nothing; the rank is as it was.
        """
        with on_disk(folder):
            self.engine.save_checkpoint(folder, tag=_TAG, exclude_frozen_parameters=self.config.lora is not None)
            save_rng(folder, self.rank, cuda=self.config.device == "cuda")
            if self.rank == 0:
                state = {
                    "steps": self.steps,
                    "version": version,
                    "world_size": self.world_size,
                    "zero_stage": self.config.zero_stage,
                    "lora": self._lora(),
                }
                (Path(folder) / _STATE).write_text(json.dumps(state) + "\n")

    def load(self, folder: str) -> int:
        """Restores what `save` wrote and returns the policy version. Collective.

        Raises LearnerError if the state is not there, not readable, or was written with other ranks.
        """
        path = Path(folder) / _STATE
        if not path.is_file():
            raise LearnerError(f"{folder} holds no learner state ({_STATE} is missing); resume from another checkpoint")
        state = json.loads(path.read_text())
        present = {"world_size": self.world_size, "zero_stage": self.config.zero_stage, "lora": self._lora()}
        for key, now in present.items():
            saved = state.get(key)
            if saved != now:
                raise LearnerError(
                    f"{folder} was saved with learner.{key}={saved}, this run has {now}; resume with {saved}"
                )
        loaded, _ = self.engine.load_checkpoint(
            folder, tag=_TAG, load_lr_scheduler_states=False, load_module_strict=self.config.lora is None
        )
        if loaded is None:
            raise LearnerError(f"DeepSpeed could not read the state in {folder}; resume from an earlier checkpoint")
        load_rng(folder, self.rank, cuda=self.config.device == "cuda")
        self.steps = state["steps"]
        return int(state["version"])

    def _lora(self) -> dict[str, Any] | None:
        return None if self.config.lora is None else self.config.lora.model_dump(mode="json")

    def export_hf(self, folder: str) -> None:
        """Writes an HF folder that transformers and vLLM load. Collective; rank 0 writes.

        Weights and config are the model's as it is; tokenizer, chat template and generation config are the start
        model's files.
        """
        weights = {name: tensor.cpu().clone() for name, tensor in self.named_full_parameters() if self.rank == 0}
        if self.rank != 0:
            return
        target = Path(folder)
        with on_disk(folder):
            target.mkdir(parents=True, exist_ok=True)
            for source in Path(self.config.model).iterdir():
                if (
                    source.is_file()
                    and not source.name.endswith(_WEIGHT_FILES)
                    and source.name not in ("config.json", "README.md")
                ):
                    shutil.copy2(source, target / source.name)
            self.engine.module.save_pretrained(target, state_dict=weights)
