"""How a rank comes up: the ranks' process group, and the start model as it is trained."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from typing import Any

from configs.schema import LearnerConfig
from infra.errors import LearnerError
from learner.attention import implementation, register


def open_store(host: str, port: int, ranks: int, *, master: bool) -> Any:
    """The TCP store where the ranks meet; the master's port 0 lets the system choose (`.host`, `.port`). The master
    listens on `host` alone: the store takes no password, and torch itself would listen on every address."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if not master:
        return TCPStore(host, port, ranks, is_master=False, wait_for_workers=False)
    listening = socket.create_server((host, port), family=_family(host))
    port = listening.getsockname()[1]
    fd = listening.detach()  # the store closes it
    return TCPStore(host, port, ranks, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def _lone_store() -> Any:
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    return HashStore()


def join(device: str, rank: int, world_size: int, store: Any) -> Any:
    """Joins the ranks' process group (once per process) and returns the deepspeed module.

    DeepSpeed reads its device and local rank from the environment and answers at import with a warning otherwise; this
    is a process of ours, and a rank sees one device.
    """
    os.environ.setdefault("DS_ACCELERATOR", device)
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed
    import torch

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # names DeepSpeed calls
    dist = torch.distributed
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise LearnerError(
                f"this process already is rank {dist.get_rank()} of {dist.get_world_size()}, asked for {rank} of "
                f"{world_size}; start each rank in its own process"
            )
    else:
        backend = "nccl" if device == "cuda" else "gloo"
        device_id = torch.device("cuda", 0) if device == "cuda" and world_size > 1 else None
        dist.init_process_group(
            backend, store=store or _lone_store(), rank=rank, world_size=world_size, device_id=device_id
        )
    if device == "cpu":
        # DeepSpeed would compile its shared-memory collectives for a minute at the first start on a machine, and use
        # them for tensor-parallel inference only. It keeps this table so that operators can be switched off.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="nccl" if device == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False
    )
    return deepspeed


def load_model(config: LearnerConfig) -> Any:
    """The start model in the training dtype, ready for packed rows."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import is_flash_attn_2_available
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if config.device == "cpu":
        torch.set_num_threads(config.threads)
    flash = config.device == "cuda" and config.dtype == "bfloat16" and is_flash_attn_2_available()
    register()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.model,
            dtype=getattr(torch, config.dtype),
            attn_implementation=implementation(AutoConfig.from_pretrained(config.model), flash=flash),
        )
    except (OSError, ValueError) as error:
        raise LearnerError(
            f"learner.model={config.model} cannot be loaded ({error}); give an HF checkpoint folder of a causal model"
        ) from error
    for module in model.modules():  # the engines sample without dropout, and ratios compare against what they recorded
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model
